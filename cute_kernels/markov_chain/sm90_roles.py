"""What the warps of the sm90 schedule do; `sm90` says how it works. Imports the compiler."""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.markov_chain.config import BASES, BLOCK, ID_BITS, SEGMENT, VECTOR, MarkovChainConfig

WARP, READERS = 32, 256  # threads of a warp, and of the two warpgroups that multiply
FLIGHT = 16  # vectors of codes that a thread loads at once
EVICT_FIRST = 0x12F0000000000000  # the L2 policy of that name, as createpolicy makes it
CODES_READY = 1  # a named barrier


@cute.jit
def fetch(
    config: cutlass.Constexpr[MarkovChainConfig],
    tma_w2: cute.CopyAtom,
    tW2: cute.Tensor,  # (V, R)
    sW2: cute.Tensor,  # (64, R, tiles)
    full: cute.Pointer,
    empty: cute.Pointer,
    tma_base: cute.CopyAtom,
    tBase: cute.Tensor,  # (B, V, K)
    sBase: cute.Tensor,  # (64, 64, slots)
    full_base: cute.Pointer,
    empty_base: cute.Pointer,
    first: Int32,
    walk: tuple[Int32, Int32, Int32],
    k: Int32,
) -> None:
    """One warp: every tile of W2 and its base logits, as buffers become free."""

    def copies(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, box: tuple[int, int]) -> tuple:
        source, target = cute.flat_divide(source, box), cute.flat_divide(target, box)
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
        )
        return source, target

    tiles, slots = config.stages()
    start, turn, count = walk
    width = SEGMENT // BASES[config.base]
    gW2, sW2 = copies(tma_w2, tW2, sW2, (BLOCK, BLOCK))
    gBase, sBase = copies(tma_base, tBase, sBase, (BLOCK, width))
    for i in cutlass.range(count, unroll=1):
        tile, s = start + i * turn, i % tiles
        cute.arch.mbarrier_wait(empty + s, i // tiles % 2 ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + s, BLOCK * config.rank * 2)
        for c in cutlass.range_constexpr(config.rank // BLOCK):
            cute.copy(tma_w2, gW2[None, tile, c], sW2[None, 0, c, s], tma_bar_ptr=full + s)
        for g in cutlass.range_constexpr(config.groups):
            item = i * config.groups + g
            t = item % slots
            cute.arch.mbarrier_wait(empty_base + t, item // slots % 2 ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_base + t, BLOCK * BLOCK * BASES[config.base])
            for h in cutlass.range_constexpr(BLOCK // width):
                cute.copy(
                    tma_base,
                    gBase[None, first // BLOCK + g, tile * (BLOCK // width) + h, k],
                    sBase[None, 0, h, t],
                    tma_bar_ptr=full_base + t,
                    cache_policy=Int64(EVICT_FIRST),
                )


@cute.jit
def gather(
    config: cutlass.Constexpr[MarkovChainConfig],
    mAnchor: cute.Tensor,
    mW1: cute.Tensor,
    mToken: cute.Tensor,
    mCode: cute.Tensor | None,
    sPrevious: cute.Tensor,  # (requests)
    sVector: cute.Tensor,  # (8 elements, 8 vectors, 64 requests, chunks, groups) as they lie in memory
    first: Int32,
    k: Int32,
) -> None:
    """The warpgroups: rows of W1 into shared memory as the tensor cores read them, zeros for unknown ids."""
    tidx, _, _ = cute.arch.thread_idx()
    _, block, _ = cute.arch.block_idx()
    _, blocks, _ = cute.arch.grid_dim()
    batch = mToken.shape[0]
    if tidx < config.groups * BLOCK:
        request, known = first + tidx, Int32(-1)
        if request < batch:
            previous = Int64(0)
            if k == 0:
                previous = mAnchor[request]
            else:  # from L2: its line may lie in L1 since the step before
                key = cute.arch.load(mToken[request, None].iterator + (k - 1), Int64, cop="cg")
                previous = (1 << ID_BITS) - 1 - (key & ((1 << ID_BITS) - 1))
            if previous >= 0 and previous < mW1.shape[0]:
                known = previous.to(Int32)
        sPrevious[tidx] = known
    cute.arch.barrier(barrier_id=CODES_READY, number_of_threads=READERS)
    gW1 = cute.tiled_divide(mW1, (1, VECTOR))  # ((1, 8), rows, R / 8)
    vectors = config.rank // VECTOR  # of a row
    share = config.groups * BLOCK * vectors // READERS
    for begin in cutlass.range_constexpr(0, share, FLIGHT):
        flight = min(FLIGHT, share - begin)
        rCode = cute.make_rmem_tensor((VECTOR, flight), mW1.element_type)
        rCode.fill(0.0)
        for u in cutlass.range_constexpr(flight):
            i = (begin + u) * READERS + tidx
            known = sPrevious[i // vectors]
            if known >= 0:
                rCode[None, u].store(gW1[(0, None), known, i % vectors].load())
        for u in cutlass.range_constexpr(flight):
            i = (begin + u) * READERS + tidx
            r, c = i // vectors, i % vectors
            # The 128-byte swizzle: vector v of a row of 64 elements lies at v ^ (row % 8)
            cute.autovec_copy(rCode[None, u], sVector[None, c % VECTOR ^ r % VECTOR, r % BLOCK, c // VECTOR, r // BLOCK])
            if cutlass.const_expr(config.codes):
                if r % blocks == block and first + r < batch:
                    gCode = cute.tiled_divide(mCode[first + r, k, None], (VECTOR,))  # type: ignore[index]
                    gCode[None, c].store(rCode[None, u].load())
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=CODES_READY, number_of_threads=READERS)


@cute.jit
def read(
    config: cutlass.Constexpr[MarkovChainConfig],
    mma: cute.TiledMma,
    sW2: cute.Tensor,  # (64, R, tiles)
    sCode: cute.Tensor,  # (64, R, groups)
    sPair: cute.Tensor,  # (2, pairs of 16 bytes, 8, 64 requests, boxes of a slot, slots) as they lie in memory
    full: cute.Pointer,
    empty: cute.Pointer,
    full_base: cute.Pointer,
    empty_base: cute.Pointer,
    mToken: cute.Tensor,
    vocab: Int32,
    first: Int32,
    walk: tuple[Int32, Int32, Int32],
    k: Int32,
) -> None:
    """The warpgroups: every second item each, then the winners under an atomic maximum."""
    tidx, _, _ = cute.arch.thread_idx()
    tiles, slots = config.stages()
    start, turn, count = walk
    width, pairs = SEGMENT // BASES[config.base], 8 // BASES[config.base]  # base logits of a swizzled row, pairs of 16 bytes
    reader, thread, lane = cute.arch.make_warp_uniform(tidx // 128), tidx % 128, tidx % WARP
    row, quad = thread // WARP * 16 + lane // 4, lane % 4  # requests row and row + 8, ids 8 * n + 2 * quad + (0, 1)
    whole = mma.get_slice(0)
    tCode, tW2 = mma.make_fragment_A(whole.partition_A(sCode)), mma.make_fragment_B(whole.partition_B(sW2))
    acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((BLOCK, BLOCK)), Float32)  # ((2, 2, 8), 1, 1)
    rBase = cute.make_rmem_tensor(acc.layout, sPair.element_type)
    own = max(1, config.groups // 2)  # groups of a warpgroup
    rKey = cute.make_rmem_tensor((2, own), Int64)
    rKey.fill(0)
    begin, by = Int32(0), 1
    if cutlass.const_expr(config.groups == 1):
        begin, by = reader, 2
    for i in cutlass.range(begin, count, by, unroll=1):
        id0, s = (start + i * turn) * BLOCK, i % tiles
        cute.arch.mbarrier_wait(full + s, i // tiles % 2)
        for j in cutlass.range_constexpr(own):
            g = 2 * j + reader
            if cutlass.const_expr(config.groups == 1):
                g = Int32(0)
            item = i * config.groups + g
            t = item % slots
            atom = cute.make_mma_atom(mma.op)
            warpgroup.fence()
            for d in cutlass.range_constexpr(cute.size(tCode.shape[2])):
                atom.set(warpgroup.Field.ACCUMULATE, d > 0)
                cute.gemm(atom, acc, tCode[None, None, d, g], tW2[None, None, d, s], acc)
            warpgroup.commit_group()
            cute.arch.mbarrier_wait(full_base + t, item // slots % 2)
            for n in cutlass.range_constexpr(BLOCK // 8):  # while the product runs
                vector = 8 * n % width // (2 * pairs) + quad // pairs ^ row % 8
                for h in cutlass.range_constexpr(2):
                    pair = sPair[None, quad % pairs, vector, row + 8 * h, 8 * n // width, t]
                    cute.autovec_copy(pair, rBase[(None, h, n), 0, 0])
            warpgroup.wait_group(0)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + s)
                cute.arch.mbarrier_arrive(empty_base + t)
            acc.store(acc.load() + rBase.load().to(Float32))
            judge(acc, rKey, j, id0 + 2 * quad, vocab)
    for j in cutlass.range_constexpr(own):
        request = first + row
        if cutlass.const_expr(config.groups > 1):
            request += (2 * j + reader) * BLOCK
        for h in cutlass.range_constexpr(2):
            key = rKey[h, j]
            for offset in cutlass.range_constexpr(2):  # over the ids: lanes of one quad
                other = cute.arch.shuffle_sync_bfly(key, offset=1 << offset)
                if other > key:
                    key = other
            if quad == 0 and request + 8 * h < mToken.shape[0]:
                cute.arch.atomic_max(mToken[request + 8 * h, None].iterator + k, key, sem="relaxed", scope="gpu")


@cute.jit
def judge(
    acc: cute.Tensor,  # ((2, 2, 8), 1, 1): id, request, id
    rKey: cute.Tensor,  # (2, groups of a warpgroup), raised
    j: cutlass.Constexpr[int],
    id0: Int32,
    vocab: Int32,
) -> None:
    """The best of a thread's 16 ids for each of its 2 requests: the largest value, a NaN above all, then the smallest id."""
    ids = BLOCK // 4
    if id0 + BLOCK > vocab:
        for n in cutlass.range_constexpr(ids):
            if id0 + n // 2 * 8 + n % 2 >= vocab:  # loses every tie, as its id is larger than all there are
                for h in cutlass.range_constexpr(2):
                    acc[(n % 2, h, n // 2), 0, 0] = -Float32.inf
    for h in cutlass.range_constexpr(2):
        top, at = acc[(0, h, 0), 0, 0], Int32(0)
        for n in cutlass.range_constexpr(1, ids):
            top = cute.arch.fmax(top, acc[(n % 2, h, n // 2), 0, 0], nan=True)
        for n in cutlass.range_constexpr(ids - 1, -1, -1):
            if acc[(n % 2, h, n // 2), 0, 0] == top:
                at = Int32(n // 2 * 8 + n % 2)
        bits = top.bitcast(Int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of integers
        if top == 0.0:  # -0.0 equals 0.0
            bits = Int32(0)
        if top != top:  # NaN is larger than every number, whatever its bits
            bits = Int32(0x7FFFFFFF)
            for n in cutlass.range_constexpr(ids - 1, -1, -1):
                value = acc[(n % 2, h, n // 2), 0, 0]
                if value != value:
                    at = Int32(n // 2 * 8 + n % 2)
        key = ((Int64(bits) + (1 << 31)) << ID_BITS) | Int64((1 << ID_BITS) - 1 - (id0 + at))
        if key > rKey[h, j]:
            rKey[h, j] = key
