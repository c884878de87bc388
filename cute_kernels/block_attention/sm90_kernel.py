"""The kernel of the sm90 schedule; `sm90` says how it works. Imports the compiler."""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention import sm90_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM90_BLOCK, BlockAttentionConfig
from cute_kernels.block_attention.sm90_roles import (
    HALF,
    THREADS,
    aim,
    fetch_queries,
    fill,
    finish,
    left,
    right,
    score,
)
from cute_kernels.block_attention.sm90_tiles import CHUNKS, LEFT, LOWEST, RIGHT
from cute_kernels.support import smem_allocator


class BlockAttentionSm90:
    def __init__(self, config: BlockAttentionConfig) -> None:
        self.config = config
        self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
        self.box = min(config.page_size, SM90_BLOCK)
        self.boxes = SM90_BLOCK // self.box

    def mma(self, b_major, columns: int, source) -> cute.TiledMma:
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (SM90_BLOCK, columns), source
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, M, W), M = S * H
        mBlock: cute.Tensor,  # (B, S, W)
        mPages: cute.Tensor,  # (num_pages, P, W)
        mTable: cute.Tensor,  # (B, max_pages), int32
        mRequests: cute.Tensor,  # (B, 4), int32: start, context tokens, first part, pieces
        mBoundaries: cute.Tensor,  # (parts + 1, 2), int32: request, tile
        mOut: cute.Tensor,  # (B, M, c)
        mLse: cute.Tensor,  # (B, M), fp32
        mPartial: cute.Tensor,  # (2 * parts, M, c), fp32
        mPartialLse: cute.Tensor,  # (2 * parts, M), fp32
        scale_log2: Float32,
        stream,
    ):
        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mmas = (
            self.mma(OperandMajorMode.K, SM90_BLOCK, memory),
            self.mma(OperandMajorMode.K, SM90_BLOCK, registers),
            self.mma(OperandMajorMode.MN, HALF, registers),
            self.mma(OperandMajorMode.MN, HALF, memory),
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        layout_q = cute.tile_to_shape(atom, (SM90_BLOCK, self.config.width), order=(0, 1))
        layout_k = cute.tile_to_shape(atom, (SM90_BLOCK, self.config.width, 2), order=(0, 1, 2))
        layout_p = cute.tile_to_shape(atom, (SM90_BLOCK, SEGMENT), order=(0, 1))
        layout_box = cute.tile_to_shape(atom, (self.box, SEGMENT), order=(0, 1))

        @cute.struct
        class Shared:
            landed: cute.struct.MemRange[Int64, 2 * CHUNKS]
            landed_q: cute.struct.MemRange[Int64, 2]
            top: cute.struct.MemRange[Float32, SM90_BLOCK]
            shrink: cute.struct.MemRange[Float32, 2 * SM90_BLOCK]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            tokens: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_p)], 1024]

        self.Shared = Shared
        load = cpasync.CopyBulkTensorTileG2SOp()
        tile = (SM90_BLOCK, SEGMENT)
        by_request = [
            cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 2, 0])) for tensor in (mQ, mBlock, mPages)
        ]
        tma_q, tQ = cpasync.make_tiled_tma_atom(load, by_request[0], layout_p, tile)
        tma_block, tBlock = cpasync.make_tiled_tma_atom(load, by_request[1], layout_box, (self.box, SEGMENT))
        tma_pages, tPages = cpasync.make_tiled_tma_atom(load, by_request[2], layout_box, (self.box, SEGMENT))
        self.kernel(
            tma_q,
            tQ,
            tma_block,
            tBlock,
            tma_pages,
            tPages,
            mTable,
            mRequests,
            mBoundaries,
            mOut,
            mLse,
            mPartial,
            mPartialLse,
            scale_log2,
            *mmas,
            layout_q,
            layout_k,
            layout_p,
        ).launch(
            grid=[(mOut.shape[1] + SM90_BLOCK - 1) // SM90_BLOCK, mBoundaries.shape[0] - 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        tQ: cute.Tensor,
        tma_block: cute.CopyAtom,
        tBlock: cute.Tensor,
        tma_pages: cute.CopyAtom,
        tPages: cute.Tensor,
        mTable: cute.Tensor,
        mRequests: cute.Tensor,
        mBoundaries: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        scale_log2: Float32,
        qk: cute.TiledMma,
        qk_rotary: cute.TiledMma,
        pv_own: cute.TiledMma,
        pv_other: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_p: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        row_tile, part, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group, warp_of_group, thread = warp_index // 4, warp_index % 4, tidx % 128
        row = (thread // 32) * 16 + (thread % 32) // 4  # of the thread's two rows of a tile the first; the other is 8 below
        shared = smem_allocator().allocate(self.Shared)
        sQ = shared.queries.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sK = shared.tokens.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        sP0 = shared.weights.get_tensor(layout_p.outer, swizzle=layout_p.inner)
        sP1 = cute.local_tile(sQ, (SM90_BLOCK, SEGMENT), (0, CHUNKS - 1))
        sTop = shared.top.get_tensor(cute.make_layout(SM90_BLOCK))
        sShrink = shared.shrink.get_tensor(cute.make_layout((SM90_BLOCK, 2)))
        sRaw = cute.make_tensor(
            shared.tokens.data_ptr(),
            cute.make_ordered_layout((8, SEGMENT // 8, SM90_BLOCK, CHUNKS, 2), order=(0, 1, 2, 3, 4)),
        )
        landed, landed_q = shared.landed.data_ptr(), shared.landed_q.data_ptr()
        if warp_index == 0:
            for atom in (tma_q, tma_block, tma_pages):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(2 * CHUNKS):
                    cute.arch.mbarrier_init(landed + i, 1)
                cute.arch.mbarrier_init(landed_q, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        cute.arch.griddepcontrol_wait()  # before it, nothing of global memory is read or written
        cute.arch.griddepcontrol_launch_dependents()

        tile = (SM90_BLOCK, SEGMENT)
        sQc, gQc = cpasync.tma_partition(
            tma_q,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.flat_divide(sQ, tile), 0, 2),
            cute.group_modes(cute.flat_divide(tQ, tile), 0, 2),
        )
        thread_qk, thread_pv = qk.get_slice(thread), pv_own.get_slice(thread)
        all_qk, all_pv = qk.get_slice(0), pv_own.get_slice(0)
        sKv = cute.local_tile(sK, (SM90_BLOCK, self.config.value_width, 2), (0, 0, 0))
        sVt = cute.composition(sKv, cute.make_ordered_layout((self.config.value_width, SM90_BLOCK, 2), order=(1, 0, 2)))
        rS = cute.make_rmem_tensor(thread_qk.partition_shape_C((SM90_BLOCK, SM90_BLOCK)), Float32)
        rO = cute.make_rmem_tensor(thread_pv.partition_shape_C((SM90_BLOCK, HALF)), Float32)
        rP = cute.make_rmem_tensor(tiles.as_operand(rS).layout, self.dtype)
        rQ = qk_rotary.make_fragment_A(qk_rotary.get_slice(thread).partition_shape_A(tile))
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy_q = cute.make_tiled_copy_A(load, qk_rotary).get_slice(thread)
        copy_p = cute.make_tiled_copy_C(store, qk).get_slice(thread)
        # What both roles use, by name; no value here changes but registers and shared memory
        k = SimpleNamespace(
            qk=qk,
            qk_rotary=qk_rotary,
            pv_own=pv_own,
            pv_other=pv_other,
            landed=landed,
            landed_q=landed_q,
            sTop=sTop,
            sShrink=sShrink,
            sRaw=sRaw,
            tA=qk.make_fragment_A(all_qk.partition_A(cute.local_tile(sQ, (SM90_BLOCK, self.config.value_width), (0, 0)))),
            tB=qk.make_fragment_B(all_qk.partition_B(sKv)),
            tBr=qk.make_fragment_B(all_qk.partition_B(cute.local_tile(sK, (SM90_BLOCK, SEGMENT, 2), (0, CHUNKS - 1, 0)))),
            tV=pv_own.make_fragment_B(all_pv.partition_B(cute.local_tile(sVt, (HALF, SM90_BLOCK, 2), (group, 0, 0)))),
            tP0=pv_other.make_fragment_A(pv_other.get_slice(0).partition_A(sP0)),
            tP1=pv_other.make_fragment_A(pv_other.get_slice(0).partition_A(sP1)),
            rS=rS,
            rO=rO,
            rP=rP,
            rQ=rQ,
            S=tiles.by_rows(rS),
            O=tiles.by_rows(rO),
            rPc=cute.make_tensor(rP.iterator, rS.layout),
            store=store,
            copy_p=copy_p,
            sP0=copy_p.partition_D(sP0),
            sP1=copy_p.partition_D(sP1),
            map_pages=ptx.map_address(tma_pages, landed),
            map_block=ptx.map_address(tma_block, landed),
            tokens_at=shared.tokens.data_ptr().toint(),
            landed_at=landed.toint(),
            boxes_of_page=cute.make_layout(self.config.page_size // self.box),  # its size stays a constant, an int does not
            num_pages=tPages.shape[2],
            queries=(tma_q, gQc, sQc),
            mTable=mTable,
            rSum=cute.make_rmem_tensor((2,), Float32),
            rBefore=cute.make_rmem_tensor((2,), Float32),
            rTicket0=cute.make_rmem_tensor((self.boxes,), Int32),
            rTicket1=cute.make_rmem_tensor((self.boxes,), Int32),
            row_tile=row_tile,
            row=row,
            group=group,
            warp=warp_of_group,
            thread=thread,
            scale_log2=scale_log2,
            block_rows=tBlock.shape[0],
        )

        first_request, first_tile = mBoundaries[part, 0], mBoundaries[part, 1]
        last_request, last_tile = mBoundaries[part + 1, 0], mBoundaries[part + 1, 1]
        stop = last_request
        if last_tile > 0:
            stop = last_request + 1
        if first_request < stop:  # the first request's queries and tiles; later ones are fetched by the one before
            start, context = mRequests[first_request, 0], mRequests[first_request, 1]
            end = tiles.context_tiles(start, context) + 1
            if first_request == last_request:
                end = last_tile
            item = (first_request, start, context, end, start, context, Int32(0))
            aim(k, item, first_tile - 2, k.rTicket0, 0)
            aim(k, item, first_tile - 1, k.rTicket1, 1)
            if group == 0:
                fetch_queries(k, first_request, (0, CHUNKS), True)
                fill(k, k.rTicket0, 0, LEFT)
                fill(k, k.rTicket1, 1, LEFT)
            else:
                fill(k, k.rTicket0, 0, RIGHT)
                fill(k, k.rTicket1, 1, RIGHT)

        phase, phase_q = Int32(0), Int32(0)
        for request in cutlass.range(first_request, stop, unroll=1):
            following = request + 1
            if following >= stop:
                following = request
            start, context = mRequests[request, 0], mRequests[request, 1]
            next_start, next_context = mRequests[following, 0], mRequests[following, 1]
            all_tiles = tiles.context_tiles(start, context) + 1
            next_end = tiles.context_tiles(next_start, next_context) + 1
            begin, end = Int32(0), all_tiles
            if request == first_request:
                begin = first_tile
            if request == last_request:
                end = last_tile
            if following == last_request:
                next_end = last_tile
            if following == request:
                next_end = Int32(0)
            item = (request, start, context, end, next_start, next_context, next_end)
            rO.fill(0.0)
            k.rSum.fill(0.0)
            k.rBefore.fill(1.0)
            if group == 0 and thread % 4 == 0:
                sTop[row] = Float32(LOWEST)
                sTop[row + 8] = Float32(LOWEST)
            ptx.wait(landed_q, phase_q)
            phase_q = phase_q ^ 1
            cute.copy(load, copy_q.partition_S(sP1), copy_q.retile(rQ))
            cute.arch.barrier()  # the rotary part is in registers: P1 may take its place
            pairs = (end - begin + 1) // 2
            if group == 0:
                score(k, phase, 0, (*range(*LEFT), *range(*RIGHT)))
                phase = phase ^ 1
                warpgroup.wait_group(0)
                for pair in cutlass.range(pairs - 1, unroll=1):
                    left(k, item, begin + 2 * pair, phase, False, False)
                    phase = phase ^ 1
                if (end - begin) % 2 == 0:
                    left(k, item, end - 2, phase, True, False)
                else:
                    left(k, item, end - 1, phase, True, True)
            else:
                if end - begin > 1:
                    score(k, phase, 1, (*range(*RIGHT), *range(*LEFT)))
                    phase = phase ^ 1
                    warpgroup.wait_group(0)
                for pair in cutlass.range(pairs - 1, unroll=1):
                    even = begin + 2 * pair
                    right(k, item, even, False, False)
                    if even + 3 < end:
                        score(k, phase, 1, (*range(*RIGHT), *range(*LEFT)))
                        phase = phase ^ 1
                        warpgroup.wait_group(0)
                if (end - begin) % 2 == 0:
                    right(k, item, end - 2, True, False)
                else:
                    right(k, item, end - 1, True, True)
            if end - begin == 1:  # the second buffer was not used: it is filled for the next request all the same
                aim(k, item, end, k.rTicket1, 1)
                if group == 0:
                    fill(k, k.rTicket1, 1, LEFT)
                else:
                    fill(k, k.rTicket1, 1, RIGHT)
            finish(k, mOut, mLse, mPartial, mPartialLse, request, part, begin, end, all_tiles)
