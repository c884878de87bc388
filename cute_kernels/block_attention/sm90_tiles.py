"""Device functions of the sm90 schedule: where tiles come from, what of them is live, softmax, and views of fragments.

Imports the compiler: `sm90.kernel_class` imports this when it is needed.
"""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention.config import SEGMENT, SM90_BLOCK

CHUNKS = 9  # of 64 columns in a latent, 8 of them values
LEFT, RIGHT = (0, 4), (4, 9)  # chunks that a warpgroup fills: those it sums, and right the rotary part too
CHUNK_BYTES = SM90_BLOCK * SEGMENT * 2
NOTHING = -(2**31)  # a ticket for no tile
TUNE: frozenset[str] = frozenset()  # switches under trial
LOWEST = -1e30  # a running maximum that is finite: with it a masked score has weight 0 and nothing is inf - inf


def on(name: str) -> bool:
    """Whether a switch is set."""
    return name in TUNE


def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2, v), 1, 1) as (2 rows, (2, v) columns)."""
    shape, step = acc.layout.shape[0], acc.layout.stride[0]
    return cute.make_tensor(
        acc.iterator, cute.make_layout((shape[1], (shape[0], shape[2])), stride=(step[1], (step[0], step[2])))
    )


def as_operand(acc: cute.Tensor) -> cute.Tensor:
    """Scores ((2, 2, v), 1, 1) as the A operand of the value product ((2, 2, 2), 1, v / 2): the same registers."""
    shape, step = acc.layout.shape[0], acc.layout.stride[0]
    layout = cute.make_layout(((2, 2, 2), 1, shape[2] // 2), stride=((step[0], step[1], step[2]), 0, 2 * step[2]))
    return cute.make_tensor(acc.iterator, layout)


def multiply(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, clear: bool) -> None:
    """Issue acc (+)= a b. An atom of its own: a flag that was set inside a loop cannot be used outside."""
    atom = cute.make_mma_atom(mma.op)
    for k in range(cute.size(a.shape[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not (clear and k == 0))
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)


@cute.jit
def context_tiles(start: Int32, context: Int32) -> Int32:
    """Tiles of a context; the block's tile comes behind them."""
    tiles = Int32(0)
    if context > 0:
        if cutlass.const_expr(on("lean")):
            tiles = ((start + context + SM90_BLOCK - 1) >> 6) - (start >> 6)
        else:
            tiles = (start + context + SM90_BLOCK - 1) // SM90_BLOCK - start // SM90_BLOCK
    return tiles


