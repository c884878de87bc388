"""Rotate each head's query and place it beside the absorbed part, so that nobody copies the absorbed part.

    out[..., W-r:] = RoPE(rotary)      adjacent pairs, fp32 angles; no norm, no weight; out[..., :W-r] is not touched

A thread rotates 16 bytes; a block takes one row of a request. Moves B * S * (2 * H * r * itemsize + 4 * r) bytes; the twin
is `cute_kernels.reference.query_rope`.

From sm_90 on the launch is a dependent one, as `add_rms_norm` says: it waits before it reads or writes global memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.arch import is_dependent_launch
from cute_kernels.cache import compiled
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.support import arch_name, check_rows, check_tensor, device_reason, toolkit_reason

NAME = "query_rope"
THREADS = 128
VECTOR = 8  # elements of 16 bytes


@dataclass(frozen=True)
class QueryRopeConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        rotary: r, rotated elements of a head. dtype: bfloat16 or float16.
    """

    rotary: int
    dtype: str

    def reason(self) -> str | None:
        """None where this can be compiled, else what is wrong with it."""
        if self.dtype not in ("bfloat16", "float16"):
            return f"dtype must be bfloat16 or float16, it is {self.dtype}"
        if self.rotary < VECTOR or self.rotary % VECTOR:
            return f"rotary must be a positive multiple of {VECTOR}, it is {self.rotary}"
        return None


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Float32, cute

    class QueryRope:
        def __init__(self, config: QueryRopeConfig, is_dependent: bool) -> None:
            self.is_dependent = is_dependent
            self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
            self.vectors = config.rotary // VECTOR  # of a head

        @cute.jit
        def __call__(
            self,
            mIn: cute.Tensor,  # (B, S, H, r)
            mCos: cute.Tensor,  # (B, S, r / 2), fp32
            mSin: cute.Tensor,
            mOut: cute.Tensor,  # (B, S, H, r)
            stream: Any,
        ) -> None:
            blocks = (mIn.shape[2] * self.vectors + THREADS - 1) // THREADS
            self.kernel(mIn, mCos, mSin, mOut).launch(
                grid=[mIn.shape[0], mIn.shape[1], blocks], block=[THREADS, 1, 1], stream=stream, use_pdl=self.is_dependent
            )

        @cute.kernel
        def kernel(self, mIn: cute.Tensor, mCos: cute.Tensor, mSin: cute.Tensor, mOut: cute.Tensor) -> None:
            if cutlass.const_expr(self.is_dependent):
                cute.arch.griddepcontrol_launch_dependents()
                cute.arch.griddepcontrol_wait()
            tidx, _, _ = cute.arch.thread_idx()
            request, row, block = cute.arch.block_idx()
            index = block * THREADS + tidx
            head, vector = index // self.vectors, index % self.vectors
            if head < mIn.shape[2]:
                gIn = cute.tiled_divide(mIn[request, row, head, None], (VECTOR,))  # (8, r / 8)
                gOut = cute.tiled_divide(mOut[request, row, head, None], (VECTOR,))
                gCos = cute.tiled_divide(mCos[request, row, None], (VECTOR // 2,))  # (4, r / 8)
                gSin = cute.tiled_divide(mSin[request, row, None], (VECTOR // 2,))
                rIn = cute.make_rmem_tensor((VECTOR,), Float32)
                rOut = cute.make_rmem_tensor((VECTOR,), self.dtype)
                rCos = cute.make_rmem_tensor((VECTOR // 2,), Float32)
                rSin = cute.make_rmem_tensor((VECTOR // 2,), Float32)
                rIn.store(gIn[None, vector].load().to(Float32))
                rCos.store(gCos[None, vector].load())
                rSin.store(gSin[None, vector].load())
                for j in cutlass.range_constexpr(VECTOR // 2):
                    even, odd = rIn[2 * j], rIn[2 * j + 1]
                    rOut[2 * j] = (even * rCos[j] - odd * rSin[j]).to(self.dtype)
                    rOut[2 * j + 1] = (even * rSin[j] + odd * rCos[j]).to(self.dtype)
                gOut[None, vector].store(rOut.load())

    return QueryRope


def compile_for(config: QueryRopeConfig, arch: str, options: str = "") -> Any:
    """Compile for an architecture; needs no GPU. `options`: more flags of the compiler."""
    why = config.reason()
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the twin.")
    import cutlass
    from cutlass import Float32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
    batch, rows, heads, half = cute.sym_int(), cute.sym_int(), cute.sym_int(), config.rotary // 2

    def strided(dtype: Any, shape: tuple[Any, ...], vector: int) -> Any:
        stride = (*(cute.sym_int64(divisibility=vector) for _ in shape[1:]), 1)
        return make_fake_tensor(dtype, shape, stride=stride, assumed_align=16)

    return cute.compile(
        kernel_class()(config, is_dependent_launch(arch)),
        strided(dtype, (batch, rows, heads, config.rotary), VECTOR),
        strided(Float32, (batch, rows, half), VECTOR // 2),
        strided(Float32, (batch, rows, half), VECTOR // 2),
        strided(dtype, (batch, rows, heads, config.rotary), VECTOR),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )


def gate_configs() -> list[tuple[str, Callable[[str, str], Any]]]:
    """What the compile gate checks: (label, compile for an architecture with more options)."""
    configs = [QueryRopeConfig(64, "bfloat16"), QueryRopeConfig(64, "float16")]
    return [(f"{NAME} r={c.rotary} {c.dtype}", partial(compile_for, c)) for c in configs]


def reason(rotary: torch.Tensor) -> str | None:
    """None where a kernel takes these queries here, else why not. Launches nothing."""
    return toolkit_reason() or device_reason(rotary.device) or _config(rotary).reason()


def launcher(config: QueryRopeConfig, device: torch.device) -> Callable[..., Any]:
    """The function for a device, compiled where no cache has it."""
    arch = arch_name(device)
    return compiled(NAME, config, arch, lambda: compile_for(config, arch))


def _config(rotary: torch.Tensor) -> QueryRopeConfig:
    return QueryRopeConfig(rotary.shape[-1], str(rotary.dtype).removeprefix("torch."))


def _check(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    if rotary.ndim != 4 or out.ndim != 4 or out.shape[-1] < rotary.shape[-1]:
        raise KernelError(
            f"{NAME}: rotary must be [B, S, H, r] and out [B, S, H, W] with W >= r, they are {list(rotary.shape)} and "
            f"{list(out.shape)}. Pass the last r columns of each head, and the buffer that they go to."
        )
    batch, rows, _, width = rotary.shape
    for name, angle in (("cos", cos), ("sin", sin)):
        check_tensor(NAME, name, angle, (batch, rows, width // 2), torch.float32, rotary.device)
        check_rows(NAME, name, angle)
    check_tensor(NAME, "out", out, (*rotary.shape[:-1], out.shape[-1]), rotary.dtype, rotary.device)
    check_rows(NAME, "rotary", rotary)
    check_rows(NAME, "the last r columns of out", out[..., out.shape[-1] - width :])


@torch.library.custom_op("trtllm_dspark::query_rope", mutates_args=("out",), device_types="cuda")
def _op(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    _launch(rotary, cos, sin, out)


@_op.register_fake
def _(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    return None


def query_rope(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Write RoPE(rotary) into the last r columns of out, [B, S, H, W]. The columns before them are not touched.

    Args:
        rotary: [B, S, H, r], bf16 or fp16, any H; a view into q_b_proj's output will do: last dim contiguous, the other
            strides multiples of 8 elements. Adjacent pairs. cos, sin: [B, S, r/2], fp32. out: as rotary, W >= r.
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for them here.
    """
    if torch.compiler.is_compiling():
        _op(rotary, cos, sin, out)
    else:
        _launch(rotary, cos, sin, out)


def _launch(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    _check(rotary, cos, sin, out)
    why = reason(rotary)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use cute_kernels.reference.query_rope.")
    if rotary.numel():
        launcher(_config(rotary), rotary.device)(rotary, cos, sin, out[..., out.shape[-1] - rotary.shape[-1] :])
