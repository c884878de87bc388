"""The two warps that fetch in the sm100 schedule: one queries and keys, one values, each in the order of the products.

Imports the compiler.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, cute

from cute_kernels.block_attention import sm100_ptx
from cute_kernels.block_attention import sm100_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM100_BLOCK
from cute_kernels.block_attention.extent import live_columns
from cute_kernels.block_attention.sm100_tiles import BLOCK_BYTES, CHUNKS, ROWS, VALUE_BYTES, VALUE_CHUNKS
from cute_kernels.ptx import expect_bytes


def box_of(f: SimpleNamespace) -> int:
    """Tokens of a box."""
    return min(cute.size(f.page), ROWS)


@cute.jit
def locate(
    f: SimpleNamespace, mTable: cute.Tensor, request: Int32, start: Int32, context: Int32, position: Int32, rBox: cute.Tensor
):
    """(map, its boxes' page and row, written) of tokens from a position on; entries outside the context are not read.

    A page that is none is num_pages, which a copy reads as zeros. The block is a page of its own.
    """
    page_size, box = cute.size(f.page), box_of(f)
    page_shift = page_size.bit_length() - 1
    tensor_map, stop = f.map_pages, start + context
    tile_position = (position >> tiles.SHIFT) << tiles.SHIFT
    if context > 0 and tile_position < stop:
        for i in cutlass.range_constexpr(cute.size(rBox.shape[0])):
            first = position + i * box
            entry, page = first >> page_shift, f.num_pages
            if first < stop and first + box > start and entry < mTable.shape[1]:
                page = mTable[request, entry]
                if page < 0 or page > f.num_pages:
                    page = f.num_pages
            rBox[i, 0] = page
            rBox[i, 1] = first & (page_size - 1)
    else:
        tensor_map = f.map_block
        for i in cutlass.range_constexpr(cute.size(rBox.shape[0])):
            rBox[i, 0] = request
            rBox[i, 1] = position - tile_position + i * box
    return tensor_map


@cute.jit
def fetch_keys(f: SimpleNamespace, part: SimpleNamespace, mTable: cute.Tensor, mRequests: cute.Tensor, rBox: cute.Tensor):
    """Queries and keys of a part: of each tile this block's half of the tokens. One thread runs this."""
    box = box_of(f)
    phase, phase_q = Int32(1), Int32(1)  # a fresh barrier lets the first wait for its other phase pass
    for request in cutlass.range(part.first_request, part.stop, unroll=1):
        start, context, _, begin, end = tiles.span_of(mRequests, part, request)
        sm100_ptx.wait(f.bars + 8 * tiles.FREE_QUERIES, phase_q)
        phase_q = phase_q ^ 1
        if f.rank == 0:
            expect_bytes(f.bars + 8 * tiles.LANDED_QUERIES, 2 * CHUNKS * BLOCK_BYTES)
        for c in cutlass.range_constexpr(CHUNKS):
            landed = f.leader_bars + 8 * tiles.LANDED_QUERIES
            sm100_ptx.copy_box(f.queries_at + c * BLOCK_BYTES, f.map_queries, c * SEGMENT, f.first_row, request, landed)
        for tile in cutlass.range(begin, end, unroll=1):
            position = (((start >> tiles.SHIFT) + tile) << tiles.SHIFT) + f.rank * ROWS
            tensor_map = locate(f, mTable, request, start, context, position, rBox)
            for c in cutlass.range_constexpr(CHUNKS):
                sm100_ptx.wait(f.bars + 8 * (tiles.FREE_KEYS + c), phase)
                if f.rank == 0:
                    expect_bytes(f.bars + 8 * (tiles.LANDED_KEYS + c), 2 * BLOCK_BYTES)
                for i in cutlass.range_constexpr(cute.size(rBox.shape[0])):
                    target, landed = f.keys_at + c * BLOCK_BYTES + i * box * SEGMENT * 2, tiles.LANDED_KEYS + c
                    sm100_ptx.copy_box(target, tensor_map, c * SEGMENT, rBox[i, 1], rBox[i, 0], f.leader_bars + 8 * landed)
            phase = phase ^ 1
    # The last releases come from the leader: a block that has ended must not be told
    sm100_ptx.wait(f.bars + 8 * tiles.FREE_QUERIES, phase_q)
    for c in cutlass.range_constexpr(CHUNKS):
        sm100_ptx.wait(f.bars + 8 * (tiles.FREE_KEYS + c), phase)


@cute.jit
def fetch_values(f: SimpleNamespace, part: SimpleNamespace, mTable: cute.Tensor, mRequests: cute.Tensor, rBox: cute.Tensor):
    """Values of a part: of each tile all tokens, in this block's half of the columns. One thread runs this.

    Of a tile with an edge the bytes count at this block's own barrier: its rows are cleared before the leader is told.
    """
    phase = Int32(1)
    box, boxes = box_of(f), ROWS // box_of(f)  # of a chunk
    for request in cutlass.range(part.first_request, part.stop, unroll=1):
        start, context, _, begin, end = tiles.span_of(mRequests, part, request)
        for tile in cutlass.range(begin, end, unroll=1):
            position = ((start >> tiles.SHIFT) + tile) << tiles.SHIFT
            tensor_map = locate(f, mTable, request, start, context, position, rBox)
            live_first, live_end = live_columns(start, context, f.block_rows, tile, SM100_BLOCK)
            is_edge = live_first > 0 or live_end < SM100_BLOCK
            for c in cutlass.range_constexpr(VALUE_CHUNKS):
                half, side = c // 2, c % 2  # of the columns, of the tokens
                sm100_ptx.wait(f.bars + 8 * (tiles.FREE_VALUES + c), phase)
                landed = f.leader_bars + 8 * (tiles.LANDED_VALUES + c)
                if is_edge:
                    if f.rank == 0:
                        sm100_ptx.arrive(landed, True)
                    landed = f.bars + 8 * tiles.LANDED_EDGE
                    if cutlass.const_expr(c == 0):
                        expect_bytes(landed, VALUE_CHUNKS * VALUE_BYTES)
                elif f.rank == 0:
                    expect_bytes(f.bars + 8 * (tiles.LANDED_VALUES + c), 2 * VALUE_BYTES)
                for i in cutlass.range_constexpr(boxes):
                    page, row = rBox[side * boxes + i, 0], rBox[side * boxes + i, 1]
                    for k in cutlass.range_constexpr(2):
                        target = f.values_at + c * VALUE_BYTES + k * BLOCK_BYTES + i * box * SEGMENT * 2
                        column = half * 256 + f.rank * 128 + k * SEGMENT
                        sm100_ptx.copy_box(target, tensor_map, column, row, page, landed)
            phase = phase ^ 1
    for c in cutlass.range_constexpr(VALUE_CHUNKS):
        sm100_ptx.wait(f.bars + 8 * (tiles.FREE_VALUES + c), phase)
