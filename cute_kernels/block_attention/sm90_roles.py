"""The two warpgroups that compute in the sm90 schedule, and the end of a request; `sm90` says how they fit together.

`k` holds what the roles share, by name: fragments, views of shared memory, copies. Only registers and memory behind it change.
Imports the compiler.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention import sm90_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM90_BLOCK, SM90_UNIT
from cute_kernels.block_attention.sm90_tiles import CHUNKS, LEFT, RIGHT
from cute_kernels.ptx import wait

COMPUTING = 256  # threads of the two warpgroups
FIRST, SECOND, BOTH = 1, 2, 3  # named barriers; 6 and 7 belong to one warpgroup each
HALF = 256  # value columns of a warpgroup
UNITS_OF_WARP = HALF // 8  # see `SM90_UNITS`
SENT_BYTES = 16 * HALF * 4 + 16 * 2 * 4  # of a warp to the other block: sums of 16 rows, and of each row what they refer to


def tensor_at(address: Int32, layout: cute.ComposedLayout, dtype) -> cute.Tensor:
    """Shared memory at an address, as the tensor cores read it."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype), layout.outer)


def score_operands(k: SimpleNamespace) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """Queries, tokens, and the tokens' rotary part, as descriptors. They are made where they are used: kept over a loop they lie in
    a thread's registers, and each product would first move its two to those of the warp.
    """
    whole, value_width, dtype = k.qk.get_slice(0), (CHUNKS - 1) * SEGMENT, k.rP.element_type
    sQ, sK = tensor_at(ptx.again(k.queries_at), k.layout_q, dtype), tensor_at(ptx.again(k.tokens_at), k.layout_k, dtype)
    sKv = cute.local_tile(sK, (SM90_BLOCK, value_width, 2), (0, 0, 0))
    sKr = cute.local_tile(sK, (SM90_BLOCK, SEGMENT, 2), (0, CHUNKS - 1, 0))
    tA = k.qk.make_fragment_A(whole.partition_A(cute.local_tile(sQ, (SM90_BLOCK, value_width), (0, 0))))
    return tA, k.qk.make_fragment_B(whole.partition_B(sKv)), k.qk.make_fragment_B(whole.partition_B(sKr))


def values(k: SimpleNamespace, half: int) -> cute.Tensor:
    """Half of the value columns of both buffers, as descriptors; see `score_operands`."""
    value_width = (CHUNKS - 1) * SEGMENT
    sKv = cute.local_tile(tensor_at(ptx.again(k.tokens_at), k.layout_k, k.rP.element_type), (SM90_BLOCK, value_width, 2), (0, 0, 0))
    sVt = cute.composition(sKv, cute.make_ordered_layout((value_width, SM90_BLOCK, 2), order=(1, 0, 2)))
    return k.pv_own.make_fragment_B(k.pv_own.get_slice(0).partition_B(cute.local_tile(sVt, (HALF, SM90_BLOCK, 2), (half, 0, 0))))


def shared_weights(k: SimpleNamespace, stage: int) -> cute.Tensor:
    """Weights that the other warpgroup wrote, of tile `stage` of a pair, as descriptors; see `score_operands`."""
    address = k.queries_at + (CHUNKS - 1) * tiles.CHUNK_BYTES if stage else k.weights_at
    sP = tensor_at(ptx.again(address), k.layout_p, k.rP.element_type)
    return k.pv_other.make_fragment_A(k.pv_other.get_slice(0).partition_A(sP))


def score(k: SimpleNamespace, phase: Int32, stage: int, chunks: tuple, clear: bool = True) -> None:
    """Issue the scores of a tile, chunk by chunk as they land; each chunk is a group of products."""
    tA, tB, tBr = score_operands(k)
    for c in chunks:
        wait(k.landed + (stage * CHUNKS + c), phase)
        warpgroup.fence()
        first = clear and c == chunks[0]
        if c == CHUNKS - 1:
            tiles.multiply(k.qk_rotary, k.rS, k.rQ, tBr[None, None, None, stage], first)
        else:
            atom = cute.make_mma_atom(k.qk.op)
            for j in range(4 * c, 4 * c + 4):
                atom.set(warpgroup.Field.ACCUMULATE, not (first and j == 4 * c))
                cute.gemm(atom, k.rS, tA[None, None, j], tB[None, None, j, stage], k.rS)
        warpgroup.commit_group()


