"""FlashMLA as a peer of the bench: what it is given, when it plans, what it covers; with a double where it is not installed."""

import inspect
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_fabricated import ATTENTION, CPU, RAGGED, run_case_untimed

from cute_kernels.bench import flash_mla, paged
from cute_kernels.bench.cases import BlockAttentionCase
from cute_kernels.bench.contestants import CONTESTANTS, Contestant
from cute_kernels.bench.run import RIGHT, WRONG

right_pages = paged.with_block


class FlashMLA(ModuleType):
    """What FlashMLA computes, read from its docstrings, in plain torch: a double for machines without it. It counts plans.

    Args:
        lazy: whether metadata are made by the first call that uses them, as at 9241ae3, or when they are asked for, as before.
    """

    def __init__(self, lazy: bool) -> None:
        super().__init__("flash_mla")
        self.lazy, self.plans = lazy, 0

    def get_mla_metadata(self, cache_seqlens, num_q_tokens_per_head_k, num_heads_k) -> tuple[dict, object]:
        assert cache_seqlens.dtype == torch.int32 and num_heads_k == 1 and num_q_tokens_per_head_k == 12
        self.plans += not self.lazy
        return {"made": not self.lazy, "lengths": cache_seqlens}, None if self.lazy else cache_seqlens

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not causal and block_table.dtype == cache_seqlens.dtype == torch.int32
        assert torch.equal(tile_scheduler_metadata["lengths"], cache_seqlens)
        assert num_splits is (None if self.lazy else cache_seqlens)
        if not tile_scheduler_metadata["made"]:
            tile_scheduler_metadata["made"] = True
            self.plans += 1
        assert k_cache.shape[2] == 1
        page_size, out = k_cache.shape[1], torch.empty(*q.shape[:-1], head_dim_v, dtype=q.dtype)
        for b, length in enumerate(cache_seqlens.tolist()):
            own = block_table[b, : -(-length // page_size)].long()
            latents = k_cache[own].flatten(0, 2)[:length].float()
            scores = softmax_scale * q[b].float() @ latents.T
            out[b] = (scores.softmax(-1) @ latents[:, :head_dim_v]).to(q.dtype)
        return out, torch.empty(0)


@pytest.fixture(params=[True, False], ids=["lazy", "eager"])
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FlashMLA:
    double = FlashMLA(request.param)
    monkeypatch.setitem(sys.modules, "flash_mla", double)
    return double


def peer(plan_each_call: bool) -> Contestant:
    return Contestant("flashmla", partial(flash_mla.prepare, plan_each_call=plan_each_call))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("plan_each_call", [True, False])
@pytest.mark.parametrize("case", [ATTENTION, RAGGED], ids=lambda case: case.label)
def test_flashmla_is_given_context_and_block_in_its_pages(case: BlockAttentionCase, plan_each_call: bool) -> None:
    (outcome,) = run_case_untimed(case, peer(plan_each_call)).outcomes
    assert (outcome.status, outcome.reason) == (RIGHT, None)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("case", [ATTENTION, RAGGED], ids=lambda case: case.label)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("lengths", lambda case, inputs: inputs["context_len"] + case.rows - 1),
        ("lengths", lambda case, inputs: inputs["context_len"]),
        ("with_block", lambda case, inputs: inputs["pages"].nan_to_num()),
        ("with_block", lambda case, inputs: right_pages(case, inputs).flip(0)),
    ],
    ids=["a token short", "no block", "block not written", "others' pages"],
)
def test_control_wrong_pages_and_lengths_are_noticed(
    monkeypatch: pytest.MonkeyPatch, case: BlockAttentionCase, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(paged, name, wrong)
    (outcome,) = run_case_untimed(case, peer(True)).outcomes
    assert outcome.status == WRONG


@pytest.mark.parametrize(("plan_each_call", "in_the_clock"), [(True, 3), (False, 0)])
def test_what_is_planned_once_is_planned_before_the_clock_runs(
    library: FlashMLA, plan_each_call: bool, in_the_clock: int
) -> None:
    """Fails when the metadata of a lazy release are left to the first timed call, or when one call reuses another's."""
    calls = flash_mla.prepare(ATTENTION, ATTENTION.sets(3, CPU), plan_each_call=plan_each_call)
    before = library.plans
    for call in calls:
        call()
    assert library.plans - before == in_the_clock
    assert before == (0 if plan_each_call else 1)


def test_the_block_lies_behind_each_context_and_nothing_else_changes() -> None:
    (inputs,) = RAGGED.sets(1, CPU)
    kept = inputs["pages"].clone()
    filled = paged.with_block(RAGGED, inputs)
    assert torch.equal(inputs["pages"].nan_to_num(-9.0), kept.nan_to_num(-9.0))
    for b, length in enumerate(RAGGED.lengths):
        own = inputs["page_table"][b].long()
        before, after = kept[own].flatten(0, 1), filled[own].flatten(0, 1)
        assert torch.equal(after[:length], before[:length])
        assert torch.equal(after[length : length + RAGGED.rows], inputs["block_latents"][b])
    assert int((~filled.isnan().any(-1)).sum()) == sum(RAGGED.lengths) + RAGGED.batch * RAGGED.rows


def test_it_takes_part_where_it_can_be_imported_and_the_case_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = {contestant.name: contestant for contestant in CONTESTANTS["block_attention"]}
    hopper, other = (9, 0), (10, 0)
    for name, planned in (("flashmla", "each call"), ("flashmla, planned once", "once")):
        flashmla = entered[name]
        assert not flashmla.ours and flashmla.planned == planned
        monkeypatch.setattr("cute_kernels.bench.contestants.find_spec", lambda package: package)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: hopper)
        assert flashmla.absent(BlockAttentionCase(2, 100), CPU) is None
        assert flashmla.absent(BlockAttentionCase(2, 4096, shortest=100), CPU) is None
        for page_size in (32, 128):
            assert "needs pages of 64" in str(flashmla.absent(BlockAttentionCase(2, 100, page_size=page_size), CPU))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: other)
        assert flashmla.absent(BlockAttentionCase(2, 100), CPU) == "needs sm_90"
        monkeypatch.setattr("cute_kernels.bench.contestants.find_spec", lambda package: None)
        assert flashmla.absent(BlockAttentionCase(2, 100), CPU) == "flash_mla is not installed"


def test_plain_torch_says_that_it_needs_one_length() -> None:
    (plain,) = [contestant for contestant in CONTESTANTS["block_attention"] if contestant.name == "torch"]
    assert plain.absent(ATTENTION, CPU) is None and plain.absent(RAGGED, CPU) == "needs contexts of one length"


def test_flashmlas_own_signatures_take_these_arguments() -> None:
    try:
        import flash_mla as installed
    except Exception as error:
        pytest.skip(f"flash_mla: cannot be imported here: {type(error).__name__}")
    theirs = inspect.signature(installed.flash_mla_with_kvcache)
    theirs.bind(*range(7), softmax_scale=1.0, causal=False)
    inspect.signature(installed.get_mla_metadata).bind(*range(3))
    assert list(theirs.parameters)[:7] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
    ]  # fmt: skip
