"""examples/fp8_latents.py: its rounding stays within e4m3's bounds, and its append rounds what it writes and nothing else."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels.reference.context_append import context_append

PATH = Path(__file__).parents[2] / "examples" / "fp8_latents.py"
SPEC = importlib.util.spec_from_file_location("fp8_latents", PATH)
assert SPEC is not None and SPEC.loader is not None
fp8 = importlib.util.module_from_spec(SPEC)
sys.modules["fp8_latents"] = fp8  # dataclasses look their module up
SPEC.loader.exec_module(fp8)

RELATIVE = 2**-4  # half of the last of three mantissa bits
SMALLEST_NORMAL, SUBNORMAL_ERROR = 2**-6, 2**-10  # in units of the scale
FP32_SLACK = 1 + 1e-6  # the quotient and the product are rounded too


def tokens_of_different_size() -> torch.Tensor:
    """[257, 512], fp32: standard normal times 10^-4 to 10^4."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(257, 512, generator=generator) * torch.logspace(-4, 4, 257)[:, None]


def worst_errors(latents: torch.Tensor, rounded: torch.Tensor) -> tuple[float, float]:
    """Largest relative error of elements that are normal in their token's scale; of the others, the largest in that scale."""
    exact, scale = latents.double(), latents.double().abs().amax(-1, keepdim=True) / 448
    error, normal = (rounded.double() - exact).abs(), exact.abs() >= SMALLEST_NORMAL * scale
    assert normal.any() and not normal.all()
    return float((error / exact.abs())[normal].max()), float((error / scale)[~normal].max())


def test_a_scale_a_token_keeps_every_token_within_the_bounds() -> None:
    latents = tokens_of_different_size()
    relative, subnormal = worst_errors(latents, fp8.round_e4m3(latents, fp8.token_scale(latents)))
    assert relative <= RELATIVE * FP32_SLACK
    assert subnormal <= SUBNORMAL_ERROR * FP32_SLACK
    assert relative > 0.9 * RELATIVE  # it is e4m3 that rounds: four mantissa bits would give half


def test_control_one_scale_for_all_tokens_breaks_the_bounds() -> None:
    latents = tokens_of_different_size()
    relative, subnormal = worst_errors(latents, fp8.round_e4m3(latents, fp8.token_scale(latents).max()))
    assert relative > 10 * RELATIVE
    assert subnormal > 10 * SUBNORMAL_ERROR


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1.0, 1e38])
def test_a_token_of_any_size_is_finite(size: float) -> None:
    """Fails on a scale that may be 0, and on a quotient beyond 448, which e4m3 without infinities makes a NaN."""
    latents = torch.linspace(-1, 1, 64)[None] * size
    rounded = fp8.round_e4m3(latents, fp8.token_scale(latents))
    assert bool(rounded.isfinite().all())
    assert float((rounded - latents).abs().max()) <= RELATIVE * FP32_SLACK * size + 1e-38


def test_append_rounds_the_rows_it_writes_and_touches_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, layers, width, rotary = 5, 2, 64, 16
    z = torch.randn(tokens, layers, width + rotary, generator=generator)
    angles = torch.randn(tokens, rotary // 2, generator=generator)
    operands = z, torch.rand(layers, width, generator=generator), angles.cos(), angles.sin()
    slots = torch.tensor([7, -1, 0, 4, -1])
    exact, found = torch.full((2, layers, 3, 4, width + rotary), 0.3)  # which bf16 lacks
    context_append(*operands, slots, exact.unbind(0), 1e-5)
    fp8.rounding_append(fp8.to_fp8)(*operands, slots, found.unbind(0), 1e-5)

    exact, found = exact.flatten(1, 2), found.flatten(1, 2)
    written = [0, 4, 7]
    others = [slot for slot in range(12) if slot not in written]
    assert torch.equal(found[:, others], exact[:, others])
    exact, found = exact[:, written].flatten(0, 1), found[:, written].flatten(0, 1)
    assert torch.equal(found[:, width:], exact[:, width:].bfloat16().float())
    relative, subnormal = worst_errors(exact[:, :width], found[:, :width])
    assert 0.5 * RELATIVE < relative <= RELATIVE * FP32_SLACK and subnormal <= SUBNORMAL_ERROR * FP32_SLACK
    assert not torch.equal(found[:, width:], exact[:, width:])  # control: the rotary part was rounded at all
