"""The parts every DSpark drafter is made of. No weight is initialised here: a checkpoint or a trainer fills all of them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from cute_kernels.reference.add_rms_norm import add_rms_norm
from cute_kernels.reference.few_row_linear import few_row_silu_mul
from trtllm_dspark.attention.operations import AddRMSNorm, GatedProduct, LinearProduct
from trtllm_dspark.attention.products import plain_linear
from trtllm_dspark.model.parallel import TensorParallel

ROWS = 8  # a matrix library takes other routines for fewer rows, and for what is left over, and rounds otherwise


def with_company(project: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """project(x), on a CPU over rows [N, in] padded to a multiple of ROWS with copies of the last. [..., in] -> [..., out].

    A request's values must not depend on who shares its batch. On a GPU they may, by rounding: libraries choose by size, and on
    Hopper up to 16 rows are multiplied by a kernel of its own.
    """
    if x.device.type != "cpu":
        return project(x)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    projected = project(torch.cat((rows, rows[-1:].expand(-len(rows) % ROWS, -1))))[: len(rows)]
    return projected.reshape(*x.shape[:-1], projected.shape[-1])


def linear(x: torch.Tensor, weight: torch.Tensor, product: LinearProduct = plain_linear) -> torch.Tensor:
    """x [..., in] times weight [out, in], transposed; see `with_company`. product: what computes it."""
    return with_company(lambda rows: product(rows, weight), x)


class RMSNorm(nn.Module):
    """fp32 statistics, rounded to the input's dtype, times weight. [..., size] -> [..., size].

    Attributes:
        add_norm: what computes it.
    """

    add_norm: AddRMSNorm

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.add_norm = add_rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add_norm(x, self.weight, self.eps)[0]


class ResidualNorm(RMSNorm):
    """RMSNorm of the residual stream, which first receives what the layer before made."""

    def forward(self, stream: torch.Tensor, made: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """[..., size], and as much to add or None -> (normalised, the stream with it added)."""
        if made is None:
            return self.add_norm(stream, self.weight, self.eps)
        return self.add_norm(made, self.weight, self.eps, stream)


class Linear(nn.Module):
    """Bias-free projection, weight [out, in].

    Attributes:
        product: what computes it.
    """

    product: LinearProduct

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.product = plain_linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.product)


class Embedding(nn.Module):
    """Rows of a table, weight [count, size]. Ids must lie in [0, count): there is no padding id."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class GatedMLP(nn.Module):
    """down(SiLU(gate x) * up x); the inner columns are split over tensor-parallel ranks. [..., D] -> [..., D].

    Attributes:
        gated: what computes SiLU(gate x) * up x.
    """

    gated: GatedProduct

    def __init__(self, hidden: int, inner: int, tp: TensorParallel) -> None:
        super().__init__()
        local = tp.share(inner, "intermediate_size")
        self.gate_proj, self.up_proj = Linear(hidden, local), Linear(hidden, local)
        self.down_proj = Linear(local, hidden)
        self.tp = tp
        self.gated = few_row_silu_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj.weight, self.up_proj.weight
        return self.tp.sum(self.down_proj(with_company(lambda rows: self.gated(rows, gate, up), x)))
