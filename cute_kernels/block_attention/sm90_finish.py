"""The end of a request in the sm90 schedule: joined with the other block's half, written out or left as a piece; see `sm90`.

`k` is what the roles share. Imports the compiler.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, cute

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention import sm90_tiles as tiles
from cute_kernels.block_attention.config import SM90_BLOCK, SM90_UNIT
from cute_kernels.block_attention.sm90_roles import BOTH, COMPUTING
from cute_kernels.block_attention.sm90_tiles import HALF
from cute_kernels.ptx import of_block, wait

UNITS_OF_WARP = HALF // 8  # see `SM90_UNITS`
SENT_BYTES = 16 * HALF * 4 + 16 * 2 * 4  # of a warp to the other block: sums of 16 rows, and of each row what they refer to


@cute.jit
def stage_rows(k: SimpleNamespace):
    """The accumulator, scaled and rounded, to where the second tile of a pair was; the fetching warp stores it."""
    rOut = cute.make_rmem_tensor(k.rO.layout, k.rP.element_type)
    for n in cutlass.range_constexpr(HALF // 8):
        for r in cutlass.range_constexpr(2):
            rOut[(None, r, n), 0, 0].store((k.rO[(None, r, n), 0, 0].load() * k.rShrink[r]).to(k.rP.element_type))
    cute.copy(k.store, k.copy_o.retile(rOut), k.sOut)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


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


def traded(memory: cute.Pointer, thread: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """A thread's place in what warps trade: (4 sums, HALF / 8), 512 bytes of a warp a step; (reference and weights, 2 rows)."""
    base, lane = memory + thread // 32 * (SENT_BYTES // 4), thread % 32
    sums = cute.make_tensor((base + 4 * lane).align(16), cute.make_layout((4, HALF // 8), stride=(1, 128)))
    rows = cute.make_tensor(base + 16 * HALF + lane // 4 * 2, cute.make_layout((2, 2), stride=(1, 16)))
    return sums, rows


@cute.jit
def send(k: SimpleNamespace):
    """The sums to the other block of the cluster, as they lie in registers, and what they refer to.

    They go from where this block's tokens were to where that one's queries were. Both blocks have the same rows, and the
    warpgroup there that gets them has the same columns.
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
    target = of_block(k.sGot.iterator.toint(), 1 - k.rank)
    received = of_block(k.received.toint(), 1 - k.rank)
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
    is_first: cutlass.Boolean,
    is_whole: cutlass.Boolean,
    pieces: Int32,
):
    """A whole request goes to the output, a piece to the workspace: slot 2 * part, or one more where it is the first."""
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
    if k.group == 0:  # right has it from the last tile, and must not read here: left may begin the next request
        for r in cutlass.range_constexpr(2):
            k.rTop[r] = k.sTop[k.row + 8 * r]
    is_mine = cutlass.Boolean(True)
    if cutlass.const_expr(joins):  # left sums go to the first of two blocks, right's to the second
        is_whole, is_mine = is_whole | (pieces < 0), (pieces > 0) | (k.group == k.rank)
        if not is_mine:
            send(k)
        if is_mine & (pieces < 0):
            receive(k)
    for r in cutlass.range_constexpr(2):
        k.rShrink[r] = cute.arch.rcp_approx(k.rSum[r])
    slot = 2 * part
    if is_first:
        slot = 2 * part + 1
    if is_mine & is_whole:
        stage_rows(k)
    if is_whole:
        ptx.arrive(k.staged, k.is_speaker)
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
