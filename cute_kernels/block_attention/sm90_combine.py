"""Merge the pieces of split requests that the sm90 schedule left: weights 2^(lse_i - lse) over normalised outputs, fp32.

A piece lies in memory as the tensor cores left it, so that every store of the attention and every load here is 256 bytes in a
row for a warp. A unit is what two such stores write: 8 rows by 16 columns, of each lane 2 and 2 values. A warp merges a unit,
or `sharing` warps do, each with every so-manieth piece, and one of them adds up their sums: with few requests a request is in
as many pieces as there are parts, and few warps would have all the work. Where there are fewer requests than parts the grid
counts requests, else the parts that begin inside one. A request that is whole was written by the attention itself and is not
touched.

The launch starts while the attention ends, and every block, one that will return at once too, waits for the attention before
it reads or writes anything: the kernel behind may then take the end of this one for the end of all before it.
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels.block_attention.config import SM90_BLOCK, SM90_UNIT, SM90_UNITS
from cute_kernels.support import smem_allocator

COMBINE = "block_attention_combine_sm90"
WARP, WARPS, LANE = 32, 8, 4  # threads of a warp, warps of a block, values of a lane
SHARING = (1, 2, 4, 8)  # warps of a unit
BLOCKS, WORTH = 1024, 3  # more warps share a unit while blocks are at most so many, and parts of a request for each at least


@dataclass(frozen=True)
class CombineConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        value_width: c. dtype: of the output. sharing: warps of a unit, of SHARING. by_request: the grid counts requests.
    """

    value_width: int
    dtype: str
    sharing: int
    by_request: bool

    @property
    def units(self) -> int:
        """Units of a warp, of the same rows."""
        return 4 if self.sharing == 1 else 1

    @property
    def at_once(self) -> int:
        """Pieces whose loads a warp has in flight."""
        return 2 if self.sharing == 1 else 4


def config_for(value_width: int, dtype: str, batch: int, parts: int, units: int) -> CombineConfig:
    """The kernel for so many requests of so many units each, in so many parts."""
    fit = (s for s in SHARING[1:] if s * batch * WORTH <= parts and s * batch * units <= BLOCKS * WARPS)
    return CombineConfig(value_width, dtype, max(fit, default=1), batch < parts)


def configs(value_width: int, dtype: str) -> tuple[CombineConfig, ...]:
    """All that `config_for` may return."""
    cases = (*((sharing, True) for sharing in SHARING), (1, False))
    return tuple(CombineConfig(value_width, dtype, sharing, by_request) for sharing, by_request in cases)


