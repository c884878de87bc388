"""What the warps of a block do; `kernel` says how it works. Imports the compiler."""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.few_row_linear.config import BLOCK, CHUNK, SILU_MUL, VECTOR, FewRowLinearConfig
from cute_kernels.ptx import wait

WARP, READERS = 32, 128  # threads of a warp, and of the warpgroup that multiplies
EVICT_FIRST = 0x12F0000000000000  # the L2 policy of that name, as createpolicy makes it
SUMS_READY, SUMS_FREE = 1, 2  # named barriers


@cute.jit
def fetch(
    config: cutlass.Constexpr[FewRowLinearConfig],
    tma_weight: cute.CopyAtom,
    tWeight: cute.Tensor,  # (N, K, G)
    tma_up: cute.CopyAtom | None,
    tUp: cute.Tensor | None,
    sWeight: cute.Tensor,  # (64, 64 * depth, stages)
    tma_x: cute.CopyAtom,
    tX: cute.Tensor,  # (M, K, G)
    sX: cute.Tensor,  # (columns, 64 * depth, stages)
    full: cute.Pointer,
    empty: cute.Pointer,
    walk: tuple[Int32, Int32, Int32, Int32, Int32],
) -> None:
    """One warp: every stage of this block, in order; of the first that fill the ring the weights come before the wait."""

    def copies(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, rows: int) -> tuple:
        source, target = cute.flat_divide(source, (rows, CHUNK)), cute.flat_divide(target, (rows, CHUNK))
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
        )
        return source, target

    first, step, tiles, per_group, rank = walk
    gWeight, sWeight_ = copies(tma_weight, tWeight, sWeight, config.outputs)  # (outputs, N / outputs, K / 64, G)
    gX, sX = copies(tma_x, tX, sX, config.columns)
    gUp = None
    if cutlass.const_expr(config.form == SILU_MUL):
        gUp, _ = copies(tma_up, tUp, sWeight, config.outputs)
    each = tWeight.shape[1] // (CHUNK * config.depth * config.split)  # stages of a tile
    count = (tiles - first + step - 1) // step * each
    filled = cutlass.min(count, config.stages)
    tile, j = first, Int32(0)
    for s in cutlass.range(filled, unroll=1):
        fetch_weights(config, tma_weight, gWeight, tma_up, gUp, sWeight_, full, tile, rank * each + j, per_group, s)
        tile, j = after(tile, j, each, step)
    cute.arch.griddepcontrol_wait()
    tile, j = first, Int32(0)
    for s in cutlass.range(filled, unroll=1):
        fetch_x(config, tma_x, gX, sX, full, tile, rank * each + j, per_group, s)
        tile, j = after(tile, j, each, step)
    for i in cutlass.range(filled, count, unroll=1):
        s = i % config.stages
        wait(empty + s, i // config.stages % 2 ^ 1)
        k = rank * each + j
        fetch_weights(config, tma_weight, gWeight, tma_up, gUp, sWeight_, full, tile, k, per_group, s)
        fetch_x(config, tma_x, gX, sX, full, tile, k, per_group, s)
        tile, j = after(tile, j, each, step)


@cute.jit
def after(tile: Int32, j: Int32, each: Int32, step: Int32) -> tuple[Int32, Int32]:
    """The stage behind stage j of a tile."""
    j += 1
    if j == each:
        tile += step
        j = Int32(0)
    return tile, j


@cute.jit
def fetch_weights(
    config: cutlass.Constexpr[FewRowLinearConfig],
    tma_weight: cute.CopyAtom,
    gWeight: cute.Tensor,  # (outputs * 64, N / outputs, K / 64, G)
    tma_up: cute.CopyAtom | None,
    gUp: cute.Tensor | None,
    sWeight: cute.Tensor,  # (outputs * 64, 64 / outputs, depth, stages)
    full: cute.Pointer,
    tile: Int32,
    k: Int32,
    per_group: Int32,
    s: Int32,
) -> None:
    """Weights of stage k of a tile into buffer s; announces the bytes of x with them."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + s, config.weight_bytes + config.x_bytes)
    group, n = tile // per_group, tile % per_group
    for d in cutlass.range_constexpr(config.depth):
        at = k * config.depth + d
        copies = [(tma_weight, gWeight[None, n, at, group])]
        if cutlass.const_expr(config.form == SILU_MUL):
            copies += [(tma_up, gUp[None, n, at, group])]  # type: ignore[index]
        for half, (atom, source) in enumerate(copies):
            target = sWeight[None, half, d, s]
            cute.copy(atom, source, target, tma_bar_ptr=full + s, cache_policy=Int64(EVICT_FIRST))


@cute.jit
def fetch_x(
    config: cutlass.Constexpr[FewRowLinearConfig],
    tma_x: cute.CopyAtom,
    gX: cute.Tensor,  # (columns * 64, 1, K / 64, G)
    sX: cute.Tensor,  # (columns * 64, 1, depth, stages)
    full: cute.Pointer,
    tile: Int32,
    k: Int32,
    per_group: Int32,
    s: Int32,
) -> None:
    """Rows of x for stage k of a tile into buffer s."""
    for d in cutlass.range_constexpr(config.depth):
        cute.copy(tma_x, gX[None, 0, k * config.depth + d, tile // per_group], sX[None, 0, d, s], tma_bar_ptr=full + s)


@cute.jit
def multiply(
    config: cutlass.Constexpr[FewRowLinearConfig],
    mma: cute.TiledMma,
    sWeight: cute.Tensor,  # (64, 64 * depth, stages)
    sX: cute.Tensor,  # (columns, 64 * depth, stages)
    sSum: cute.Tensor,  # (64, own columns, split), fp32
    full: cute.Pointer,
    empty: cute.Pointer,
    sent: cute.Pointer,
    taken: cute.Pointer,
    mOut: cute.Tensor,  # (M, N, G)
    inner: Int32,
    walk: tuple[Int32, Int32, Int32, Int32, Int32],
) -> None:
    """The warpgroup: this block's part of each tile's sum, then the tile's output with the other blocks of the cluster."""
    tidx, _, _ = cute.arch.thread_idx()
    first, step, tiles, per_group, rank = walk
    lane = tidx % WARP
    row, quad = tidx // WARP * 16 + lane // 4, lane % 4  # weight rows row and row + 8, columns 8 * n + 2 * quad + (0, 1)
    whole = mma.get_slice(0)
    tWeight, tX = mma.make_fragment_A(whole.partition_A(sWeight)), mma.make_fragment_B(whole.partition_B(sX))
    acc = cute.make_rmem_tensor(mma.get_slice(tidx).partition_shape_C((BLOCK, config.columns)), Float32)
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    each = inner // (CHUNK * config.depth * config.split)
    s, phase, turn = Int32(0), Int32(0), Int32(0)
    for tile in cutlass.range(first, tiles, step, unroll=1):
        acc.fill(0.0)
        for _ in cutlass.range(each, unroll=1):
            wait(full + s, phase)
            warpgroup.fence()
            for d in cutlass.range_constexpr(cute.size(tX.shape[2])):
                cute.gemm(atom, acc, tWeight[None, None, d, s], tX[None, None, d, s], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + s)
            s += 1
            if s == config.stages:
                s = Int32(0)
                phase ^= 1
        send(config, acc, sSum, sent, taken, row, quad, rank, turn)
        finish(config, sSum, sent, taken, mOut, tile, per_group, rank, turn, tile + step >= tiles)
        turn += 1


@cute.jit
def send(
    config: cutlass.Constexpr[FewRowLinearConfig],
    acc: cute.Tensor,  # 2 columns, 2 weight rows, columns / 8, the first fastest
    sSum: cute.Tensor,
    sent: cute.Pointer,
    taken: cute.Pointer,
    row: Int32,
    quad: Int32,
    rank: Int32,
    turn: Int32,
) -> None:
    """Partial sums to the blocks that complete their columns; to this block's own memory where it is alone."""
    tidx, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(config.split > 1):
        if tidx == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(sent, BLOCK * config.columns * 4)
        wait(taken, turn % 2 ^ 1)  # every block of the cluster has read what it was sent for the tile before
    for n in cutlass.range_constexpr(config.columns // 8):
        for e in cutlass.range_constexpr(2):
            column = 8 * n + 2 * quad + e
            for h in cutlass.range_constexpr(2):
                value = acc[4 * n + 2 * h + e]
                if cutlass.const_expr(config.split > 1):
                    peer = column // config.own_columns
                    offset = cute.crd2idx((row + 8 * h, column % config.own_columns, rank), sSum.layout)
                    cute.arch.store_async_dsmem(sSum.iterator + offset, value.bitcast(Int32), sent, peer)
                else:
                    sSum[row + 8 * h, column, 0] = value
    if cutlass.const_expr(config.split == 1):
        cute.arch.barrier(barrier_id=SUMS_READY, number_of_threads=READERS)


@cute.jit
def finish(
    config: cutlass.Constexpr[FewRowLinearConfig],
    sSum: cute.Tensor,
    sent: cute.Pointer,
    taken: cute.Pointer,
    mOut: cute.Tensor,  # (M, N, G)
    tile: Int32,
    per_group: Int32,
    rank: Int32,
    turn: Int32,
    is_last: cutlass.Boolean,
) -> None:
    """This block's columns of a tile: partial sums in the order of K, the form, one rounding, 16 bytes a store."""
    tidx, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(config.split > 1):
        wait(sent, turn % 2)
    vectors = config.outputs // VECTOR
    units = vectors * config.own_columns
    rOut = cute.make_rmem_tensor((VECTOR,), mOut.element_type)
    for begin in cutlass.range_constexpr(0, units, READERS):
        unit = begin + tidx
        vector, column = unit % vectors, unit // vectors
        request, n = rank * config.own_columns + column, tile % per_group * config.outputs + vector * VECTOR
        if unit < units and request < mOut.shape[0] and n < mOut.shape[1]:
            if cutlass.const_expr(config.form == SILU_MUL):
                gate = total(config, sSum, vector, column).to(mOut.element_type).to(Float32)
                up = total(config, sSum, vector + vectors, column).to(mOut.element_type).to(Float32)
                one = Float32(1.0)
                silu = (gate / (one + cute.math.exp(-gate, fastmath=True))).to(mOut.element_type).to(Float32)
                rOut.store((silu * up).to(mOut.element_type))
            else:
                rOut.store(total(config, sSum, vector, column).to(mOut.element_type))
            gOut = cute.tiled_divide(mOut[request, None, tile // per_group], (VECTOR,))
            gOut[None, n // VECTOR].store(rOut.load())
    if cutlass.const_expr(config.split > 1):
        cute.arch.sync_warp()
        if tidx % WARP < config.split and not is_last:
            cute.arch.mbarrier_arrive(taken, tidx % WARP)
    else:
        cute.arch.barrier(barrier_id=SUMS_FREE, number_of_threads=READERS)


@cute.jit
def total(config: cutlass.Constexpr[FewRowLinearConfig], sSum: cute.Tensor, vector: Int32, column: Int32) -> cute.TensorSSA:
    """Sums of 8 weight rows, the parts in the order of K."""
    rSum = cute.make_rmem_tensor((VECTOR,), Float32)
    rPart = cute.make_rmem_tensor((VECTOR,), Float32)
    rSum.fill(0.0)
    for source in cutlass.range_constexpr(config.split):
        cute.autovec_copy(cute.tiled_divide(sSum[None, column, source], (VECTOR,))[None, vector], rPart)
        rSum.store(rSum.load() + rPart.load())
    return rSum.load()
