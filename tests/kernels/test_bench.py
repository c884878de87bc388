"""The bench: its formulas by hand, its gate with the twins and with mistakes, its report from made-up times, its exit codes.

All on a CPU, at small shapes, except the last test, which runs the command on a GPU.
"""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cute_kernels.bench import __main__ as command
from cute_kernels.bench import contestants, flashinfer_mla, machine, report, timing
from cute_kernels.bench.cases import BlockAttentionCase, Case, ContextAppendCase, Inputs, MarkovChainCase, QueryRopeCase
from cute_kernels.bench.contestants import CONTESTANTS, Contestant
from cute_kernels.bench.correctness import Verdict, judge, poison, worst_row, yardstick
from cute_kernels.bench.run import ABSENT, FAILED, RIGHT, WRONG, CaseResult, Outcome, run_case
from cute_kernels.bench.suites import SUITES, select
from cute_kernels.bench.timing import Ceilings
from cute_kernels.reference.block_attention import block_attention
from cute_kernels.reference.context_append import context_append
from cute_kernels.reference.markov_chain import markov_chain
from cute_kernels.reference.query_rope import query_rope
from cute_kernels.reference.rotation import rotate_half_split

CPU = torch.device("cpu")
L2 = 50_000_000
H200 = Ceilings(copy=4.3e12, elementwise=4.2e12, matmul=790e12)  # as in the tables of floors

ATTENTION = BlockAttentionCase(5, 70, heads=3, rows=4, page_size=16, value_width=64, rotary=16)
APPEND = ContextAppendCase(21, layers=3, page_size=8, latent=32, rotary=16)
ROPE = QueryRopeCase(3, rows=4, heads=5, rotary=16, nope=8, latent=32)
CHAIN = MarkovChainCase(5, vocabulary=211, rank=16, steps=4)
SMALL = {case.kernel: case for case in (ATTENTION, APPEND, ROPE, CHAIN)}


# -------------------------------------------------------------------------------------------------------------- formulas
@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (BlockAttentionCase(1, 1024), "1.5"),
        (BlockAttentionCase(1, 8192), "11.6"),
        (BlockAttentionCase(8, 8192), "92.5"),
        (BlockAttentionCase(64, 1024), "93"),
        (BlockAttentionCase(64, 8192), "740"),
        (BlockAttentionCase(1, 1024, heads=8), "0.3"),
        (BlockAttentionCase(1, 8192, heads=8), "2.2"),
        (BlockAttentionCase(64, 8192, heads=8), "143"),
        (BlockAttentionCase(64, 8192, heads=64, rows=1), "143"),
        (ContextAppendCase(8), "0.02"),
        (ContextAppendCase(512), "1.4"),
        (ContextAppendCase(1024), "2.7"),
        (QueryRopeCase(1), "0.03"),
        (MarkovChainCase(1), "137"),
        (MarkovChainCase(64), "171"),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_floors_are_those_computed_by_hand(case: Case, floor: str) -> None:
    found = report.floor_us(case.flop, case.bytes, H200.copy, H200.matmul)
    decimals = len(floor.partition(".")[2])
    assert f"{found:.{decimals}f}" == floor


def test_bytes_and_flop_by_hand() -> None:
    attention = BlockAttentionCase(3, 1024)
    assert attention.flop == 2176 * 3 * 512 * 1032
    assert attention.bytes == 3 * (1152 * 1032 + 1152 * 512 + 1024 * 512)
    assert (ContextAppendCase(7).flop, ContextAppendCase(7).bytes) == (0, 7 * 5 * 2304)
    assert (QueryRopeCase(2).flop, QueryRopeCase(2).bytes) == (0, 16 * (4 * 64 * 64 + 4 * 64))
    assert MarkovChainCase(8).flop == 2 * 8 * 7 * 163_840 * 256
    assert MarkovChainCase(8).bytes == 7 * 163_840 * (256 + 8) * 2


@pytest.mark.parametrize(
    ("moved", "sets"), [(10**9, 2), (60_000_000, 2), (50_000_000, 2), (49_000_000, 3), (10_000_000, 10), (1_000, 64)]
)
def test_the_sets_exceed_twice_l2_or_are_as_many_as_a_graph_takes(moved: int, sets: int) -> None:
    assert timing.num_sets(moved, L2) == sets
    assert sets * moved >= 2 * L2 or sets == timing.MAX_SETS


def test_the_suite_holds_the_shapes_it_promises() -> None:
    cases = select("kernels")
    attention = [case for case in cases if isinstance(case, BlockAttentionCase)]
    assert {(c.batch, c.context) for c in attention if c.heads == 64} == {
        (1, 1024),
        (1, 8192),
        (8, 8192),
        (64, 1024),
        (64, 8192),
    }
    assert {(c.batch, c.context) for c in attention if c.heads == 8} == {(1, 8192), (64, 8192)}
    assert all(case.kernel in CONTESTANTS for suite in SUITES.values() for case in suite)
    labels = [f"{case.kernel} {case.label}" for case in cases]
    assert len(set(labels)) == len(labels)
    assert [case.label for case in select("kernels", "rope rows=512")] == ["rows=512 H=64"]


