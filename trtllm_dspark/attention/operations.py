"""The computations of a draft step that kernels exist for, as a backend gives them, and the shape they are chosen for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cute_kernels.reference.add_rms_norm import add_rms_norm
from cute_kernels.reference.context_append import context_append, finish_latents
from cute_kernels.reference.few_row_linear import few_row_silu_mul
from cute_kernels.reference.query_rope import query_rope
from trtllm_dspark.attention.products import plain_linear
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.model.parallel import SINGLE, TensorParallel

DEFAULT_BLOCK_ROWS = 8  # where neither the checkpoint nor the caller says: 7 drafts and a bonus token


@dataclass(frozen=True)
class DraftShape:
    """What a deployment fixes, as far as kernels care.

    Attributes:
        dtype: of activations and pool. page_size: P. heads: H on this rank. block_rows: S.
    """

    dtype: torch.dtype
    page_size: int
    heads: int
    block_rows: int

    @classmethod
    def of(
        cls,
        config: DraftConfig,
        *,
        dtype: torch.dtype | None = None,
        page_size: int = 64,
        tp: TensorParallel = SINGLE,
    ) -> "DraftShape":
        """The shape of this draft on one rank. dtype None is the checkpoint's own."""
        heads = tp.share(config.num_heads, "num_attention_heads")
        own = getattr(torch, config.dtype) if dtype is None else dtype
        return cls(own, page_size, heads, config.block_size or DEFAULT_BLOCK_ROWS)


def normalised(config: DraftConfig) -> tuple[tuple[int, bool], ...]:
    """(width, whether a residual is added) of every norm in a step of an MLA draft, the latents' own excepted."""
    assert config.q_lora_rank is not None, f"an MLA draft without q_lora_rank: {config}"
    found = [(config.hidden_size, True), (config.hidden_size, False), (config.q_lora_rank, False)]
    if config.per_tap_norm:
        found.append((config.target_hidden_size, False))
    return tuple(sorted(set(found)))


class BlockAttention(Protocol):
    """The one signature; see `vanilla.block_attention` for shapes. plan: what the same backend's `plan` returned."""

    def __call__(
        self,
        q: torch.Tensor,
        block_latents: torch.Tensor,
        pages: torch.Tensor,
        page_table: torch.Tensor,
        context_len: torch.Tensor,
        *,
        scale: float,
        value_width: int,
        layer: int = 0,
        context_start: torch.Tensor | None = None,
        plan: object = None,
    ) -> torch.Tensor: ...


class Planner(Protocol):
    """Work that all layers of a step share, done once before them: (lengths, starts) [B] int32 -> an opaque plan.

    block_rows: S. heads: H. value_width: c. pages: any layer's view. page_table: [B, max_pages].
    """

    def __call__(
        self,
        context_len: torch.Tensor,
        context_start: torch.Tensor | None,
        *,
        block_rows: int,
        heads: int,
        value_width: int,
        pages: torch.Tensor,
        page_table: torch.Tensor,
    ) -> object: ...


def no_plan(
    context_len: torch.Tensor,
    context_start: torch.Tensor | None,
    *,
    block_rows: int,
    heads: int,
    value_width: int,
    pages: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Of a backend whose layers share nothing."""


def one_way(shape: DraftShape, device: torch.device) -> tuple[int, ...]:
    """Of a backend whose attention goes the same way whatever the number of requests."""
    return ()


MarkovChain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(base logits [B, K, V], anchors [B], W1, W2, codes [B, K, R] or None) -> tokens [B, K]; see the twin."""
ContextAppend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor], float], None
]
"""(z, norm_weight, cos, sin, slots, pools, eps); see the twin."""


class FinishLatents(Protocol):
    """(z [B, S, W], norm_weight [c], cos, sin [B, S, r/2], eps) -> finished latents [B, S, W]; see the twin."""

    def __call__(
        self, z: torch.Tensor, norm_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
    ) -> torch.Tensor: ...


class AddRMSNorm(Protocol):
    """(x, weight, eps, residual or None) -> (normalised, residual + x); see the twin."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class LinearProduct(Protocol):
    """(x [..., in], weight [out, in], where it is written or None) -> [..., out]; or [..., H, in], [H, out, in]; see the twin.

    A weight is a constant: it may be read before the work that was launched before this has ended.
    """

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


GatedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [..., in], gate and up [out, in]) -> silu(gate x) * up x [..., out]; see the twin. Weights as of a LinearProduct."""
QueryRope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(rotary, cos, sin, out); see the twin."""


@dataclass(frozen=True)
class Operations:
    """How a backend computes a draft step.

    Attributes:
        block_attention, plan, context_append, query_rope, finish_latents, add_rms_norm, linear, silu_mul: see their types.
        markov_chain: None is `model.heads.greedy_chain`.
        batches: (shape, device) -> numbers of requests for which block_attention takes other kernels or cuts the work anew.
        capturable: whether they read nothing on the host, so that a step can be captured in a CUDA graph.
        differentiable: whether gradients flow through them.
    """

    block_attention: BlockAttention
    plan: Planner = no_plan
    context_append: ContextAppend = context_append
    query_rope: QueryRope = query_rope
    finish_latents: FinishLatents = finish_latents
    add_rms_norm: AddRMSNorm = add_rms_norm
    linear: LinearProduct = plain_linear
    silu_mul: GatedProduct = few_row_silu_mul
    markov_chain: MarkovChain | None = None
    batches: Callable[[DraftShape, torch.device], tuple[int, ...]] = one_way
    capturable: bool = False
    differentiable: bool = True
