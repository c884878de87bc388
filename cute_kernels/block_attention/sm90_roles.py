"""The two roles of the sm90 schedule, and the end of a request; `sm90` says how they fit together. Imports the compiler.

`k` holds what the roles share, by name: fragments, views of shared memory, copies. Only registers and memory behind it change.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention import sm90_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM90_BLOCK
from cute_kernels.block_attention.sm90_tiles import CHUNK_BYTES, CHUNKS, LEFT, NOTHING, RIGHT

THREADS = 256
FIRST, SECOND, P0, P1 = 1, 2, 3, 4  # named barriers; 6 and 7 belong to one warpgroup each
HALF = 256  # value columns of a warpgroup


@cute.jit
def fill(k: SimpleNamespace, rTicket: cute.Tensor, stage: cutlass.Constexpr[int], chunks: cutlass.Constexpr):
    """Issue the copies of some chunks of a tile into a buffer; each chunk has a barrier.

    One thread issues all of them, and boxes of pages and of the block differ by their operands only.
    """
    boxes, per_page = cute.size(rTicket.shape), cute.size(k.boxes_of_page)
    box, shift = SM90_BLOCK // boxes, per_page.bit_length() - 1
    if k.warp == 0 and rTicket[0] != NOTHING:
        tensor_map = k.map_pages
        if rTicket[0] < 0:
            tensor_map = k.map_block
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(boxes):
                row, index = (rTicket[i] & (per_page - 1)) * box, rTicket[i] >> shift
                if rTicket[0] < 0:
                    row, index = Int32(i * box), -1 - rTicket[0]
                for c in cutlass.range_constexpr(*chunks):
                    barrier = k.landed_at + 8 * (stage * CHUNKS + c)
                    if cutlass.const_expr(i == 0):
                        ptx.expect_bytes(barrier, CHUNK_BYTES)
                    target = k.tokens_at + (stage * CHUNKS + c) * CHUNK_BYTES + i * (box * SEGMENT * 2)
                    ptx.copy_box(target, tensor_map, c * SEGMENT, row, index, barrier)


@cute.jit
def aim_later(k: SimpleNamespace, item: tuple, tile: Int32, rTicket: cute.Tensor, stage: cutlass.Constexpr[int]):
    """`aim`, by the warp that will issue. Called where a product runs: the table's latency is off the softmax's path."""
    if k.warp == 0:
        aim(k, item, tile, rTicket, stage)


@cute.jit
def aim(k: SimpleNamespace, item: tuple, tile: Int32, rTicket: cute.Tensor, stage: cutlass.Constexpr[int]):
    """Tickets for what comes into a buffer after a tile: the request's tile after next, else one of the next request."""
    request, start, context, end, next_start, next_context, next_end = item
    tile += 2
    is_there = tile < end
    if tile >= end:
        request, start, context, tile = request + 1, next_start, next_context, Int32(stage)
        is_there = next_end > stage
    rTicket[0] = Int32(NOTHING)
    if is_there:
        tiles.find(k.mTable, k.boxes_of_page, k.num_pages, request, start, context, tile, rTicket)


@cute.jit
def fetch_queries(k: SimpleNamespace, request: Int32, chunks: cutlass.Constexpr, is_there: cutlass.Boolean):
    """Issue the copies of some chunks of a request's queries; the first chunk announces them all."""
    tma, source, target = k.queries
    if k.warp == 0 and is_there:
        if cutlass.const_expr(chunks[0] == 0):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(k.landed_q, CHUNKS * CHUNK_BYTES)
        for c in cutlass.range_constexpr(*chunks):
            cute.copy(tma, source[None, k.row_tile, c, request], target[None, 0, c], tma_bar_ptr=k.landed_q)


def score(k: SimpleNamespace, phase: Int32, stage: int, chunks: tuple, clear: bool = True) -> None:
    """Issue the scores of a tile, chunk by chunk as they land; each chunk is a group of products."""
    for c in chunks:
        ptx.wait(k.landed + (stage * CHUNKS + c), phase)
        warpgroup.fence()
        first = clear and c == chunks[0]
        if c == CHUNKS - 1:
            tiles.multiply(k.qk_rotary, k.rS, k.rQ, k.tBr[None, None, None, stage], first)
        else:
            atom = cute.make_mma_atom(k.qk.op)
            for j in range(4 * c, 4 * c + 4):
                atom.set(warpgroup.Field.ACCUMULATE, not (first and j == 4 * c))
                cute.gemm(atom, k.rS, k.tA[None, None, j], k.tB[None, None, j, stage], k.rS)
        warpgroup.commit_group()


def round_weights(k: SimpleNamespace) -> None:
    """Probabilities as an operand."""
    k.rP.store(tiles.as_operand(k.rS).load().to(k.rP.element_type))


def share_weights(k: SimpleNamespace, target: cute.Tensor) -> None:
    """Write the operand to shared memory for the other warpgroup's tensor cores."""
    cute.copy(k.store, k.copy_p.retile(k.rPc), target)
    cute.arch.fence_view_async_shared()


