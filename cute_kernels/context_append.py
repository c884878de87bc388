"""Finish latents and write them into the pages of every layer: RMSNorm, RoPE and scatter in one launch.

    page row = [w * z[:c] / sqrt(mean(z[:c]^2) + eps) | RoPE(z[c:])]      at slots[t], for each layer; slot -1: not written

One warp a row, eight rows a block, 16 bytes a load. Moves 2 * T * L * W * itemsize bytes; the twin is
`cute_kernels.reference.context_append`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.arch import arch_of
from cute_kernels.cache import compiled
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.support import device_reason, toolkit_reason

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
        def __init__(self, config: ContextAppendConfig) -> None:
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
            stream,
        ):
            self.kernel(mZ, mWeight, mCos, mSin, mSlot, mPool, eps).launch(
                grid=[(mZ.shape[0] + ROWS - 1) // ROWS, mZ.shape[1], 1], block=[ROWS * WARP, 1, 1], stream=stream
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
        ):
            tidx, _, _ = cute.arch.thread_idx()
            block, layer, _ = cute.arch.block_idx()
            lane, token = tidx % WARP, block * ROWS + tidx // WARP
            slot = Int64(-1)
            if token < mZ.shape[0]:
                slot = mSlot[token]
            page = slot // self.config.page_size
            if slot >= 0 and page < mPool.shape[1]:
                gZ = cute.tiled_divide(mZ[token, layer, None], (VECTOR,))  # (8, W / 8)
                gWeight = cute.tiled_divide(mWeight[layer, None], (VECTOR,))
                gOut = cute.tiled_divide(mPool[layer, page, slot % self.config.page_size, None], (VECTOR,))
                rZ = cute.make_rmem_tensor(((VECTOR,), self.rounds), Float32)
                total = Float32(0.0)
                for i in cutlass.range_constexpr(self.rounds):
                    vector = lane + i * WARP
                    if vector < self.vectors:
                        x = gZ[None, vector].load().to(Float32)
                        rZ[None, i].store(x)
                        total += (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                total = cute.arch.warp_reduction_sum(total)
                scale = cute.math.rsqrt(total / Float32(self.config.latent) + eps)
                for i in cutlass.range_constexpr(self.rounds):
                    vector = lane + i * WARP
                    if vector < self.vectors:
                        normed = (rZ[None, i].load() * scale).to(self.dtype).to(Float32)
                        gOut[None, vector].store((normed * gWeight[None, vector].load().to(Float32)).to(self.dtype))
                if lane < self.config.rotary // VECTOR:
                    rIn = cute.make_rmem_tensor((VECTOR,), self.dtype)
                    rOut = cute.make_rmem_tensor((VECTOR,), self.dtype)
                    rIn.store(gZ[None, self.vectors + lane].load())
                    for j in cutlass.range_constexpr(VECTOR // 2):
                        cos, sin = mCos[token, lane * (VECTOR // 2) + j], mSin[token, lane * (VECTOR // 2) + j]
                        even, odd = rIn[2 * j].to(Float32), rIn[2 * j + 1].to(Float32)
                        rOut[2 * j] = (even * cos - odd * sin).to(self.dtype)
                        rOut[2 * j + 1] = (even * sin + odd * cos).to(self.dtype)
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

    def stride() -> Any:
        return cute.sym_int64(divisibility=VECTOR)

    half = config.rotary // 2
    return cute.compile(
        kernel_class()(config),
        make_fake_tensor(dtype, (tokens, layers, width), stride=(stride(), stride(), 1), assumed_align=16),
        make_fake_tensor(dtype, (layers, config.latent), stride=(config.latent, 1), assumed_align=16),
        make_fake_tensor(Float32, (tokens, half), stride=(half, 1), assumed_align=4),
        make_fake_tensor(Float32, (tokens, half), stride=(half, 1), assumed_align=4),
        make_fake_tensor(Int64, (tokens,), stride=(1,), assumed_align=8),
        make_fake_tensor(
            dtype, (layers, pages, config.page_size, width), stride=(stride(), stride(), width, 1), assumed_align=16
        ),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )


def launcher(config: ContextAppendConfig, device: torch.device) -> Callable[..., Any]:
    """The function for a device, compiled where no cache has it."""
    arch = arch_of(torch.cuda.get_device_capability(device)).name
    return compiled(NAME, config, arch, lambda: compile_for(config, arch))


def reason(z: torch.Tensor, norm_weight: torch.Tensor, pools: Sequence[torch.Tensor]) -> str | None:
    """None where the kernel takes these arguments, else why not. Launches nothing."""
    return toolkit_reason() or device_reason(z.device) or _config(z, norm_weight, pools).reason()


def _config(z: torch.Tensor, norm_weight: torch.Tensor, pools: Sequence[torch.Tensor]) -> ContextAppendConfig:
    latent = norm_weight.shape[-1]
    return ContextAppendConfig(latent, z.shape[-1] - latent, pools[0].shape[1], str(z.dtype).removeprefix("torch."))


def _stacked(pools: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The layers' views as [L, num_pages, P, W] tensors: one where they are evenly spaced, else one a layer. No copy."""
    first = pools[0]
    steps = {b.data_ptr() - a.data_ptr() for a, b in zip(pools, pools[1:], strict=False)}
    if len(pools) == 1 or (len(steps) == 1 and (step := steps.pop()) > 0 and step % (VECTOR * first.element_size()) == 0):
        step = 0 if len(pools) == 1 else step
        return [first.as_strided((len(pools), *first.shape), (step // first.element_size(), *first.stride()))]
    return [view.unsqueeze(0) for view in pools]


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
        z: [T, L, W], bf16 or fp16; last dim contiguous, other strides multiples of 8. norm_weight: [L, c], contiguous.
        cos, sin: [T, r/2], fp32, contiguous. slots: [T], int64. pools: L tensors [num_pages, P, W]. eps: of the RMSNorm.
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for them here.
    """
    why = reason(z, norm_weight, pools)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use cute_kernels.reference.context_append.")
    config = _config(z, norm_weight, pools)
    tokens, layers, width = z.shape
    _check("norm_weight", norm_weight, (layers, config.latent), z.dtype, z.device)
    for name, angle in (("cos", cos), ("sin", sin)):
        _check(name, angle, (tokens, config.rotary // 2), torch.float32, z.device)
    _check("slots", slots, (tokens,), torch.int64, z.device)
    if len(pools) != layers:
        raise KernelError(f"{NAME}: {layers} pools are required, one a layer of z, {len(pools)} came. Pass each layer's view.")
    for view in pools:
        if view.dtype != z.dtype or view.device != z.device or view.shape[1:] != (config.page_size, width):
            raise KernelError(
                f"{NAME}: each pool must be [num_pages, {config.page_size}, {width}] of {z.dtype} on {z.device}, one is "
                f"{list(view.shape)} of {view.dtype} on {view.device}. Pass views of one layout."
            )
        if view.stride()[1:] != (width, 1) or view.stride(0) % VECTOR or view.data_ptr() % 16:
            raise KernelError(f"{NAME}: a page must be contiguous and 16-byte aligned, strides are {view.stride()}. Re-lay it.")
    if z.stride(-1) != 1 or z.stride(0) % VECTOR or z.stride(1) % VECTOR or z.data_ptr() % 16:
        raise KernelError(f"{NAME}: rows of z must be contiguous and 16-byte aligned, strides are {z.stride()}. Copy z.")
    if not tokens:
        return
    launch = launcher(config, z.device)
    first = 0
    for stacked in _stacked(pools):
        count = stacked.shape[0]
        launch(z[:, first : first + count], norm_weight[first : first + count], cos, sin, slots, stacked, eps)
        first += count


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise KernelError(
            f"{NAME}: {name} must be {list(shape)} of {dtype} on {device}, contiguous; it is {list(tensor.shape)} of "
            f"{tensor.dtype} on {tensor.device}, strides {tensor.stride()}."
        )
