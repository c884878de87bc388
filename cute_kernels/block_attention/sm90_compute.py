"""What the two computing warpgroups of the sm90 schedule do with a part: their fragments, and request after request.

Imports the compiler.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention import sm90_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM90_BLOCK
from cute_kernels.block_attention.extent import context_tiles, span
from cute_kernels.block_attention.sm90_finish import finish, traded
from cute_kernels.block_attention.sm90_roles import left, right, score
from cute_kernels.block_attention.sm90_tiles import HALF, LEFT, LOWEST, RIGHT
from cute_kernels.ptx import of_block, wait


@cute.jit
def compute(
    c: SimpleNamespace,
    joins: cutlass.Constexpr[bool],
    mRequests: cute.Tensor,
    mOut: cute.Tensor,
    mLse: cute.Tensor,
    mPartial: cute.Tensor,
    mPartialLse: cute.Tensor,
    part: Int32,
    first_item: tuple[Int32, Int32],
    first_request: Int32,
    first_tile: Int32,
    last_request: Int32,
    last_tile: Int32,
    stop: Int32,
):
    """A part's requests: first_request from first_tile on, to last_request up to last_tile; `stop` is behind the last."""
    qk, qk_rotary, pv_own, pv_other, thread = c.qk, c.qk_rotary, c.pv_own, c.pv_other, c.thread
    dtype, tile_shape = c.sP0.element_type, (SM90_BLOCK, SEGMENT)
    rS = cute.make_rmem_tensor(qk.get_slice(thread).partition_shape_C((SM90_BLOCK, SM90_BLOCK)), Float32)
    rO = cute.make_rmem_tensor(pv_own.get_slice(thread).partition_shape_C((SM90_BLOCK, HALF)), Float32)
    rP = cute.make_rmem_tensor(tiles.as_operand(rS).layout, dtype)
    rQ = qk_rotary.make_fragment_A(qk_rotary.get_slice(thread).partition_shape_A(tile_shape))
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    copy_q = cute.make_tiled_copy_A(load, qk_rotary).get_slice(thread)
    copy_p = cute.make_tiled_copy_C(store, qk).get_slice(thread)
    copy_o = cute.make_tiled_copy_C(store, pv_own).get_slice(thread)
    sent, got = traded(c.sums_here, thread), traded(c.sums_there, thread)
    # What both roles use, by name; no value here changes but registers and shared memory
    k = SimpleNamespace(
        qk=qk,
        qk_rotary=qk_rotary,
        pv_own=pv_own,
        pv_other=pv_other,
        landed=c.landed,
        free=c.free,
        sTop=c.sTop,
        sShrink=c.sShrink,
        sRaw=c.sRaw,
        layout_q=c.layout_q,
        layout_k=c.layout_k,
        layout_p=c.layout_p,
        queries_at=c.queries_at,
        tokens_at=c.tokens_at,
        weights_at=c.weights_at,
        rS=rS,
        rO=rO,
        rP=rP,
        rQ=rQ,
        S=tiles.by_rows(rS),
        O=tiles.by_rows(rO),
        rPc=cute.make_tensor(rP.iterator, rS.layout),
        store=store,
        copy_p=copy_p,
        sP0=copy_p.partition_D(c.sP0),
        sP1=copy_p.partition_D(c.sP1),
        rTop=cute.make_rmem_tensor((2,), Float32),
        rShrink=cute.make_rmem_tensor((2,), Float32),
        rSum=cute.make_rmem_tensor((2,), Float32),
        row_tile=c.row_tile,
        row=c.row,
        group=c.group,
        thread=thread,
        is_speaker=thread % 32 == 0,
        scale_log2=c.scale_log2,
        block_rows=c.block_rows,
        rank=part % 2,
        copy_o=copy_o,
        sOut=copy_o.partition_D(c.sOut),
        staged=c.staged,
        ready=c.ready,
        received=c.received,
        sSent=sent[0],
        sSentRows=sent[1],
        sGot=got[0],
        sGotRows=got[1],
        peer_ready=of_block(c.ready.toint(), 1 - part % 2) if joins else None,
    )
    start, context = first_item
    phase, phase_q = Int32(0), Int32(0)
    for request in cutlass.range(first_request, stop, unroll=1):
        pieces = Int32(1)
        if cutlass.const_expr(joins):
            pieces = mRequests[request, 3]  # less than 0: this part is joined with its neighbour. Wanted at the end
        all_tiles = context_tiles(start, context, SM90_BLOCK) + 1
        begin, end = span(request, all_tiles, first_request, first_tile, last_request, last_tile)
        item = (start, context)
        rO.fill(0.0)
        k.rSum.fill(0.0)
        # Of the pairs before the last, the first may hold the start of the context, and the one before a lone last tile its
        # end; the pairs from plain to far need no mask
        pairs, plain = (end - begin + 1) // 2, Int32(0)
        if begin == 0 and start % SM90_BLOCK != 0 and pairs > 1:
            plain = Int32(1)
        far = pairs - 1 - (end - begin) % 2
        if far < plain:
            far = plain
        if c.group == 0:
            if thread % 4 == 0:
                c.sTop[c.row] = Float32(LOWEST)
                c.sTop[c.row + 8] = Float32(LOWEST)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(2):
                wait(c.landed_q + i, phase_q)
            phase_q = phase_q ^ 1
            cute.copy(load, copy_q.partition_S(c.sP1), copy_q.retile(rQ))
            score(k, phase, 0, (*range(*LEFT), *range(*RIGHT)))
            phase = phase ^ 1
            warpgroup.wait_group(0)
            for side in cutlass.range(2, unroll=1):
                for pair in cutlass.range(plain, far * side, unroll=1):
                    left(k, item, begin + 2 * pair, phase, False, False, False)
                    phase = phase ^ 1
                for pair in cutlass.range(far * side, plain + (pairs - 1 - plain) * side, unroll=1):
                    left(k, item, begin + 2 * pair, phase, True, False, False)
                    phase = phase ^ 1
            ptx.arrive(c.free_q, k.is_speaker)
            if (end - begin) % 2 == 0:
                left(k, item, end - 2, phase, True, True, False)
            else:
                left(k, item, end - 1, phase, True, True, True)
            ptx.arrive(c.free_q + 1, k.is_speaker)
            if cutlass.const_expr(joins):
                ptx.arrive_at_peer(k.peer_ready, k.is_speaker & (pieces < 0))
        else:
            if end - begin > 1:
                for i in cutlass.range_constexpr(2):
                    wait(c.landed_q + i, phase_q)  # if it scores nothing, FIRST says that they landed
                cute.copy(load, copy_q.partition_S(c.sP1), copy_q.retile(rQ))
                score(k, phase, 1, (*range(*RIGHT), *range(*LEFT)))
                phase = phase ^ 1
                warpgroup.wait_group(0)
            for side in cutlass.range(2, unroll=1):
                for pair in cutlass.range(plain, far * side, unroll=1):
                    right(k, item, begin + 2 * pair, False, False)
                    score(k, phase, 1, (*range(*RIGHT), *range(*LEFT)))
                    phase = phase ^ 1
                    warpgroup.wait_group(0)
                for pair in cutlass.range(far * side, plain + (pairs - 1 - plain) * side, unroll=1):
                    right(k, item, begin + 2 * pair, True, False)
                    if begin + 2 * pair + 3 < end:
                        score(k, phase, 1, (*range(*RIGHT), *range(*LEFT)))
                        phase = phase ^ 1
                        warpgroup.wait_group(0)
            phase_q = phase_q ^ 1
            ptx.arrive(c.free_q, k.is_speaker)
            if (end - begin) % 2 == 0:
                right(k, item, end - 2, True, False)
            else:
                right(k, item, end - 1, True, True)
        finish(k, joins, mOut, mLse, mPartial, mPartialLse, request, part, begin == 0, begin == 0 and end == all_tiles, pieces)
        if request + 1 < stop:
            start, context = mRequests[request + 1, 0], mRequests[request + 1, 1]
