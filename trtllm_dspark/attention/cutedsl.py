"""CUTEDSL: the draft step on this project's CuTe DSL kernels. Reads nothing on the host; can be captured in a CUDA graph."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import torch

from cute_kernels import support
from cute_kernels.add_rms_norm import AddRMSNormConfig, add_rms_norm
from cute_kernels.block_attention import (
    BlockAttentionConfig,
    BlockAttentionWorkspace,
    block_attention,
    plan_block_attention,
)
from cute_kernels.block_attention.config import PORTABLE, SM90, candidates, num_parts, pick_schedule, shape_reason
from cute_kernels.context_append import ContextAppendConfig, context_append
from cute_kernels.few_row_linear import few_row_linear, few_row_silu_mul
from cute_kernels.few_row_linear import reason as few_row_reason
from cute_kernels.markov_chain import MarkovChainConfig, markov_chain
from cute_kernels.prebuild import SCRATCH_PAGE
from cute_kernels.query_rope import QueryRopeConfig, query_rope
from cute_kernels.reference import few_row_linear as reference
from trtllm_dspark.attention.operations import DraftShape, Operations, normalised
from trtllm_dspark.attention.products import plain_linear
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError

MIN_BATCH = 256  # requests that a workspace takes at least; 16 bytes each

ChosenSchedules = Mapping[BlockAttentionConfig, str]
"""Pages -> the schedule that attends over them. Over all others the trusted one does."""
NONE_CHOSEN: ChosenSchedules = MappingProxyType({})


def reason(config: DraftConfig, device: torch.device, shape: DraftShape) -> str | None:
    """None where every kernel of a step takes this draft on this device, else what is in the way."""
    missing = support.device_reason(device) or support.toolkit_reason()
    if missing is not None:
        return missing
    if config.kv_lora_rank is None or config.qk_rope_head_dim is None:
        return f"needs an MLA draft, {config.architecture} is {config.family}"
    c, r, dtype = config.kv_lora_rank, config.qk_rope_head_dim, str(shape.dtype).removeprefix("torch.")
    reasons = [
        _attention(config, shape).reason(),
        shape_reason(shape.block_rows, shape.heads),
        ContextAppendConfig(c, r, shape.page_size, dtype).reason(),
        QueryRopeConfig(r, dtype).reason(),
        *(AddRMSNormConfig(size, dtype, residual).reason() for size, residual in normalised(config)),
    ]
    if config.markov_rank:
        reasons.append(MarkovChainConfig(config.markov_rank, 1, dtype, dtype).reason())
    return next((why for why in reasons if why is not None), None)


def schedules(config: DraftConfig, device: torch.device, shape: DraftShape) -> tuple[str, ...]:
    """Names of the schedules that attend over a deployment's pages on a device that `reason` passed; the trusted one first."""
    return candidates(_attention(config, shape), support.arch_name(device))


def _attention(config: DraftConfig, shape: DraftShape) -> BlockAttentionConfig:
    c, r = config.kv_lora_rank, config.qk_rope_head_dim
    assert c is not None and r is not None, f"attention over latents of a draft that has none: {config}"
    return BlockAttentionConfig(c, r, shape.page_size, str(shape.dtype).removeprefix("torch."))


