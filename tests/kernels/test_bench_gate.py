"""The gate of the bench: it passes the twins and plain torch, and refuses every mistake."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_fabricated import ATTENTION, BY_HEAD, CPU, FLAT, GATED, MISTAKES, RAGGED, SMALL, Answer, answer, of, run_case_untimed

from cute_kernels.bench import contestants
from cute_kernels.bench.cases import BlockAttentionCase, FewRowLinearCase
from cute_kernels.bench.contestants import CONTESTANTS
from cute_kernels.bench.correctness import ROUNDING, Verdict, judge, poison, worst_row, yardstick
from cute_kernels.bench.run import FAILED, RIGHT, WRONG
from cute_kernels.reference.block_attention import block_attention
from cute_kernels.reference.few_row_linear import few_row_linear, few_row_silu_mul


def verdict_of(case: Any, answer: Answer) -> Verdict:
    inputs = case.sets(1, CPU)[0]
    held = yardstick(case, inputs)
    result = answer(case, inputs)
    poison(result)
    return judge(held, answer(case, inputs))


@pytest.mark.parametrize("case", [*SMALL.values(), RAGGED, FLAT, GATED], ids=lambda case: f"{case.kernel} {case.label}")
def test_the_gate_passes_the_twin(case: Any) -> None:
    verdict = verdict_of(case, answer)
    assert verdict.complaint is None and verdict.error is not None
    assert verdict.error <= verdict.baseline + 2**-8


@pytest.mark.parametrize("case", [*SMALL.values(), FLAT, GATED], ids=lambda case: f"{case.kernel} {case.label}")
def test_the_gate_passes_plain_torch(case: Any) -> None:
    (peer,) = [c for c in CONTESTANTS[case.kernel] if c.name == "torch"]
    outcome = run_case_untimed(case, of(answer), peer).outcomes[1]
    assert (outcome.status, outcome.reason) == (RIGHT, None)


@pytest.mark.parametrize("case", [BY_HEAD, FLAT, GATED], ids=lambda case: case.label)
def test_our_linear_layer_is_given_what_the_case_says(case: FewRowLinearCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins stand for the kernels. Fails when the wrong one of the two is called, or with another set's operands."""
    ours = CONTESTANTS["few_row_linear"][0]
    seen: list[str] = []
    for linear, gated in (
        (few_row_linear, few_row_silu_mul),
        (few_row_silu_mul, few_row_linear),  # controls
        (lambda x, weight: 2 * few_row_linear(x, weight), lambda x, gate, up: few_row_silu_mul(x, up, gate)),
    ):
        monkeypatch.setattr(contestants, "few_row_linear", linear)
        monkeypatch.setattr(contestants, "few_row_silu_mul", gated)
        seen.append(run_case_untimed(case, ours).outcomes[0].status)
    assert seen == [RIGHT, FAILED, WRONG]


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


def test_control_a_tile_of_a_wide_linear_layer_that_misses_some_of_k_is_noticed() -> None:
    """64 outputs of 16,384 without the last 8 products of 2,048: fails when the rows are compared whole."""
    case = FewRowLinearCase("head", 16384, 2048, rows=2)
    inputs = case.sets(1, CPU)[0]
    held = yardstick(case, inputs)
    right = answer(case, inputs)
    assert judge(held, right).complaint is None
    found = right.clone()
    found[1, 640:704] = inputs["x"][1, :-8] @ inputs["weight"][640:704, :-8].T
    assert "error" in str(judge(held, found).complaint)
    truth = held.truth.view_as(right)
    assert worst_row(found, truth) <= 2 * worst_row(right, truth) + ROUNDING  # whole rows: too weak a mistake to show


def test_the_worst_row_by_hand() -> None:
    truth = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    assert worst_row(torch.tensor([[3.0, 4.5], [0.0, 10.5]]), truth) == pytest.approx(0.1)
    assert not worst_row(torch.tensor([[3.0, 4.0], [0.0, torch.nan]]), truth) <= 1e9


def test_of_many_requests_some_are_compared_and_named() -> None:
    inputs = ATTENTION.sets(1, CPU)[0]
    assert yardstick(ATTENTION, inputs).checked == "requests 0, 2, 4 of 5"
    ragged = replace(RAGGED, batch=12)
    extremes = {ragged.lengths.index(max(ragged.lengths)), ragged.lengths.index(min(ragged.lengths))}
    picked = sorted({0, 6, 11} | extremes)
    assert len(picked) > 3  # else the extremes show nothing here
    checked = yardstick(ragged, ragged.sets(1, CPU)[0]).checked
    assert checked == f"requests {', '.join(map(str, picked))} of 12"
    one = replace(ATTENTION, batch=1)
    assert yardstick(one, one.sets(1, CPU)[0]).checked == "request 0 of 1"