def label(config: CombineConfig) -> str:
    """In the compile gate's table."""
    return f"sharing={config.sharing} by={'request' if config.by_request else 'part'} {config.dtype}"


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Float32, Int32, cute

    class BlockAttentionCombineSm90:
        def __init__(self, config: CombineConfig) -> None:
            self.config = config
            self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16

        @cute.jit
        def __call__(
            self,
            mRequests: cute.Tensor,  # (B, 4), int32: start, context tokens, first part, pieces
            mBoundaries: cute.Tensor,  # (parts + 1, 4), int32: request, tile, start, context
            mPartial: cute.Tensor,  # (2 * parts, units, 128), fp32
            mPartialLse: cute.Tensor,  # (2 * parts, M), fp32
            mOut: cute.Tensor,  # (B, M, c)
            mLse: cute.Tensor,  # (B, M), fp32
            stream,
        ):
            requests = mBoundaries.shape[0] - 2
            if cutlass.const_expr(self.config.by_request):
                requests = mOut.shape[0]
            self.kernel(mRequests, mBoundaries, mPartial, mPartialLse, mOut, mLse).launch(
                grid=[mPartial.shape[1] * self.config.sharing // (WARPS * self.config.units), requests, 1],
                block=[WARPS * WARP, 1, 1],
                stream=stream,
                use_pdl=True,
            )

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
            block, request, _ = cute.arch.block_idx()
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            is_first = True
            if cutlass.const_expr(not self.config.by_request):
                part = request + 1
                request = mBoundaries[part, 0]
                if mBoundaries[part, 1] == 0:
                    request = Int32(-1)
            if request >= 0:
                first_part, pieces = mRequests[request, 2], mRequests[request, 3]
                if cutlass.const_expr(not self.config.by_request):
                    is_first = part == first_part + 1  # of all parts that begin inside it
                if pieces > 1 and is_first:
                    self.merge(mPartial, mPartialLse, mOut, mLse, request, first_part, pieces, block, tidx // WARP, tidx % WARP)

        @cute.jit
        def merge(
            self,
            mPartial: cute.Tensor,
            mPartialLse: cute.Tensor,
            mOut: cute.Tensor,
            mLse: cute.Tensor,
            request: Int32,
            first_part: Int32,
            pieces: Int32,
            block: Int32,
            warp: Int32,
            lane: Int32,
        ):
            sharing, units, at_once = self.config.sharing, self.config.units, self.config.at_once
            unit, share = (block * WARPS + warp) // sharing * units, warp % sharing
            # (row tile, half of the columns, warp, row of a thread's two, pair of column groups); see `SM90_UNITS`
            row = unit // SM90_UNITS * SM90_BLOCK + unit // 32 % 4 * 16 + unit // 16 % 2 * 8 + lane // 4
            column = unit // 128 % 2 * (self.config.value_width // 2) + unit % 16 * 16 + lane % 4 * 2
            if row - lane // 4 >= mOut.shape[1]:  # eight rows that are none: nobody wrote them
                pieces = Int32(0)
            held = row  # a row beyond the last reads another's sum
            if row >= mOut.shape[1]:
                held = mOut.shape[1] - 1
            rSum = cute.make_rmem_tensor((LANE, units), Float32)
            rParts = [cute.make_rmem_tensor((LANE, units), Float32) for _ in range(at_once)]
            rSum.fill(0.0)
            top, weights = -Float32.inf, Float32(0.0)
            for base in cutlass.range(share, pieces, sharing * at_once, unroll=1):
                lses = []
                for i in cutlass.range_constexpr(at_once):  # pieces beyond the last are the last, with weight 0
                    piece = base + i * sharing
                    at = piece
                    if piece >= pieces:
                        at = pieces - 1
                    slot = 2 * (first_part + at)
                    if at == 0:
                        slot += 1
                    lse = mPartialLse[slot, held]
                    if piece >= pieces:
                        lse = -Float32.inf
                    lses.append(lse)
                    for u in cutlass.range_constexpr(units):
                        line = cute.tiled_divide(mPartial[slot, unit + u, None], (2,))
                        for half in cutlass.range_constexpr(2):
                            target = cute.tiled_divide(rParts[i][None, u], (2,))[None, half]
                            cute.autovec_copy(line[None, half * WARP + lane], target)
                old = top
                for i in cutlass.range_constexpr(at_once):
                    top = cute.arch.fmax(top, lses[i])
                shrink = cute.math.exp2(old - top, fastmath=True)
                weights = weights * shrink
                rSum.store(rSum.load() * shrink)
                for i in cutlass.range_constexpr(at_once):
                    weight = cute.math.exp2(lses[i] - top, fastmath=True)
                    weights = weights + weight
                    rSum.store(rSum.load() + rParts[i].load() * weight)
            if cutlass.const_expr(sharing > 1):
                allocator = smem_allocator()
                sSum = allocator.allocate_tensor(
                    Float32, cute.make_ordered_layout((LANE * units, WARP, WARPS), order=(0, 1, 2)), byte_alignment=16
                )
                scalars = cute.make_ordered_layout((WARP, WARPS), order=(0, 1))
                sTop = allocator.allocate_tensor(Float32, scalars, byte_alignment=16)
                sWeights = allocator.allocate_tensor(Float32, scalars, byte_alignment=16)
                cute.autovec_copy(cute.group_modes(rSum, 0, 2), sSum[None, lane, warp])
                sTop[lane, warp], sWeights[lane, warp] = top, weights
                cute.arch.sync_threads()
                if share == 0:
                    for other in cutlass.range_constexpr(1, sharing):
                        top = cute.arch.fmax(top, sTop[lane, warp + other])
                    shrink = cute.math.exp2(sTop[lane, warp] - top, fastmath=True)
                    weights = weights * shrink
                    rSum.store(rSum.load() * shrink)
                    for other in cutlass.range_constexpr(1, sharing):
                        shrink = cute.math.exp2(sTop[lane, warp + other] - top, fastmath=True)
                        weights = weights + sWeights[lane, warp + other] * shrink
                        cute.autovec_copy(sSum[None, lane, warp + other], cute.group_modes(rParts[0], 0, 2))
                        rSum.store(rSum.load() + rParts[0].load() * shrink)
            if share == 0 and row < mOut.shape[1]:
                rOut = cute.make_rmem_tensor((LANE, units), self.dtype)
                rOut.store((rSum.load() * cute.arch.rcp_approx(weights)).to(self.dtype))
                line = cute.tiled_divide(mOut[request, row, None], (2,))
                for u in cutlass.range_constexpr(units):
                    for half in cutlass.range_constexpr(2):
                        source = cute.tiled_divide(rOut[None, u], (2,))[None, half]
                        cute.autovec_copy(source, line[None, column // 2 + 8 * u + 4 * half])
                if column == 0:
                    mLse[request, row] = top + cute.math.log2(weights, fastmath=True)

    return BlockAttentionCombineSm90


def compile_for(config: CombineConfig, arch: str, options: str = "") -> Any:
    """Compile for sm_90a; needs no GPU. `options`: more flags of the compiler."""
    import cutlass
    from cutlass import Float32, Int32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
    batch, rows, slots, units, bounds = (cute.sym_int() for _ in range(5))
    value = config.value_width

    def stride() -> Any:
        return cute.sym_int64(divisibility=8)

    return cute.compile(
        kernel_class()(config),
        make_fake_tensor(Int32, (batch, 4), stride=(4, 1), assumed_align=16),
        make_fake_tensor(Int32, (bounds, 4), stride=(4, 1), assumed_align=16),
        make_fake_tensor(Float32, (slots, units, SM90_UNIT), stride=(stride(), SM90_UNIT, 1), assumed_align=16),
        make_fake_tensor(Float32, (slots, rows), stride=(cute.sym_int64(), 1), assumed_align=4),
        make_fake_tensor(dtype, (batch, rows, value), stride=(stride(), value, 1), assumed_align=16),
        make_fake_tensor(Float32, (batch, rows), stride=(cute.sym_int64(), 1), assumed_align=4),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )
