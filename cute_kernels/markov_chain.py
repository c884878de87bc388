"""Greedy draft tokens of a block, each biased by the one before it, without writing the bias to memory.

    token_k = argmax over v of  base_k[v] + W2[v] . W1[token_{k-1}],  token_{-1} = anchor

One launch a step and one at the end, no host work between them. A warp takes 16 rows of W2 and multiplies them with the codes
of up to 64 requests on the tensor cores (mma.sync, fp32 accumulation); W2 is read once a step for all of them. The winner of a
request is the largest of 64-bit keys (value above, smaller id above larger) under an atomic maximum: independent of order, so
the same in every run. Moves K * V * (2 * R + B * itemsize) bytes; the twin is `cute_kernels.reference.markov_chain`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.cache import compiled
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.support import arch_name, check_rows, check_tensor, device_reason, smem_allocator, toolkit_reason

NAME = "markov_chain"
WARP, WARPS = 32, 8
THREADS = WARP * WARPS
VECTOR = 8  # elements of 16 bytes
ROWS, COLUMNS, DEPTH = 16, 8, 32  # of W2, requests, elements: what a warp multiplies between two loads; two mma.m16n8k16
ID_BITS = 31  # of a key, below the value
BLOCKS_PER_SM = 2
GROUPS = (1, 4, 8)  # of COLUMNS requests in a block
BASES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class MarkovChainConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        rank: R. groups: of 8 requests that a block takes. base: dtype of the base logits. dtype: of W1 and W2, bfloat16 or
        float16. codes: whether W1 of the previous tokens is written out.
    """

    rank: int
    groups: int
    base: str
    dtype: str
    codes: bool = False

    def reason(self) -> str | None:
        """None where this can be compiled, else what is wrong with it."""
        if self.dtype not in ("bfloat16", "float16"):
            return f"W1 and W2 must be bfloat16 or float16, they are {self.dtype}"
        if self.base not in BASES:
            return f"base logits must be one of {', '.join(BASES)}, they are {self.base}"
        if self.rank < VECTOR or self.rank % VECTOR or self.rank > 512:
            return f"rank must be a multiple of {VECTOR} up to 512, it is {self.rank}"
        if self.groups not in GROUPS:
            return f"groups must be one of {GROUPS}, it is {self.groups}"
        return None


def groups_for(batch: int) -> int:
    """Groups of 8 requests in a block: the fewest of `GROUPS` that hold the batch, else the most."""
    return next((groups for groups in GROUPS if groups * COLUMNS >= batch), GROUPS[-1])


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


