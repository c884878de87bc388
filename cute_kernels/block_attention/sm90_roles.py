"""The two roles of the sm90 schedule, and the end of a request; `sm90` says how they fit together. Imports the compiler.

`k` holds what the roles share, by name: fragments, views of shared memory, copies. Only registers and memory behind it change.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention import sm90_tiles as tiles
from cute_kernels.block_attention.config import SM90_BLOCK
from cute_kernels.block_attention.sm90_tiles import CHUNK_BYTES, CHUNKS, LEFT, NOTHING, RIGHT

THREADS = 256
FIRST, SECOND, P0, P1, TURN = 1, 2, 3, 4, 5  # named barriers; 6 and 7 belong to one warpgroup each
HALF = 256  # value columns of a warpgroup


def wait(barrier: cute.Pointer, phase: Int32) -> None:
    """Wait for a phase of a barrier in shared memory."""
    (ptx.wait_spinning if tiles.on("spin") else cute.arch.mbarrier_wait)(barrier, phase)


def fill(k: SimpleNamespace, rTicket: cute.Tensor, stage: int, chunks: tuple) -> None:
    """Issue the copies of some chunks of a tile into a buffer."""
    if tiles.on("lean"):
        tiles.fill_lean(k.raw, k.fills[1], rTicket, k.warp, stage, chunks)
    else:
        tiles.fill(*k.fills, rTicket, k.warp, stage, chunks)


def stamp(k: SimpleNamespace, tile: Int32, what: int) -> None:
    """Under trial: the clock at a point of a pair, 8 numbers a pair and warpgroup, into the workspace."""
    if tiles.on("trace"):
        slot, first, target = k.traced
        write_stamp(target, slot, 2 * k.row_tile + k.group, tile - first, k.thread, what)


@cute.jit
def write_stamp(target: cute.Tensor, slot: Int32, row: Int32, tile: Int32, thread: Int32, what: cutlass.Constexpr[int]):
    """`stamp`, by one thread."""
    now = ptx.clock()
    if thread == 0 and tile >= 0:
        target[slot, row, ((tile // 2) % 64) * 8 + what] = now


@cute.jit
def look_ahead(ahead: tuple, item: tuple, tile: Int32, who: Int32, gPages: cute.Tensor, rTicket: cute.Tensor):
    """Ask for two tiles ahead of their copies; one warp of all row tiles does."""
    if who == 0:
        tiles.prefetch(*ahead, item, tile, gPages, rTicket)
        tiles.prefetch(*ahead, item, tile + 1, gPages, rTicket)


@cute.jit
def aim_later(k: SimpleNamespace, item: tuple, tile: Int32, rTicket: cute.Tensor, stage: cutlass.Constexpr[int]):
    """`aim` by the warp that issues, for all other warps nothing."""
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
        tiles.find(k.mTable, k.fills[1], k.num_pages, request, start, context, tile, rTicket)


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
        wait(k.landed + (stage * CHUNKS + c), phase)
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
    stamp(k, tile, 0)
    if cutlass.const_expr(not tiles.on("aim")):
        aim(k, item, tile, k.rTicket0, 0)
    first, end = tiles.live_columns(start, context, k.block_rows, tile)
    tiles.mask(k.S, first, end, k.thread)
    tiles.clear_rows(k.sRaw, first, end, 0, k.thread, 0)
    signal = FIRST if tiles.on("early") else 0
    tiles.softmax(k.S, k.O, k.sTop, k.sShrink, k.rSum, k.rBefore, k.row, k.thread, k.scale_log2, 0, signal)
    round_weights(k)
    if cutlass.const_expr(not tiles.on("early")):
        cute.arch.barrier_arrive(barrier_id=FIRST, number_of_threads=THREADS)
    stamp(k, tile, 1)
    warpgroup.fence()
    tiles.multiply(k.pv_own, k.rO, k.rP, k.tV[None, None, None, 0], False)
    warpgroup.commit_group()
    if cutlass.const_expr(tiles.on("aim")):
        aim_later(k, item, tile, k.rTicket0, 0)
    if cutlass.const_expr(not is_alone):
        if cutlass.const_expr(tiles.on("aim")):
            aim_later(k, item, tile + 1, k.rTicket1, 1)
        else:
            aim(k, item, tile + 1, k.rTicket1, 1)
        first, end = tiles.live_columns(start, context, k.block_rows, tile + 1)
    if cutlass.const_expr(tiles.on("l2")):
        look_ahead(k.ahead, item, tile + 4, k.warp + k.row_tile, k.fills[1], k.rTicket0)
    warpgroup.wait_group(0)
    stamp(k, tile, 2)
    fill(k, k.rTicket0, 0, LEFT)
    cute.arch.barrier(barrier_id=SECOND, number_of_threads=THREADS)
    stamp(k, tile, 3)
    if cutlass.const_expr(is_alone):
        fetch_queries(k, request + 1, (0, CHUNKS), next_end > 0)
        share_weights(k, k.sP0)
        cute.arch.barrier_arrive(barrier_id=P0, number_of_threads=THREADS)
    else:
        if cutlass.const_expr(is_last):
            fetch_queries(k, request + 1, (0, CHUNKS - 1), next_end > 0)
        tiles.clear_rows(k.sRaw, first, end, 0, k.thread, 1)
        if cutlass.const_expr(tiles.on("skip")):
            shrink0, shrink1 = k.sShrink[k.row, 1], k.sShrink[k.row + 8, 1]
            k.rSum[0] = k.rSum[0] * shrink0
            k.rSum[1] = k.rSum[1] * shrink1
            tiles.rescale(k.S, k.O, shrink0, shrink1)
            round_weights(k)
        else:
            for r in cutlass.range_constexpr(2):
                shrink = k.sShrink[k.row + 8 * r, 1]
                k.rSum[r] = k.rSum[r] * shrink
                tiles.scale_rows(k.S, r, shrink)
                tiles.scale_rows(k.O, r, shrink)
            round_weights(k)
        share_weights(k, k.sP0)
        cute.arch.barrier_arrive(barrier_id=P0, number_of_threads=THREADS)
        stamp(k, tile, 4)
        cute.arch.barrier(barrier_id=P1, number_of_threads=THREADS)
        stamp(k, tile, 5)
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
            stamp(k, tile, 6)
            fill(k, k.rTicket1, 1, LEFT)
            score(k, phase, 0, tuple(range(*RIGHT)), False)
            if cutlass.const_expr(tiles.on("turn")):
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=THREADS)
            stamp(k, tile, 7)
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
    stamp(k, tile, 0)
    if cutlass.const_expr(not tiles.on("aim")):
        aim(k, item, tile, k.rTicket0, 0)
    first, end = tiles.live_columns(start, context, k.block_rows, tile + 1)
    if cutlass.const_expr(not is_alone):
        if cutlass.const_expr(not tiles.on("aim")):
            aim(k, item, tile + 1, k.rTicket1, 1)
        tiles.mask(k.S, first, end, k.thread)
        tiles.clear_rows(k.sRaw, first, end, 1, k.thread, 1)
    cute.arch.barrier(barrier_id=FIRST, number_of_threads=THREADS)
    stamp(k, tile, 1)
    for r in cutlass.range_constexpr(2):
        k.rBefore[r] = k.sShrink[k.row + 8 * r, 0]
    if cutlass.const_expr(not is_alone):
        signal = SECOND if tiles.on("early") else 0
        tiles.softmax(k.S, k.O, k.sTop, k.sShrink, k.rSum, k.rBefore, k.row, k.thread, k.scale_log2, 1, signal)
    if cutlass.const_expr(is_alone or not tiles.on("early")):
        cute.arch.barrier_arrive(barrier_id=SECOND, number_of_threads=THREADS)
    stamp(k, tile, 2)
    first, end = tiles.live_columns(start, context, k.block_rows, tile)
    tiles.clear_rows(k.sRaw, first, end, 1, k.thread, 0)
    if cutlass.const_expr(is_alone):
        for r in cutlass.range_constexpr(2):
            k.rSum[r] = k.rSum[r] * k.rBefore[r]
            tiles.scale_rows(k.O, r, k.rBefore[r])
    else:
        round_weights(k)
        share_weights(k, k.sP1)
        if cutlass.const_expr(tiles.on("p1")):
            cute.arch.barrier_arrive(barrier_id=P1, number_of_threads=THREADS)
        warpgroup.fence()
        tiles.multiply(k.pv_own, k.rO, k.rP, k.tV[None, None, None, 1], False)
        warpgroup.commit_group()
    stamp(k, tile, 3)
    if cutlass.const_expr(tiles.on("aim")):
        aim_later(k, item, tile, k.rTicket0, 0)
        if cutlass.const_expr(not is_alone):
            aim_later(k, item, tile + 1, k.rTicket1, 1)
    cute.arch.barrier(barrier_id=P0, number_of_threads=THREADS)
    stamp(k, tile, 4)
    warpgroup.fence()
    tiles.multiply(k.pv_other, k.rO, k.tP0, k.tV[None, None, None, 0], False)
    warpgroup.commit_group()
    if cutlass.const_expr(not is_alone):
        if cutlass.const_expr(not tiles.on("p1")):
            cute.arch.barrier_arrive(barrier_id=P1, number_of_threads=THREADS)
        warpgroup.wait_group(1)
        stamp(k, tile, 5)
        fill(k, k.rTicket1, 1, RIGHT)
    warpgroup.wait_group(0)
    stamp(k, tile, 6)
    fill(k, k.rTicket0, 0, RIGHT)


@cute.jit
def write_rows(k: SimpleNamespace, mOut: cute.Tensor, request: Int32, rows: Int32):
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
            if row < rows:
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
    rows: Int32,  # that are written
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
    thread_pv, place = k.pv_own.get_slice(k.thread), (k.row_tile, k.group)
    tOut = thread_pv.partition_C(cute.local_tile(mOut[request, None, None], (SM90_BLOCK, HALF), place))
    tPartial = thread_pv.partition_C(cute.local_tile(mPartial[slot, None, None], (SM90_BLOCK, HALF), place))
    rPair = cute.make_rmem_tensor((2,), k.rP.element_type)
    if cutlass.const_expr(tiles.on("vec")):
        for r in cutlass.range_constexpr(2):
            total = k.rSum[r] + k.sShrink[k.row + 8 * r, k.group]
            tiles.scale_rows(k.O, r, cute.arch.rcp_approx(total))
        if is_whole:
            write_rows(k, mOut, request, rows)
    for r in cutlass.range_constexpr(2):
        total = k.rSum[r] + k.sShrink[k.row + 8 * r, k.group]
        if cutlass.const_expr(not tiles.on("vec")):
            tiles.scale_rows(k.O, r, cute.arch.rcp_approx(total))
        row = k.row_tile * SM90_BLOCK + k.row + 8 * r
        if row < rows:
            for n in cutlass.range_constexpr(HALF // 8):
                pair = k.rO[(None, r, n), 0, 0]
                if cutlass.const_expr(tiles.on("vec")):
                    if not is_whole:
                        cute.autovec_copy(pair, tPartial[(None, r, n), 0, 0])
                else:
                    if is_whole:
                        rPair.store(pair.load().to(k.rP.element_type))
                        cute.autovec_copy(rPair, tOut[(None, r, n), 0, 0])
                    else:
                        cute.autovec_copy(pair, tPartial[(None, r, n), 0, 0])
            if k.thread % 4 == 0 and k.group == 0:
                lse = k.sTop[k.row + 8 * r] + cute.math.log2(total, fastmath=True)
                if is_whole:
                    mLse[request, row] = lse
                else:
                    mPartialLse[slot, row] = lse