@cute.jit
def find(
    mTable: cute.Tensor,
    gPages: cute.Tensor,  # TMA view (box, boxes of a page, chunks, pages)
    num_pages: Int32,
    request: Int32,
    start: Int32,
    context: Int32,
    tile: Int32,
    rTicket: cute.Tensor,  # (boxes of a tile), written
):
    """Tickets for a tile: page * (boxes of a page) + box; -1 - request for the block. A page that is none is num_pages,
    which a copy reads as zeros. Entries of the table outside the context are not read.
    """
    boxes, per_page = cute.size(rTicket.shape), cute.size(gPages.shape[1])
    box = SM90_BLOCK // boxes
    page_shift, box_shift, box_mask = (box * per_page).bit_length() - 1, box.bit_length() - 1, per_page - 1
    position = (start // SM90_BLOCK + tile) * SM90_BLOCK
    if cutlass.const_expr(on("lean")):
        position = ((start >> 6) + tile) << 6
    stop = start + context
    if context > 0 and position < stop:
        for i in cutlass.range_constexpr(boxes):
            first = position + i * box
            entry, page = first // (box * per_page), num_pages
            if cutlass.const_expr(on("lean")):
                entry = first >> page_shift
            if first < stop and first + box > start and entry < mTable.shape[1]:
                page = mTable[request, entry]
                if page < 0 or page > num_pages:
                    page = num_pages
            if cutlass.const_expr(on("lean")):
                rTicket[i] = page * per_page + ((first >> box_shift) & box_mask)
            else:
                rTicket[i] = page * per_page + first // box % per_page
    else:
        rTicket[0] = -1 - request


@cute.jit
def fill(
    tma_pages: cute.CopyAtom,
    gPages: cute.Tensor,  # TMA view (box, boxes of a page, chunks, pages)
    sBoxes: cute.Tensor,  # (box, boxes of a tile, chunks, 2)
    tma_block: cute.CopyAtom,
    gBlock: cute.Tensor,  # (tile, 1, chunks, requests)
    sTiles: cute.Tensor,  # (tile, 1, chunks, 2)
    landed: cute.Pointer,  # 2 * CHUNKS barriers
    rTicket: cute.Tensor,
    warp: Int32,  # in its warpgroup; the first one issues
    stage: cutlass.Constexpr[int],
    chunks: cutlass.Constexpr,
):
    """Issue the copies of some chunks of a tile into a buffer; each chunk has a barrier."""
    boxes = cute.size(rTicket.shape)
    per_page = cute.size(gPages.shape[1])
    if warp == 0 and rTicket[0] != NOTHING:
        for c in cutlass.range_constexpr(*chunks):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(landed + (stage * CHUNKS + c), CHUNK_BYTES)
        if rTicket[0] >= 0:
            for c in cutlass.range_constexpr(*chunks):
                for i in cutlass.range_constexpr(boxes):
                    page, box = rTicket[i] // per_page, rTicket[i] % per_page
                    cute.copy(
                        tma_pages,
                        gPages[None, box, c, page],
                        sBoxes[None, i, c, stage],
                        tma_bar_ptr=landed + (stage * CHUNKS + c),
                    )
        else:
            for c in cutlass.range_constexpr(*chunks):
                cute.copy(
                    tma_block,
                    gBlock[None, 0, c, -1 - rTicket[0]],
                    sTiles[None, 0, c, stage],
                    tma_bar_ptr=landed + (stage * CHUNKS + c),
                )


@cute.jit
def fill_lean(
    raw: tuple,  # maps of pages and block (Int64), shared address of tokens, of the barriers (Int32)
    gPages: cute.Tensor,  # TMA view (box, boxes of a page, chunks, pages)
    rTicket: cute.Tensor,
    warp: Int32,
    stage: cutlass.Constexpr[int],
    chunks: cutlass.Constexpr,
):
    """`fill`: one thread issues all, and the pages' boxes and the block's are told apart by operands only."""
    pages, block, tokens, landed = raw
    boxes, per_page = cute.size(rTicket.shape), cute.size(gPages.shape[1])
    box = SM90_BLOCK // boxes
    shift, mask_of_page, bytes_of_box = per_page.bit_length() - 1, per_page - 1, box * SEGMENT * 2
    if warp == 0 and rTicket[0] != NOTHING:
        tensor_map = pages
        if rTicket[0] < 0:
            tensor_map = block
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(boxes):
                row, index = (rTicket[i] & mask_of_page) * box, rTicket[i] >> shift
                if rTicket[0] < 0:
                    row, index = Int32(i * box), -1 - rTicket[0]
                for c in cutlass.range_constexpr(*chunks):
                    barrier = landed + 8 * (stage * CHUNKS + c)
                    if cutlass.const_expr(i == 0):
                        ptx.expect_bytes(barrier, CHUNK_BYTES)
                    target = tokens + (stage * CHUNKS + c) * CHUNK_BYTES + i * bytes_of_box
                    ptx.copy_box(target, tensor_map, c * SEGMENT, row, index, barrier)


@cute.jit
def prefetch(
    raw: tuple,  # address of the pool (Int64), bytes from a page to the next (Int64)
    mTable: cute.Tensor,
    num_pages: Int32,
    item: tuple,
    tile: Int32,
    gPages: cute.Tensor,  # TMA view (box, boxes of a page, chunks, pages)
    rTicket: cute.Tensor,  # (boxes of a tile)
):
    """Ask for a tile of the context to be brought into the L2. Where a page is none, page 0: no branch depends on a load."""
    address, step = raw
    boxes, per_page = cute.size(rTicket.shape), cute.size(gPages.shape[1])
    request, start, context, end, next_start, next_context, next_end = item
    if tile >= end:
        request, start, context, tile, end = request + 1, next_start, next_context, tile - end, next_end
    box = SM90_BLOCK // boxes
    page_shift, box_shift, box_mask = (box * per_page).bit_length() - 1, box.bit_length() - 1, per_page - 1
    bytes_of_box = box * CHUNKS * SEGMENT * 2
    position = ((start >> 6) + tile) << 6
    if tile < end and position < start + context:
        for i in cutlass.range_constexpr(boxes):
            first = position + i * box
            entry = first >> page_shift
            if first < start + context and first + box > start and entry < mTable.shape[1]:
                page = mTable[request, entry]
                if page < 0 or page >= num_pages:
                    page = Int32(0)
                part = (first >> box_shift) & box_mask
                with cute.arch.elect_one():
                    ptx.prefetch_bytes(address + step * page + part * bytes_of_box, bytes_of_box)


@cute.jit
def live_columns(start: Int32, context: Int32, block_rows: Int32, tile: Int32):
    """(first, end) of a tile's tokens that are live."""
    position = (start // SM90_BLOCK + tile) * SM90_BLOCK
    if cutlass.const_expr(on("lean")):
        position = ((start >> 6) + tile) << 6
    first, end = Int32(0), block_rows
    if context > 0 and position < start + context:
        first, end = start - position, start + context - position
        if first < 0:
            first = Int32(0)
        if end > SM90_BLOCK:
            end = Int32(SM90_BLOCK)
    return first, end


@cute.jit
def mask(S: cute.Tensor, first: Int32, end: Int32, thread: Int32):
    """Scores of tokens that are not live become -inf."""
    if first > 0 or end < SM90_BLOCK:
        for c in cutlass.range_constexpr(cute.size(S.shape[1])):
            column = 8 * (c // 2) + c % 2 + 2 * (thread % 4)
            if column < first or column >= end:
                S[0, c] = -Float32.inf
                S[1, c] = -Float32.inf


@cute.jit
def clear_rows(
    sRaw: cute.Tensor,  # (8 elements, 8 vectors, 64 rows, chunks, 2), no swizzle: rows are cleared whole
    first: Int32,
    end: Int32,
    group: Int32,
    thread: Int32,
    stage: cutlass.Constexpr[int],
):
    """Zero the rows of a tile that are not live, in the columns that this warpgroup sums; the tensor cores see it."""
    if first > 0 or end < SM90_BLOCK:
        rZero = cute.make_rmem_tensor((8,), sRaw.element_type)
        rZero.fill(0.0)
        vector = thread % 32
        for i in cutlass.range(SM90_BLOCK // 4, unroll=1):
            row = 4 * i + thread // 32
            if row < first or row >= end:
                cute.autovec_copy(rZero, sRaw[None, vector % 8, row, 4 * group + vector // 8, stage])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=6 + group, number_of_threads=128)


@cute.jit
def scale_rows(S: cute.Tensor, r: cutlass.Constexpr[int], factor: Float32):
    """Multiply one of a thread's two rows."""
    for c in cutlass.range_constexpr(cute.size(S.shape[1])):
        S[r, c] = S[r, c] * factor


@cute.jit
def rescale(S: cute.Tensor | None, O: cute.Tensor, factor0: Float32, factor1: Float32):  # noqa: E741
    """`scale_rows` of both rows, left out where no row of the warp changes: a factor is at most 1."""
    if cute.arch.vote_any_sync(factor0 * factor1 < 1.0):
        if cutlass.const_expr(S is not None):
            for c in cutlass.range_constexpr(cute.size(S.shape[1])):
                S[0, c] = S[0, c] * factor0
                S[1, c] = S[1, c] * factor1
        for c in cutlass.range_constexpr(cute.size(O.shape[1])):
            O[0, c] = O[0, c] * factor0
            O[1, c] = O[1, c] * factor1


@cute.jit
def softmax(
    S: cute.Tensor,  # (2, 32): scores, then probabilities
    O: cute.Tensor,  # (2, 128): rescaled  # noqa: E741
    sTop: cute.Tensor,  # (64): running maximum of both warpgroups, times scale_log2
    sShrink: cute.Tensor,  # (64, 2): what this tile scaled the earlier ones by
    rSum: cute.Tensor,  # (2)
    rBefore: cute.Tensor,  # (2): what the other warpgroup's tile scaled by before
    row: Int32,
    thread: Int32,
    scale_log2: Float32,
    stage: cutlass.Constexpr[int],
    signal: cutlass.Constexpr[int] = 0,
):
    """One tile's softmax against the running maximum.

    `signal`: a named barrier at which to arrive once maximum and scale are there; 0 for none.
    """
    columns = cute.size(S.shape[1])
    rTop = cute.make_rmem_tensor((2,), Float32)
    rShrink = cute.make_rmem_tensor((2,), Float32)
    for r in cutlass.range_constexpr(2):
        top, other = S[r, 0], S[r, 1]
        for c in cutlass.range_constexpr(2, columns, 2):
            top = cute.arch.fmax(top, S[r, c])
            other = cute.arch.fmax(other, S[r, c + 1])
        top = cute.arch.fmax(top, other)
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
        old = sTop[row + 8 * r]
        top = cute.arch.fmax(old, top * scale_log2)
        shrink = cute.math.exp2(old - top, fastmath=True)
        cute.arch.sync_warp()
        if thread % 4 == 0:
            sTop[row + 8 * r] = top
            sShrink[row + 8 * r, stage] = shrink
        rTop[r], rShrink[r] = top, shrink
        if cutlass.const_expr(not on("early") and not on("skip")):
            weigh(S, O, rSum, rBefore, rTop, rShrink, r, scale_log2)
    if cutlass.const_expr(signal > 0):
        cute.arch.barrier_arrive(barrier_id=signal, number_of_threads=256)
    if cutlass.const_expr(on("early") or on("skip")):
        for r in cutlass.range_constexpr(2):
            weigh(S, O, rSum, rBefore, rTop, rShrink, r, scale_log2)
    if cutlass.const_expr(on("skip")):
        shrink0, shrink1 = rShrink[0] * rBefore[0], rShrink[1] * rBefore[1]
        rescale(None, O, shrink0, shrink1)


@cute.jit
def weigh(
    S: cute.Tensor,
    O: cute.Tensor,  # noqa: E741
    rSum: cute.Tensor,
    rBefore: cute.Tensor,
    rTop: cute.Tensor,
    rShrink: cute.Tensor,
    r: cutlass.Constexpr[int],
    scale_log2: Float32,
):
    """Scores of one of a thread's rows become weights; sum and accumulator follow."""
    columns = cute.size(S.shape[1])
    shrink = rShrink[r] * rBefore[r]
    if cutlass.const_expr(on("lean")):  # four sums: a single one is a chain of additions
        parts = [Float32(0.0) for _ in range(4)]
        for c in cutlass.range_constexpr(columns):
            p = cute.math.exp2(S[r, c] * scale_log2 - rTop[r], fastmath=True)
            S[r, c] = p
            parts[c % 4] = parts[c % 4] + p
        total = (parts[0] + parts[1]) + (parts[2] + parts[3])
    else:
        total = Float32(0.0)
        for c in cutlass.range_constexpr(columns):
            p = cute.math.exp2(S[r, c] * scale_log2 - rTop[r], fastmath=True)
            S[r, c] = p
            total += p
    rSum[r] = rSum[r] * shrink + total
    if cutlass.const_expr(not on("skip")):
        scale_rows(O, r, shrink)