def compile_for(config: MarkovChainConfig, arch: str, options: str = "") -> Any:
    """Compile for an architecture; needs no GPU. `options`: more flags of the compiler."""
    why = config.reason()
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the twin.")
    import cutlass
    from cutlass import Int32, Int64, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    types = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
    base, dtype, rank = types[config.base], types[config.dtype], config.rank
    batch, steps, vocab, known = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int()

    def stride(divisibility: int) -> Any:
        return cute.sym_int64(divisibility=divisibility)

    codes = (
        make_fake_tensor(dtype, (batch, steps, rank), stride=(stride(VECTOR), stride(VECTOR), 1), assumed_align=16)
        if config.codes
        else None
    )
    return cute.compile(
        kernel_class()(config),
        make_fake_tensor(base, (batch, steps, vocab), stride=(stride(1), stride(1), 1), assumed_align=base.width // 8),
        make_fake_tensor(Int64, (batch,), stride=(1,), assumed_align=8),
        make_fake_tensor(dtype, (known, rank), stride=(stride(VECTOR), 1), assumed_align=16),
        make_fake_tensor(dtype, (vocab, rank), stride=(stride(VECTOR), 1), assumed_align=16),
        make_fake_tensor(Int64, (batch, steps), stride=(stride(1), 1), assumed_align=8),
        codes,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )


def gate_configs() -> list[tuple[str, Callable[[str, str], Any]]]:
    """What the compile gate checks: (label, compile for an architecture with more options)."""
    configs = [MarkovChainConfig(256, groups, "bfloat16", "bfloat16") for groups in GROUPS]
    configs += [MarkovChainConfig(512, 8, "float32", "float16", codes=True), MarkovChainConfig(8, 1, "float16", "bfloat16")]
    return [
        (
            f"{NAME} R={c.rank} groups={c.groups} base={c.base} tables={c.dtype}{' codes' if c.codes else ''}",
            partial(compile_for, c),
        )
        for c in configs
    ]


def reason(base_logits: torch.Tensor, w2: torch.Tensor) -> str | None:
    """None where a kernel takes these arguments here, else why not. Launches nothing."""
    return toolkit_reason() or device_reason(base_logits.device) or _config(base_logits, w2, None).reason()


def launcher(config: MarkovChainConfig, device: torch.device) -> Callable[..., Any]:
    """The function for a device, compiled where no cache has it."""
    arch = arch_name(device)
    return compiled(NAME, config, arch, lambda: compile_for(config, arch))


def _config(base_logits: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None) -> MarkovChainConfig:
    base, dtype = (str(tensor.dtype).removeprefix("torch.") for tensor in (base_logits, w2))
    return MarkovChainConfig(w2.shape[1], groups_for(base_logits.shape[0]), base, dtype, codes is not None)


def _check(
    base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None
) -> None:
    if base_logits.ndim != 3 or w1.ndim != 2 or w2.ndim != 2:
        raise KernelError(
            f"{NAME}: base_logits must be [B, K, V], w1 [V1, R], w2 [V, R]; they are {list(base_logits.shape)}, "
            f"{list(w1.shape)}, {list(w2.shape)}. Reshape them."
        )
    (batch, steps, vocab), rank, device = base_logits.shape, w2.shape[1], base_logits.device
    if not 0 < vocab < 1 << ID_BITS:
        raise KernelError(f"{NAME}: the vocabulary must hold 1 to 2^{ID_BITS} - 1 ids, it holds {vocab}.")
    if base_logits.stride(2) != 1:
        raise KernelError(f"{NAME}: rows of base_logits must be contiguous, strides are {base_logits.stride()}. Copy them.")
    check_tensor(NAME, "anchors", anchors, (batch,), torch.int64, device)
    if not anchors.is_contiguous():
        raise KernelError(f"{NAME}: anchors must be contiguous, the stride is {anchors.stride(0)}. Copy them.")
    check_tensor(NAME, "w1", w1, (w1.shape[0], rank), w2.dtype, device)
    check_tensor(NAME, "w2", w2, (vocab, rank), w2.dtype, device)
    check_rows(NAME, "w1", w1)
    check_rows(NAME, "w2", w2)
    if codes is not None:
        check_tensor(NAME, "codes", codes, (batch, steps, rank), w2.dtype, device)
        check_rows(NAME, "codes", codes)


@torch.library.custom_op("trtllm_dspark::markov_chain", mutates_args=("codes",), device_types="cuda")
def _op(
    base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None
) -> torch.Tensor:
    return _launch(base_logits, anchors, w1, w2, codes)


@_op.register_fake
def _(
    base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None
) -> torch.Tensor:
    return anchors.new_empty(base_logits.shape[:2])


def markov_chain(
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    codes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Greedy tokens of K draft steps, [B, K] int64 in [0, V), each step biased by W2 . W1[the token before].

    On a tie the smallest id; a NaN is larger than every number, and the first NaN wins, as in torch.argmax.

    Args:
        base_logits: [B, K, V], bf16, fp16 or fp32, last dim contiguous. anchors: [B], int64: the tokens before the first.
        w1: [V1, R], w2: [V, R], bf16 or fp16, R a multiple of 8 up to 512, rows contiguous and 16-byte aligned.
        codes: [B, K, R] or None; receives W1 of the token before each. Zero where that id is outside [0, V1): padded and
            warm-up rows carry such ids, and get no bias.
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for them here.
    Numerics: bf16 or fp16 products, fp32 sums; the order of the sum is the tensor cores', so a near tie may fall otherwise
        than in the twin.
    """
    if torch.compiler.is_compiling():
        return _op(base_logits, anchors, w1, w2, codes)
    return _launch(base_logits, anchors, w1, w2, codes)


def _launch(
    base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None
) -> torch.Tensor:
    _check(base_logits, anchors, w1, w2, codes)
    why = reason(base_logits, w2)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use cute_kernels.reference.markov_chain.")
    batch, steps, vocab = base_logits.shape
    tokens = anchors.new_zeros((batch, steps))
    if tokens.numel():
        config, device = _config(base_logits, w2, codes), base_logits.device
        tiles = -(-vocab // (ROWS * WARPS))
        blocks = min(tiles, BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count)
        launcher(config, device)(base_logits, anchors, w1, w2, tokens, codes, blocks)
    return tokens
