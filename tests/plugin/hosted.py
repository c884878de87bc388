"""What tests ask of a stand-in host at work: traces, pages, and the stock worker as the control."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_pair import FOLDER, Pair
from plugin.host.executor import StandIn

from trtllm_dspark.engine.requests import Completion, SamplingParams
from trtllm_dspark.plugin import register

DRAFT = FOLDER / "draft"
SHORT = SamplingParams(max_new_tokens=16, ignore_eos=True)


def hosted(pair: Pair, draft: Path = DRAFT, **options: Any) -> StandIn:
    """Registered, built and loaded."""
    assert register().state == "active"
    return StandIn(pair.target, draft, **options).load()


def with_stock_worker(pair: Pair, **options: Any) -> StandIn:
    """The same with the host's own worker and its faults: what our worker is held against."""
    assert register().state == "active"
    stand_in = StandIn(pair.target, DRAFT, **options)
    stand_in.model.draft_model.fixes = frozenset()
    return stand_in.load()


def trace(done: Sequence[Completion]) -> list[list[tuple[tuple[int, ...], int]]]:
    """Of each request: the tokens and accepted drafts of every pass."""
    return [[(commit.tokens, commit.accepted) for commit in one.commits] for one in done]


def accept_len(done: Sequence[Completion]) -> float:
    passes = [commit for one in done for commit in one.commits if not commit.prefill]
    return 1 + sum(commit.accepted for commit in passes) / len(passes)


def bits(storage: torch.Tensor) -> torch.Tensor:
    """For comparing pages that hold NaN."""
    return storage.view(torch.int32).clone()


def changed_pages(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    """Ids of pages of which some byte changed, over all layers."""
    return set((before != after).flatten(1).any(1).nonzero().flatten().tolist())


def slot_state(stand_in: StandIn, request: int) -> tuple[int, int]:
    """Readable positions of a request's draft context: start, end."""
    context = stand_in.model.spec_worker._context
    start, end = context.state[context.ledger.entries[request].slot].tolist()
    return start, end
