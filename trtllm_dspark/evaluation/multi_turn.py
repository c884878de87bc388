"""Conversations whose every turn begins with all earlier turns: what a prefix cache is for, and what it can spoil.

When the target skips a cached prefix and the draft has no context for it, the text stays right and acceptance falls in
silence. Measured here with reuse off, with joint reuse, and with that fault on purpose.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.requests import Completion, SamplingParams
from trtllm_dspark.evaluation.measure import measure
from trtllm_dspark.evaluation.stdlib_text import held_out_prompts

Conversation = list[list[int]]
"""What is said in each turn, before the model answers: token ids."""


@dataclass(frozen=True)
class TurnsResult:
    """One engine over all conversations.

    Attributes:
        completions: of every turn, conversation by conversation. accept_len: pooled over verifications.
        stderr: of the mean accept_len of conversations. reused_tokens: prompt tokens that were not computed again.
    """

    completions: list[Completion]
    accept_len: float
    stderr: float
    verifications: int
    reused_tokens: int


def conversations(tokenizer: Any, count: int, turns: int, *, first: int, then: int) -> list[Conversation]:
    """`count` conversations from held-out text: `first` tokens in the first turn, `then` more of the text in each later one."""
    length = first + (turns - 1) * then
    windows = held_out_prompts(tokenizer, count, length)
    cuts = [0, *range(first, length + 1, then)]
    return [[window[a:b] for a, b in pairwise(cuts)] for window in windows]


def run_turns(
    engine: Engine,
    talks: Sequence[Conversation],
    params: SamplingParams,
    *,
    batch: int = 1,
    progress: Callable[[int], None] = lambda turns: None,
) -> TurnsResult:
    """Hold the conversations, `batch` of them at a time; the answer of each turn stays in the history of the next."""
    reused_before = engine.scheduler.counts.reused_tokens
    by_talk: list[list[Completion]] = [[] for _ in talks]
    for begin in range(0, len(talks), batch):
        group = range(begin, min(begin + batch, len(talks)))
        histories: dict[int, list[int]] = {index: [] for index in group}
        for turn in range(len(talks[begin])):
            for index in group:
                histories[index] += talks[index][turn]
            answers = engine.generate([histories[index] for index in group], params)
            for index, answer in zip(group, answers, strict=True):
                histories[index] += answer.tokens
                by_talk[index].append(answer)
            progress(len(group))
    completions = [completion for talk in by_talk for completion in talk]
    means = [measure(talk, engine.num_drafts).acceptance.accept_len for talk in by_talk] if engine.drafter else []
    pooled = measure(completions, engine.num_drafts).acceptance
    return TurnsResult(
        completions=completions,
        accept_len=pooled.accept_len,
        stderr=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan,
        verifications=pooled.verifications,
        reused_tokens=engine.scheduler.counts.reused_tokens - reused_before,
    )
