"""Add to the residual stream and normalise the sum, in one pass over both.

    total = residual + x           out = w * total / sqrt(mean(total^2) + eps)

A block takes a row and keeps it in registers between the two passes. Rounds where the twin does: the sum, the normalised
values, and their product with the weight. Moves T * N * itemsize * 4 bytes, 2 without a residual; the twin is
`cute_kernels.reference.add_rms_norm`.

From sm_90 on a launch is a dependent one: it starts while the kernel before it ends, and lets the next one start at once, so
that a linear layer behind it can fetch its weights meanwhile. Every thread waits for the kernel before it reads or writes
global memory. The other kernels of a step do the same, so that the end of one means the end of all before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.arch import is_dependent_launch
from cute_kernels.cache import compiled
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.support import arch_name, check_rows, check_tensor, device_reason, smem_allocator, toolkit_reason

NAME = "add_rms_norm"
VECTOR = 8  # elements of 16 bytes
WARP = 32
MAX_WARPS, MAX_ROUNDS = 16, 4  # 16,384 elements a row


@dataclass(frozen=True)
class AddRMSNormConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        size: N. dtype: bfloat16 or float16. residual: whether there is one to add.
    """

    size: int
    dtype: str
    residual: bool

    @property
    def warps(self) -> int:
        """Of a block: as few as hold a row in one vector a lane, up to MAX_WARPS."""
        return min(-(-self.size // (VECTOR * WARP)), MAX_WARPS)

    @property
    def rounds(self) -> int:
        """Vectors of a lane."""
        return -(-self.size // (VECTOR * WARP * self.warps))

    def reason(self) -> str | None:
        """None where this can be compiled, else what is wrong with it."""
        if self.dtype not in ("bfloat16", "float16"):
            return f"dtype must be bfloat16 or float16, it is {self.dtype}"
        most = VECTOR * WARP * MAX_WARPS * MAX_ROUNDS
        if self.size < VECTOR or self.size % VECTOR or self.size > most:
            return f"the row must be a multiple of {VECTOR} up to {most} elements, it has {self.size}"
        return None


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Float32, cute

    class AddRMSNorm:
        def __init__(self, config: AddRMSNormConfig, is_dependent: bool) -> None:
            self.is_dependent = is_dependent
            self.config = config
            self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
            self.vectors = config.size // VECTOR
            self.threads = config.warps * WARP

        @cute.jit
        def __call__(
            self,
            mX: cute.Tensor,  # (T, N)
            mResidual: cute.Tensor | None,
            mWeight: cute.Tensor,  # (N)
            mOut: cute.Tensor,
            mTotal: cute.Tensor | None,
            eps: Float32,
            stream: Any,
        ) -> None:
            self.kernel(mX, mResidual, mWeight, mOut, mTotal, eps).launch(
                grid=[mX.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.is_dependent
            )

        @cute.kernel
        def kernel(
            self,
            mX: cute.Tensor,
            mResidual: cute.Tensor | None,
            mWeight: cute.Tensor,
            mOut: cute.Tensor,
            mTotal: cute.Tensor | None,
            eps: Float32,
        ) -> None:
            if cutlass.const_expr(self.is_dependent):
                cute.arch.griddepcontrol_launch_dependents()
                cute.arch.griddepcontrol_wait()
            tidx, _, _ = cute.arch.thread_idx()
            row, _, _ = cute.arch.block_idx()
            gX = cute.tiled_divide(mX[row, None], (VECTOR,))  # (8, N / 8)
            gWeight, gOut = cute.tiled_divide(mWeight, (VECTOR,)), cute.tiled_divide(mOut[row, None], (VECTOR,))
            rX = cute.make_rmem_tensor((VECTOR, self.config.rounds), self.dtype)
            rWeight = cute.make_rmem_tensor((VECTOR, self.config.rounds), self.dtype)
            rX.fill(0.0)
            for i in cutlass.range_constexpr(self.config.rounds):
                vector = tidx + i * self.threads
                if vector < self.vectors:
                    rX[None, i].store(gX[None, vector].load())
                    rWeight[None, i].store(gWeight[None, vector].load())
            if cutlass.const_expr(self.config.residual):
                gResidual = cute.tiled_divide(mResidual[row, None], (VECTOR,))  # type: ignore[index]
                gTotal = cute.tiled_divide(mTotal[row, None], (VECTOR,))  # type: ignore[index]
                rOther = cute.make_rmem_tensor((VECTOR, self.config.rounds), self.dtype)
                rOther.fill(0.0)
                for i in cutlass.range_constexpr(self.config.rounds):
                    vector = tidx + i * self.threads
                    if vector < self.vectors:
                        rOther[None, i].store(gResidual[None, vector].load())
                for i in cutlass.range_constexpr(self.config.rounds):
                    vector = tidx + i * self.threads
                    summed = rX[None, i].load().to(Float32) + rOther[None, i].load().to(Float32)
                    rX[None, i].store(summed.to(self.dtype))
                    if vector < self.vectors:
                        gTotal[None, vector].store(rX[None, i].load())
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.config.rounds):
                x = rX[None, i].load().to(Float32)
                total += (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            total = cute.arch.warp_reduction_sum(total)
            if cutlass.const_expr(self.config.warps > 1):
                sSum = smem_allocator().allocate_tensor(Float32, cute.make_layout((self.config.warps,)), 16)
                if tidx % WARP == 0:
                    sSum[tidx // WARP] = total
                cute.arch.sync_threads()
                total = Float32(0.0)
                for w in cutlass.range_constexpr(self.config.warps):
                    total += sSum[w]
            scale = cute.math.rsqrt(total / Float32(self.config.size) + eps)
            for i in cutlass.range_constexpr(self.config.rounds):
                vector = tidx + i * self.threads
                if vector < self.vectors:
                    normed = (rX[None, i].load().to(Float32) * scale).to(self.dtype).to(Float32)
                    gOut[None, vector].store((normed * rWeight[None, i].load().to(Float32)).to(self.dtype))

    return AddRMSNorm


def compile_for(config: AddRMSNormConfig, arch: str, options: str = "") -> Any:
    """Compile for an architecture; needs no GPU. `options`: more flags of the compiler."""
    why = config.reason()
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the twin.")
    import cutlass
    from cutlass import Float32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
    rows = cute.sym_int()

    def matrix() -> Any:
        stride = (cute.sym_int64(divisibility=VECTOR), 1)
        return make_fake_tensor(dtype, (rows, config.size), stride=stride, assumed_align=16)

    return cute.compile(
        kernel_class()(config, is_dependent_launch(arch)),
        matrix(),
        matrix() if config.residual else None,
        make_fake_tensor(dtype, (config.size,), stride=(1,), assumed_align=16),
        matrix(),
        matrix() if config.residual else None,
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )


def gate_configs() -> list[tuple[str, Callable[[str, str], Any]]]:
    """What the compile gate checks: (label, compile for an architecture with more options)."""
    configs = [
        AddRMSNormConfig(7168, "bfloat16", True),
        AddRMSNormConfig(1536, "bfloat16", False),
        AddRMSNormConfig(16384, "float16", True),
    ]
    return [(f"{NAME} N={c.size} {c.dtype}{' residual' if c.residual else ''}", partial(compile_for, c)) for c in configs]


def reason(x: torch.Tensor, residual: torch.Tensor | None = None) -> str | None:
    """None where a kernel takes these arguments here, else why not. Launches nothing."""
    return toolkit_reason() or device_reason(x.device) or _config(x, residual).reason()


def launcher(config: AddRMSNormConfig, device: torch.device) -> Callable[..., Any]:
    """The function for a device, compiled where no cache has it."""
    arch = arch_name(device)
    return compiled(NAME, config, arch, lambda: compile_for(config, arch))


def _config(x: torch.Tensor, residual: torch.Tensor | None) -> AddRMSNormConfig:
    return AddRMSNormConfig(x.shape[-1], str(x.dtype).removeprefix("torch."), residual is not None)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    if x.ndim < 1:
        raise KernelError(f"{NAME}: x must be [..., N], it is a scalar. Pass rows.")
    for name, tensor, shape in (("x", x, x.shape), ("weight", weight, x.shape[-1:]), ("residual", residual, x.shape)):
        if tensor is None:
            continue
        check_tensor(NAME, name, tensor, tuple(shape), x.dtype, x.device)
        if not tensor.is_contiguous():
            raise KernelError(f"{NAME}: {name} must be contiguous, strides are {tensor.stride()}. Copy it.")
        if not torch.compiler.is_compiling():
            check_rows(NAME, name, tensor)


@torch.library.custom_op("trtllm_dspark::add_rms_norm", mutates_args=(), device_types="cuda")
def _op(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = _launch(x, weight, eps, residual)
    return out, total.clone() if residual is None else total  # an op may not return its input


@_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, total) of a row: total = residual + x, rounded; normalised = RMSNorm(total) * weight.

    Args:
        x: [..., N], bf16 or fp16, contiguous, N a multiple of 8 up to 16,384. weight: [N]. eps: of the RMSNorm.
        residual: as x, or None: the total is x itself, a copy of it under torch.compile.
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for them here.
    """
    if torch.compiler.is_compiling():
        return _op(x, weight, eps, residual)
    return _launch(x, weight, eps, residual)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    why = _config(x, residual).reason() if x.ndim else None
    if why is None:
        _check(x, weight, residual)
        why = reason(x, residual)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use cute_kernels.reference.add_rms_norm.")
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if x.numel():
        rows = (x.numel() // x.shape[-1], x.shape[-1])
        launcher(_config(x, residual), x.device)(
            x.view(rows),
            None if residual is None else residual.view(rows),
            weight,
            out.view(rows),
            None if residual is None else total.view(rows),
            eps,
        )
    return out, total
