"""The portable schedule: mma.sync, sm_80 and later, any rank.

One launch a step and one at the end. A warp takes 16 rows of W2 and multiplies them with the codes of up to 64 requests; a lane
loads 16 bytes of a row and uses its 8 elements as the k = 2 + 2 of two products, on both sides alike. Above 64 requests W2 is
read again for each 64 more.
"""

from typing import Any

from cute_kernels.markov_chain.config import COLUMNS, ID_BITS, VECTOR, MarkovChainConfig
from cute_kernels.support import smem_allocator

WARP, WARPS = 32, 8
THREADS = WARP * WARPS
ROWS, DEPTH = 16, 32  # of W2, elements: what a warp multiplies between two loads; two mma.m16n8k16
BLOCKS_PER_SM = 2


def num_blocks(vocab: int, multiprocessors: int) -> int:
    """Blocks that share the rows of W2."""
    return min(-(-vocab // (ROWS * WARPS)), BLOCKS_PER_SM * multiprocessors)


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Float32, Int32, Int64, cute
    from cutlass.cute.nvgpu import warp

    class MarkovChain:
        def __init__(self, config: MarkovChainConfig) -> None:
            self.config = config
            self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
            self.requests = config.groups * COLUMNS
            self.depth = -(-config.rank // DEPTH)  # loads of a row by a quad
            self.chunk = min(self.depth, 8 if config.groups == 1 else 4)  # of them in flight
            self.depth = -(-self.depth // self.chunk) * self.chunk
            # A row of codes in shared memory ends on an odd multiple of 64 bytes: eight lanes then read eight different banks.
            self.pitch = (self.depth + 1 - self.depth % 2) * DEPTH

        @cute.jit
        def __call__(
            self,
            mBase: cute.Tensor,  # (B, K, V)
            mAnchor: cute.Tensor,  # (B), int64
            mW1: cute.Tensor,  # (V1, R)
            mW2: cute.Tensor,  # (V, R)
            mToken: cute.Tensor,  # (B, K), int64; zero, holds keys until the last launch
            mCode: cute.Tensor | None,  # (B, K, R)
            blocks: Int32,
            stream: Any,
        ) -> None:
            groups = (mBase.shape[0] + self.requests - 1) // self.requests
            for k in range(mBase.shape[1]):
                self.step(mBase, mAnchor, mW1, mW2, mToken, mCode, k).launch(
                    grid=[groups, blocks, 1], block=[THREADS, 1, 1], stream=stream
                )
            self.finish(mToken).launch(
                grid=[(mToken.shape[0] * mToken.shape[1] + THREADS - 1) // THREADS, 1, 1],
                block=[THREADS, 1, 1],
                stream=stream,
            )

        @cute.kernel
        def step(
            self,
            mBase: cute.Tensor,
            mAnchor: cute.Tensor,
            mW1: cute.Tensor,
            mW2: cute.Tensor,
            mToken: cute.Tensor,
            mCode: cute.Tensor | None,
            k: Int32,
        ) -> None:
            tidx, _, _ = cute.arch.thread_idx()
            group, block, _ = cute.arch.block_idx()
            _, blocks, _ = cute.arch.grid_dim()
            lane, warp_index = tidx % WARP, tidx // WARP
            row, quad = lane // 4, lane % 4
            first = group * self.requests
            batch, vocab = mBase.shape[0], mBase.shape[2]
            gW1, gW2 = cute.tiled_divide(mW1, (1, VECTOR)), cute.tiled_divide(mW2, (1, VECTOR))  # ((1, 8), rows, R / 8)

            smem = smem_allocator()
            sCode = smem.allocate_tensor(
                self.dtype, cute.make_layout((self.requests, self.pitch), stride=(self.pitch, 1)), byte_alignment=128
            )
            sKey = smem.allocate_tensor(Int64, cute.make_layout((WARPS, self.requests), stride=(self.requests, 1)), 16)
            vCode = cute.tiled_divide(sCode, (1, VECTOR))
            vectors = self.depth * (DEPTH // VECTOR)  # of a row, the zeros that fill it up included
            for i in cutlass.range(tidx, self.requests * vectors, THREADS, unroll=1):
                r, c = i // vectors, i % vectors
                request = first + r
                previous = Int64(-1)
                if request < batch:
                    if k == 0:
                        previous = mAnchor[request]
                    else:
                        previous = (1 << ID_BITS) - 1 - (mToken[request, k - 1] & ((1 << ID_BITS) - 1))
                rCode = cute.make_rmem_tensor((VECTOR,), self.dtype)
                rCode.fill(0.0)
                if previous >= 0 and previous < mW1.shape[0] and c < self.config.rank // VECTOR:
                    rCode.store(gW1[(0, None), previous, c].load())
                vCode[(0, None), r, c].store(rCode.load())
                if cutlass.const_expr(self.config.codes):
                    if block == 0 and request < batch and c < self.config.rank // VECTOR:
                        gCode = cute.tiled_divide(mCode[request, k, None], (VECTOR,))  # type: ignore[index]
                        gCode[None, c].store(rCode.load())
            cute.arch.sync_threads()

            mma = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)))
            rBest = cute.make_rmem_tensor((self.config.groups, 2), Int32)  # the value, its bits in the order of integers
            rId = cute.make_rmem_tensor((self.config.groups, 2), Int32)
            rBest.fill(-(2**31))
            rId.fill((1 << ID_BITS) - 1)
            rW2 = cute.make_rmem_tensor((VECTOR, 2, self.chunk), self.dtype)  # rows `row` and `row + 8`
            acc = cute.make_rmem_tensor(((2, 2), 1, 1, self.config.groups), Float32)
            rBase = cute.make_rmem_tensor((4, self.config.groups), Float32)
            tiles = (vocab + ROWS - 1) // ROWS
            for tile in cutlass.range(block * WARPS + warp_index, tiles, blocks * WARPS, unroll=1):
                id0 = tile * ROWS + row
                acc.fill(0.0)
                for g in cutlass.range_constexpr(self.config.groups):
                    for i in cutlass.range_constexpr(4):
                        request, id_ = first + g * COLUMNS + quad * 2 + i % 2, id0 + 8 * (i // 2)
                        rBase[i, g] = Float32(0.0)
                        if request < batch and id_ < vocab:
                            rBase[i, g] = mBase[request, k, id_].to(Float32)
                for start in cutlass.range(0, self.depth, self.chunk, unroll=1):
                    for d in cutlass.range_constexpr(self.chunk):
                        c = (start + d) * (DEPTH // VECTOR) + quad
                        for i in cutlass.range_constexpr(2):
                            rW2[None, i, d].fill(0.0)
                            if c < self.config.rank // VECTOR and id0 + 8 * i < vocab:
                                rW2[None, i, d].store(gW2[(0, None), id0 + 8 * i, c].load())
                    cute.arch.sync_warp()  # keeps every load above the first product: all are in flight at once
                    for d in cutlass.range_constexpr(self.chunk):
                        for g in cutlass.range_constexpr(self.config.groups):
                            rCode = cute.make_rmem_tensor((VECTOR,), self.dtype)
                            rCode.store(vCode[(0, None), g * COLUMNS + row, (start + d) * (DEPTH // VECTOR) + quad].load())
                            # A dot product does not care about the order of its terms: a lane's 8 neighbours serve as the
                            # 2 + 2 elements that each of two mma expect from it, on both sides alike.
                            for half in cutlass.range_constexpr(2):
                                rA = cute.make_tensor(
                                    rW2[None, None, d].iterator + 4 * half,
                                    cute.make_layout(((2, 2, 2), 1), stride=((1, VECTOR, 2), 0)),
                                )
                                rB = cute.make_tensor(
                                    rCode.iterator + 4 * half, cute.make_layout(((2, 2), 1), stride=((1, 2), 0))
                                )
                                cute.gemm(mma, acc[None, None, None, g], rA, rB, acc[None, None, None, g])
                for g in cutlass.range_constexpr(self.config.groups):
                    for i in cutlass.range_constexpr(4):
                        request, id_ = first + g * COLUMNS + quad * 2 + i % 2, id0 + 8 * (i // 2)
                        value = acc[(i % 2, i // 2), 0, 0, g] + rBase[i, g]
                        bits = value.bitcast(Int32)
                        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
                        if value == 0.0:  # -0.0 equals 0.0
                            bits = Int32(0)
                        if value != value:  # NaN is larger than every number, whatever its bits
                            bits = Int32(0x7FFFFFFF)
                        if request < batch and id_ < vocab and bits > rBest[g, i % 2]:
                            rBest[g, i % 2] = bits
                            rId[g, i % 2] = id_

            for g in cutlass.range_constexpr(self.config.groups):
                for j in cutlass.range_constexpr(2):
                    key = ((Int64(rBest[g, j]) + (1 << 31)) << ID_BITS) | Int64((1 << ID_BITS) - 1 - rId[g, j])
                    for offset in cutlass.range_constexpr(2, 5):  # over the rows: lanes of one quad
                        other = cute.arch.shuffle_sync_bfly(key, offset=1 << offset)
                        if other > key:
                            key = other
                    if row == 0:
                        sKey[warp_index, g * COLUMNS + quad * 2 + j] = key
            cute.arch.sync_threads()
            if tidx < self.requests and first + tidx < batch:
                key = sKey[0, tidx]
                for w in cutlass.range_constexpr(1, WARPS):
                    if sKey[w, tidx] > key:
                        key = sKey[w, tidx]
                cute.arch.atomic_max(mToken[first + tidx, None].iterator + k, key, sem="relaxed", scope="gpu")

        @cute.kernel
        def finish(self, mToken: cute.Tensor) -> None:
            tidx, _, _ = cute.arch.thread_idx()
            block, _, _ = cute.arch.block_idx()
            i = block * THREADS + tidx
            request, k = i // mToken.shape[1], i % mToken.shape[1]
            if request < mToken.shape[0]:
                mToken[request, k] = (1 << ID_BITS) - 1 - (mToken[request, k] & ((1 << ID_BITS) - 1))

    return MarkovChain
