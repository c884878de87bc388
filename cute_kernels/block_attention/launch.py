"""The public function: checks, then at most three launches on torch's current stream. And the op for torch.compile."""

import math
from functools import partial
from typing import Any

import torch

from cute_kernels.block_attention import combine, kernels, portable, sm90, sm90_combine, sm100
from cute_kernels.block_attention import plan as planning
from cute_kernels.block_attention.config import (
    NAME,
    PAGE_SIZES,
    PORTABLE,
    SM90,
    SM90_PAGE_SIZES,
    SM100,
    SM100_PAGE_SIZES,
    VECTOR,
    BlockAttentionConfig,
    pick_schedule,
    shape_reason,
)
from cute_kernels.block_attention.workspace import BlockAttentionWorkspace, plan_block_attention
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.reference import block_attention as reference
from cute_kernels.support import arch_name, check_tensor, device_reason, toolkit_reason


def gate_configs() -> list[tuple[Any, ...]]:
    """What the compile gate checks: (label, compile for an architecture with more options, architectures if not all).

    Of the page sizes the smallest and the largest; all four were seen to take the same registers.
    """
    configs = [BlockAttentionConfig(512, 64, page_size, "bfloat16") for page_size in (PAGE_SIZES[0], PAGE_SIZES[-1])]
    configs += [BlockAttentionConfig(64, 16, 64, "float16")]
    merges = [combine.CombineConfig(512, "bfloat16"), combine.CombineConfig(64, "bfloat16")]
    return [
        *(
            (f"{NAME} c={c.value_width} r={c.rotary} P={c.page_size} {c.dtype}", partial(portable.compile_for, c))
            for c in configs
        ),
        *((f"{combine.COMBINE} c={c.value_width} {c.dtype}", partial(combine.compile_for, c)) for c in merges),
        *(
            (f"{sm90_combine.COMBINE} {sm90_combine.label(c)}", partial(sm90_combine.compile_for, c), ("sm_90a",))
            for c in sm90_combine.configs(512, "bfloat16")
        ),
        (planning.PLAN, partial(planning.compile_for, PORTABLE)),
        (f"{planning.PLAN} {SM90.name}", partial(planning.compile_for, SM90), ("sm_90a",)),
        *(
            (
                f"{NAME} {SM90.name} P={page_size} bfloat16{' joins' if joins else ''}",
                partial(sm90.compile_for, BlockAttentionConfig(512, 64, page_size, "bfloat16"), joins=joins),
                ("sm_90a",),
            )
            for page_size, joins in ((SM90_PAGE_SIZES[0], True), (SM90_PAGE_SIZES[-1], True), (SM90_PAGE_SIZES[0], False))
        ),
        (f"{planning.PLAN} {SM100.name}", partial(planning.compile_for, SM100), ("sm_100a",)),
        *(
            (f"{NAME} {SM100.name} P={c.page_size} {c.dtype}", partial(sm100.compile_for, c), ("sm_100a",))
            for c in (BlockAttentionConfig(512, 64, page_size, "bfloat16") for page_size in SM100_PAGE_SIZES[::2])
        ),
    ]


