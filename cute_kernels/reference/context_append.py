"""Finish latents (RMSNorm of the latent part, RoPE of the rotary part) and write them into the pages of every layer."""

from collections.abc import Sequence

import torch

from cute_kernels.reference.rotation import rms_norm, rotate_adjacent


def finish_latents(
    z: torch.Tensor, norm_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """[RMSNorm(z[:c]) | RoPE(z[c:])]: the row that a page holds. The rotary part is not normalised.

    Args:
        z: [..., c + r], what kv_a_proj_with_mqa gives. norm_weight: [..., c], broadcastable; its last dim is c.
        cos, sin: broadcastable to [..., r/2], fp32. eps: of the RMSNorm.
    Returns:
        [..., c + r] in z's dtype.
    """
    latent, rotary = z.split([norm_weight.shape[-1], z.shape[-1] - norm_weight.shape[-1]], -1)
    return torch.cat((rms_norm(latent, norm_weight, eps), rotate_adjacent(rotary, cos, sin)), -1)


def context_append(
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pools: Sequence[torch.Tensor],
    eps: float,
) -> None:
    """Finish the latents of T context tokens and write each into its slot, for all L layers.

    Args:
        z: [T, L, W], W = c + r; rows may be strided.
        norm_weight: [L, c], the layers' kv_a_layernorm weights.
        cos, sin: [T, r/2], fp32, angles of the tokens' absolute positions.
        slots: [T], integer; page * P + offset. -1: the token is not written. Slots >= 0 are distinct.
        pools: L tensors [num_pages, P, W], each with a contiguous page; written in place. Their dtype must be z's.
        eps: of the RMSNorm.
    Raises:
        TypeError: a pool whose dtype is not z's: bytes are never reinterpreted.
    """
    for layer, pool in enumerate(pools):
        if pool.dtype != z.dtype:
            raise TypeError(
                f"context_append: the pool must have the latents' dtype; layer {layer} has {pool.dtype}, "
                f"the latents {z.dtype}. Cast one of them."
            )
    if not z.shape[0]:
        return
    rows = finish_latents(z, norm_weight, cos[:, None], sin[:, None], eps)
    # Fixed shapes and no host sync (indexing with a 0-dim tensor would be one): a token without a slot repeats the write of
    # the one with the highest slot, and where no token has one, slot 0 is given what it holds.
    highest, at = slots.max(0)
    row = rows.index_select(0, at.view(1))  # [1, L, W]
    written, any_written = (slots >= 0).unsqueeze(1), highest >= 0
    target = torch.where(written[:, 0], slots, highest.clamp(min=0)).long()
    page_size = pools[0].shape[1]
    page, offset = target // page_size, target % page_size
    for layer, pool in enumerate(pools):
        values = torch.where(written, rows[:, layer], row[:, layer])
        pool.index_put_((page, offset), torch.where(any_written, values, pool[page, offset]))
