"""Rotary position embedding in its two pairings, and RMSNorm: the arithmetic that several kernels share.

Statistics and angles are fp32 (fp64 where the input is fp64); the result returns to the input's dtype, so that what is
written to a page has the page's dtype.
"""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything narrower is accumulated in fp32."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, times weight. Over the last dim.

    Args:
        x: [..., N]. weight: [N] or broadcastable. eps: added to the mean square.
    """
    wide = x.to(accumulation_dtype(x.dtype))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight


def rotate_adjacent(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (2i, 2i+1) of the last dim: the MLA family's convention.

    Args:
        x: [..., R]. cos, sin: broadcastable to [..., R/2], fp32.
    Returns:
        [..., R] in x's dtype; pair i stays at lanes 2i and 2i+1.
    """
    even, odd = x.to(accumulation_dtype(x.dtype)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def rotate_half_split(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + R/2) of the last dim: the GQA family's convention. Shapes as `rotate_adjacent`."""
    first, second = x.to(accumulation_dtype(x.dtype)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)
