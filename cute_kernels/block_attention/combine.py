"""Merge the pieces of split requests: weights 2^(lse_i - lse) over normalised partial outputs, fp32.

A request is split where a part begins inside it. The block row of the grid that stands for the first such part merges the
request; all others return at once. A request that is whole was written by the attention itself and is not touched.

A warp merges a row, and a lane's loads of all its columns are in flight together. From sm_90 on the launch starts while the
attention ends, and every block, one that will return at once too, waits for the attention before it reads or writes anything:
the kernel behind may then take the end of this one for the end of all before it.
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels.arch import is_dependent_launch

COMBINE = "block_attention_combine"
WARP = 32
ROWS = 4  # of a block, a warp each


@dataclass(frozen=True)
class CombineConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        value_width: c, a multiple of 64. dtype: of the output.
    """

    value_width: int
    dtype: str

    @property
    def floats(self) -> int:
        """Of one load: 16 bytes, or 8 where a warp's loads of 16 would pass the end of a row."""
        return 4 if self.value_width % (4 * WARP) == 0 else 2


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Float32, Int32, cute

    class BlockAttentionCombine:
        def __init__(self, config: CombineConfig, is_dependent: bool) -> None:
            self.is_dependent = is_dependent
            self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
            self.floats, self.vectors = config.floats, config.value_width // (config.floats * WARP)  # vectors: of a lane

        @cute.jit
        def __call__(
            self,
            mRequests: cute.Tensor,  # (B, 4), int32: start, context tokens, first part, pieces
            mBoundaries: cute.Tensor,  # (parts + 1, 4), int32: request, tile, start, context
            mPartial: cute.Tensor,  # (2 * parts, M, c), fp32
            mPartialLse: cute.Tensor,  # (2 * parts, M), fp32
            mOut: cute.Tensor,  # (B, M, c)
            mLse: cute.Tensor,  # (B, M), fp32
            stream,
        ):
            self.kernel(mRequests, mBoundaries, mPartial, mPartialLse, mOut, mLse).launch(
                grid=[(mOut.shape[1] + ROWS - 1) // ROWS, mBoundaries.shape[0] - 2, 1],
                block=[ROWS * WARP, 1, 1],
                stream=stream,
                use_pdl=self.is_dependent,
            )

        @cute.jit
        def slot_of(self, first_part: Int32, piece: Int32) -> Int32:
            """Where a piece's partial result lies: the first is the last item of its part, the others the first."""
            slot = 2 * (first_part + piece)
            if piece == 0:
                slot += 1
            return slot

        @cute.kernel
        def kernel(
            self,
            mRequests: cute.Tensor,
            mBoundaries: cute.Tensor,
            mPartial: cute.Tensor,
            mPartialLse: cute.Tensor,
            mOut: cute.Tensor,
            mLse: cute.Tensor,
        ):
            tidx, _, _ = cute.arch.thread_idx()
            row_block, part, _ = cute.arch.block_idx()
            part += 1
            if cutlass.const_expr(self.is_dependent):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            row, lane = row_block * ROWS + tidx // WARP, tidx % WARP
            request, tile = mBoundaries[part, 0], mBoundaries[part, 1]
            if tile > 0 and row < mOut.shape[1]:
                first_part, pieces = mRequests[request, 2], mRequests[request, 3]
                if part == first_part + 1:
                    top = -Float32.inf
                    for piece in cutlass.range(pieces, unroll=4):
                        top = cute.arch.fmax(top, mPartialLse[self.slot_of(first_part, piece), row])
                    weights = Float32(0.0)
                    rSum = cute.make_rmem_tensor((self.floats, self.vectors), Float32)
                    rPart = cute.make_rmem_tensor((self.floats, self.vectors), Float32)
                    rOut = cute.make_rmem_tensor((self.floats, self.vectors), self.dtype)
                    rSum.fill(0.0)
                    for piece in cutlass.range(pieces, unroll=4):
                        slot = self.slot_of(first_part, piece)
                        weight = cute.math.exp2(mPartialLse[slot, row] - top, fastmath=True)
                        weights += weight
                        for v in cutlass.range_constexpr(self.vectors):
                            source = cute.tiled_divide(mPartial[slot, row, None], (self.floats,))[None, lane + v * WARP]
                            cute.autovec_copy(source, rPart[None, v])
                        rSum.store(rSum.load() + rPart.load() * weight)
                    rOut.store((rSum.load() * cute.arch.rcp_approx(weights)).to(self.dtype))
                    for v in cutlass.range_constexpr(self.vectors):
                        target = cute.tiled_divide(mOut[request, row, None], (self.floats,))[None, lane + v * WARP]
                        cute.autovec_copy(rOut[None, v], target)
                    if lane == 0:
                        mLse[request, row] = top + cute.math.log2(weights, fastmath=True)

    return BlockAttentionCombine


def compile_for(config: CombineConfig, arch: str, options: str = "") -> Any:
    """Compile for an architecture; needs no GPU. `options`: more flags of the compiler."""
    import cutlass
    from cutlass import Float32, Int32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
    batch, rows, slots, bounds = (cute.sym_int() for _ in range(4))
    value = config.value_width

    def stride() -> Any:
        return cute.sym_int64(divisibility=8)

    return cute.compile(
        kernel_class()(config, is_dependent_launch(arch)),
        make_fake_tensor(Int32, (batch, 4), stride=(4, 1), assumed_align=16),
        make_fake_tensor(Int32, (bounds, 4), stride=(4, 1), assumed_align=16),
        make_fake_tensor(Float32, (slots, rows, value), stride=(stride(), value, 1), assumed_align=16),
        make_fake_tensor(Float32, (slots, rows), stride=(cute.sym_int64(), 1), assumed_align=4),
        make_fake_tensor(dtype, (batch, rows, value), stride=(stride(), value, 1), assumed_align=16),
        make_fake_tensor(Float32, (batch, rows), stride=(cute.sym_int64(), 1), assumed_align=4),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )
