"""The buffers that the layers of a step share, and the launch that plans a step into them."""

from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from cute_kernels.block_attention import plan
from cute_kernels.block_attention.config import NAME, PORTABLE, SCHEDULES, shape_reason, workspace_shapes
from cute_kernels.cache import compiled
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.reference import block_attention as reference
from cute_kernels.support import arch_name, check_tensor, device_reason, toolkit_reason


@dataclass(frozen=True)
class BlockAttentionWorkspace:
    """Work list and scratch of a step, allocated once; the addresses never change, as a CUDA graph needs.

    Attributes:
        block_rows, heads: S and H that it was made for. value_width: c. schedule: name of the one that reads it.
        requests: [max_batch, 4], int32: first position, context tokens, part of the first tile, number of pieces; -1 where
            two parts are joined.
        boundaries: [parts + 1, 4], int32: the request and tile where each part begins, that request's first two numbers.
        partial_out: fp32, as `workspace_shapes` says. partial_lse: [2 * parts, S * H], fp32. Pieces of split requests.
    """

    block_rows: int
    heads: int
    value_width: int
    requests: torch.Tensor
    boundaries: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    schedule: str = PORTABLE.name

    @classmethod
    def allocate(
        cls,
        *,
        max_batch: int,
        block_rows: int,
        heads: int,
        value_width: int,
        device: torch.device,
        num_sms: int | None = None,
        schedule: str = PORTABLE.name,
    ) -> "BlockAttentionWorkspace":
        """Buffers for up to max_batch requests of S rows and H heads.

        Args:
            num_sms: multiprocessors to share the work among; None asks the device.
            schedule: the kernel that will read it, portable, sm90 or sm100; `candidates` names those worth a trial.
        Raises:
            UnsupportedKernelError: S or H that no kernel covers. KernelError: a schedule that does not exist.
        """
        why = shape_reason(block_rows, heads)
        if why is not None:
            raise UnsupportedKernelError(f"{NAME}: {why}. Use cute_kernels.reference.block_attention.")
        if schedule not in SCHEDULES:
            raise KernelError(f"{NAME}: a schedule must be one of {', '.join(SCHEDULES)}, it is {schedule}. Name one that is.")
        sms = num_sms or _num_sms(device)
        shapes = workspace_shapes(max_batch, block_rows, heads, value_width, sms, SCHEDULES[schedule])
        buffers = {
            name: torch.empty(shape, dtype=torch.float32 if name.startswith("partial") else torch.int32, device=device)
            for name, shape in shapes.items()
        }
        return cls(block_rows, heads, value_width, **buffers, schedule=schedule)

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut."""
        return self.boundaries.shape[0] - 1

    @property
    def max_batch(self) -> int:
        """Requests that a plan may have."""
        return self.requests.shape[0]


@lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def plan_block_attention(
    context_len: torch.Tensor,
    context_start: torch.Tensor | None = None,
    *,
    workspace: BlockAttentionWorkspace,
    max_context: int,
) -> BlockAttentionWorkspace:
    """Plan a step: one small launch, no host synchronisation. All layers of the step then share the result.

    Args:
        context_len: [B], int32, contiguous, the ends of the contexts. context_start: the same, their first positions;
            None is 0. Read as at least 0. A request without context is legal, padding rows too.
        workspace: written. max_context: tokens that a row of the page table holds; contexts end there at the latest.
    Returns:
        The workspace.
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for this device.
    """
    batch, device = context_len.numel(), workspace.requests.device
    for name, tensor in (("context_len", context_len), ("context_start", context_start)):
        if tensor is not None:
            check_tensor(plan.PLAN, name, tensor, (batch,), torch.int32, device)
            if not tensor.is_contiguous():
                raise KernelError(f"{plan.PLAN}: {name} must be contiguous, strides are {tensor.stride()}. Copy it.")
    if batch > workspace.max_batch:
        raise KernelError(
            f"{plan.PLAN}: at most {workspace.max_batch} requests fit the workspace, {batch} came. Allocate a larger one."
        )
    if batch:
        launch = _op_plan if torch.compiler.is_compiling() or device.type == "cpu" else _launch_plan
        launch(
            context_len,
            context_start,
            workspace.requests[:batch],
            workspace.boundaries,
            workspace.block_rows,
            max_context,
            workspace.schedule,
        )
    return workspace


def _launch_plan(
    context_len: torch.Tensor,
    context_start: torch.Tensor | None,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    block_rows: int,
    max_context: int,
    schedule: str = PORTABLE.name,
) -> None:
    why = toolkit_reason() or device_reason(context_len.device)
    if why is not None:
        raise UnsupportedKernelError(f"{plan.PLAN}: {why}. Use cute_kernels.reference.block_attention.")
    arch = arch_name(context_len.device)
    launch = compiled(plan.PLAN, SCHEDULES[schedule], arch, partial(plan.compile_for, SCHEDULES[schedule], arch))
    start = context_len if context_start is None else context_start
    launch(context_len, start, requests, boundaries, int(context_start is not None), block_rows, max_context)


@torch.library.custom_op("trtllm_dspark::plan_block_attention", mutates_args=("requests", "boundaries"))
def _op_plan(
    context_len: torch.Tensor,
    context_start: torch.Tensor | None,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    block_rows: int,
    max_context: int,
    schedule: str = PORTABLE.name,
) -> None:
    _launch_plan(context_len, context_start, requests, boundaries, block_rows, max_context, schedule)


@_op_plan.register_kernel("cpu")
def _plan_on_cpu(
    context_len: torch.Tensor,
    context_start: torch.Tensor | None,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    block_rows: int,
    max_context: int,
    schedule: str = PORTABLE.name,
) -> None:
    tiling = SCHEDULES[schedule]
    reference.plan_block_attention(
        context_len,
        context_start,
        requests,
        boundaries,
        tiling.aligned,
        block_rows=block_rows,
        max_context=max_context,
        block_tokens=tiling.block_tokens,
        item_cost=tiling.item_cost,
        min_quantum=tiling.min_quantum,
        joins=tiling.joins,
    )


@_op_plan.register_fake
def _plan_fake(
    context_len: torch.Tensor,
    context_start: torch.Tensor | None,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    block_rows: int,
    max_context: int,
    schedule: str = PORTABLE.name,
) -> None:
    return None
