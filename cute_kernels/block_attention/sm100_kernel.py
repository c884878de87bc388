"""The kernel of the sm100 schedule; `sm100` says how it works. Imports the compiler."""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels.block_attention import sm100_ptx
from cute_kernels.block_attention import sm100_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM100_BLOCK, BlockAttentionConfig
from cute_kernels.block_attention.sm100_producer import fetch_keys, fetch_values
from cute_kernels.block_attention.sm100_products import issue
from cute_kernels.block_attention.sm100_tiles import CHUNKS, ROWS, VALUE_CHUNKS, WEIGHING_WARPS
from cute_kernels.block_attention.sm100_weights import weigh_part
from cute_kernels.ptx import map_address, of_block
from cute_kernels.support import smem_allocator

KEYS, VALUES, PRODUCTS = WEIGHING_WARPS, WEIGHING_WARPS + 1, WEIGHING_WARPS + 2  # warps behind those that weigh
THREADS = 32 * (PRODUCTS + 1)


class BlockAttentionSm100:
    def __init__(self, config: BlockAttentionConfig) -> None:
        self.config = config
        self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
        self.box = min(config.page_size, ROWS)

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
        mPartial: cute.Tensor,  # (2 * parts, M, c), fp32
        mPartialLse: cute.Tensor,  # (2 * parts, M), fp32
        scale_log2: Float32,
        stream,
    ):
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, self.dtype)
        layout_q = cute.tile_to_shape(atom, (ROWS, SEGMENT), order=(0, 1))
        layout_box = cute.tile_to_shape(atom, (self.box, SEGMENT), order=(0, 1))
        chunk = ROWS * SEGMENT

        @cute.struct
        class Shared:
            bars: cute.struct.MemRange[Int64, tiles.BARRIERS]
            tensor_at: cute.struct.MemRange[Int32, 1]
            largest: cute.struct.MemRange[Float32, 2 * SM100_BLOCK]
            total: cute.struct.MemRange[Float32, SM100_BLOCK]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, CHUNKS * chunk], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, CHUNKS * chunk], 1024]
            values: cute.struct.Align[cute.struct.MemRange[self.dtype, 2 * VALUE_CHUNKS * chunk], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[self.dtype, 2 * chunk], 1024]

        self.Shared = Shared
        copy = cpasync.CopyBulkTensorTileG2SOp()
        by_request = [
            cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 2, 0])) for tensor in (mQ, mBlock, mPages)
        ]
        tma_q, _ = cpasync.make_tiled_tma_atom(copy, by_request[0], layout_q, (ROWS, SEGMENT))
        tma_block, tBlock = cpasync.make_tiled_tma_atom(copy, by_request[1], layout_box, (self.box, SEGMENT))
        tma_pages, tPages = cpasync.make_tiled_tma_atom(copy, by_request[2], layout_box, (self.box, SEGMENT))
        row_tiles = (mOut.shape[1] + SM100_BLOCK - 1) // SM100_BLOCK
        self.kernel(
            tma_q,
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
        ).launch(
            grid=[2 * row_tiles, mBoundaries.shape[0] - 1, 1],
            block=[THREADS, 1, 1],
            cluster=[2, 1, 1],
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
        mTable: cute.Tensor,
        mRequests: cute.Tensor,
        mBoundaries: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        scale_log2: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, part_number, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = block % 2  # in the cluster; 0 leads
        first_row = block * ROWS  # of the packed rows
        shared = smem_allocator().allocate(self.Shared)
        bars = shared.bars.data_ptr()
        if warp_index == 0:
            for atom in (tma_q, tma_block, tma_pages):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(tiles.BARRIERS):
                    cute.arch.mbarrier_init(bars + i, 2 * WEIGHING_WARPS if i == tiles.WEIGHED else 1)
            cute.arch.mbarrier_init_fence()
        if warp_index == PRODUCTS:
            cute.arch.alloc_tmem(tiles.ALL_COLUMNS, shared.tensor_at.data_ptr(), is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            sm100_ptx.before_meeting()
        meet()  # the barriers of both blocks are set up
        sm100_ptx.after_meeting()
        tensor = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_at.data_ptr())
        cute.arch.griddepcontrol_wait()  # before it, nothing of global memory is read or written
        cute.arch.griddepcontrol_launch_dependents()
        last_request, last_tile = mBoundaries[part_number + 1, 0], mBoundaries[part_number + 1, 1]
        stop = last_request
        if last_tile > 0:
            stop = last_request + 1
        part = SimpleNamespace(
            number=part_number,
            first_request=mBoundaries[part_number, 0],
            first_tile=mBoundaries[part_number, 1],
            last_request=last_request,
            last_tile=last_tile,
            stop=stop,
        )
        bars_at = Int32(bars.toint())
        leader_bars = of_block(bars_at, 0)
        keys_at, values_at = Int32(shared.keys.data_ptr().toint()), Int32(shared.values.data_ptr().toint())
        queries_at = Int32(shared.queries.data_ptr().toint())
        if warp_index == KEYS or warp_index == VALUES:
            with cute.arch.elect_one():
                f = SimpleNamespace(
                    bars=bars_at,
                    leader_bars=leader_bars,
                    queries_at=queries_at,
                    keys_at=keys_at,
                    values_at=values_at,
                    map_queries=map_address(tma_q, bars),
                    map_pages=map_address(tma_pages, bars),
                    map_block=map_address(tma_block, bars),
                    page=cute.make_layout(self.config.page_size),  # its size stays a constant
                    num_pages=tPages.shape[2],
                    block_rows=tBlock.shape[0],
                    first_row=first_row,
                    rank=rank,
                )
                if warp_index == KEYS:
                    fetch_keys(f, part, mTable, mRequests, cute.make_rmem_tensor((ROWS // self.box, 2), Int32))
                else:
                    fetch_values(f, part, mTable, mRequests, cute.make_rmem_tensor((SM100_BLOCK // self.box, 2), Int32))
        elif warp_index == PRODUCTS:
            if rank == 0:
                with cute.arch.elect_one():
                    m = SimpleNamespace(
                        bars=bars_at,
                        queries_at=queries_at,
                        keys_at=keys_at,
                        values_at=values_at,
                        weights_at=Int32(shared.weights.data_ptr().toint()),
                        tensor_at=Int32(tensor.toint()),
                        score=sm100_ptx.product(self.dtype, SM100_BLOCK, False),
                        add=sm100_ptx.product(self.dtype, 256, True),
                    )
                    issue(m, part, mRequests)
        else:
            lines = (8, SEGMENT // 8, ROWS)  # of 64 rows of 128 bytes, no swizzle
            w = SimpleNamespace(
                bars=bars_at,
                leader_bars=leader_bars,
                lanes_at=Int32(tensor.toint()) + (thread // 32) * (32 << 16),  # of its warp
                sWeights=cute.make_tensor(shared.weights.data_ptr(), cute.make_layout((*lines, 2))),
                sValues=cute.make_tensor(shared.values.data_ptr(), cute.make_layout((*lines, 2, 2, 2))),
                sLargest=shared.largest.get_tensor(cute.make_layout((SM100_BLOCK, 2))),
                sTotal=shared.total.get_tensor(cute.make_layout(SM100_BLOCK)),
                thread=thread,
                row=thread % ROWS,
                side=thread // ROWS,
                first_row=first_row,
                scale_log2=scale_log2,
                block_rows=tBlock.shape[0],
            )
            weigh_part(w, part, mRequests, mOut, mLse, mPartial, mPartialLse)
            sm100_ptx.before_meeting()
        meet()  # no block ends while the other may still reach for it, and no product or load is left
        if warp_index == PRODUCTS:
            sm100_ptx.after_meeting()
            cute.arch.sync_warp()
            cute.arch.dealloc_tmem(tensor, tiles.ALL_COLUMNS, is_two_cta=True)


@cute.jit
def meet():
    """All threads of both blocks."""
    cute.arch.sync_warp()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
