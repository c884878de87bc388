"""Linear layers without bias: one weight for all rows, one for each head, and the inside of a gated MLP."""

import torch
import torch.nn.functional as F


def few_row_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x times weight, transposed.

    Args:
        x: [..., K]. weight: [N, K]; or x: [..., G, K] and weight: [G, N, K], group by group.
        out: where it is written, or None.
    Returns:
        [..., N], or [..., G, N], in x's dtype.
    """
    found = F.linear(x, weight) if weight.ndim == 2 else torch.einsum("...gk,gnk->...gn", x, weight)
    return found if out is None else out.copy_(found)


def few_row_silu_mul(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x gate^T) * (x up^T), each product, the SiLU and the result rounded to x's dtype. [..., K] -> [..., N].

    Args:
        x: [..., K]. gate, up: [N, K].
    """
    return F.silu(F.linear(x, gate)) * F.linear(x, up)