def release(k: SimpleNamespace, stage: int, half: int) -> None:
    """A half of a buffer has been read: each warp of the warpgroup that sums it says so."""
    ptx.arrive(k.free + (2 * stage + half), k.is_speaker)


def share_weights(k: SimpleNamespace, target: cute.Tensor) -> None:
    """Round the weights to an operand, and write it to shared memory for the other warpgroup's tensor cores."""
    k.rP.store(tiles.as_operand(k.rS).load().to(k.rP.element_type))
    cute.copy(k.store, k.copy_p.retile(k.rPc), target)
    cute.arch.fence_view_async_shared()


@cute.jit
def left(
    k: SimpleNamespace,
    item: tuple,
    tile: Int32,
    phase: Int32,
    is_edge: cutlass.Constexpr[bool],
    is_last: cutlass.Constexpr[bool],
    is_alone: cutlass.Constexpr[bool],
):
    """A pair of tiles, by warpgroup 0. Its scores are there; unless it is the last, so are the next tile's at the end."""
    start, context = item
    if cutlass.const_expr(is_edge):
        first, end = tiles.live_columns(start, context, k.block_rows, tile)
        tiles.mask(k.S, first, end, k.thread)
        tiles.clear_rows(k.sRaw, first, end, 0, k.thread, 0)
    tiles.largest(k.S, k.rTop)
    tiles.settle(k.rTop, k.rShrink, k.sTop, k.sShrink, k.row, k.thread, k.scale_log2, 0)
    tiles.follow(k.O, k.rSum, k.rShrink, False)
    tiles.weigh(k.S, k.rTop, k.rSum, k.scale_log2)
    share_weights(k, k.sP0)
    cute.arch.barrier_arrive(barrier_id=FIRST, number_of_threads=COMPUTING)
    warpgroup.fence()
    tiles.multiply(k.pv_own, k.rO, k.rP, values(k, 0)[None, None, None, 0], False)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    release(k, 0, 0)
    if cutlass.const_expr(not is_alone):
        cute.arch.barrier(barrier_id=SECOND, number_of_threads=COMPUTING)
        if cutlass.const_expr(is_edge):
            first, end = tiles.live_columns(start, context, k.block_rows, tile + 1)
            tiles.clear_rows(k.sRaw, first, end, 0, k.thread, 1)
        for r in cutlass.range_constexpr(2):
            k.rShrink[r] = k.sShrink[k.row + 8 * r, 1]
        tiles.follow(k.O, k.rSum, k.rShrink, False)
        warpgroup.fence()
        tiles.multiply(k.pv_other, k.rO, shared_weights(k, 1), values(k, 0)[None, None, None, 1], False)
        warpgroup.commit_group()
        if cutlass.const_expr(is_last):
            warpgroup.wait_group(0)
            release(k, 1, 0)
        else:
            score(k, phase, 0, tuple(range(*LEFT)))
            warpgroup.wait_group(LEFT[1] - LEFT[0])  # the product before the scores retired
            release(k, 1, 0)
            score(k, phase, 0, tuple(range(*RIGHT)), False)
            warpgroup.wait_group(0)


@cute.jit
def right(
    k: SimpleNamespace,
    item: tuple,
    tile: Int32,
    is_edge: cutlass.Constexpr[bool],
    is_alone: cutlass.Constexpr[bool],
):
    """A pair of tiles, by warpgroup 1. Its scores are there, unless the first tile is alone."""
    start, context = item
    if cutlass.const_expr(not is_alone):
        if cutlass.const_expr(is_edge):
            first, end = tiles.live_columns(start, context, k.block_rows, tile + 1)
            tiles.mask(k.S, first, end, k.thread)
            tiles.clear_rows(k.sRaw, first, end, 1, k.thread, 1)
        tiles.largest(k.S, k.rTop)
    cute.arch.barrier(barrier_id=FIRST, number_of_threads=COMPUTING)
    if cutlass.const_expr(is_edge):
        first, end = tiles.live_columns(start, context, k.block_rows, tile)
        tiles.clear_rows(k.sRaw, first, end, 1, k.thread, 0)
    for r in cutlass.range_constexpr(2):
        k.rShrink[r] = k.sShrink[k.row + 8 * r, 0]
    tiles.follow(k.O, k.rSum, k.rShrink, False)
    warpgroup.fence()
    tiles.multiply(k.pv_other, k.rO, shared_weights(k, 0), values(k, 1)[None, None, None, 0], False)
    warpgroup.commit_group()
    if cutlass.const_expr(not is_alone):
        tiles.settle(k.rTop, k.rShrink, k.sTop, k.sShrink, k.row, k.thread, k.scale_log2, 1)
        tiles.follow(k.O, k.rSum, k.rShrink, True)
        tiles.weigh(k.S, k.rTop, k.rSum, k.scale_log2)
        share_weights(k, k.sP1)
        cute.arch.barrier_arrive(barrier_id=SECOND, number_of_threads=COMPUTING)
        warpgroup.fence()
        tiles.multiply(k.pv_own, k.rO, k.rP, values(k, 1)[None, None, None, 1], False)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        release(k, 0, 1)
        warpgroup.wait_group(0)
        release(k, 1, 1)
    else:
        warpgroup.wait_group(0)
        release(k, 0, 1)