class _SharedWorkspaces:
    """The buffers in which a step's plan lies, one for each shape, at addresses that never change.

    Steps of one drafter follow each other on one stream, so they may share them. A captured graph holds their addresses:
    a larger one is made beside the old, which stays.
    """

    def __init__(self, chosen: ChosenSchedules) -> None:
        self._chosen = chosen
        self._made: dict[tuple[int, int, int, str, torch.device], list[BlockAttentionWorkspace]] = {}

    def plan(
        self,
        context_len: torch.Tensor,
        context_start: torch.Tensor | None,
        *,
        block_rows: int,
        heads: int,
        value_width: int,
        pages: torch.Tensor,
        page_table: torch.Tensor,
    ) -> BlockAttentionWorkspace:
        batch, device = context_len.numel(), context_len.device
        dtype, page_size = str(pages.dtype).removeprefix("torch."), pages.shape[1]
        config = BlockAttentionConfig(value_width, pages.shape[2] - value_width, page_size, dtype)
        schedule = self._chosen.get(config) or pick_schedule(config, support.arch_name(device))
        made = self._made.setdefault((block_rows, heads, value_width, schedule, device), [])
        found = next((workspace for workspace in made if workspace.max_batch >= batch), None)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise DSparkError(
                    f"CUTEDSL: a step of {batch} requests must run once before it is captured in a CUDA graph, so that its "
                    "buffers outlive the graph. Run it once first."
                )
            found = BlockAttentionWorkspace.allocate(
                max_batch=max(MIN_BATCH, 1 << (batch - 1).bit_length()),
                block_rows=block_rows,
                heads=heads,
                value_width=value_width,
                device=device,
                schedule=schedule,
            )
            made.append(found)
        max_context = page_table.shape[1] * page_size
        return plan_block_attention(context_len, context_start, workspace=found, max_context=max_context)


def _attend(
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
    found = block_attention(
        q,
        block_latents,
        pages,
        page_table,
        context_len,
        scale=scale,
        value_width=value_width,
        layer=layer,
        context_start=context_start,
        plan=cast("BlockAttentionWorkspace | None", plan),
    )
    return cast(torch.Tensor, found)


class _LatentFinisher:
    """Finishes the latents of a block by appending them, densely, to a page of their own."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, torch.device], torch.Tensor] = {}

    def finish(
        self, z: torch.Tensor, norm_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See the twin; z [B, S, W], norm_weight [c], cos and sin [B, S, r/2], contiguous."""
        rows, width = z.shape[0] * z.shape[1], z.shape[2]
        pages = z.new_empty(-(-rows // SCRATCH_PAGE), SCRATCH_PAGE, width)
        slots = self._counted(rows, z.device)
        context_append(
            z.reshape(rows, 1, width), norm_weight.unsqueeze(0), cos.flatten(0, 1), sin.flatten(0, 1), slots, [pages], eps
        )
        return pages.view(-1, width)[:rows].view(z.shape)

    def _counted(self, count: int, device: torch.device) -> torch.Tensor:
        """0 .. count-1. Made within a capture it holds nothing before the first replay, so it is not kept then."""
        held = self._slots.get((count, device))
        if held is None:
            held = torch.arange(count, device=device)
            if not torch.cuda.is_current_stream_capturing():
                self._slots[count, device] = held
        return held


def _linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """By the kernel where it takes this product, else by torch's: many rows, other parts than Hopper, odd sizes."""
    return plain_linear(x, weight, out) if few_row_reason(x, weight) else few_row_linear(x, weight, out)


def _silu_mul(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `_linear`."""
    return reference.few_row_silu_mul(x, gate, up) if few_row_reason(x, gate) else few_row_silu_mul(x, gate, up)


def scheduled(schedule: str, config: DraftConfig, shape: DraftShape) -> Operations:
    """`operations` that attend by one of `schedules` over this deployment's pages."""
    return operations({_attention(config, shape): schedule})


def _batches(shape: DraftShape, device: torch.device) -> tuple[int, ...]:
    """One request; two parts for each, which a kernel of its own may join; more requests than there are parts."""
    trusted = SM90 if support.arch_name(device) == "sm_90a" else PORTABLE
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    parts = num_parts(shape.block_rows, shape.heads, multiprocessors, trusted)
    return tuple(sorted({1, max(1, parts // 2), parts + 1}))


def operations(chosen: ChosenSchedules = NONE_CHOSEN) -> Operations:
    """The kernels, with workspaces of their own: one set for each model, whose steps follow each other on one stream.

    Args:
        chosen: see `ChosenSchedules`.
    """
    return Operations(
        block_attention=_attend,
        plan=_SharedWorkspaces(chosen).plan,
        context_append=context_append,
        query_rope=query_rope,
        finish_latents=_LatentFinisher().finish,
        add_rms_norm=add_rms_norm,
        linear=_linear,
        silu_mul=_silu_mul,
        markov_chain=markov_chain,
        batches=_batches,
        capturable=True,
        differentiable=False,
    )