def reason(q: torch.Tensor, pages: torch.Tensor, value_width: int) -> str | None:
    """None where the kernel takes these arguments, else why not. Launches nothing.

    Args:
        q: [B, S, H, W]. pages: [num_pages, P, W]. value_width: c.
    """
    return (
        _config(q, pages, value_width).reason()
        or shape_reason(q.shape[1], q.shape[2])
        or toolkit_reason()
        or device_reason(q.device)
    )


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
    plan: BlockAttentionWorkspace | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    schedule: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of block rows over their context and over each other; the formula is the package's docstring.

    Pages and table entries outside a request's context are never read. A live page id outside the pool reads as zeros.

    Args:
        q: [B, S, H, W], bf16 or fp16; S 1 to 16, H 1 to 128; (S, H) must fold into one strided dim, last dim contiguous.
        block_latents: [B, S, W], last dim contiguous. Both: other strides multiples of 8, 16-byte aligned.
        pages: [num_pages, P, W], one layer's view, each page contiguous and 16-byte aligned; P 16, 32, 64 or 128.
        page_table: [B, max_pages], int32, last dim contiguous.
        context_len, context_start: [B], int32, see `plan_block_attention`.
        scale: softmax scale, above 0. value_width: c, a multiple of 64 up to 512. layer: which layer, for messages.
        plan: what `plan_block_attention` returned for these lengths; its lengths are the ones that count. None plans here.
        out: [B, S, H, c] in q's dtype, contiguous; written. lse: [B, S, H], fp32, contiguous; written. None allocates.
        return_lse: also return lse: log2 of the sum of exponentials.
        schedule: which kernel, portable, sm90 (Hopper) or sm100 (Blackwell, never run on one); the last two need c = 512,
            r = 64 and P 32, 64 or 128. None: the plan's, without a plan what `pick_schedule` says.
    Returns:
        out, or (out, lse).
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for them here.
    Numerics: fp32 scores, softmax and sums; probabilities are rounded to q's dtype for the value product.
    """
    _check(q, block_latents, pages, page_table, context_len, value_width, layer)
    if not scale > 0:
        raise KernelError(
            f"{NAME} of layer {layer}: a scale above 0 is required, it is {scale}. Masked scores are -inf times it."
        )
    why = reason(q, pages, value_width)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME} of layer {layer}: {why}. Use cute_kernels.reference.block_attention.")
    config, arch = _config(q, pages, value_width), arch_name(q.device)
    chosen = schedule or (pick_schedule(config, arch) if plan is None else plan.schedule)
    why = config.reason_of(chosen, arch)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME} of layer {layer}: {why}. Use the portable schedule, with a workspace for it.")
    if plan is not None and plan.schedule != chosen:
        raise KernelError(
            f"{NAME}: a plan for the {chosen} schedule is required, it is for {plan.schedule}. Allocate its workspace for it."
        )
    batch, rows, heads, _ = q.shape
    if out is None:
        out = q.new_empty(batch, rows, heads, value_width)
    if lse is None:
        lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=q.device)
    _expect("out", out, (batch, rows, heads, value_width), q.dtype, q.device)
    _expect("lse", lse, (batch, rows, heads), torch.float32, q.device)
    if plan is None:
        plan = BlockAttentionWorkspace.allocate(
            max_batch=batch, block_rows=rows, heads=heads, value_width=value_width, device=q.device, schedule=chosen
        )
        plan_block_attention(context_len, context_start, workspace=plan, max_context=page_table.shape[1] * pages.shape[1])
    made_for, needed = (plan.block_rows, plan.heads, plan.value_width), (rows, heads, value_width)
    if made_for != needed or batch > plan.max_batch or plan.requests.device != q.device:
        raise KernelError(
            f"{NAME}: a plan for (S, H, c) = {needed} and {batch} requests on {q.device} is required, it is for {made_for} and "
            f"up to {plan.max_batch} on {plan.requests.device}. Allocate one workspace for each shape."
        )
    if batch:
        launch = _op if torch.compiler.is_compiling() else _launch
        launch(
            q,
            block_latents,
            pages,
            page_table,
            plan.requests[:batch],
            plan.boundaries,
            plan.partial_out,
            plan.partial_lse,
            out,
            lse,
            scale,
            chosen,
        )
    return (out, lse) if return_lse else out


def _config(q: torch.Tensor, pages: torch.Tensor, value_width: int) -> BlockAttentionConfig:
    return BlockAttentionConfig(value_width, q.shape[-1] - value_width, pages.shape[1], str(q.dtype).removeprefix("torch."))


def _launch(
    q: torch.Tensor,
    block_latents: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    schedule: str = PORTABLE.name,
) -> None:
    config, arch = _config(q, pages, out.shape[-1]), arch_name(q.device)
    batch, parts = requests.shape[0], boundaries.shape[0] - 1
    attend = kernels.attention(config, schedule, batch, parts).load(arch)
    if schedule != PORTABLE.name and not pages.shape[0]:
        pages = pages.new_zeros(1, *pages.shape[1:])  # a tensor map has no empty dim
    packed_out, packed_lse = out.flatten(1, 2), lse.flatten(1, 2)
    attend(
        _packed(q),
        _plain(block_latents),
        _plain(pages),
        _plain(page_table),
        requests,
        boundaries,
        packed_out,
        packed_lse,
        partial_out,
        partial_lse,
        scale * math.log2(math.e),
    )
    if parts > 1:
        merge = kernels.merge(config, schedule, batch, parts, partial_out.shape[1]).load(arch)
        merge(requests, boundaries, partial_out, partial_lse, packed_out, packed_lse)


@torch.library.custom_op(
    "trtllm_dspark::block_attention", mutates_args=("partial_out", "partial_lse", "out", "lse"), device_types="cuda"
)
def _op(
    q: torch.Tensor,
    block_latents: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    schedule: str = PORTABLE.name,
) -> None:
    _launch(q, block_latents, pages, page_table, requests, boundaries, partial_out, partial_lse, out, lse, scale, schedule)


@_op.register_kernel("cpu")
def _on_cpu(
    q: torch.Tensor,
    block_latents: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    schedule: str = PORTABLE.name,
) -> None:
    start, count = requests[:, 0], requests[:, 1]
    reference.block_attention(
        q,
        block_latents,
        pages,
        page_table,
        start + count,
        scale=scale,
        value_width=out.shape[-1],
        context_start=start,
        out=out,
        lse=lse,
    )


@_op.register_fake
def _fake(
    q: torch.Tensor,
    block_latents: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    schedule: str = PORTABLE.name,
) -> None:
    return None


def _row_stride(q: torch.Tensor) -> int | None:
    """Elements between packed rows (s, h) of q; None where one stride cannot say it."""
    _, rows, heads, width = q.shape
    if heads == 1:
        return q.stride(1) if rows > 1 else width
    return q.stride(2) if rows == 1 or q.stride(1) == heads * q.stride(2) else None


def _packed(q: torch.Tensor) -> torch.Tensor:
    """q as [B, S * H, W]; no copy."""
    batch, rows, heads, width = q.shape
    step = _row_stride(q)
    assert step is not None, (q.shape, q.stride())
    return q.as_strided((batch, rows * heads, width), (q.stride(0) if batch > 1 else rows * heads * step, step, 1))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same view with the strides that a contiguous tensor has wherever a dim of size 1 leaves them open."""
    strides, step = [], 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        strides.append(stride if size > 1 else step)
        step = strides[-1] * max(size, 1)
    return tensor.as_strided(tensor.shape, strides[::-1])


