"""Add what a layer made to the residual stream, and normalise the sum."""

import torch

from cute_kernels.reference.rotation import rms_norm


def add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """total = residual + x, rounded; RMSNorm(total) * weight.

    Args:
        x: [..., N]. weight: [N]. eps: of the RMSNorm. residual: as x, or None: the total is x itself.
    Returns:
        (normalised, total), each [..., N] in x's dtype.
    """
    total = x if residual is None else residual + x
    return rms_norm(total, weight, eps), total
