"""Finish latents and write them into the pages of every layer: RMSNorm, RoPE and scatter in one launch.

    page row = [w * z[:c] / sqrt(mean(z[:c]^2) + eps) | RoPE(z[c:])]      at slots[t], for each layer; slot -1: not written

One warp a row, eight rows a block, 16 bytes a load. Moves 2 * T * L * W * itemsize bytes; the twin is
`cute_kernels.reference.context_append`.

From sm_90 on the launch is a dependent one, as `add_rms_norm` says: it waits before it reads or writes global memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from cute_kernels.arch import is_dependent_launch
from cute_kernels.cache import compiled
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.support import arch_name, check_rows, check_tensor, device_reason, toolkit_reason

NAME = "context_append"
ROWS = 8  # of a block, a warp each
VECTOR = 8  # elements of 16 bytes
WARP = 32


@dataclass(frozen=True)
class ContextAppendConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        latent: c, normalised elements. rotary: r, rotated elements. page_size: P, tokens. dtype: bfloat16 or float16.
    """

    latent: int
    rotary: int
    page_size: int
    dtype: str

    def reason(self) -> str | None:
        """None where this can be compiled, else what is wrong with it."""
        if self.dtype not in ("bfloat16", "float16"):
            return f"dtype must be bfloat16 or float16, it is {self.dtype}"
        if self.latent < VECTOR or self.latent % VECTOR:
            return f"latent must be a positive multiple of {VECTOR}, it is {self.latent}"
        if self.rotary < VECTOR or self.rotary % VECTOR or self.rotary > VECTOR * WARP:
            return f"rotary must be a multiple of {VECTOR} up to {VECTOR * WARP}, it is {self.rotary}"
        if self.page_size < 1:
            return f"page_size must be at least 1, it is {self.page_size}"
        return None


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Float32, Int64, cute

    class ContextAppend:
        def __init__(self, config: ContextAppendConfig, is_dependent: bool) -> None:
            self.is_dependent = is_dependent
            self.config = config
            self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
            self.vectors = config.latent // VECTOR
            self.rounds = -(-self.vectors // WARP)

        @cute.jit
        def __call__(
            self,
            mZ: cute.Tensor,  # (T, L, W)
            mWeight: cute.Tensor,  # (L, c)
            mCos: cute.Tensor,  # (T, r / 2), fp32
            mSin: cute.Tensor,
            mSlot: cute.Tensor,  # (T), int64
            mPool: cute.Tensor,  # (L, num_pages, P, W)
            eps: Float32,
            stream: Any,
        ) -> None:
            self.kernel(mZ, mWeight, mCos, mSin, mSlot, mPool, eps).launch(
                grid=[(mZ.shape[0] + ROWS - 1) // ROWS, mZ.shape[1], 1],
                block=[ROWS * WARP, 1, 1],
                stream=stream,
                use_pdl=self.is_dependent,
            )

        @cute.kernel
        def kernel(
            self,
            mZ: cute.Tensor,
            mWeight: cute.Tensor,
            mCos: cute.Tensor,
            mSin: cute.Tensor,
            mSlot: cute.Tensor,
            mPool: cute.Tensor,
            eps: Float32,
        ) -> None:
            if cutlass.const_expr(self.is_dependent):
                cute.arch.griddepcontrol_launch_dependents()
                cute.arch.griddepcontrol_wait()
            tidx, _, _ = cute.arch.thread_idx()
            block, layer, _ = cute.arch.block_idx()
            lane, token = tidx % WARP, block * ROWS + tidx // WARP
            # All loads are issued before the first use of one: a row's life is then one latency, not three in a chain.
            rZ = cute.make_rmem_tensor((VECTOR, self.rounds), self.dtype)
            rWeight = cute.make_rmem_tensor((VECTOR, self.rounds), self.dtype)
            rIn = cute.make_rmem_tensor((VECTOR,), self.dtype)
            rCos = cute.make_rmem_tensor((VECTOR // 2,), Float32)
            rSin = cute.make_rmem_tensor((VECTOR // 2,), Float32)
            rZ.fill(0.0)
            slot = Int64(-1)
            if token < mZ.shape[0]:
                slot = mSlot[token]
                gZ = cute.tiled_divide(mZ[token, layer, None], (VECTOR,))  # (8, W / 8)
                gWeight = cute.tiled_divide(mWeight[layer, None], (VECTOR,))
                for i in cutlass.range_constexpr(self.rounds):
                    vector = lane + i * WARP
                    if vector < self.vectors:
                        rZ[None, i].store(gZ[None, vector].load())
                        rWeight[None, i].store(gWeight[None, vector].load())
                if lane < self.config.rotary // VECTOR:
                    rIn.store(gZ[None, self.vectors + lane].load())
                    rCos.store(cute.tiled_divide(mCos[token, None], (VECTOR // 2,))[None, lane].load())
                    rSin.store(cute.tiled_divide(mSin[token, None], (VECTOR // 2,))[None, lane].load())
            page = slot // self.config.page_size
            if slot >= 0 and page < mPool.shape[1]:
                gOut = cute.tiled_divide(mPool[layer, page, slot % self.config.page_size, None], (VECTOR,))
                total = Float32(0.0)
                for i in cutlass.range_constexpr(self.rounds):
                    x = rZ[None, i].load().to(Float32)  # zeros where this lane has no vector
                    total += (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                total = cute.arch.warp_reduction_sum(total)
                scale = cute.math.rsqrt(total / Float32(self.config.latent) + eps)
                for i in cutlass.range_constexpr(self.rounds):
                    vector = lane + i * WARP
                    if vector < self.vectors:
                        normed = (rZ[None, i].load().to(Float32) * scale).to(self.dtype).to(Float32)
                        gOut[None, vector].store((normed * rWeight[None, i].load().to(Float32)).to(self.dtype))
                if lane < self.config.rotary // VECTOR:
                    rOut = cute.make_rmem_tensor((VECTOR,), self.dtype)
                    for j in cutlass.range_constexpr(VECTOR // 2):
                        even, odd = rIn[2 * j].to(Float32), rIn[2 * j + 1].to(Float32)
                        rOut[2 * j] = (even * rCos[j] - odd * rSin[j]).to(self.dtype)
                        rOut[2 * j + 1] = (even * rSin[j] + odd * rCos[j]).to(self.dtype)
                    gOut[None, self.vectors + lane].store(rOut.load())

    return ContextAppend


def compile_for(config: ContextAppendConfig, arch: str, options: str = "") -> Any:
    """Compile for an architecture; needs no GPU. `options`: more flags of the compiler."""
    why = config.reason()
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the twin.")
    import cutlass
    from cutlass import Float32, Int64, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
    tokens, layers, pages, width = cute.sym_int(), cute.sym_int(), cute.sym_int(), config.latent + config.rotary

    def stride(divisibility: int = VECTOR) -> Any:
        return cute.sym_int64(divisibility=divisibility)

    half = config.rotary // 2
    return cute.compile(
        kernel_class()(config, is_dependent_launch(arch)),
        make_fake_tensor(dtype, (tokens, layers, width), stride=(stride(), stride(), 1), assumed_align=16),
        make_fake_tensor(dtype, (layers, config.latent), stride=(stride(), 1), assumed_align=16),
        make_fake_tensor(Float32, (tokens, half), stride=(stride(VECTOR // 2), 1), assumed_align=16),
        make_fake_tensor(Float32, (tokens, half), stride=(stride(VECTOR // 2), 1), assumed_align=16),
        make_fake_tensor(Int64, (tokens,), stride=(1,), assumed_align=8),
        make_fake_tensor(
            dtype, (layers, pages, config.page_size, width), stride=(stride(), stride(), width, 1), assumed_align=16
        ),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )


def gate_configs() -> list[tuple[str, Callable[[str, str], Any]]]:
    """What the compile gate checks: (label, compile for an architecture with more options)."""
    configs = [ContextAppendConfig(512, 64, 64, "bfloat16"), ContextAppendConfig(64, 16, 16, "float16")]
    return [
        (
            f"{NAME} c={c.latent} r={c.rotary} P={c.page_size} {c.dtype}",
            partial(compile_for, c),
        )
        for c in configs
    ]


def launcher(config: ContextAppendConfig, device: torch.device) -> Callable[..., Any]:
    """The function for a device, compiled where no cache has it."""
    arch = arch_name(device)
    return compiled(NAME, config, arch, lambda: compile_for(config, arch))


def reason(z: torch.Tensor, norm_weight: torch.Tensor, pools: Sequence[torch.Tensor]) -> str | None:
    """None where a kernel takes these arguments here, else why not. Launches nothing."""
    return toolkit_reason() or device_reason(z.device) or _config(z, norm_weight, pools).reason()


def _config(z: torch.Tensor, norm_weight: torch.Tensor, pools: Sequence[torch.Tensor]) -> ContextAppendConfig:
    latent = norm_weight.shape[-1]
    return ContextAppendConfig(latent, z.shape[-1] - latent, pools[0].shape[1], str(z.dtype).removeprefix("torch."))


def _stacked(pools: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The layers' views as [L, num_pages, P, W] tensors, no copy: one where they lie evenly spaced in one allocation, else
    one a layer."""
    first = pools[0]
    steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(pools)}
    same = all(
        view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and view.stride() == first.stride()
        for view in pools
    )
    if same and len(steps) == 1 and (step := steps.pop()) > 0 and step % (VECTOR * first.element_size()) == 0:
        return [first.as_strided((len(pools), *first.shape), (step // first.element_size(), *first.stride()))]
    return [view.unsqueeze(0) for view in pools]


def _check(
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pools: Sequence[torch.Tensor],
) -> None:
    if z.ndim != 3 or norm_weight.ndim != 2 or len(pools) != z.shape[1] or not len(pools):
        raise KernelError(
            f"{NAME}: z must be [T, L, W], norm_weight [L, c], with L pools; they are {list(z.shape)}, "
            f"{list(norm_weight.shape)}, {len(pools)} pools. Pass each layer's view."
        )
    (tokens, layers, width), latent = z.shape, norm_weight.shape[1]
    check_rows(NAME, "z", z)
    check_tensor(NAME, "norm_weight", norm_weight, (layers, latent), z.dtype, z.device)
    check_rows(NAME, "norm_weight", norm_weight)
    for name, angle in (("cos", cos), ("sin", sin)):
        check_tensor(NAME, name, angle, (tokens, (width - latent) // 2), torch.float32, z.device)
        check_rows(NAME, name, angle)
    check_tensor(NAME, "slots", slots, (tokens,), torch.int64, z.device)
    if not slots.is_contiguous():
        raise KernelError(f"{NAME}: slots must be contiguous, the stride is {slots.stride(0)}. Copy them.")
    for index, view in enumerate(pools):
        if view.ndim != 3:
            raise KernelError(f"{NAME}: pools must be [num_pages, P, W], the one of layer {index} is {list(view.shape)}.")
        shape = (pools[0].shape[0], pools[0].shape[1], width)
        check_tensor(NAME, f"the pool of layer {index}", view, shape, z.dtype, z.device)
        check_rows(NAME, f"the pool of layer {index}", view)
        if view.stride(1) != width:
            raise KernelError(f"{NAME}: a page must be contiguous, strides of layer {index} are {view.stride()}. Re-lay it.")


@torch.library.custom_op("trtllm_dspark::context_append", mutates_args=("pools",), device_types="cuda")
def _op(
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pools: Sequence[torch.Tensor],
    eps: float,
) -> None:
    _launch(z, norm_weight, cos, sin, slots, pools, eps)


@_op.register_fake
def _(
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pools: Sequence[torch.Tensor],
    eps: float,
) -> None:
    return None


def context_append(
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pools: Sequence[torch.Tensor],
    eps: float,
) -> None:
    """Finish the latents of T context tokens and write each into its slot, for all L layers. See the twin for shapes.

    Args:
        z: [T, L, W], bf16 or fp16; last dim contiguous, other strides multiples of 8. norm_weight: [L, c].
        cos, sin: [T, r/2], fp32. slots: [T], int64; -1, or any id past the pool: not written.
        pools: L tensors [num_pages, P, W], pages contiguous. One launch where they are views of one allocation, evenly
            spaced; else one a layer. eps: of the RMSNorm.
        Every row starts at a multiple of 16 bytes.
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for them here.
    """
    if torch.compiler.is_compiling():
        _op(z, norm_weight, cos, sin, slots, pools, eps)
    else:
        _launch(z, norm_weight, cos, sin, slots, pools, eps)


def _launch(
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pools: Sequence[torch.Tensor],
    eps: float,
) -> None:
    _check(z, norm_weight, cos, sin, slots, pools)
    why = reason(z, norm_weight, pools)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use cute_kernels.reference.context_append.")
    if not z.shape[0]:
        return
    launch = launcher(_config(z, norm_weight, pools), z.device)
    first = 0
    for stacked in _stacked(pools):
        count = stacked.shape[0]
        launch(z[:, first : first + count], norm_weight[first : first + count], cos, sin, slots, stacked, eps)
        first += count
