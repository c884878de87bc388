"""VANILLA: block attention in plain torch, on any device. Right first; it also sets what the other backends must equal.

Each request is computed alone, from its live pages only, so its result does not depend on who shares the batch. Groups of
pages are folded into an online softmax: memory is one group, whatever the context. It reads `context_len` on the host and
so cannot be captured in a CUDA graph.
"""

from collections.abc import Iterator

import torch

from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError

GROUP_TOKENS = 8192


def reason(config: DraftConfig, device: torch.device, shape: DraftShape) -> str | None:
    """None: plain torch runs everywhere."""
    return None


def operations() -> Operations:
    """Plain torch throughout."""
    return Operations(block_attention)


def block_attention(
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
) -> torch.Tensor:
    """Attention of S block rows over their context and over each other, non-causal, in the latent space.

    out[b, s, h] = sum_t softmax_t(scale * q[b, s, h] . latent[b, t]) * latent[b, t, :c],
    t over positions context_start[b] .. context_len[b]-1 of request b's context and all S rows of its block.

    Args:
        q: [B, S, H, W]. block_latents: [B, S, W], finished; never written to the pool.
        pages: [num_pages, P, W], one layer's view. page_table: [B, max_pages], int32; entries outside the context are
            neither read nor checked. context_len: [B], int32, the end of the context; 0 is legal.
        scale: softmax scale. value_width: c. layer: which layer, for messages.
        context_start: [B], int32, first position read; None is 0. At or past context_len the context is empty.
        plan: not used.
    Returns:
        [B, S, H, c] in q's dtype.
    Raises:
        DSparkError: a context longer than its row of the table, or a live page id outside the pool.
    Numerics: fp32 scores, softmax and sums (fp64 where q is fp64). A request without rows costs nothing.
    """
    batch, rows, heads, width = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, rows, heads, value_width)
    starts = [0] * batch if context_start is None else context_start.tolist()
    for request, (start, length) in enumerate(zip(starts, context_len.tolist(), strict=True)):
        queries = q[request].reshape(rows * heads, width).to(wide) * scale
        top = queries.new_full((rows * heads, 1), -torch.inf)
        weight = queries.new_zeros(rows * heads, 1)
        total = queries.new_zeros(rows * heads, value_width)
        for latents in _live_latents(block_latents[request], pages, page_table[request], start, length, request):
            keys = latents.to(wide)
            scores = queries @ keys.T
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            shrink = (top - new_top).exp()
            probabilities = (scores - new_top).exp_()
            weight = weight * shrink + probabilities.sum(-1, keepdim=True)
            total = total * shrink + probabilities @ keys[:, :value_width]
            top = new_top
        out[request] = (total / weight).view(rows, heads, value_width).to(q.dtype)
    return out


def _live_latents(
    block: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, start: int, length: int, request: int
) -> Iterator[torch.Tensor]:
    """The block's own latents, then the context's, group by group: tensors [tokens, W] that hold live tokens only."""
    yield block
    page_size = pages.shape[1]
    live = -(-length // page_size)
    if length < 0 or live > table.shape[0]:
        raise DSparkError(
            f"block_attention: request {request} must have 0 to {table.shape[0] * page_size} context tokens (its page table "
            f"has {table.shape[0]} pages of {page_size}), it has {length}. "
            "Clamp context_len to the request's page bound."
        )
    if start < 0:
        raise DSparkError(f"block_attention: context_start of request {request} must be 0 or more, it is {start}. Clamp it.")
    per_group = max(GROUP_TOKENS // page_size, 1)
    for first in range(start // page_size, live if start < length else 0, per_group):
        ids = table[first : min(first + per_group, live)].long()
        if bool(((ids < 0) | (ids >= pages.shape[0])).any()):
            raise DSparkError(
                f"block_attention: live pages of request {request} must lie in 0..{pages.shape[0] - 1}, its table has "
                f"{ids.tolist()}. The page table does not belong to this pool."
            )
        yield pages[ids].flatten(0, 1)[max(start - first * page_size, 0) : length - first * page_size]
