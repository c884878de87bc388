"""The self-check that a backend must pass before it is used: right ones pass, planted faults are refused with their error."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import published
import pytest
import torch

from cute_kernels.few_row_linear.config import HOPPER_MULTIPROCESSORS, SILU_MUL, pick_split
from cute_kernels.reference.add_rms_norm import add_rms_norm
from cute_kernels.reference.context_append import context_append, finish_latents
from cute_kernels.reference.few_row_linear import few_row_linear, few_row_silu_mul
from cute_kernels.reference.markov_chain import markov_chain
from cute_kernels.reference.query_rope import query_rope
from trtllm_dspark.attention import policy, self_check, vanilla
from trtllm_dspark.attention.finding import Finding, worst
from trtllm_dspark.attention.operations import DraftShape, Operations, normalised
from trtllm_dspark.attention.policy import Backend, resolve_backend
from trtllm_dspark.attention.product_check import TURNS, fewer_outputs
from trtllm_dspark.attention.products import multiplied
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = DraftConfig.from_dict(published.tiny("mla"))
RIGHT = Operations(vanilla.block_attention, markov_chain=markov_chain)


def shape(dtype: torch.dtype = torch.bfloat16, page_size: int = 16) -> DraftShape:
    return replace(DraftShape.of(CONFIG, dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_torch_passes(dtype: torch.dtype, page_size: int) -> None:
    outcome = self_check.self_check(RIGHT, CONFIG, shape(dtype, page_size), CPU)
    assert outcome.reason() is None and len(outcome.findings) == 8
    assert all(0 <= finding.error <= finding.allowed < 0.1 for finding in outcome.findings)


def causal(q: torch.Tensor, block_latents: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
    rows = range(q.shape[1])
    parts = [vanilla.block_attention(q[:, s : s + 1], block_latents[:, : s + 1], *rest, **options) for s in rows]
    return torch.cat(parts, 1)


def no_window(*arguments: torch.Tensor, context_start: torch.Tensor, **options: object) -> torch.Tensor:
    return vanilla.block_attention(*arguments, context_start=torch.zeros_like(context_start), **options)


def one_row_short(*arguments: torch.Tensor, context_len: torch.Tensor, **options: object) -> torch.Tensor:
    return vanilla.block_attention(*arguments, context_len=(context_len - 1).clamp(min=0), **options)


def unwritten_row(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
    found = vanilla.block_attention(*arguments, **options)
    found[-1, -1, -1] = torch.nan
    return found


def writes_every_slot(z, norm_weight, cos, sin, slots, pools, eps):  # type: ignore[no-untyped-def]
    context_append(z, norm_weight, cos, sin, slots.clamp(min=0), pools, eps)


def unrotated(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    query_rope(rotary, torch.ones_like(cos), torch.zeros_like(sin), out)


def next_token(*arguments: torch.Tensor) -> torch.Tensor:
    return markov_chain(*arguments) + 1


def one_angle_for_all(z, norm_weight, cos, sin, eps):  # type: ignore[no-untyped-def]
    return finish_latents(z, norm_weight, cos[:, :1], sin[:, :1], eps)


def residual_forgotten(x, weight, eps, residual=None):  # type: ignore[no-untyped-def]
    return add_rms_norm(x, weight, eps)


def total_not_returned(x, weight, eps, residual=None):  # type: ignore[no-untyped-def]
    return add_rms_norm(x, weight, eps, residual)[0], x


def codes_forgotten(base, anchors, w1, w2, codes):  # type: ignore[no-untyped-def]
    codes.zero_()
    return markov_chain(base, anchors, w1, w2)


def end_of_k_missed(x, weight, out=None):  # type: ignore[no-untyped-def]
    return few_row_linear(x[..., :-8], weight[..., :-8], out)


def heads_shifted(x, weight, out=None):  # type: ignore[no-untyped-def]
    return few_row_linear(x, weight.roll(1, 0) if weight.ndim == 3 else weight, out)


def written_beside(x, weight, out=None):  # type: ignore[no-untyped-def]
    if out is not None:
        torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()
    return few_row_linear(x, weight, out)


def more_rows_than_sixteen_lost(x, weight, out=None):  # type: ignore[no-untyped-def]
    found = few_row_linear(x, weight, out)
    found[16:] = 0
    return found


def gate_for_up(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return few_row_silu_mul(x, up, gate)


FAULTS = {
    "causal": ("block_attention", causal),
    "window-ignored": ("block_attention", no_window),
    "last-token-missed": ("block_attention", one_row_short),
    "unwritten-row": ("block_attention", unwritten_row),
    "slot-minus-one-written": ("context_append", writes_every_slot),
    "query-not-rotated": ("query_rope", unrotated),
    "block-at-one-position": ("finish_latents", one_angle_for_all),
    "residual-forgotten": ("add_rms_norm", residual_forgotten),
    "stream-lost": ("add_rms_norm", total_not_returned),
    "end-of-k-missed": ("linear", end_of_k_missed),
    "heads-shifted": ("linear", heads_shifted),
    "written-beside": ("linear", written_beside),
    "rows-lost": ("linear", more_rows_than_sixteen_lost),
    "gate-for-up": ("silu_mul", gate_for_up),
    "codes-not-written": ("markov_chain", codes_forgotten),
    "wrong-token": ("markov_chain", next_token),
}


@pytest.mark.parametrize(("operation", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_and_named(operation: str, fault: Callable[..., torch.Tensor]) -> None:
    outcome = self_check.self_check(replace(RIGHT, **{operation: fault}), CONFIG, shape(), CPU)
    wrong = [finding for finding in outcome.findings if not finding.passed]
    assert [finding.operation for finding in wrong] == [operation] and wrong[0].error > 2 * wrong[0].allowed
    assert f"{operation} is off by {wrong[0].error:.1e}" in str(outcome.reason())


def test_one_row_of_one_head_is_enough() -> None:
    """Fails where an error is averaged over the batch: at 64 heads a single wrong row is a thousandth of it."""

    def zero_row(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        found = vanilla.block_attention(*arguments, **options)
        found[2, 1, 5] = 0
        return found

    wide = replace(shape(), heads=64)
    outcome = self_check.self_check(replace(RIGHT, block_attention=zero_row), CONFIG, wide, CPU)
    assert "block_attention is off by 1.0e+00" in str(outcome.reason())
    assert self_check.self_check(RIGHT, CONFIG, wide, CPU).reason() is None


def test_a_draft_with_norms_of_its_taps_is_checked_at_their_width() -> None:
    config = DraftConfig.from_dict(published.tiny("mla", fc_norm=True, target_hidden_size=96))
    seen = set()

    def recording(x, weight, eps, residual=None):  # type: ignore[no-untyped-def]
        seen.add((x.shape[-1], residual is not None))
        return add_rms_norm(x, weight, eps, residual)

    self_check.self_check(replace(RIGHT, add_rms_norm=recording), config, shape(), CPU)
    assert seen == set(normalised(config)) and (96, False) in seen


def backends(cutedsl: Operations) -> dict[str, Backend]:
    def available(*arguments: object) -> None:
        """No reason against it."""

    return {
        "CUTEDSL": Backend("CUTEDSL", available, lambda: cutedsl),
        "TRTLLM": Backend("TRTLLM", available, lambda: RIGHT),
        "VANILLA": Backend("VANILLA", vanilla.reason, vanilla.operations, checked=False),
    }


def on_cpu(
    name: str, make: Callable[[], Operations], config: DraftConfig, shape: DraftShape, device: torch.device
) -> str | None:
    """The real check; the policy believes that it decides for a GPU."""
    return self_check.self_check(make(), config, shape, CPU).reason()


def test_auto_passes_over_a_wrong_kernel_with_the_error_it_made(caplog: pytest.LogCaptureFixture) -> None:
    table = backends(replace(RIGHT, block_attention=causal))
    with caplog.at_level(logging.INFO, logger=policy.__name__):
        choice = resolve_backend(CONFIG, CUDA, backends=table, check=on_cpu)
    assert choice.name == "TRTLLM"
    [(name, why)] = choice.passed_over
    assert name == "CUTEDSL" and why.startswith("failed its self-check: block_attention is off by ") and "allowed is" in why
    assert why in caplog.text


def test_an_explicit_wrong_kernel_is_refused_with_the_error_it_made() -> None:
    with pytest.raises(DSparkError, match=r"CUTEDSL was asked for.*failed its self-check: query_rope is off by"):
        resolve_backend(CONFIG, CUDA, "CUTEDSL", backends=backends(replace(RIGHT, query_rope=unrotated)), check=on_cpu)


@pytest.mark.parametrize(("times", "picked"), [((10.0, 20.0), "CUTEDSL"), ((20.0, 10.0), "TRTLLM"), ((10.0, 10.0), "CUTEDSL")])
def test_of_two_that_pass_the_faster_is_taken(times: tuple[float, float], picked: str) -> None:
    mine = replace(RIGHT)
    measured = {id(mine): times[0], id(RIGHT): times[1]}
    choice = resolve_backend(
        CONFIG, CUDA, backends=backends(mine), check=on_cpu, measure=lambda operations, *rest: measured[id(operations)]
    )
    assert choice.name == picked
    [(_, why)] = choice.passed_over
    assert why == f"takes {max(times):.0f} us where {picked} takes {min(times):.0f}"


def test_a_check_that_raises_is_a_reason_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("illegal instruction")

    make = partial(replace, RIGHT, block_attention=broken)
    why = self_check.checked_reason("CUTEDSL", make, CONFIG, shape(), CPU)
    assert self_check.checked_reason("CUTEDSL", make, CONFIG, shape(), CPU) == why and caplog.text.count("illegal") == 2
    assert why == "failed its self-check: RuntimeError: illegal instruction" and "illegal instruction" in caplog.text


def test_the_outcome_is_kept_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made: list[int] = []

    def make() -> Operations:
        made.append(1)
        return RIGHT

    with caplog.at_level(logging.INFO, logger=self_check.__name__):
        found = {self_check.checked_reason("X", make, CONFIG, shape(), CPU) for _ in range(3)}
    assert found == {None} and made == [1]
    assert len([r for r in caplog.records if "self-check of X on cpu" in r.getMessage() and "passed" in r.getMessage()]) == 1


def test_a_finding_of_nan_is_worse_than_any_that_passed() -> None:
    """Fails where the first of several findings hides a NaN behind it."""
    fine, lost = Finding("linear", 0.1, 1.0), Finding("linear", float("nan"), 1.0)
    for found in ([fine, lost], [lost, fine]):
        assert not worst(found).passed
    assert worst([fine, Finding("linear", 0.5, 1.0)]).error == 0.5


def test_a_product_is_checked_with_the_split_that_runs_and_several_tiles_a_block() -> None:
    """Fails where a cut product takes another kernel than the whole, as o, down and the head did."""
    draft = DraftConfig.from_dict(published.INFERACT, max_draft_len=7)
    for multiprocessors in HOPPER_MULTIPROCESSORS:
        for product in multiplied(draft, draft.num_heads):
            cut = fewer_outputs(product, multiprocessors)
            split = pick_split(product, multiprocessors)
            assert pick_split(cut, multiprocessors) == split and cut.reason() is None
            tiles = cut.groups * -(-cut.outputs // (32 if cut.form == SILU_MUL else 64))
            assert cut == product or tiles >= TURNS * (multiprocessors // split), product
            assert cut.outputs * cut.inner * cut.groups <= 260 << 20, product  # 0.5 GB


def test_each_number_of_requests_is_checked_that_goes_another_way() -> None:
    """Fails where a kernel that only some batches take is trusted without a check. Control: not asked for, it is not seen."""

    def wrong_for_three(q: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        found = vanilla.block_attention(q, *rest, **options)
        return found * 1.5 if q.shape[0] == 3 else found

    planted = replace(RIGHT, block_attention=wrong_for_three)
    assert self_check.self_check(planted, CONFIG, shape(), CPU).reason() is None
    asked = replace(planted, batches=lambda shape, device: (1, 3, 5))
    assert "block_attention" in (self_check.self_check(asked, CONFIG, shape(), CPU).reason() or "")
    right = replace(RIGHT, batches=lambda shape, device: (1, 3, 5))
    assert self_check.self_check(right, CONFIG, shape(), CPU).reason() is None