@cute.jit
def write_rows(k: SimpleNamespace, mOut: cute.Tensor, request: Int32):
    """The accumulator, scaled and rounded, 16 bytes a store: the four threads of a row trade words until each has 8 columns."""
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
                rRow[None, j].store((k.rO[(None, r, 4 * g + j), 0, 0].load() * k.rShrink[r]).to(k.rP.element_type))
            w = [rWords[j] for j in range(4)]
            low, high = trade(is_odd, w[0], w[1], 1), trade(is_odd, w[2], w[3], 1)
            a, b = trade(is_high, low[0], high[0], 2), trade(is_high, low[1], high[1], 2)
            rLine[0], rLine[1], rLine[2], rLine[3] = a[0], b[0], a[1], b[1]
            if row < mOut.shape[1]:
                column = k.group * (HALF // 8) + 4 * g + lane
                cute.autovec_copy(rOut, cute.tiled_divide(mOut[request, row, None], (8,))[None, column])


@cute.jit
def write_piece(k: SimpleNamespace, mPartial: cute.Tensor, slot: Int32, rows: Int32):
    """The accumulator, scaled, as it lies in registers, 256 bytes a store of a warp; `sm90_combine` reads it so."""
    first = ((k.row_tile * 2 + k.group) * 4 + k.thread // 32) * UNITS_OF_WARP
    lines = cute.tiled_divide(mPartial[slot, first, None], (2,))
    layout = cute.make_layout((2, 2 * UNITS_OF_WARP), stride=(1, SM90_UNIT // 2))
    own = cute.make_tensor(lines[None, k.thread % 32].iterator, layout)
    rTwo = cute.make_rmem_tensor((2,), k.rO.element_type)
    for r in cutlass.range_constexpr(2):
        if k.row_tile * SM90_BLOCK + k.thread // 32 * 16 + 8 * r < rows:  # of eight rows that are none, nothing is written
            for n in cutlass.range_constexpr(HALF // 8):
                rTwo.store(k.rO[(None, r, n), 0, 0].load() * k.rShrink[r])
                cute.autovec_copy(rTwo, own[None, HALF // 8 * r + n])


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


def traded(memory: cute.Pointer, thread: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """A thread's place in what warps trade: (4 sums, HALF / 8), 512 bytes of a warp in a row; (reference and weights, 2 rows)."""
    base, lane = memory + thread // 32 * (SENT_BYTES // 4), thread % 32
    sums = cute.make_tensor((base + 4 * lane).align(16), cute.make_layout((4, HALF // 8), stride=(1, 128)))
    rows = cute.make_tensor(base + 16 * HALF + lane // 4 * 2, cute.make_layout((2, 2), stride=(1, 16)))
    return sums, rows


@cute.jit
def send(k: SimpleNamespace):
    """The sums to the other block of the cluster, as they lie in registers, and what they refer to: from where this block's tokens
    were to where that one's queries were. Both have the same rows, and the warpgroup there that gets them the same columns.
    """
    rFour = cute.make_rmem_tensor((4,), k.rO.element_type)
    for i in cutlass.range_constexpr(HALF // 8):
        for e in cutlass.range_constexpr(4):
            rFour[e] = k.rO[(e % 2, e // 2, i), 0, 0]
        cute.autovec_copy(rFour, k.sSent[None, i])
    rows, is_first = k.sSentRows, k.thread % 4 == 0
    for r in cutlass.range_constexpr(2):
        top, weights = k.rTop[r], k.rSum[r]
        if is_first:
            rows[0, r] = top
            rows[1, r] = weights
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    wait(k.ready, Int32(0))
    is_speaker, source = k.is_speaker, k.sSent.iterator.toint()
    target = ptx.of_peer(k.sGot.iterator.toint(), 1 - k.rank)
    received = ptx.of_peer(k.received.toint(), 1 - k.rank)
    if is_speaker:
        ptx.copy_to_peer(target, source, Int32(SENT_BYTES), received)


@cute.jit
def receive(k: SimpleNamespace):
    """Add what the other block sent to the sums here, both measured against the higher reference."""
    wait(k.received, Int32(0))
    rOther = cute.make_rmem_tensor((4,), k.rO.element_type)
    for r in cutlass.range_constexpr(2):
        top = cute.arch.fmax(k.rTop[r], k.sGotRows[0, r])
        k.rShrink[r] = cute.math.exp2(k.sGotRows[0, r] - top, fastmath=True)
        shrink = cute.math.exp2(k.rTop[r] - top, fastmath=True)
        k.rSum[r] = k.rSum[r] * shrink + k.sGotRows[1, r] * k.rShrink[r]
        k.rTop[r] = top
        tiles.scale_rows(k.O, r, shrink)
    for i in cutlass.range_constexpr(HALF // 8):
        cute.autovec_copy(k.sGot[None, i], rOther)
        for e in cutlass.range_constexpr(4):
            k.rO[(e % 2, e // 2, i), 0, 0] = k.rO[(e % 2, e // 2, i), 0, 0] + rOther[e] * k.rShrink[e // 2]


@cute.jit
def finish(
    k: SimpleNamespace,
    joins: cutlass.Constexpr[bool],
    mOut: cute.Tensor,
    mLse: cute.Tensor,
    mPartial: cute.Tensor,
    mPartialLse: cute.Tensor,
    request: Int32,
    part: Int32,
    first_part: Int32,
    pieces: Int32,
):
    """A whole request goes to the output, a piece to the workspace: slot 2 * part, or one more where it is the first.

    Two joined parts leave their piece where the first of them would.
    """
    for r in cutlass.range_constexpr(2):
        total = k.rSum[r]
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        k.rSum[r] = total
        if k.thread % 4 == 0:
            k.sShrink[k.row + 8 * r, 1 - k.group] = total  # the column that only this warpgroup read
    cute.arch.barrier(barrier_id=BOTH, number_of_threads=COMPUTING)
    for r in cutlass.range_constexpr(2):
        k.rSum[r] = k.rSum[r] + k.sShrink[k.row + 8 * r, k.group]
        k.rTop[r] = k.sTop[k.row + 8 * r]
    is_whole, is_mine, home = pieces == 1, cutlass.Boolean(True), part
    if cutlass.const_expr(joins):  # left sums go to the first of two blocks, right's to the second
        is_whole, is_mine = (pieces == 1) | (pieces == -1), (pieces > 0) | (k.group == k.rank)
        if pieces < 0:
            home = part - part % 2
        if not is_mine:
            send(k)
        if is_mine & (pieces < 0):
            receive(k)
    for r in cutlass.range_constexpr(2):
        k.rShrink[r] = cute.arch.rcp_approx(k.rSum[r])
    slot = 2 * home
    if home == first_part:
        slot = 2 * home + 1
    if is_mine & is_whole:
        write_rows(k, mOut, request)
    if is_mine & (not is_whole):
        write_piece(k, mPartial, slot, mOut.shape[1])
    for r in cutlass.range_constexpr(2):
        row = k.row_tile * SM90_BLOCK + k.row + 8 * r
        if row < mOut.shape[1]:
            if k.thread % 4 == 0 and k.group == 0 and is_mine:
                lse = k.rTop[r] + cute.math.log2(k.rSum[r], fastmath=True)
                if is_whole:
                    mLse[request, row] = lse
                else:
                    mPartialLse[slot, row] = lse
    if cutlass.const_expr(joins):
        if pieces < 0:  # memory that the other block reads stays until it has
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
