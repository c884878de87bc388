"""The four warps that turn scores into weights in the sm100 schedule, and write the results. Imports the compiler.

A thread has one row of its block's 64, and half of the columns: lane for lane what a product leaves in tensor memory.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, cute

from cute_kernels.block_attention import sm100_ptx as ptx
from cute_kernels.block_attention import sm100_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM100_BLOCK
from cute_kernels.block_attention.extent import live_columns
from cute_kernels.block_attention.sm100_tiles import ROWS, WEIGHING_WARPS

THREADS = 32 * WEIGHING_WARPS
MEETING = 1  # named barrier of these threads
TURN = 32  # columns of tensor memory that a thread takes at once
TURNS = 256 // TURN  # of its sums
LAZY = 8.0  # a maximum rises only where weights would pass 2^LAZY: sums hold that with ease, and so does fp16
LOWEST = -1e30  # a reference that is finite: with it a masked score has weight 0 and nothing is inf - inf


@cute.jit
def largest(rS: cute.Tensor) -> Float32:
    """Of a thread's scores."""
    top, other = rS[0], rS[1]
    for c in cutlass.range_constexpr(2, ROWS, 2):
        top = cute.arch.fmax(top, rS[c])
        other = cute.arch.fmax(other, rS[c + 1])
    return cute.arch.fmax(top, other)


@cute.jit
def weigh(rS: cute.Tensor, top: Float32, scale_log2: Float32) -> Float32:
    """Scores become weights; their sum."""
    parts = [Float32(0.0)] * 4  # a single sum is a chain of additions
    for c in cutlass.range_constexpr(ROWS):
        weight = cute.math.exp2(rS[c] * scale_log2 - top, fastmath=True)
        rS[c] = weight
        parts[c % 4] = parts[c % 4] + weight
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


@cute.jit
def follow(w: SimpleNamespace, shrink: Float32):
    """Sums move to a new reference where it rose for any row of the warp."""
    if cute.arch.vote_any_sync(shrink != 1.0):
        for turn in cutlass.range(TURNS, unroll=1):
            address = w.lanes_at + (tiles.SUMS + TURN * turn)
            ptx.store(address, [value * shrink for value in ptx.load(address, TURN)])
        ptx.wait_for_stores()


