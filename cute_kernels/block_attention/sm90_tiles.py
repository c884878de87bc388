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
HALF = 256  # value columns of a warpgroup
SHIFT = SM90_BLOCK.bit_length() - 1  # positions are not negative: a shift divides where // would take five instructions
LAZY = 8.0  # a maximum rises only where weights would pass 2^LAZY: sums hold that with ease, and so does fp16
LOWEST = -1e30  # a running maximum that is finite: with it a masked score has weight 0 and nothing is inf - inf


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
def ask_ahead(mTable: cute.Tensor, page_size: cutlass.Constexpr[int], request: Int32, start: Int32, tile: Int32):
    """The table's entry of a tile into L2, for `find`."""
    entry = (((start >> SHIFT) + tile) << SHIFT) >> (page_size.bit_length() - 1)
    if entry < mTable.shape[1]:
        ptx.ask_line_ahead((mTable.iterator + cute.crd2idx((request, entry), mTable.layout)).toint())


@cute.jit
def find(
    mTable: cute.Tensor,
    boxes_of_page: cute.Layout,  # its size is the number
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
    boxes, per_page = cute.size(rTicket.shape), cute.size(boxes_of_page)
    box = SM90_BLOCK // boxes
    page_shift, box_shift = (box * per_page).bit_length() - 1, box.bit_length() - 1
    position = ((start >> SHIFT) + tile) << SHIFT
    stop = start + context
    if context > 0 and position < stop:
        for i in cutlass.range_constexpr(boxes):
            first = position + i * box
            entry, page = first >> page_shift, num_pages
            if first < stop and first + box > start and entry < mTable.shape[1]:
                page = mTable[request, entry]
                if page < 0 or page > num_pages:
                    page = num_pages
            rTicket[i] = page * per_page + ((first >> box_shift) & (per_page - 1))
    else:
        rTicket[0] = -1 - request


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
def follow(O: cute.Tensor, rSum: cute.Tensor, rShrink: cute.Tensor, in_flight: cutlass.Constexpr[bool]):  # noqa: E741
    """Sums move to a new reference, (2, columns) and (2) times (2), where it rose for any row of the warp.

    in_flight: a product may still be adding to O; it is waited for only here.
    """
    if cute.arch.vote_any_sync(rShrink[0] != 1.0 or rShrink[1] != 1.0):
        if cutlass.const_expr(in_flight):
            warpgroup.wait_group(0)
        for r in cutlass.range_constexpr(2):
            rSum[r] = rSum[r] * rShrink[r]
            scale_rows(O, r, rShrink[r])


@cute.jit
def largest(S: cute.Tensor, rTop: cute.Tensor):
    """Row maxima of a tile's scores, of all four threads of a row."""
    columns = cute.size(S.shape[1])
    for r in cutlass.range_constexpr(2):
        top, other = S[r, 0], S[r, 1]
        for c in cutlass.range_constexpr(2, columns, 2):
            top = cute.arch.fmax(top, S[r, c])
            other = cute.arch.fmax(other, S[r, c + 1])
        rTop[r] = cute.arch.fmax(top, other)
    for offset in cutlass.range_constexpr(1, 3):
        for r in cutlass.range_constexpr(2):
            rTop[r] = cute.arch.fmax(rTop[r], cute.arch.shuffle_sync_bfly(rTop[r], offset=offset))


@cute.jit
def settle(
    rTop: cute.Tensor,  # (2): row maxima of the tile; the reference it is weighed against, written
    rShrink: cute.Tensor,  # (2), written: what earlier sums are multiplied by, nearly always 1
    sTop: cute.Tensor,  # (64): the reference of both warpgroups, times scale_log2
    sShrink: cute.Tensor,  # (64, 2): shrinks of the two tiles of a pair
    row: Int32,
    thread: Int32,
    scale_log2: Float32,
    stage: cutlass.Constexpr[int],
):
    """The reference rises to a row's maximum where that is larger by more than LAZY, and stays where it is not."""
    for r in cutlass.range_constexpr(2):
        old, top = sTop[row + 8 * r], rTop[r] * scale_log2
        rTop[r] = old
        if top > old + LAZY:
            rTop[r] = top
        rShrink[r] = cute.math.exp2(old - rTop[r], fastmath=True)
    cute.arch.sync_warp()
    if thread % 4 == 0:
        for r in cutlass.range_constexpr(2):
            sTop[row + 8 * r] = rTop[r]
            sShrink[row + 8 * r, stage] = rShrink[r]


@cute.jit
def weigh(S: cute.Tensor, rTop: cute.Tensor, rSum: cute.Tensor, scale_log2: Float32):
    """Scores become weights, and are added up."""
    columns = cute.size(S.shape[1])
    for r in cutlass.range_constexpr(2):
        parts = [rSum[r], Float32(0.0), Float32(0.0), Float32(0.0)]  # a single sum is a chain of additions
        for c in cutlass.range_constexpr(columns):
            p = cute.math.exp2(S[r, c] * scale_log2 - rTop[r], fastmath=True)
            S[r, c] = p
            parts[c % 4] = parts[c % 4] + p
        rSum[r] = (parts[0] + parts[1]) + (parts[2] + parts[3])
