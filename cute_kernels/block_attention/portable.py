"""The portable schedule: mma.sync and cp.async, sm_80 and later, under 99 KB of shared memory.

A block owns 32 packed rows and walks the tiles of its part, 32 tokens each, context first and the block's own latents
behind it as if they were further tokens. A token's row is copied once into shared memory and serves as key and as value.
The 8 warps are 2 (rows) x 4: for the scores the four share the W elements of the latent, each with its quarter of the
queries in registers, and add their partial scores through shared memory; for the values they share the c columns.

A row that is no token (past the end, or on a page that does not exist) is written as zeros: masking its score alone would
leave 0 * NaN in the value product.
"""

from typing import Any

from cute_kernels.block_attention.config import (
    BLOCK_M,
    BLOCK_N,
    NAME,
    SCORE_PITCH,
    SEGMENT,
    STAGES,
    THREADS,
    VECTOR,
    WARPS_K,
    WARPS_M,
    BlockAttentionConfig,
)
from cute_kernels.block_attention.operands import fake_operands
from cute_kernels.errors import UnsupportedKernelError
from cute_kernels.support import smem_allocator


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Boolean, Float32, Int32, Int64, cute
    from cutlass.cute.nvgpu import cpasync, warp

    class BlockAttentionPortable:
        def __init__(self, config: BlockAttentionConfig) -> None:
            self.config = config
            self.dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
            self.padded = config.segments * SEGMENT

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
            op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
            qk = cute.make_tiled_mma(op, (WARPS_M, 1, WARPS_K), permutation_mnk=(BLOCK_M, 16, 16 * WARPS_K))
            pv = cute.make_tiled_mma(op, (WARPS_M, WARPS_K, 1), permutation_mnk=(BLOCK_M, 16 * WARPS_K, 16))
            atom = cute.make_composed_layout(cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, SEGMENT), stride=(SEGMENT, 1)))
            layout_k = cute.tile_to_shape(atom, (BLOCK_N, self.padded, STAGES), (0, 1, 2))

            @cute.struct
            class Shared:
                tokens: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
                scores: cute.struct.Align[cute.struct.MemRange[Float32, WARPS_K * BLOCK_M * SCORE_PITCH], 128]

            self.Shared = Shared
            self.kernel(
                mQ,
                mBlock,
                mPages,
                mTable,
                mRequests,
                mBoundaries,
                mOut,
                mLse,
                mPartial,
                mPartialLse,
                scale_log2,
                qk,
                pv,
                layout_k,
            ).launch(
                grid=[(mQ.shape[1] + BLOCK_M - 1) // BLOCK_M, mBoundaries.shape[0] - 1, 1],
                block=[THREADS, 1, 1],
                stream=stream,
                min_blocks_per_mp=1,
            )

        @cute.jit
        def copy_row(self, address: Int64, is_live: Boolean, sK: cute.Tensor, stage: Int32, tidx: Int32):
            """Copy one row of W elements, or zeros, into row tidx // 8 of a stage. Eight threads share a row."""
            column = (tidx % 8) * VECTOR
            atom = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
            )
            copy = cute.make_tiled_copy_tv(
                atom, cute.make_ordered_layout((BLOCK_N, 8), order=(1, 0)), cute.make_layout((1, VECTOR))
            )
            sRow = copy.get_slice(tidx).partition_D(sK)  # ((8, 1), 1, segments, stages); keeps the swizzle
            row = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16) + column
            pred = cute.make_rmem_tensor(cute.make_layout((1,)), Boolean)
            for j in cutlass.range_constexpr(self.config.segments):
                target = sRow[None, 0, j, stage]
                pred[0] = is_live
                if cutlass.const_expr((j + 1) * SEGMENT > self.config.width):
                    pred[0] = is_live and column < self.config.width - j * SEGMENT
                cute.copy(copy, cute.make_tensor((row + j * SEGMENT).align(16), target.layout), target, pred=pred)

        @cute.jit
        def page_of(self, mTable: cute.Tensor, request: Int32, start: Int32, context: Int32, token: Int32) -> Int32:
            """The page of a context token, -1 for what is none. Entries of the table outside the context are not read."""
            page = Int32(-1)
            entry = (start + token) // self.config.page_size
            if token < context and entry < mTable.shape[1]:
                page = mTable[request, entry]
            return page

        @cute.jit
        def copy_token(
            self,
            mPages: cute.Tensor,
            mBlock: cute.Tensor,
            sK: cute.Tensor,
            request: Int32,
            start: Int32,
            context: Int32,
            token: Int32,
            page: Int32,
            stage: Int32,
            tidx: Int32,
        ):
            """Copy a token's latent: from its page, behind the context from the block, else zeros."""
            address = mBlock[request, 0, None].iterator.toint()
            is_live = Boolean(False)
            if token < context:
                if page >= 0 and page < mPages.shape[0]:
                    is_live = Boolean(True)
                    address = mPages[page, (start + token) % self.config.page_size, None].iterator.toint()
            elif token < context + mBlock.shape[1]:
                is_live = Boolean(True)
                address = mBlock[request, token - context, None].iterator.toint()
            self.copy_row(address, is_live, sK, stage, tidx)

        @cute.kernel
        def kernel(
            self,
            mQ: cute.Tensor,
            mBlock: cute.Tensor,
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
            pv: cute.TiledMma,
            layout_k: cute.ComposedLayout,
        ):
            tidx, _, _ = cute.arch.thread_idx()
            row_tile, part, _ = cute.arch.block_idx()
            shared = smem_allocator().allocate(self.Shared)
            sK = shared.tokens.get_tensor(layout_k)
            sS = shared.scores.get_tensor(
                cute.make_layout((BLOCK_M, BLOCK_N, WARPS_K), stride=(SCORE_PITCH, 1, BLOCK_M * SCORE_PITCH))
            )
            thread_qk, thread_pv = qk.get_slice(tidx), pv.get_slice(tidx)
            load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
            load_t = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype)
            copy_q = cute.make_tiled_copy_A(load, qk).get_slice(tidx)
            copy_k = cute.make_tiled_copy_B(load, qk).get_slice(tidx)
            copy_v = cute.make_tiled_copy_B(load_t, pv).get_slice(tidx)
            sKv = cute.local_tile(sK, (BLOCK_N, self.config.value_width, STAGES), (0, 0, 0))
            sVt = cute.composition(sKv, cute.make_ordered_layout((self.config.value_width, BLOCK_N, STAGES), order=(1, 0, 2)))
            tQs, tKs, tVs = copy_q.partition_S(sK), copy_k.partition_S(sK), copy_v.partition_S(sVt)
            rQ = thread_qk.make_fragment_A(thread_qk.partition_A(sK[None, None, 0]))
            rK = thread_qk.make_fragment_B(thread_qk.partition_B(sK[None, None, 0]))
            rV = thread_pv.make_fragment_B(thread_pv.partition_B(sVt[None, None, 0]))
            rQc, rKc, rVc = copy_q.retile(rQ), copy_k.retile(rK), copy_v.retile(rV)
            rO = cute.make_rmem_tensor(thread_pv.partition_shape_C((BLOCK_M, self.config.value_width)), Float32)
            rS = cute.make_rmem_tensor(thread_qk.partition_shape_C((BLOCK_M, BLOCK_N)), Float32)  # ((2, 2), 1, 4)
            rPart = cute.make_rmem_tensor((2,), Float32)
            # Scores of two n8 tiles are, register for register, the probabilities of one k16 step
            by_step = cute.make_layout(
                ((2, 2, 2), 1, BLOCK_N // 16),
                stride=((rS.layout.stride[0][0], rS.layout.stride[0][1], rS.layout.stride[2]), 0, 2 * rS.layout.stride[2]),
            )
            rP = cute.make_rmem_tensor(by_step.shape, self.dtype)
            tSs = thread_qk.partition_C(sS)  # ((2, 2), 1, 4, WARPS_K)
            tSc = thread_qk.partition_C(cute.make_identity_tensor((BLOCK_M, BLOCK_N)))
            rTop, rSum = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
            quarter = (tidx // 32) // WARPS_M

            first_request, first_tile = mBoundaries[part, 0], mBoundaries[part, 1]
            last_request, last_tile = mBoundaries[part + 1, 0], mBoundaries[part + 1, 1]
            stop = last_request
            if last_tile > 0:
                stop = last_request + 1
            for request in cutlass.range(first_request, stop, unroll=1):
                start, context = mRequests[request, 0], mRequests[request, 1]
                tokens = context + mBlock.shape[1]
                tiles = (tokens + BLOCK_N - 1) // BLOCK_N
                begin, end = Int32(0), tiles
                if request == first_request:
                    begin = first_tile
                if request == last_request:
                    end = last_tile
                rO.fill(0.0)
                rTop.fill(-Float32.inf)
                rSum.fill(0.0)
                token = begin * BLOCK_N + tidx // 8  # this thread copies an eighth of one row of every tile
                page = self.page_of(mTable, request, start, context, token)
                cute.arch.sync_threads()  # nobody reads the previous request's tiles any more
                row = row_tile * BLOCK_M + tidx // 8
                q_row = row
                if row >= mQ.shape[1]:
                    q_row = Int32(0)
                self.copy_row(mQ[request, q_row, None].iterator.toint(), row < mQ.shape[1], sK, Int32(STAGES - 1), tidx)
                self.copy_token(mPages, mBlock, sK, request, start, context, token, page, Int32(0), tidx)
                cute.arch.cp_async_commit_group()
                token += BLOCK_N
                page = self.page_of(mTable, request, start, context, token)
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                for k in cutlass.range_constexpr(cute.size(rQ.shape[2])):
                    cute.copy(load, tQs[None, None, k, STAGES - 1], rQc[None, None, k])
                for i in cutlass.range(end - begin, unroll=1):
                    stage = i % STAGES
                    cute.arch.cp_async_wait_group(0)
                    cute.arch.sync_threads()  # tile i has landed; nobody reads the other stage any more
                    if begin + i + 1 < end:
                        self.copy_token(mPages, mBlock, sK, request, start, context, token, page, (i + 1) % STAGES, tidx)
                    cute.arch.cp_async_commit_group()
                    token += BLOCK_N
                    page = self.page_of(mTable, request, start, context, token)  # a tile ahead of its use
                    rS.fill(0.0)
                    for k in cutlass.range_constexpr(cute.size(rQ.shape[2])):
                        cute.copy(load, tKs[None, None, k, stage], rKc[None, None, k])
                        cute.gemm(qk, rS, rQ[None, None, k], rK[None, None, k], rS)
                    for r in cutlass.range_constexpr(2):
                        for n in cutlass.range_constexpr(BLOCK_N // 8):
                            cute.autovec_copy(rS[(None, r), 0, n], tSs[(None, r), 0, n, quarter])
                    cute.arch.sync_threads()
                    left = tokens - (begin + i) * BLOCK_N
                    for r in cutlass.range_constexpr(2):
                        top = rTop[r]
                        for n in cutlass.range_constexpr(BLOCK_N // 8):
                            pair = rS[(None, r), 0, n]
                            pair.fill(0.0)
                            for w in cutlass.range_constexpr(WARPS_K):
                                cute.autovec_copy(tSs[(None, r), 0, n, w], rPart)
                                pair.store(pair.load() + rPart.load())
                            for e in cutlass.range_constexpr(2):
                                if tSc[(e, r), 0, n][1] >= left:
                                    pair[e] = -Float32.inf
                                top = cute.arch.fmax(top, pair[e])
                        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
                        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
                        base = top
                        if top == -Float32.inf:
                            base = Float32(0.0)
                        shrink = cute.math.exp2((rTop[r] - base) * scale_log2, fastmath=True)
                        rTop[r] = top
                        total = Float32(0.0)
                        for n in cutlass.range_constexpr(BLOCK_N // 8):
                            for e in cutlass.range_constexpr(2):
                                p = cute.math.exp2((rS[(e, r), 0, n] - base) * scale_log2, fastmath=True)
                                rS[(e, r), 0, n] = p
                                total += p
                        rSum[r] = rSum[r] * shrink + total
                        for n in cutlass.range_constexpr(cute.size(rO.shape[2])):
                            for e in cutlass.range_constexpr(2):
                                rO[(e, r), 0, n] = rO[(e, r), 0, n] * shrink
                    rP.store(cute.make_tensor(rS.iterator, by_step).load().to(self.dtype))
                    for k in cutlass.range_constexpr(BLOCK_N // 16):
                        cute.copy(load_t, tVs[None, None, k, stage], rVc[None, None, k])
                        cute.gemm(pv, rO, rP[None, None, k], rV[None, None, k], rO)

                # A whole request goes to the output, a piece to the workspace: slot 2 * part, or one more where it is the first
                is_whole = begin == 0 and end == tiles
                slot = 2 * part
                if begin == 0:
                    slot = 2 * part + 1
                gOut = cute.local_tile(mOut[request, None, None], (BLOCK_M, self.config.value_width), (row_tile, 0))
                gPartial = cute.local_tile(mPartial[slot, None, None], (BLOCK_M, self.config.value_width), (row_tile, 0))
                tOut, tPartial = thread_pv.partition_C(gOut), thread_pv.partition_C(gPartial)
                rPair = cute.make_rmem_tensor((2,), self.dtype)
                for r in cutlass.range_constexpr(2):
                    total = rSum[r]
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
                    inverse = cute.arch.rcp_approx(total)
                    lse = rTop[r] * scale_log2 + cute.math.log2(total, fastmath=True)
                    row = row_tile * BLOCK_M + tSc[(0, r), 0, 0][0]
                    if row < mOut.shape[1]:
                        for n in cutlass.range_constexpr(cute.size(rO.shape[2])):
                            pair = rO[(None, r), 0, n]
                            pair.store(pair.load() * inverse)
                            if is_whole:
                                rPair.store(pair.load().to(self.dtype))
                                cute.autovec_copy(rPair, tOut[(None, r), 0, n])
                            else:
                                cute.autovec_copy(pair, tPartial[(None, r), 0, n])
                        if tidx % 4 == 0 and quarter == 0:
                            if is_whole:
                                mLse[request, row] = lse
                            else:
                                mPartialLse[slot, row] = lse

    return BlockAttentionPortable


def compile_for(config: BlockAttentionConfig, arch: str, options: str = "") -> Any:
    """Compile for an architecture; needs no GPU. `options`: more flags of the compiler."""
    why = config.reason()
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the twin.")
    from cutlass import cute

    options = f"--gpu-arch {arch} --enable-tvm-ffi {options}"
    return cute.compile(kernel_class()(config), *fake_operands(config, config.value_width), options=options)