@cute.jit
def clear_rows(w: SimpleNamespace, first: Int32, end: Int32):
    """Zero the rows of a tile's values that are not live."""
    rZero = cute.make_rmem_tensor((8,), w.sValues.element_type)
    rZero.fill(0.0)
    vector = w.thread % 32  # of the 32 vectors of a row that this block holds
    for i in cutlass.range(SM100_BLOCK // WEIGHING_WARPS, unroll=1):
        row = WEIGHING_WARPS * i + w.thread // 32
        if row < first or row >= end:
            cute.autovec_copy(rZero, w.sValues[None, vector % 8, row % ROWS, (vector // 8) % 2, row // ROWS, vector // 16])


@cute.jit
def share(w: SimpleNamespace, rS: cute.Tensor, rP: cute.Tensor):
    """Round the weights to an operand and write them, swizzled as the tensor cores read it: vector v of row r at v ^ r % 8."""
    rP.store(rS.load().to(rP.element_type))
    lines = cute.tiled_divide(rP, (8,))
    for v in cutlass.range_constexpr(SEGMENT // 8):
        cute.autovec_copy(lines[None, v], w.sWeights[None, v ^ (w.row % 8), w.row, w.side])


@cute.jit
def write(w: SimpleNamespace, mTarget: cute.Tensor, index: Int32, factor: Float32):
    """A thread's sums, scaled, to its row of a tensor of outputs or of pieces."""
    rTurn = cute.make_rmem_tensor((TURN,), Float32)
    rOut = cute.make_rmem_tensor((TURN,), mTarget.element_type)
    vector = 128 // mTarget.element_type.width
    lines = cute.tiled_divide(rOut, (vector,))
    row = w.first_row + w.row
    for turn in cutlass.range(TURNS, unroll=1):
        sums = ptx.load(w.lanes_at + (tiles.SUMS + TURN * turn), TURN)
        for c in cutlass.range_constexpr(TURN):
            rTurn[c] = sums[c] * factor
        rOut.store(rTurn.load().to(mTarget.element_type))
        column = (turn // 4) * 256 + w.side * 128 + (turn % 4) * TURN
        if row < mTarget.shape[1]:
            target = cute.tiled_divide(mTarget[index, row, None], (vector,))
            for v in cutlass.range_constexpr(TURN // vector):
                cute.autovec_copy(lines[None, v], target[None, column // vector + v])


@cute.jit
def tell(w: SimpleNamespace):
    """Weights and cleared rows are written, scores read, sums scaled: the leader's products may follow."""
    cute.arch.fence_view_async_shared()
    ptx.before_meeting()
    cute.arch.sync_warp()
    ptx.arrive(w.leader_bars + 8 * tiles.WEIGHED, w.thread % 32 == 0)


@cute.jit
def weigh_part(
    w: SimpleNamespace,
    part: SimpleNamespace,
    mRequests: cute.Tensor,
    mOut: cute.Tensor,
    mLse: cute.Tensor,
    mPartial: cute.Tensor,
    mPartialLse: cute.Tensor,
):
    """All tiles of a part, request by request; a whole request goes to the output, a piece to the workspace."""
    rS = cute.make_rmem_tensor((ROWS,), Float32)
    rP = cute.make_rmem_tensor((ROWS,), w.sWeights.element_type)
    partner = w.thread ^ ROWS  # it has the other columns of the row
    number, phase_edge = Int32(0), Int32(0)
    for request in cutlass.range(part.first_request, part.stop, unroll=1):
        start, context, all_tiles, begin, end = tiles.span_of(mRequests, part, request)
        top, total = Float32(LOWEST), Float32(0.0)
        for tile in cutlass.range(begin, end, unroll=1):
            stage = number & 1
            ptx.wait(w.bars + 8 * (tiles.SCORED + stage), (number >> 1) & 1)
            ptx.after_meeting()
            scores = tiles.SCORES + SM100_BLOCK // 2 * stage
            for c, score in enumerate(ptx.load(w.lanes_at + scores, ROWS)):
                rS[c] = score
            first, live_end = live_columns(start, context, w.block_rows, tile, SM100_BLOCK)
            is_edge = first > 0 or live_end < SM100_BLOCK
            if is_edge:
                for c in cutlass.range_constexpr(ROWS):
                    column = w.side * ROWS + c
                    if column < first or column >= live_end:
                        rS[c] = -Float32.inf
            own = largest(rS)
            w.sLargest[w.thread, stage] = own
            cute.arch.barrier(barrier_id=MEETING, number_of_threads=THREADS)
            new = cute.arch.fmax(own, w.sLargest[partner, stage]) * w.scale_log2
            if new <= top + LAZY:
                new = top
            shrink = cute.math.exp2(top - new, fastmath=True)
            top = new
            total = total * shrink + weigh(rS, top, w.scale_log2)
            if tile > begin:
                ptx.wait(w.bars + 8 * tiles.SUMMED, (number - 1) & 1)
                ptx.after_meeting()
                follow(w, shrink)
            if is_edge:
                ptx.wait(w.bars + 8 * tiles.LANDED_EDGE, phase_edge)
                phase_edge = phase_edge ^ 1
                clear_rows(w, first, live_end)
            share(w, rS, rP)
            tell(w)
            number = number + 1
        w.sTotal[w.thread] = total
        cute.arch.barrier(barrier_id=MEETING, number_of_threads=THREADS)
        total = total + w.sTotal[partner]
        factor, lse = cute.arch.rcp_approx(total), top + cute.math.log2(total, fastmath=True)
        ptx.wait(w.bars + 8 * tiles.SUMMED, (number - 1) & 1)
        ptx.after_meeting()
        is_writer = w.side == 0 and w.first_row + w.row < mOut.shape[1]
        if begin == 0 and end == all_tiles:
            write(w, mOut, request, factor)
            if is_writer:
                mLse[request, w.first_row + w.row] = lse
        else:
            slot = 2 * part.number
            if begin == 0:
                slot = slot + 1
            write(w, mPartial, slot, factor)
            if is_writer:
                mPartialLse[slot, w.first_row + w.row] = lse