def _check(
    q: torch.Tensor,
    block_latents: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    context_len: torch.Tensor,
    value_width: int,
    layer: int,
) -> None:
    """Everything that can be said of the operands without a device."""
    who = f"{NAME} of layer {layer}"
    if q.dim() != 4 or pages.dim() != 3:
        raise KernelError(
            f"{who}: q must be [B, S, H, W] and pages [num_pages, P, W], they are {list(q.shape)} and {list(pages.shape)}."
        )
    batch, rows, _, width = q.shape
    check_tensor(who, "block_latents", block_latents, (batch, rows, width), q.dtype, q.device)
    check_tensor(who, "pages", pages, (*pages.shape[:2], width), q.dtype, q.device)
    check_tensor(who, "page_table", page_table, (batch, *page_table.shape[1:2]), torch.int32, q.device)
    check_tensor(who, "context_len", context_len, (batch,), torch.int32, q.device)
    for name, tensor in (("q", q), ("block_latents", block_latents), ("pages", pages), ("page_table", page_table)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise KernelError(f"{who}: the last dim of {name} must be contiguous, strides are {tensor.stride()}. Copy it.")
    for name, tensor in (("q", q), ("block_latents", block_latents), ("pages", pages)):
        steps = [step for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        if any(step % VECTOR for step in steps) or _misaligned(tensor):
            raise KernelError(
                f"{who}: rows of {name} must be 16-byte aligned; strides are {tensor.stride()} elements, it starts "
                f"{_misaligned(tensor)} bytes past a multiple of 16. Copy it."
            )
    if _row_stride(q) is None:
        raise KernelError(f"{who}: S and H of q must fold into one dim, strides are {q.stride()}. Copy q.")
    if pages.shape[1] > 1 and pages.stride(1) != width:
        raise KernelError(f"{who}: a page must be contiguous, strides are {pages.stride()}. Re-lay the pool.")


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    check_tensor(NAME, name, tensor, shape, dtype, device)
    if not tensor.is_contiguous() or _misaligned(tensor):
        raise KernelError(
            f"{NAME}: {name} must be contiguous and 16-byte aligned; strides are {tensor.stride()} elements, it starts "
            f"{_misaligned(tensor)} bytes past a multiple of 16. Allocate it anew."
        )


def _misaligned(tensor: torch.Tensor) -> int:
    """Bytes past a multiple of 16. A tensor that is being traced has no address yet."""
    return 0 if torch.compiler.is_compiling() else tensor.data_ptr() % 16