def test_sets_differ_and_share_what_a_step_shares() -> None:
    first, second = ATTENTION.sets(2, CPU)
    assert first["page_table"] is second["page_table"] and first["context_len"] is second["context_len"]
    assert not torch.equal(first["q"], second["q"])
    again = ATTENTION.sets(1, CPU)[0]
    assert all(torch.equal(first[name].nan_to_num(-9.0), again[name].nan_to_num(-9.0)) for name in first)
    live = torch.zeros(first["pages"].shape[:2], dtype=torch.bool)
    for row in first["page_table"].tolist():
        for position in range(ATTENTION.context):
            assert not live[row[position // 16], position % 16]  # nobody shares
            live[row[position // 16], position % 16] = True
    assert torch.equal(~first["pages"].isnan().any(-1), live) and torch.equal(first["pages"].isnan().all(-1), ~live)
    slots = APPEND.sets(1, CPU)[0]["slots"]
    assert len(slots.unique()) == APPEND.tokens


def test_sums_of_the_chain_are_exact_in_bf16() -> None:
    """Otherwise tokens could not be compared exactly: fails when the integers are drawn too large."""
    inputs = MarkovChainCase(8, vocabulary=20_000, steps=1).sets(1, CPU)[0]
    bias = inputs["w1"][inputs["anchors"]].float() @ inputs["w2"].float().T
    for exact in (bias, bias + inputs["base_logits"][:, 0]):
        assert torch.equal(exact.bfloat16().float(), exact)


# ------------------------------------------------------------------------------------------------------------------ gate
def answer(case: Any, inputs: Inputs) -> torch.Tensor:
    """The twin, into the set's own buffers."""
    if case is ATTENTION:
        names = ("q", "block_latents", "pages", "page_table", "context_len", "out")
        given = {name: inputs[name] for name in names}
        block_attention(**given, scale=case.scale, value_width=case.value_width)
        return inputs["out"]
    if case is APPEND:
        context_append(*(inputs[name] for name in ("z", "norm_weight", "cos", "sin", "slots", "pools", "eps")))
        return inputs["pool"]
    if case is ROPE:
        query_rope(*(inputs[name] for name in ("rotary", "cos", "sin", "out")))
        return inputs["out"]
    return markov_chain(**inputs)


Answer = Callable[[Any, Inputs], torch.Tensor]


def of(answer: Answer, name: str = "ours", ours: bool = True) -> Contestant:
    return Contestant(name, lambda case, sets: [partial(answer, case, inputs) for inputs in sets], ours=ours)


def verdict_of(case: Any, answer: Answer) -> Verdict:
    inputs = case.sets(1, CPU)[0]
    held = yardstick(case, inputs)
    result = answer(case, inputs)
    poison(result)
    return judge(held, answer(case, inputs))


@pytest.mark.parametrize("kernel", SMALL)
def test_the_gate_passes_the_twin(kernel: str) -> None:
    verdict = verdict_of(SMALL[kernel], answer)
    assert verdict.complaint is None and verdict.error is not None
    assert verdict.error <= verdict.baseline + 2**-8


@pytest.mark.parametrize("kernel", SMALL)
def test_the_gate_passes_plain_torch(kernel: str) -> None:
    case, (peer,) = SMALL[kernel], [c for c in CONTESTANTS[kernel] if c.name == "torch"]
    outcome = run_case_untimed(case, of(answer), peer).outcomes[1]
    assert (outcome.status, outcome.reason) == (RIGHT, None)


def swaps_two_heads(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[:, :, [0, 1]] = found[:, :, [1, 0]]
    return found


def leaves_a_row(case: Any, inputs: Inputs) -> torch.Tensor:
    """A row of a request that is not compared with the truth: only the poison tells."""
    found = answer(case, inputs)
    found[1, -1, -1] = torch.nan
    return found


def loses_a_token(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {**inputs, "context_len": inputs["context_len"] - 1})


def reads_past_the_context(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {**inputs, "context_len": inputs["context_len"] + 1})


def swaps_two_requests(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {**inputs, "page_table": inputs["page_table"].flip(0)})


def writes_a_slot_too_far(case: Any, inputs: Inputs) -> torch.Tensor:
    slots = inputs["slots"].clone()
    slots[3] = next(slot for slot in range(10**6) if slot not in slots.tolist())
    return answer(case, {**inputs, "slots": slots})


def swaps_two_slots(case: Any, inputs: Inputs) -> torch.Tensor:
    slots = inputs["slots"].clone()
    slots[[0, 1]] = slots[[1, 0]]
    return answer(case, {**inputs, "slots": slots})


def writes_a_spare_row_too(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    rows = found.flatten(1, 2)
    rows[0, next(slot for slot in range(10**6) if slot not in inputs["slots"].tolist())] = 0.0
    return found


def forgets_the_norm_of_a_layer(case: Any, inputs: Inputs) -> torch.Tensor:
    weight = inputs["norm_weight"].clone()
    weight[-1] = 1.0
    return answer(case, {**inputs, "norm_weight": weight})


def pairs_halves(case: Any, inputs: Inputs) -> torch.Tensor:
    turned = rotate_half_split(inputs["rotary"], inputs["cos"].unsqueeze(-2), inputs["sin"].unsqueeze(-2))
    inputs["out"][..., case.latent :] = turned
    return inputs["out"]


def touches_the_absorbed_part(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[0, 0, 0, case.latent - 1] = 0.0
    return found


def biased_by_the_anchor(case: Any, inputs: Inputs) -> torch.Tensor:
    steps = [markov_chain(**{**inputs, "base_logits": inputs["base_logits"][:, k : k + 1]}) for k in range(case.steps)]
    return torch.cat(steps, 1)


def leaves_a_token(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[-1, -1] = -1
    return found


def one_token_off(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[-1, -1] = (found[-1, -1] + 1) % case.vocabulary
    return found


def leaves_rows_of_the_pool(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found.flatten(1, 2)[-1, inputs["slots"][5]] = torch.nan
    return found


MISTAKES = [
    (ATTENTION, swaps_two_heads, "error"),
    (ATTENTION, leaves_a_row, "64 of 3840 elements are not written"),
    (ATTENTION, loses_a_token, "error"),
    (ATTENTION, reads_past_the_context, "not written or not finite"),
    (ATTENTION, swaps_two_requests, "error"),
    (APPEND, writes_a_slot_too_far, "not written"),
    (APPEND, swaps_two_slots, "error"),
    (APPEND, writes_a_spare_row_too, "changed that belong to others"),
    (APPEND, forgets_the_norm_of_a_layer, "error"),
    (APPEND, leaves_rows_of_the_pool, "48 of 3024 elements are not written"),
    (ROPE, swaps_two_heads, "error"),
    (ROPE, leaves_a_row, "16 of 960 elements are not written"),
    (ROPE, pairs_halves, "error"),
    (ROPE, touches_the_absorbed_part, "changed that belong to others"),
    (CHAIN, biased_by_the_anchor, "of the tokens are wrong"),
    (CHAIN, leaves_a_token, "1 of 20 elements are not written"),
    (CHAIN, one_token_off, "5.0% of the tokens are wrong"),
]


@pytest.mark.parametrize(("case", "wrong", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", None))
def test_control_the_gate_refuses_a_mistake(case: Any, wrong: Answer, said: str) -> None:
    complaint = verdict_of(case, wrong).complaint
    assert complaint is not None and said in complaint


def test_control_a_lost_token_of_a_long_context_is_noticed() -> None:
    """One of 8,192 tokens: fails when the ends of a context weigh no more than its other tokens."""
    case = BlockAttentionCase(1, 8192, heads=4, rows=2)
    inputs = case.sets(1, CPU)[0]
    names = ("q", "block_latents", "pages", "page_table")
    given = {name: inputs[name] for name in names} | {"scale": case.scale, "value_width": case.value_width}
    last, first = inputs["context_len"] - 1, torch.ones_like(inputs["context_len"])
    held = yardstick(case, inputs)
    assert judge(held, block_attention(**given, context_len=last + 1)).complaint is None
    assert "error" in str(judge(held, block_attention(**given, context_len=last)).complaint)
    assert "error" in str(judge(held, block_attention(**given, context_len=last + 1, context_start=first)).complaint)


def test_the_worst_row_by_hand() -> None:
    truth = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    assert worst_row(torch.tensor([[3.0, 4.5], [0.0, 10.5]]), truth) == pytest.approx(0.1)
    assert not worst_row(torch.tensor([[3.0, 4.0], [0.0, torch.nan]]), truth) <= 1e9


def test_of_many_requests_three_are_compared_and_named() -> None:
    inputs = ATTENTION.sets(1, CPU)[0]
    assert yardstick(ATTENTION, inputs).checked == "requests 0, 2, 4 of 5"
    one = replace(ATTENTION, batch=1)
    assert yardstick(one, one.sets(1, CPU)[0]).checked == "request 0 of 1"


# ------------------------------------------------------------------------------------------------------------ FlashInfer
class PagedMLA:
    """What FlashInfer's wrapper computes, read from its docstrings, in plain torch: a double for machines without it."""

    def __init__(self, float_workspace_buffer, use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr, backend) -> None:
        assert use_cuda_graph and backend in ("fa2", "fa3")
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
        q_data_type, kv_data_type,
    ) -> None:  # fmt: skip
        assert not causal and q_data_type == kv_data_type == torch.bfloat16
        for buffer, values in zip(self.buffers, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True):
            assert values.dtype == torch.int32
            buffer.copy_(values)
        self.scale, self.page_size, self.heads = sm_scale, page_size, num_heads
        self.widths = (head_dim_ckv, head_dim_kpe)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out) -> torch.Tensor:
        assert (q_nope.shape[1:], q_pe.shape[1:]) == ((self.heads, self.widths[0]), (self.heads, self.widths[1]))
        rows, pages, indices, lengths = (buffer.tolist() for buffer in self.buffers)
        for b, length in enumerate(lengths):
            own = indices[pages[b] : pages[b + 1]]
            assert len(own) == -(-length // self.page_size)
            values, keys = (cache[own].flatten(0, 1)[:length].float() for cache in (ckv_cache, kpe_cache))
            queries = torch.cat((q_nope, q_pe), -1)[rows[b] : rows[b + 1]].float()
            scores = self.scale * queries @ torch.cat((values, keys), -1).T
            out[rows[b] : rows[b + 1]] = (scores.softmax(-1) @ values).to(out.dtype)
        return out


@pytest.fixture
def paged_mla(monkeypatch: pytest.MonkeyPatch) -> type[PagedMLA]:
    double = ModuleType("flashinfer.mla")
    double.BatchMLAPagedAttentionWrapper = PagedMLA  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", double)
    monkeypatch.setattr(flashinfer_mla, "WORKSPACE_BYTES", 16)
    return PagedMLA


@pytest.mark.usefixtures("paged_mla")
@pytest.mark.parametrize("context", [70, 64, 63, 60])
def test_flashinfer_is_given_context_and_block_in_its_pages(context: int) -> None:
    peer = Contestant("flashinfer fa2", partial(flashinfer_mla.prepare, backend="fa2"))
    case = replace(ATTENTION, context=context)
    (outcome,) = run_case_untimed(case, peer).outcomes
    assert (outcome.status, outcome.reason) == (RIGHT, None)


@pytest.mark.usefixtures("paged_mla")
@pytest.mark.parametrize(
    "change",
    [
        lambda lists: {"kv_len_arr": lists["kv_len_arr"] - 1},
        lambda lists: {"kv_indices": lists["kv_indices"].flip(0)},
        lambda lists: {"qo_indptr": lists["qo_indptr"].clamp(max=16)},
    ],
    ids=["a token short", "others' pages", "a request unwritten"],
)
def test_control_wrong_lists_for_flashinfer_are_noticed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    right = flashinfer_mla.lists

    def wrong(case: BlockAttentionCase, inputs: Inputs) -> dict[str, torch.Tensor]:
        found = right(case, inputs)
        return found | change(found)

    monkeypatch.setattr(flashinfer_mla, "lists", wrong)
    peer = Contestant("flashinfer fa2", partial(flashinfer_mla.prepare, backend="fa2"))
    (outcome,) = run_case_untimed(ATTENTION, peer).outcomes
    assert outcome.status == WRONG


def test_flashinfers_own_signatures_take_these_arguments() -> None:
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except Exception as error:
        pytest.skip(f"flashinfer: cannot be imported here: {type(error).__name__}")
    for name in ("__init__", "plan", "run"):
        theirs = inspect.signature(getattr(BatchMLAPagedAttentionWrapper, name)).parameters
        assert set(inspect.signature(getattr(PagedMLA, name)).parameters) <= set(theirs), name


# ------------------------------------------------------------------------------------------------------------------- run
def run_case_untimed(case: Case, *entered: Contestant) -> CaseResult:
    """Without a device there are no times; everything before them is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "measure", lambda replays, rounds, device: [[1.0] * rounds for _ in replays])
        return run_case(case, entered, 3, CPU, L2 // 10**6)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Made-up times, 10, 20, ... us in the order of entry; how many contestants each measurement was given."""
    seen: list[int] = []

    def measure(replays: Sequence[timing.Replay], rounds: int, device: torch.device) -> list[list[float]]:
        seen.append(len(replays))
        return [[10.0 * (i + 1) + r for r in range(rounds)] for i in range(len(replays))]

    monkeypatch.setattr(timing, "measure", measure)
    return seen


def raises(case: Any, inputs: Inputs) -> torch.Tensor:
    raise RuntimeError("first line\nerror: no such instruction\nlast line")


def test_a_right_case_is_timed_with_all_who_are_right(measured: list[int]) -> None:
    result = run_case(ATTENTION, [of(answer), of(answer, "peer", ours=False)], 5, CPU, 50)
    assert result.passed and result.reason is None and measured == [2]
    assert [outcome.times_us for outcome in result.outcomes] == [(10.0, 11.0, 12.0, 13.0, 14.0), (20.0, 21.0, 22.0, 23.0, 24.0)]
    assert result.sets == 2


@pytest.mark.parametrize(("case", "wrong", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", None))
def test_a_case_that_we_get_wrong_has_no_speed(case: Any, wrong: Answer, said: str, measured: list[int]) -> None:
    result = run_case(case, [of(wrong), of(answer, "peer", ours=False)], 5, CPU, 50)
    assert not result.passed and measured == []
    assert result.outcomes[0].status == WRONG and "ours: wrong: " in str(result.reason) and said in str(result.reason)
    assert result.outcomes[1].status == RIGHT and result.outcomes[1].times_us == ()


def test_one_wrong_schedule_of_ours_is_enough(measured: list[int]) -> None:
    result = run_case(ATTENTION, [of(answer), of(swaps_two_heads, "ours, planned once")], 5, CPU, 50)
    assert result.reason is not None and result.reason.startswith("ours, planned once: wrong: ") and measured == []


def test_a_wrong_or_failing_peer_is_not_timed_and_the_others_are(measured: list[int]) -> None:
    peers = [of(swaps_two_heads, "wrong", ours=False), of(raises, "broken", ours=False), of(answer, "right", ours=False)]
    gone = Contestant("gone", peers[0].prepare, package="no_such_package_here")
    result = run_case(ATTENTION, [of(answer), *peers, gone], 5, CPU, 50)
    assert [o.status for o in result.outcomes] == [RIGHT, WRONG, FAILED, RIGHT, ABSENT]
    assert [bool(o.times_us) for o in result.outcomes] == [True, False, False, True, False]
    assert result.outcomes[2].reason == "error: no such instruction"
    assert result.outcomes[4].reason == "no_such_package_here is not installed"
    assert measured == [2] and result.reason is None and not result.passed


def test_a_peer_that_is_absent_is_no_fault(measured: list[int]) -> None:
    gone = Contestant("gone", of(answer).prepare, package="no_such_package_here")
    assert run_case(ATTENTION, [of(answer), gone], 5, CPU, 50).passed


def test_only_the_last_set_being_wrong_is_noticed(measured: list[int]) -> None:
    """A call that is bound to another set's tensors; fails when the first set alone is judged."""

    def prepare(case: Any, sets: list[Inputs]) -> list[Callable[[], torch.Tensor]]:
        return [partial(answer, case, {**sets[0], "out": inputs["out"]}) for inputs in sets]

    assert run_case(ATTENTION, [Contestant("ours", prepare, ours=True)], 5, CPU, 50).outcomes[0].status == WRONG


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)], ids=str)
def test_control_a_call_that_works_only_once_is_not_timed(device: torch.device, measured: list[int]) -> None:
    """A graph that captured no work would be the fastest of all: fails when results of an earlier run count."""
    done: dict[int, torch.Tensor] = {}

    def only_once(case: Any, inputs: Inputs) -> torch.Tensor:
        if id(inputs) not in done:
            done[id(inputs)] = answer(case, inputs)
        return done[id(inputs)]

    for case in SMALL.values():
        done.clear()
        (outcome,) = run_case(case, [of(only_once)], 3, device, 50).outcomes
        assert outcome.status == WRONG and "not written" in str(outcome.reason) and measured == []


def test_a_case_that_cannot_be_set_up_is_reported(measured: list[int]) -> None:
    result = run_case(replace(ATTENTION, page_size=0), [of(answer)], 5, CPU, 50)
    assert not result.passed and result.outcomes == () and "division" in str(result.reason)


def test_times_that_cannot_be_had_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "measure", raises)
    result = run_case(ATTENTION, [of(answer)], 5, CPU, 50)
    assert not result.passed and result.reason is not None and result.outcomes[0].status == RIGHT


# ---------------------------------------------------------------------------------------------------------------- warm-up
class SlowingClock:
    """A device whose calls get slower until its clock has settled; time stands still but for them."""

    def __init__(self, factors: Iterator[float]) -> None:
        self.now, self.factors, self.rounds = 0.0, factors, 0

    def __call__(self) -> float:
        return self.now

    def run(self, rounds: int) -> list[list[float]]:
        call_us = 1000.0 * next(self.factors)
        self.now += 1e-6 * rounds * 10 * call_us
        self.rounds += rounds
        return [[call_us] * rounds, [2 * call_us] * rounds]


def test_the_warm_up_ends_when_the_clock_is_steady() -> None:
    device = SlowingClock(iter([1.0, 1.0, 1.2, 1.3, 1.305]))
    assert timing.warm_up(device.run, device) == 4
    assert device.rounds == 1 + 4 * 5  # 10 ms a round, 50 ms a block


def test_the_warm_up_ends_anyway() -> None:
    device = SlowingClock(1.0 + i % 2 for i in range(10**6))
    timing.warm_up(device.run, device)
    assert 1.0 <= device.now < 1.3


# ---------------------------------------------------------------------------------------------------------------- report
MACHINE = {
    "device": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "memory_bytes": 150 * 10**9, "l2_bytes": L2,
    "cuda": "13.0", "python": "3.12.0", "versions": {"torch": "2.11.0", "flashinfer-python": None},
    "commit": "0123456789abcdef", "dirty": True, "date": "2026-11-29T12:00:00+00:00",
    "driver": "580.1", "sm_clock_mhz": 1755.0, "sm_clock_max_mhz": 1980.0, "power_limit_w": 700.0,
}  # fmt: skip
FINE = Verdict(None, 1.7e-3, 3.0e-3, 9.9e-3, "request 0 of 1")
OFF = Verdict("error 1.00e-01, at most 9.90e-03 is allowed (plain torch: 3.00e-03)", 0.1, 3.0e-3, 9.9e-3, "request 0 of 1")
BLIND = Verdict("64 of 128 elements are not written or not finite", None, 3.0e-3, 9.9e-3, "request 0 of 1")


def timed(name: str, ours: bool, *times: float, note: str = "") -> Outcome:
    return Outcome(name, ours, note, RIGHT, None, FINE, times)


def made_up() -> list[CaseResult]:
    fast = (
        timed("ours", True, 18.0, 20.0, 22.0, note="Plan each call."),
        timed("ours, planned once", True, 15.0, 16.0, 17.0),
        timed("torch", False, 100.0, 100.0, 100.0, note="A note."),
        timed("flashinfer fa3", False, 30.0, 30.0, 30.0, note="A note."),
    )
    slow = (
        timed("ours", True, 4000.0, 4000.0, 4000.0),
        timed("ours, planned once", True, 4000.0, 4000.0, 4000.0),
        timed("torch", False, 2000.0, 2000.0, 2000.0),
        Outcome("flashinfer fa3", False, "A note.", WRONG, OFF.complaint, OFF),
    )
    wrong = (
        Outcome("ours", True, "", WRONG, BLIND.complaint, BLIND),
        Outcome("torch", False, "", RIGHT, None, FINE),
        Outcome("flashinfer fa3", False, "", ABSENT, "flashinfer is not installed"),
    )
    return [
        CaseResult(BlockAttentionCase(1, 1024), 44, fast),
        CaseResult(BlockAttentionCase(64, 8192), 2, slow),
        CaseResult(BlockAttentionCase(8, 8192), 2, wrong, f"ours: wrong: {BLIND.complaint}"),
        CaseResult(ContextAppendCase(8), 64, (), "out of memory"),
    ]


def made_up_document(end: Ceilings | None = None) -> report.Document:
    return report.document("kernels", MACHINE, replace(H200, copy=4.0e12, matmul=700e12), end, 3, made_up())


def test_the_document_by_hand() -> None:
    document = made_up_document(end=H200)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["ceilings"]["copy_gb_per_s"] == 4300 and document["ceilings"]["matmul_tflop_per_s"] == 790
    assert document["ceilings"]["measured"]["start"]["matmul_tflop_per_s"] == 700
    assert document["passed"] is False
    fast, slow, wrong, failed = document["cases"]
    assert fast["floor_us"] == pytest.approx(1.455, abs=1e-3)
    assert (fast["best_peer"], fast["numerics_passed"], fast["passed"], fast["reason"]) == ("flashinfer fa3", True, True, None)
    ours, once, torch_, fa3 = fast["contestants"]
    assert (ours["p10_us"], ours["median_us"], ours["p90_us"]) == (18.4, 20.0, 21.6)
    assert (ours["ratio"], once["ratio"], torch_["ratio"], fa3["ratio"]) == (1.5, 1.875, 5.0, 1.5)
    assert ours["tflop_per_s"] == pytest.approx(1_149_763_584 / 20e-6 / 1e12, rel=1e-5)
    assert ours["gb_per_s"] == pytest.approx(2_302_976 / 20e-6 / 1e9, rel=1e-5)
    assert ours["share_of_floor"] == pytest.approx(ours["share_of_matmul"]) == pytest.approx(0.0728, abs=1e-4)
    assert ours["share_of_copy"] == pytest.approx(2_302_976 / 20e-6 / 4.3e12, rel=1e-5)
    assert (ours["error"], ours["error_of_plain_torch"], ours["error_allowed"]) == (1.7e-3, 3e-3, 9.9e-3)
    assert slow["best_peer"] == "torch" and slow["contestants"][0]["ratio"] == 0.5
    assert slow["contestants"][3]["numerics_passed"] is False and slow["contestants"][3]["median_us"] is None
    assert slow["numerics_passed"] is True and slow["passed"] is False
    assert wrong["numerics_passed"] is False and wrong["best_peer"] is None
    assert not any(entry.get("gb_per_s") or entry["median_us"] for entry in wrong["contestants"])
    assert (wrong["contestants"][0]["error"], wrong["contestants"][2]["numerics_passed"]) == (None, None)
    assert failed["contestants"] == [] and failed["numerics_passed"] is False and failed["reason"] == "out of memory"


def test_ceilings_of_the_start_serve_where_there_are_none_at_the_end() -> None:
    document = made_up_document()
    assert document["ceilings"]["copy_gb_per_s"] == 4200  # the elementwise kernel was the faster copy
    assert document["ceilings"]["measured"]["end"] is None
    report.markdown(document)


def test_the_markdown_keeps_slower_wrong_and_failed_cases() -> None:
    text = report.markdown(made_up_document(end=H200))
    assert text.startswith(
        "NVIDIA H200 (sm_90, 132 SMs), SM clock 1,755 MHz under the matmul, 1,980 at most, 700 W, driver 580.1"
    )
    assert "torch 2.11.0" in text and "flashinfer-python" not in text and "commit 0123456789ab with changes" in text
    assert "at the start copy_ 4,000" in text and "at the end copy_ 4,300" in text
    lines = text.splitlines()
    (fast,) = [line for line in lines if line.startswith("| B=1 ")]
    (slow,) = [line for line in lines if line.startswith("| B=64 ")]
    (wrong,) = [line for line in lines if line.startswith("| B=8 ")]
    assert "| 20 (18.4 to 21.6) | 7% |" in fast and "| 16 | 100 (5.00x) | 30 (1.50x) | flashinfer fa3, 1.50x |" in fast
    assert "| 4,000 (4,000 to 4,000) |" in slow and "| 2,000 (0.50x) | wrong | torch, 0.50x |" in slow
    assert "| wrong |" in wrong and "right, not timed" in wrong and wrong.endswith("| absent | none |")
    assert "- torch, flashinfer fa3: A note." in lines and "- flashinfer fa3: absent: flashinfer is not installed." in lines
    assert f"- B=64 context=8192 H=64 S=8, flashinfer fa3: wrong: {OFF.complaint}" in lines
    assert f"- B=8 context=8192 H=64 S=8: not timed: ours: wrong: {BLIND.complaint}" in lines
    assert text.count(str(BLIND.complaint)) == 1
    assert "## context_append" in lines and "- tokens=8 layers=5: not timed: out of memory" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables if line.startswith("| B=")} == {tables[0].count("|")}


def test_nothing_that_json_does_not_have_gets_into_a_document() -> None:
    assert report.figure(float("nan")) is None and report.figure(float("inf")) is None
    assert report.figure(1234567.8) == 1234570.0


# ---------------------------------------------------------------------------------------------------------------- machine
def test_the_commit_and_whether_the_tree_differs(tmp_path: Path) -> None:
    assert machine.commit(tmp_path) == {"commit": None, "dirty": None}
    git = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    git(["git", "init"])
    (tmp_path / "file").write_text("1")
    git(["git", "add", "file"])
    git(["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "commit", "-m", "one"])
    clean = machine.commit(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert machine.commit(tmp_path) == {**clean, "dirty": True}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("580.65.06, 1755, 1980, 700.00", ("580.65.06", 1755.0, 1980.0, 700.0)),
        ("580.65.06, 1755, 1980, [N/A]", ("580.65.06", 1755.0, 1980.0, None)),
        (None, (None, None, None, None)),
    ],
)
def test_clocks_are_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch, said: str | None, expected: tuple[Any, ...]) -> None:
    monkeypatch.setattr(machine, "_run", lambda *command: said)
    monkeypatch.setattr(machine, "_smi_name", lambda device: "GPU-0")
    assert tuple(machine.clocks(CPU).values()) == expected


# ---------------------------------------------------------------------------------------------------------------- command
@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch, measured: list[int]) -> None:
    """The command with small cases, the twins as ours, made-up times and a machine that says it is an H200."""
    monkeypatch.setitem(SUITES, "kernels", tuple(SMALL.values()))
    monkeypatch.setattr(command, "cuda_device", lambda: CPU)
    monkeypatch.setattr(machine, "facts", lambda device: dict(MACHINE))
    monkeypatch.setattr(machine, "clocks", lambda device: {})
    monkeypatch.setattr(timing, "ceilings", lambda rounds, device, busy=None: (busy and busy()) or H200)
    enter(monkeypatch, answer)


def enter(monkeypatch: pytest.MonkeyPatch, ours: Answer) -> None:
    for kernel, entered in list(CONTESTANTS.items()):
        plain = [contestant for contestant in entered if contestant.name == "torch"]
        monkeypatch.setitem(CONTESTANTS, kernel, (of(ours), *plain))


@pytest.mark.usefixtures("without_a_gpu")
def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tables = tmp_path / "a.json", tmp_path / "a.md"
    assert command.main(["--quick", "--json", "--out", str(out), "--md", str(tables)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert json.loads(out.read_text()) == document and tables.read_text() in printed
    assert [case["kernel"] for case in document["cases"]] == list(SMALL) and document["passed"] is True
    assert document["rounds"] == command.QUICK_ROUNDS
    assert f"block_attention {ATTENTION.label}: ours 13.0 us, torch 23.0 us" in printed.splitlines()


@pytest.mark.usefixtures("without_a_gpu")
def test_exit_code_1_where_something_was_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    enter(monkeypatch, swaps_two_heads)
    assert command.main(["--json", "--only", "query_rope"]) == 1
    printed = capsys.readouterr().out
    (case,) = json.loads(printed.splitlines()[-1])["cases"]
    assert case["numerics_passed"] is False and case["contestants"][0]["status"] == "wrong"
    assert f"query_rope {ROPE.label}: not timed: ours: wrong: error" in printed
    assert command.main(["--only", "markov_chain"]) == 1  # it has no heads: raises


@pytest.mark.usefixtures("without_a_gpu")
def test_a_device_that_is_gone_at_the_end_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([H200])

    def ceilings(rounds: int, device: torch.device, busy: Any = None) -> Ceilings:
        for measured in found:
            return measured
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(timing, "ceilings", ceilings)
    assert command.main(["--json", "--only", "query_rope"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["ceilings"]["measured"]["end"] is None
    assert "no ceilings at the end: CUDA error" in printed.err


def test_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SUITES["kernels"])
    assert lines[0] == "block_attention B=1 context=1024 H=64 S=8: 2.30 MB, 1.15 GFLOP"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "no such case"], "a case that contains 'no such case' is required, kernels has none. Use --list."),
        (["--out", "no/such/folder/a.json"], "--out needs a folder that exists, no/such/folder does not. Make it."),
        (["--md", "no/such/folder/a.md"], "--md needs a folder that exists, no/such/folder does not. Make it."),
    ],
)
def test_exit_code_2_where_nothing_was_tried(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"cute_kernels.bench: {said}\n"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    said = "cute_kernels.bench: a CUDA device is required, torch sees none. Use --list to see the cases.\n"
    assert capsys.readouterr().err == said


def test_the_module_runs_and_imports_neither_drafter_nor_peers() -> None:
    probe = (
        "import runpy, sys; sys.argv = ['bench', '--list']\n"
        "try: runpy.run_module('cute_kernels.bench', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, sorted({'trtllm_dspark', 'flashinfer', 'cutlass', 'tensorrt_llm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stderr


def test_every_contestant_can_be_told_from_the_others() -> None:
    for kernel, entered in CONTESTANTS.items():
        names = [contestant.name for contestant in entered]
        assert len(set(names)) == len(names) and entered[0].name == "ours" and entered[0].ours, kernel
    fa3 = CONTESTANTS["block_attention"][-1]
    assert (fa3.name, fa3.package, fa3.capability) == ("flashinfer fa3", "flashinfer", (9, 0))


def test_ours_refuses_a_cpu_and_says_why(measured: list[int]) -> None:
    """The product's own contestants, where no kernel can run: reported, not raised."""
    for case in SMALL.values():
        ours = [contestant for contestant in contestants.CONTESTANTS[case.kernel] if contestant.ours]
        result = run_case(case, ours, 3, CPU, 50)
        assert [outcome.status for outcome in result.outcomes] == [FAILED] * len(ours)
        assert all("needs a CUDA device" in str(o.reason) or "not installed" in str(o.reason) for o in result.outcomes)


# ------------------------------------------------------------------------------------------------------------------- gpu
@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = (BlockAttentionCase(2, 130, heads=8), ContextAppendCase(40), QueryRopeCase(2), MarkovChainCase(3, vocabulary=4099))
    monkeypatch.setitem(SUITES, "kernels", cases)
    for kernel, entered in list(CONTESTANTS.items()):  # FlashInfer may have to be compiled for minutes
        monkeypatch.setitem(CONTESTANTS, kernel, tuple(contestant for contestant in entered if contestant.package is None))
    tables = tmp_path / "a.md"
    code = command.main(["--quick", "--json", "--md", str(tables)])
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    problems = [case["reason"] for case in document["cases"] if case["reason"]]
    problems += [entry["reason"] for case in document["cases"] for entry in case["contestants"] if entry["reason"]]
    assert (code, problems, document["passed"]) == (0, [], True)
    assert document["ceilings"]["copy_gb_per_s"] > 50 and document["ceilings"]["matmul_tflop_per_s"] > 5
    for case in document["cases"]:
        for entry in case["contestants"]:
            assert 0.5 < entry["p10_us"] <= entry["median_us"] <= entry["p90_us"] < 5000, (case["label"], entry)
            assert entry["share_of_floor"] < 1.05
    assert tables.read_text() in printed
