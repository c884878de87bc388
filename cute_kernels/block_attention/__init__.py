"""Attention of an MLA drafter's block over its paged context and over itself, in the latent space.

    out[b, s, h] = sum_t softmax_t(scale * q[b, s, h] . latent[b, t]) * latent[b, t, :c]

over the positions start[b] .. len[b]-1 of request b's context, in pages, and the S rows of its block, in a tensor of their
own that is never written to the pool. Non-causal. The S * H rows of a request are packed, so that a token is read once for
all of them in a row tile; long contexts are split by a work list made on the device once a step (`plan_block_attention`),
which all layers share; the pieces are merged in a second launch.

    config.py     tiles, configuration, number of parts          plan.py      the work list
    portable.py   the attention, sm_80 and later                 combine.py   merging of pieces
    sm90.py       the attention on Hopper, with sm90_kernel.py and what it names; sm90_combine.py merges its pieces
    sm100.py      the attention on Blackwell, with sm100_kernel.py and what it names; never run on a GPU
    operands.py   what all of them are compiled against          extent.py    tiles of a part, for sm90 and sm100
    kernels.py    which kernels a schedule launches              launch.py    the public function and its op
    workspace.py  buffers of a step and the plan's launch

Moves about B * (len * W + M * (W + c)) * itemsize bytes, M = S * H, and computes 2 * B * M * (len + S) * (W + c) FLOP. The
twin is `cute_kernels.reference.block_attention`.
"""

from cute_kernels.block_attention.config import (
    BlockAttentionConfig,
    candidates,
    num_parts,
    pick_schedule,
    workspace_shapes,
)
from cute_kernels.block_attention.launch import block_attention, gate_configs, reason
from cute_kernels.block_attention.workspace import BlockAttentionWorkspace, plan_block_attention

__all__ = [
    "BlockAttentionConfig",
    "BlockAttentionWorkspace",
    "block_attention",
    "candidates",
    "gate_configs",
    "num_parts",
    "pick_schedule",
    "plan_block_attention",
    "reason",
    "workspace_shapes",
]
