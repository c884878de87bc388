"""The kernel of the sm90 schedule; `sm90` says how it works. Imports the compiler."""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention.config import SEGMENT, SM90_BLOCK, BlockAttentionConfig
from cute_kernels.block_attention.sm90_compute import compute
from cute_kernels.block_attention.sm90_finish import SENT_BYTES
from cute_kernels.block_attention.sm90_producer import fetch, slice_of
from cute_kernels.block_attention.sm90_roles import COMPUTING
from cute_kernels.block_attention.sm90_tiles import CHUNKS, HALF
from cute_kernels.ptx import expect_bytes, map_address
from cute_kernels.support import smem_allocator

THREADS = COMPUTING + 128  # a warpgroup more, one warp of which fetches
# Registers of a thread there, and of one that computes, by boxes of a tile: together what a block of 384 threads starts with
REGISTERS = {1: (40, 232), 2: (56, 224)}


class BlockAttentionSm90:
    def __init__(self, config: BlockAttentionConfig, joins: bool) -> None:
        self.config, self.joins = config, joins
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
        mBoundaries: cute.Tensor,  # (parts + 1, 4), int32: request, tile, start, context
        mOut: cute.Tensor,  # (B, M, c)
        mLse: cute.Tensor,  # (B, M), fp32
        mPartial: cute.Tensor,  # (2 * parts, row tiles * SM90_UNITS, SM90_UNIT), fp32
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
            free: cute.struct.MemRange[Int64, 4]
            free_q: cute.struct.MemRange[Int64, 2]
            staged: cute.struct.MemRange[Int64, 1]
            ready: cute.struct.MemRange[Int64, 1]
            received: cute.struct.MemRange[Int64, 1]
            top: cute.struct.MemRange[Float32, SM90_BLOCK]
            shrink: cute.struct.MemRange[Float32, 2 * SM90_BLOCK]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            tokens: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_p)], 1024]

        self.Shared = Shared
        load = cpasync.CopyBulkTensorTileG2SOp()
        tile = (SM90_BLOCK, SEGMENT)
        by_request = [
            cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 2, 0]))
            for tensor in (mQ, mBlock, mPages, mOut)
        ]
        tma_q, _ = cpasync.make_tiled_tma_atom(load, by_request[0], layout_p, tile)
        tma_block, tBlock = cpasync.make_tiled_tma_atom(load, by_request[1], layout_box, (self.box, SEGMENT))
        tma_pages, tPages = cpasync.make_tiled_tma_atom(load, by_request[2], layout_box, (self.box, SEGMENT))
        tma_out, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), by_request[3], layout_p, tile)
        self.kernel(
            tma_q,
            tma_block,
            tBlock,
            tma_pages,
            tPages,
            mPages,
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
            tma_out,
        ).launch(
            grid=[(mOut.shape[1] + SM90_BLOCK - 1) // SM90_BLOCK, mBoundaries.shape[0] - 1, 1],
            block=[THREADS, 1, 1],
            cluster=[1, 2, 1] if self.joins else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        tma_block: cute.CopyAtom,
        tBlock: cute.Tensor,
        tma_pages: cute.CopyAtom,
        tPages: cute.Tensor,
        mPages: cute.Tensor,
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
        tma_out: cute.CopyAtom,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        row_tile, part, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group, warp_of_group, thread = warp_index // 4, warp_index % 4, tidx % 128
        row = (thread // 32) * 16 + (thread % 32) // 4  # of the thread's two rows of a tile the first; the other is 8 below
        shared = smem_allocator().allocate(self.Shared)
        sQ = shared.queries.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sP0 = shared.weights.get_tensor(layout_p.outer, swizzle=layout_p.inner)
        sP1 = cute.local_tile(sQ, (SM90_BLOCK, SEGMENT), (0, CHUNKS - 1))
        sTop = shared.top.get_tensor(cute.make_layout(SM90_BLOCK))
        sShrink = shared.shrink.get_tensor(cute.make_layout((SM90_BLOCK, 2)))
        sRaw = cute.make_tensor(
            shared.tokens.data_ptr(),
            cute.make_ordered_layout((8, SEGMENT // 8, SM90_BLOCK, CHUNKS, 2), order=(0, 1, 2, 3, 4)),
        )
        landed, landed_q = shared.landed.data_ptr(), shared.landed_q.data_ptr()
        free, free_q = shared.free.data_ptr(), shared.free_q.data_ptr()
        if warp_index == 0:
            for atom in (tma_q, tma_block, tma_pages, tma_out):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(2 * CHUNKS):
                    cute.arch.mbarrier_init(landed + i, 1)
                cute.arch.mbarrier_init(landed_q, 1)
                cute.arch.mbarrier_init(landed_q + 1, 1)
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(free + i, 4)
                cute.arch.mbarrier_init(free_q, 8)
                cute.arch.mbarrier_init(free_q + 1, 4)
                cute.arch.mbarrier_init(shared.staged.data_ptr(), 8)
                cute.arch.mbarrier_init(shared.ready.data_ptr(), 4)
                cute.arch.mbarrier_init(shared.received.data_ptr(), 1)
                expect_bytes(shared.received.data_ptr().toint(), 4 * SENT_BYTES)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        slice_begin, slice_bytes = [ptx.again(x) for x in slice_of(self.box, row_tile)]  # a division; here nothing waits for it
        if cutlass.const_expr(self.joins):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_wait()  # before it, nothing of global memory is read or written
        cute.arch.griddepcontrol_launch_dependents()
        first_request, first_tile = mBoundaries[part, 0], mBoundaries[part, 1]
        first_item = (mBoundaries[part, 2], mBoundaries[part, 3])
        last_request, last_tile = mBoundaries[part + 1, 0], mBoundaries[part + 1, 1]
        stop = last_request
        if last_tile > 0:
            stop = last_request + 1
        if group == 2:
            cute.arch.setmaxregister_decrease(REGISTERS[self.boxes][0])
            if warp_of_group == 0:
                with cute.arch.elect_one():
                    f = SimpleNamespace(
                        landed_q=landed_q,
                        free=free,
                        free_q=free_q,
                        map_queries=map_address(tma_q, landed),
                        map_pages=map_address(tma_pages, landed),
                        map_block=map_address(tma_block, landed),
                        map_out=map_address(tma_out, landed),
                        staged=shared.staged.data_ptr(),
                        rank=part % 2,
                        queries_at=shared.queries.data_ptr().toint(),
                        tokens_at=shared.tokens.data_ptr().toint(),
                        landed_at=landed.toint(),
                        boxes_of_page=cute.make_layout(self.config.page_size // self.box),  # its size stays a constant
                        num_pages=tPages.shape[2],
                        rTicket0=cute.make_rmem_tensor((self.boxes,), Int32),
                        rTicket1=cute.make_rmem_tensor((self.boxes,), Int32),
                        rNext0=cute.make_rmem_tensor((self.boxes,), Int32),
                        rNext1=cute.make_rmem_tensor((self.boxes,), Int32),
                        pool_at=mPages.iterator.toint(),
                        page_bytes=mPages.stride[0] * 2,
                        slice_begin=slice_begin,
                        slice_bytes=slice_bytes,
                        row_tile=row_tile,
                    )
                    fetch(
                        f, self.joins, mTable, mRequests, first_item, first_request, first_tile, last_request, last_tile, stop
                    )
            if cutlass.const_expr(self.joins):
                cute.arch.cluster_wait()
            else:  # were the other threads gone, the fetching one would be compiled for the warp's datapath, which is slower
                cute.arch.sync_warp()
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.boxes][1])
            if cutlass.const_expr(self.joins):
                cute.arch.cluster_wait()  # the other block's barriers are set up
            c = SimpleNamespace(
                layout_q=layout_q,
                layout_k=layout_k,
                layout_p=layout_p,
                queries_at=shared.queries.data_ptr().toint(),
                tokens_at=shared.tokens.data_ptr().toint(),
                weights_at=shared.weights.data_ptr().toint(),
                sP0=sP0,
                sP1=sP1,
                sTop=sTop,
                sShrink=sShrink,
                sRaw=sRaw,
                landed=landed,
                landed_q=landed_q,
                free=free,
                free_q=free_q,
                qk=qk,
                qk_rotary=qk_rotary,
                pv_own=pv_own,
                pv_other=pv_other,
                group=group,
                thread=thread,
                row=row,
                row_tile=row_tile,
                scale_log2=scale_log2,
                block_rows=tBlock.shape[0],
                staged=shared.staged.data_ptr(),
                sOut=cute.local_tile(
                    shared.tokens.get_tensor(layout_k.outer, swizzle=layout_k.inner)[None, None, 1],
                    (SM90_BLOCK, HALF),
                    (0, group),
                ),
                ready=shared.ready.data_ptr(),
                received=shared.received.data_ptr(),
                sums_here=cute.recast_ptr(shared.tokens.data_ptr(), dtype=Float32),
                sums_there=cute.recast_ptr(shared.queries.data_ptr(), dtype=Float32),
            )
            compute(
                c,
                self.joins,
                mRequests,
                mOut,
                mLse,
                mPartial,
                mPartialLse,
                part,
                first_item,
                first_request,
                first_tile,
                last_request,
                last_tile,
                stop,
            )
