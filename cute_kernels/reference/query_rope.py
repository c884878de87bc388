"""Rotate each head's query and place it beside the absorbed part."""

import torch

from cute_kernels.reference.rotation import rotate_adjacent


def query_rope(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Write RoPE(rotary) into the last r columns of out. The columns before them are not touched.

    Args:
        rotary: [B, S, H, r], the last r columns of each head of q_b_proj's output; rows may be strided. Adjacent pairs.
        cos, sin: [B, S, r/2], fp32, angles of the rows' absolute positions; the same for all heads.
        out: [B, S, H, W], W >= r; out[..., :W-r] belongs to whoever writes the absorbed part. Its dtype must be rotary's.
    Raises:
        TypeError: an out whose dtype is not rotary's: bytes are never reinterpreted.
    """
    if out.dtype != rotary.dtype:
        raise TypeError(f"query_rope: out must have the queries' dtype {rotary.dtype}, it has {out.dtype}. Cast one of them.")
    start = out.shape[-1] - rotary.shape[-1]
    out[..., start:].copy_(rotate_adjacent(rotary, cos.unsqueeze(-2), sin.unsqueeze(-2)))