@cute.jit
def left(
    k: SimpleNamespace,
    item: tuple,
    tile: Int32,
    phase: Int32,
    is_last: cutlass.Constexpr[bool],
    is_alone: cutlass.Constexpr[bool],
):
    """A pair of tiles, by warpgroup 0. Its scores are there; unless it is the last, so are the next tile's at the end."""
    request, start, context, _, _, _, next_end = item
    first, end = tiles.live_columns(start, context, k.block_rows, tile)
    tiles.mask(k.S, first, end, k.thread)
    tiles.clear_rows(k.sRaw, first, end, 0, k.thread, 0)
    tiles.softmax(k.S, k.O, k.sTop, k.sShrink, k.rSum, k.rBefore, k.row, k.thread, k.scale_log2, 0)
    round_weights(k)
    cute.arch.barrier_arrive(barrier_id=FIRST, number_of_threads=THREADS)
    warpgroup.fence()
    tiles.multiply(k.pv_own, k.rO, k.rP, k.tV[None, None, None, 0], False)
    warpgroup.commit_group()
    aim_later(k, item, tile, k.rTicket0, 0)
    if cutlass.const_expr(not is_alone):
        aim_later(k, item, tile + 1, k.rTicket1, 1)
        first, end = tiles.live_columns(start, context, k.block_rows, tile + 1)
    warpgroup.wait_group(0)
    fill(k, k.rTicket0, 0, LEFT)
    cute.arch.barrier(barrier_id=SECOND, number_of_threads=THREADS)
    if cutlass.const_expr(is_alone):
        fetch_queries(k, request + 1, (0, CHUNKS), next_end > 0)
        share_weights(k, k.sP0)
        cute.arch.barrier_arrive(barrier_id=P0, number_of_threads=THREADS)
    else:
        if cutlass.const_expr(is_last):
            fetch_queries(k, request + 1, (0, CHUNKS - 1), next_end > 0)
        tiles.clear_rows(k.sRaw, first, end, 0, k.thread, 1)
        for r in cutlass.range_constexpr(2):
            shrink = k.sShrink[k.row + 8 * r, 1]
            k.rSum[r] = k.rSum[r] * shrink
            tiles.scale_rows(k.S, r, shrink)
            tiles.scale_rows(k.O, r, shrink)
        round_weights(k)
        share_weights(k, k.sP0)
        cute.arch.barrier_arrive(barrier_id=P0, number_of_threads=THREADS)
        cute.arch.barrier(barrier_id=P1, number_of_threads=THREADS)
        warpgroup.fence()
        tiles.multiply(k.pv_other, k.rO, k.tP1, k.tV[None, None, None, 1], False)
        warpgroup.commit_group()
        if cutlass.const_expr(is_last):
            warpgroup.wait_group(0)
            fill(k, k.rTicket1, 1, LEFT)
            fetch_queries(k, request + 1, (CHUNKS - 1, CHUNKS), next_end > 0)
        else:
            score(k, phase, 0, tuple(range(*LEFT)))
            warpgroup.wait_group(LEFT[1] - LEFT[0])  # the product before the scores retired
            fill(k, k.rTicket1, 1, LEFT)
            score(k, phase, 0, tuple(range(*RIGHT)), False)
            warpgroup.wait_group(0)


@cute.jit
def right(
    k: SimpleNamespace,
    item: tuple,
    tile: Int32,
    is_last: cutlass.Constexpr[bool],
    is_alone: cutlass.Constexpr[bool],
):
    """A pair of tiles, by warpgroup 1. Its scores are there, unless the first tile is alone."""
    _, start, context, _, _, _, _ = item
    first, end = tiles.live_columns(start, context, k.block_rows, tile + 1)
    if cutlass.const_expr(not is_alone):
        tiles.mask(k.S, first, end, k.thread)
        tiles.clear_rows(k.sRaw, first, end, 1, k.thread, 1)
    cute.arch.barrier(barrier_id=FIRST, number_of_threads=THREADS)
    for r in cutlass.range_constexpr(2):
        k.rBefore[r] = k.sShrink[k.row + 8 * r, 0]
    if cutlass.const_expr(not is_alone):
        tiles.softmax(k.S, k.O, k.sTop, k.sShrink, k.rSum, k.rBefore, k.row, k.thread, k.scale_log2, 1)
    cute.arch.barrier_arrive(barrier_id=SECOND, number_of_threads=THREADS)
    first, end = tiles.live_columns(start, context, k.block_rows, tile)
    tiles.clear_rows(k.sRaw, first, end, 1, k.thread, 0)
    if cutlass.const_expr(is_alone):
        for r in cutlass.range_constexpr(2):
            k.rSum[r] = k.rSum[r] * k.rBefore[r]
            tiles.scale_rows(k.O, r, k.rBefore[r])
    else:
        round_weights(k)
        share_weights(k, k.sP1)
        warpgroup.fence()
        tiles.multiply(k.pv_own, k.rO, k.rP, k.tV[None, None, None, 1], False)
        warpgroup.commit_group()
    aim_later(k, item, tile, k.rTicket0, 0)
    if cutlass.const_expr(not is_alone):
        aim_later(k, item, tile + 1, k.rTicket1, 1)
    cute.arch.barrier(barrier_id=P0, number_of_threads=THREADS)
    warpgroup.fence()
    tiles.multiply(k.pv_other, k.rO, k.tP0, k.tV[None, None, None, 0], False)
    warpgroup.commit_group()
    if cutlass.const_expr(not is_alone):
        cute.arch.barrier_arrive(barrier_id=P1, number_of_threads=THREADS)
        warpgroup.wait_group(1)
        fill(k, k.rTicket1, 1, RIGHT)
    warpgroup.wait_group(0)
    fill(k, k.rTicket0, 0, RIGHT)


