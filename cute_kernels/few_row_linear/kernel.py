"""How it works, the launch and the kernel. Imports the compiler.

A tile is 64 weight rows; under silu_mul 32 rows of the gate and the same 32 of the other weight. A cluster walks every
`clusters`-th tile, its blocks a part of K each. One warp of a block fetches: stages of one or two chunks of 64 elements of K,
weights and x, go round a ring of about 100 KB, which is filled on across tiles. A warpgroup multiplies (wgmma), D[weight row,
x row] in fp32. Each tile reads x anew, from L2: that is why more rows than MAX_ROWS are better left to others.

The sum over the cluster. A block completes `own_columns` columns, rows of x, of each tile: block r the r-th. Every thread sends
each of its partial sums to the block that completes it, into the place kept for the sender; that block adds the parts in the
order of K. So it is the same sum in every run and for every number of rows. Alone, a block passes its sums through the same
memory, as a store of 16 bytes needs 8 weight rows of one x row.

Barriers. Stage i of a block, counted over its tiles, lies in buffer i % stages; its use of the buffer is u = i // stages.
`full` completes once a use, by the fetching thread's arrival and the bytes of weights and x; `empty` by the warps that have
multiplied. The fetching warp waits for `empty` of use u - 1; a fresh barrier counts as having completed the parity before its
first. `sent` completes once a tile by one arrival and the bytes that all blocks send here; `taken` once a tile, by all warps of
the cluster that have read what they were sent. Before it sends for tile t a thread waits for `taken` of tile t - 1: nothing is
overwritten that is not read, no send of tile t + 1 reaches `sent` before its phase t is complete, and no block is two tiles
ahead. Nothing is sent to a block that is gone: it has waited for all that it is sent, and of the last tile `taken` is not told.
No deadlock: a wait is for stages and tiles before, or for the same tile of blocks that wait for nothing later; the hardware
starts a cluster as a whole.

The launch is a dependent one, and lets the next one start at once: half of the shared memory is left for it. Weights are
constants, so the ring is filled with them before the wait for the kernel before (griddepcontrol.wait); x follows. Every warp
waits before it reads or writes anything else. When kernels in a row do so, the end of one means the end of all before it: there
is no earlier reader left of the output that this one writes. What is launched behind as usual waits for the end of this one.
The copies' descriptors, read before the wait, are arguments of the launch.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from cute_kernels.few_row_linear.config import BLOCK, CHUNK, PITCH, SILU_MUL, FewRowLinearConfig
from cute_kernels.few_row_linear.roles import READERS, WARP, fetch, multiply
from cute_kernels.support import smem_allocator


class FewRowLinear:
    def __init__(self, config: FewRowLinearConfig) -> None:
        self.config = config
        self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (M, G, K)
        mWeight: cute.Tensor,  # (G, N, K)
        mUp: cute.Tensor | None,
        mOut: cute.Tensor,  # (M, G, N)
        clusters: Int32,
        stream: Any,
    ) -> None:
        config, kind = self.config, warpgroup.SmemLayoutAtomKind
        atom_x = warpgroup.make_smem_layout_atom(kind.K_SW128, self.dtype)
        atom_weight = warpgroup.make_smem_layout_atom(kind.MN_SW128 if config.transposed else kind.K_SW128, self.dtype)
        inner, stages = CHUNK * config.depth, config.stages
        layout_weight = cute.tile_to_shape(atom_weight, (BLOCK, inner, stages), order=(0, 1, 2))
        layout_x = cute.tile_to_shape(atom_x, (config.columns, inner, stages), order=(0, 1, 2))

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, config.stages]
            empty: cute.struct.MemRange[Int64, config.stages]
            sent: cute.struct.MemRange[Int64, 1]
            taken: cute.struct.MemRange[Int64, 1]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, config.partial_floats], 16]
            weight: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_weight)], 1024]
            x: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_x)], 1024]

        self.Shared = Shared
        load = cpasync.CopyBulkTensorTileG2SOp()
        box_weight = cute.tile_to_shape(atom_weight, (config.outputs, CHUNK), order=(0, 1))
        box_x = cute.tile_to_shape(atom_x, (config.columns, CHUNK), order=(0, 1))

        def mapped(tensor: cute.Tensor, modes: list[int], box: cute.ComposedLayout, size: int) -> tuple:
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))
            return cpasync.make_tiled_tma_atom(load, view, box, (size, CHUNK))

        tma_weight, tWeight = mapped(mWeight, [1, 2, 0], box_weight, config.outputs)
        tma_x, tX = mapped(mX, [0, 2, 1], box_x, config.columns)
        tma_up, tUp = None, None
        if cutlass.const_expr(config.form == SILU_MUL):
            tma_up, tUp = mapped(mUp, [1, 2, 0], box_weight, config.outputs)
        mma = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.MN if config.transposed else OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (BLOCK, config.columns),
            warpgroup.OperandSource.SMEM,
        )
        out = cute.make_tensor(mOut.iterator, cute.select(mOut.layout, mode=[0, 2, 1]))
        self.kernel(tma_weight, tWeight, tma_up, tUp, tma_x, tX, out, mma, layout_weight, layout_x).launch(
            grid=[clusters * config.split, 1, 1],
            block=[READERS + WARP, 1, 1],
            cluster=[config.split, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # per cent: room for the block of the next launch
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma_weight: cute.CopyAtom,
        tWeight: cute.Tensor,  # (N, K, G)
        tma_up: cute.CopyAtom | None,
        tUp: cute.Tensor | None,
        tma_x: cute.CopyAtom,
        tX: cute.Tensor,  # (M, K, G)
        mOut: cute.Tensor,  # (M, N, G)
        mma: cute.TiledMma,
        layout_weight: cute.ComposedLayout,
        layout_x: cute.ComposedLayout,
    ) -> None:
        config = self.config
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = smem_allocator().allocate(self.Shared)
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        sent, taken = shared.sent.data_ptr(), shared.taken.data_ptr()
        sWeight = shared.weight.get_tensor(layout_weight.outer, swizzle=layout_weight.inner)
        sX = shared.x.get_tensor(layout_x.outer, swizzle=layout_x.inner)
        sums = cute.make_layout((BLOCK, config.own_columns, config.split), stride=(1, PITCH, PITCH * config.own_columns))
        sSum = shared.sums.get_tensor(sums)
        if warp_index == READERS // WARP:
            cpasync.prefetch_descriptor(tma_weight)
            cpasync.prefetch_descriptor(tma_x)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, READERS // WARP)
                cute.arch.mbarrier_init(sent, 1)
                cute.arch.mbarrier_init(taken, READERS // WARP * config.split)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if cutlass.const_expr(config.split > 1):
            cute.arch.cluster_arrive_relaxed()

        per_group = (mOut.shape[1] + config.outputs - 1) // config.outputs
        tiles = per_group * mOut.shape[2]
        walk = (block // config.split, blocks // config.split, tiles, per_group, block % config.split)
        if warp_index == READERS // WARP:
            fetch(config, tma_weight, tWeight, tma_up, tUp, sWeight, tma_x, tX, sX, full, empty, walk)
            if cutlass.const_expr(config.split > 1):
                cute.arch.cluster_wait()
        else:
            if cutlass.const_expr(config.split > 1):
                cute.arch.cluster_wait()  # every block's barriers are set up
            cute.arch.griddepcontrol_wait()
            multiply(config, mma, sWeight, sX, sSum, full, empty, sent, taken, mOut, tX.shape[1], walk)
