"""The launches and the kernel of the sm90 schedule; `sm90` says how it works. Imports the compiler."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from cute_kernels.markov_chain.config import BASES, BLOCK, ID_BITS, SEGMENT, VECTOR, MarkovChainConfig
from cute_kernels.markov_chain.sm90_roles import READERS, WARP, fetch, gather, read
from cute_kernels.support import smem_allocator

THREADS = READERS + WARP  # the last warp fetches
TYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": Float32}


class MarkovChainSm90:
    def __init__(self, config: MarkovChainConfig) -> None:
        self.config, self.groups = config, config.groups
        self.dtype, self.base = TYPES[config.dtype], TYPES[config.base]
        self.tiles, self.slots = config.stages()
        self.width = SEGMENT // BASES[config.base]  # base logits of a swizzled row

    @cute.jit
    def __call__(
        self,
        mBase: cute.Tensor,  # (B, K, V)
        mAnchor: cute.Tensor,  # (B), int64
        mW1: cute.Tensor,  # (V1, R)
        mW2: cute.Tensor,  # (V, R)
        mToken: cute.Tensor,  # (B, K), int64; holds keys until the last launch
        mCode: cute.Tensor | None,  # (B, K, R)
        blocks: Int32,
        stream: Any,
    ) -> None:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        atom_base = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.base)
        layout_w2 = cute.tile_to_shape(atom, (BLOCK, self.config.rank, self.tiles), order=(0, 1, 2))
        layout_code = cute.tile_to_shape(atom, (BLOCK, self.config.rank, self.groups), order=(0, 1, 2))
        layout_base = cute.tile_to_shape(atom_base, (BLOCK, BLOCK, self.slots), order=(0, 1, 2))

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, self.tiles]
            empty: cute.struct.MemRange[Int64, self.tiles]
            full_base: cute.struct.MemRange[Int64, self.slots]
            empty_base: cute.struct.MemRange[Int64, self.slots]
            previous: cute.struct.MemRange[Int32, self.groups * BLOCK]
            codes: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_code)], 1024]
            w2: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_w2)], 1024]
            base: cute.struct.Align[cute.struct.MemRange[self.base, cute.cosize(layout_base)], 1024]

        self.Shared = Shared
        load = cpasync.CopyBulkTensorTileG2SOp()
        box = cute.tile_to_shape(atom, (BLOCK, BLOCK), order=(0, 1))
        box_base = cute.tile_to_shape(atom_base, (BLOCK, self.width), order=(0, 1))
        by_step = cute.make_tensor(mBase.iterator, cute.select(mBase.layout, mode=[0, 2, 1]))
        tma_w2, tW2 = cpasync.make_tiled_tma_atom(load, mW2, box, (BLOCK, BLOCK))
        tma_base, tBase = cpasync.make_tiled_tma_atom(load, by_step, box_base, (BLOCK, self.width))
        mma = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (BLOCK, BLOCK),
            warpgroup.OperandSource.SMEM,
        )
        sets = (mBase.shape[0] + self.groups * BLOCK - 1) // (self.groups * BLOCK)
        cells = [(mToken.shape[0] * mToken.shape[1] + READERS - 1) // READERS, 1, 1]
        self.clear(mToken).launch(grid=cells, block=[READERS, 1, 1], stream=stream)
        for k in range(mBase.shape[1]):
            self.step(
                tma_w2, tW2, tma_base, tBase, mAnchor, mW1, mToken, mCode, mma, layout_w2, layout_code, layout_base, k
            ).launch(grid=[sets, blocks, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True)
        self.finish(mToken).launch(grid=cells, block=[READERS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def clear(self, mToken: cute.Tensor) -> None:
        """Every key becomes less than all keys."""
        cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * READERS + tidx
        if i < mToken.shape[0] * mToken.shape[1]:
            mToken[i // mToken.shape[1], i % mToken.shape[1]] = Int64(0)

    @cute.kernel
    def finish(self, mToken: cute.Tensor) -> None:
        """Keys become ids."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * READERS + tidx
        request, k = i // mToken.shape[1], i % mToken.shape[1]
        cute.arch.griddepcontrol_wait()
        if request < mToken.shape[0]:
            mToken[request, k] = (1 << ID_BITS) - 1 - (mToken[request, k] & ((1 << ID_BITS) - 1))

    @cute.kernel
    def step(
        self,
        tma_w2: cute.CopyAtom,
        tW2: cute.Tensor,  # (V, R)
        tma_base: cute.CopyAtom,
        tBase: cute.Tensor,  # (B, V, K)
        mAnchor: cute.Tensor,
        mW1: cute.Tensor,
        mToken: cute.Tensor,
        mCode: cute.Tensor | None,
        mma: cute.TiledMma,
        layout_w2: cute.ComposedLayout,
        layout_code: cute.ComposedLayout,
        layout_base: cute.ComposedLayout,
        k: Int32,
    ) -> None:
        """One token of every request."""
        set_, block, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = smem_allocator().allocate(self.Shared)
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        full_base, empty_base = shared.full_base.data_ptr(), shared.empty_base.data_ptr()
        sW2 = shared.w2.get_tensor(layout_w2.outer, swizzle=layout_w2.inner)
        sCode = shared.codes.get_tensor(layout_code.outer, swizzle=layout_code.inner)
        sBase = shared.base.get_tensor(layout_base.outer, swizzle=layout_base.inner)
        sPrevious = shared.previous.get_tensor(cute.make_layout(self.groups * BLOCK))
        # The same memory without the swizzle, for what is read and written by hand
        vectors = (VECTOR, BLOCK // VECTOR, BLOCK, self.config.rank // BLOCK, self.groups)
        sVector = cute.make_tensor(shared.codes.data_ptr(), cute.make_ordered_layout(vectors, order=(0, 1, 2, 3, 4)))
        pairs = (2, 8 // BASES[self.config.base], SEGMENT // 16, BLOCK, BLOCK // self.width, self.slots)
        sPair = cute.make_tensor(shared.base.data_ptr(), cute.make_ordered_layout(pairs, order=(0, 1, 2, 3, 4, 5)))
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_w2)
            cpasync.prefetch_descriptor(tma_base)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.tiles):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 4 * self.groups)
                for i in cutlass.range_constexpr(self.slots):
                    cute.arch.mbarrier_init(full_base + i, 1)
                    cute.arch.mbarrier_init(empty_base + i, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        cute.arch.griddepcontrol_launch_dependents()

        first = set_ * self.groups * BLOCK  # request
        vocab = tW2.shape[0]
        count = ((vocab + BLOCK - 1) // BLOCK - block + blocks - 1) // blocks  # tiles of this block
        start, turn = block, blocks
        if k % 2 == 1:
            start, turn = block + (count - 1) * blocks, -blocks
        walk = (start, turn, count)
        if warp_index == READERS // WARP:
            fetch(self.config, tma_w2, tW2, sW2, full, empty, tma_base, tBase, sBase, full_base, empty_base, first, walk, k)
        else:
            cute.arch.griddepcontrol_wait()  # the step before is complete: its tokens are there
            gather(self.config, mAnchor, mW1, mToken, mCode, sPrevious, sVector, first, k)
            read(self.config, mma, sW2, sCode, sPair, full, empty, full_base, empty_base, mToken, vocab, first, walk, k)
