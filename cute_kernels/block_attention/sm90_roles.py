"""The two warpgroups that compute in the sm90 schedule, a pair of tiles each; `sm90` says how they fit together.

`k` holds what the roles share, by name: fragments, views of shared memory, copies. Only registers and memory behind it change.
Imports the compiler.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention import sm90_tiles as tiles
from cute_kernels.block_attention.config import SM90_BLOCK
from cute_kernels.block_attention.extent import live_columns
from cute_kernels.block_attention.sm90_descriptors import score_operands, shared_weights, values
from cute_kernels.block_attention.sm90_tiles import CHUNKS, LEFT, RIGHT
from cute_kernels.ptx import wait

COMPUTING = 256  # threads of the two warpgroups
FIRST, SECOND, BOTH = 1, 2, 3  # named barriers; 6 and 7 belong to one warpgroup each


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


def clear(k: SimpleNamespace, item: tuple, tile: Int32, group: int, stage: int) -> None:
    """Zero the rows of a tile that are not live. Behind the block's rows a copy has left zeros."""
    first, end = live_columns(*item, SM90_BLOCK, tile, SM90_BLOCK)
    tiles.clear_rows(k.sRaw, first, end, group, k.thread, stage)


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
        first, end = live_columns(start, context, k.block_rows, tile, SM90_BLOCK)
        tiles.mask(k.S, first, end, k.thread)
        clear(k, item, tile, 0, 0)
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
            clear(k, item, tile + 1, 0, 1)
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
    else:
        # Behind it left may tell right the next sums: right has read the last ones
        cute.arch.barrier(barrier_id=SECOND, number_of_threads=COMPUTING)


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
            first, end = live_columns(start, context, k.block_rows, tile + 1, SM90_BLOCK)
            tiles.mask(k.S, first, end, k.thread)
            clear(k, item, tile + 1, 1, 1)
        tiles.largest(k.S, k.rTop)
    cute.arch.barrier(barrier_id=FIRST, number_of_threads=COMPUTING)
    if cutlass.const_expr(is_alone):
        cute.arch.barrier_arrive(barrier_id=SECOND, number_of_threads=COMPUTING)
    if cutlass.const_expr(is_edge):
        clear(k, item, tile, 1, 0)
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
        for r in cutlass.range_constexpr(2):
            k.rTop[r] = k.sTop[k.row + 8 * r]
        warpgroup.wait_group(0)
        release(k, 0, 1)