@cute.jit
def write_rows(k: SimpleNamespace, mOut: cute.Tensor, request: Int32):
    """The accumulator, rounded, 16 bytes a store: the four threads of a row trade words until each holds 8 columns."""
    lane = k.thread % 4
    is_odd, is_high = lane % 2 == 1, lane >= 2
    rRow = cute.make_rmem_tensor((2, 4), k.rP.element_type)
    rWords = cute.recast_tensor(rRow, Int32)  # (1, 4)
    rOut = cute.make_rmem_tensor((8,), k.rP.element_type)
    rLine = cute.recast_tensor(rOut, Int32)
    for r in cutlass.range_constexpr(2):
        row = k.row_tile * SM90_BLOCK + k.row + 8 * r
        for g in cutlass.range_constexpr(HALF // 32):
            for j in cutlass.range_constexpr(4):
                rRow[None, j].store(k.rO[(None, r, 4 * g + j), 0, 0].load().to(k.rP.element_type))
            w = [rWords[j] for j in range(4)]
            low, high = trade(is_odd, w[0], w[1], 1), trade(is_odd, w[2], w[3], 1)
            a, b = trade(is_high, low[0], high[0], 2), trade(is_high, low[1], high[1], 2)
            rLine[0], rLine[1], rLine[2], rLine[3] = a[0], b[0], a[1], b[1]
            if row < mOut.shape[1]:
                column = k.group * (HALF // 8) + 4 * g + lane
                cute.autovec_copy(rOut, cute.tiled_divide(mOut[request, row, None], (8,))[None, column])


@cute.jit
def trade(is_upper: cutlass.Boolean, x: Int32, y: Int32, offset: cutlass.Constexpr[int]):
    """Of (x, y) the lower thread keeps x and gets the other's x, the upper one keeps y and gets the other's y."""
    given, kept = y, x
    if is_upper:
        given, kept = x, y
    got = cute.arch.shuffle_sync_bfly(given, offset=offset)
    first, second = kept, got
    if is_upper:
        first, second = got, kept
    return first, second


@cute.jit
def finish(
    k: SimpleNamespace,
    mOut: cute.Tensor,
    mLse: cute.Tensor,
    mPartial: cute.Tensor,
    mPartialLse: cute.Tensor,
    request: Int32,
    part: Int32,
    begin: Int32,
    end: Int32,
    all_tiles: Int32,
):
    """A whole request goes to the output, a piece to the workspace: slot 2 * part, or one more where it is the first."""
    for r in cutlass.range_constexpr(2):
        total = k.rSum[r]
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        k.rSum[r] = total
        if k.thread % 4 == 0:
            k.sShrink[k.row + 8 * r, 1 - k.group] = total  # the column that only this warpgroup read
    cute.arch.barrier()
    is_whole = begin == 0 and end == all_tiles
    slot = 2 * part
    if begin == 0:
        slot = 2 * part + 1
    piece = cute.local_tile(mPartial[slot, None, None], (SM90_BLOCK, HALF), (k.row_tile, k.group))
    tPartial = k.pv_own.get_slice(k.thread).partition_C(piece)
    for r in cutlass.range_constexpr(2):
        total = k.rSum[r] + k.sShrink[k.row + 8 * r, k.group]
        tiles.scale_rows(k.O, r, cute.arch.rcp_approx(total))
    if is_whole:
        write_rows(k, mOut, request)
    for r in cutlass.range_constexpr(2):
        total = k.rSum[r] + k.sShrink[k.row + 8 * r, k.group]
        row = k.row_tile * SM90_BLOCK + k.row + 8 * r
        if row < mOut.shape[1]:
            if not is_whole:
                for n in cutlass.range_constexpr(HALF // 8):
                    cute.autovec_copy(k.rO[(None, r, n), 0, 0], tPartial[(None, r, n), 0, 0])
            if k.thread % 4 == 0 and k.group == 0:
                lse = k.sTop[k.row + 8 * r] + cute.math.log2(total, fastmath=True)
                if is_whole:
                    mLse[request, row] = lse
                else:
                    mPartialLse[slot, row] = lse
