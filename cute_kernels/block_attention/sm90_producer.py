"""The warp that fetches in the sm90 schedule: queries, pages and blocks as they are needed; and that stores whole requests.

Imports the compiler.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, Int64, cute

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention import sm90_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM90_BLOCK
from cute_kernels.block_attention.extent import context_tiles, span
from cute_kernels.block_attention.sm90_tiles import CHUNK_BYTES, CHUNKS, HALF, LEFT, RIGHT
from cute_kernels.ptx import expect_bytes, wait

ROW_BYTES = CHUNKS * SEGMENT * 2
AHEAD = 4  # row tiles that share a request's pages, from which on these are asked into L2 ahead; with fewer it is slower


@cute.jit
def slice_of(box: cutlass.Constexpr[int], row_tile: Int32):
    """(first, bytes) of a box that the block of a row tile asks into L2."""
    row_tiles, _, _ = cute.arch.grid_dim()
    all_bytes = box * ROW_BYTES
    size = ((all_bytes // row_tiles + 127) // 128) * 128
    first = row_tile * size
    if first + size > all_bytes:
        size = all_bytes - first
    if row_tiles < AHEAD:
        size = Int32(0)
    return first, size


@cute.jit
def fetch_queries(f: SimpleNamespace, request: Int32, phase: Int32, is_rotary: cutlass.Constexpr[bool]):
    """The queries of a request's row tile, or their rotary part, when what was there is done with."""
    wait(f.free_q + int(is_rotary), phase)
    chunks = (CHUNKS - 1, CHUNKS) if is_rotary else (0, CHUNKS - 1)
    landed = (f.landed_q + int(is_rotary)).toint()
    expect_bytes(landed, (chunks[1] - chunks[0]) * CHUNK_BYTES)
    for c in cutlass.range_constexpr(*chunks):
        target = f.queries_at + c * CHUNK_BYTES
        ptx.copy_box(target, f.map_queries, Int32(c * SEGMENT), f.row_tile * SM90_BLOCK, request, landed)


@cute.jit
def ask_queries_ahead(f: SimpleNamespace, request: Int32):
    """The queries of a request's row tile into L2."""
    for c in cutlass.range_constexpr(CHUNKS):
        ptx.ask_box_ahead(f.map_queries, Int32(c * SEGMENT), f.row_tile * SM90_BLOCK, request)


@cute.jit
def store(f: SimpleNamespace, request: Int32, first: Int32, end: Int32, phase: Int32):
    """Chunks `first` to `end` of a request's rows to the output, when they are staged; returns when all are read."""
    wait(f.staged, phase)
    for c in cutlass.range_constexpr(CHUNKS - 1):
        if c >= first and c < end:
            ptx.store_box(
                f.map_out, Int32(c * SEGMENT), f.row_tile * SM90_BLOCK, request, f.tokens_at + (CHUNKS + c) * CHUNK_BYTES
            )
    ptx.wait_until_read()


@cute.jit
def fill(
    f: SimpleNamespace,
    rTicket: cute.Tensor,
    phase: Int32,
    stage: cutlass.Constexpr[int],
    half: cutlass.Constexpr[int],
):
    """A half of a tile into its buffer, when what was there has been read; each chunk has a barrier.

    Boxes of pages and of the block differ by their operands only.
    """
    boxes, per_page = cute.size(rTicket.shape), cute.size(f.boxes_of_page)
    box, shift = SM90_BLOCK // boxes, per_page.bit_length() - 1
    tensor_map = f.map_pages
    if rTicket[0] < 0:
        tensor_map = f.map_block
    wait(f.free + (2 * stage + half), phase)
    for i in cutlass.range_constexpr(boxes):
        row, index = (rTicket[i] & (per_page - 1)) * box, rTicket[i] >> shift
        if rTicket[0] < 0:
            row, index = Int32(i * box), -1 - rTicket[0]
        for c in cutlass.range_constexpr(*(LEFT, RIGHT)[half]):
            barrier = f.landed_at + 8 * (stage * CHUNKS + c)
            if cutlass.const_expr(i == 0):
                expect_bytes(barrier, CHUNK_BYTES)
            target = f.tokens_at + (stage * CHUNKS + c) * CHUNK_BYTES + i * (box * SEGMENT * 2)
            ptx.copy_box(target, tensor_map, Int32(c * SEGMENT), row, index, barrier)


@cute.jit
def ask_ahead(f: SimpleNamespace, rTicket: cute.Tensor):
    """A tile of pages into L2, each row tile's block its slice: the copies that follow later find it there."""
    boxes, per_page = cute.size(rTicket.shape), cute.size(f.boxes_of_page)
    box, shift = SM90_BLOCK // boxes, per_page.bit_length() - 1
    if rTicket[0] >= 0 and f.slice_bytes > 0:
        for i in cutlass.range_constexpr(boxes):
            index = rTicket[i] >> shift
            if index < f.num_pages:
                row = (rTicket[i] & (per_page - 1)) * box
                ptx.ask_ahead(f.pool_at + Int64(index) * f.page_bytes + row * ROW_BYTES + f.slice_begin, f.slice_bytes)


@cute.jit
def fetch(
    f: SimpleNamespace,
    joins: cutlass.Constexpr[bool],
    mTable: cute.Tensor,
    mRequests: cute.Tensor,
    first_item: tuple[Int32, Int32],
    first_request: Int32,
    first_tile: Int32,
    last_request: Int32,
    last_tile: Int32,
    stop: Int32,
):
    """Everything that a part reads, and the rows of whole requests that it writes. One thread runs this."""
    start, context = first_item
    even, odd, phase_q = Int32(1), Int32(1), Int32(1)  # a fresh barrier lets the first wait for its other phase pass
    first_chunk, end_chunk, phase_out = Int32(0), Int32(0), Int32(0)  # of the request before, what is to be stored
    if first_request < stop:  # a copy for nobody could land when this block is gone
        page_size = SM90_BLOCK // cute.size(f.rTicket0.shape) * cute.size(f.boxes_of_page)
        tiles.ask_ahead(mTable, page_size, first_request, start, first_tile)
        fetch_queries(f, first_request, phase_q, False)
        fetch_queries(f, first_request, phase_q, True)
    for request in cutlass.range(first_request, stop, unroll=1):
        all_tiles = context_tiles(start, context, SM90_BLOCK) + 1
        begin, end = span(request, all_tiles, first_request, first_tile, last_request, last_tile)
        tiles.find(mTable, f.boxes_of_page, f.num_pages, request, start, context, begin, f.rTicket0)
        if begin + 1 < end:
            tiles.find(mTable, f.boxes_of_page, f.num_pages, request, start, context, begin + 1, f.rTicket1)
        if request > first_request:  # its tiles have been looked up while the request before was computed
            ask_ahead(f, f.rTicket0)
            if begin + 1 < end:
                ask_ahead(f, f.rTicket1)
            phase_q = phase_q ^ 1
            fetch_queries(f, request, phase_q, False)
        for tile in cutlass.range(begin, end, 2, unroll=1):
            fill(f, f.rTicket0, even, 0, 0)
            fill(f, f.rTicket0, even, 0, 1)
            even = even ^ 1
            if tile == begin and request > first_request:
                if begin + 1 < end:
                    fetch_queries(f, request, phase_q, True)
                if first_chunk < end_chunk:
                    store(f, request - 1, first_chunk, end_chunk, phase_out)
                    phase_out = phase_out ^ 1
                if begin + 1 == end:  # nothing else keeps its rows from being staged before those of the last are read
                    fetch_queries(f, request, phase_q, True)
            if tile + 2 < end:
                tiles.find(mTable, f.boxes_of_page, f.num_pages, request, start, context, tile + 2, f.rNext0)
                ask_ahead(f, f.rNext0)
            if tile + 1 < end:
                fill(f, f.rTicket1, odd, 1, 1)
                fill(f, f.rTicket1, odd, 1, 0)
                odd = odd ^ 1
            if tile + 3 < end:
                tiles.find(mTable, f.boxes_of_page, f.num_pages, request, start, context, tile + 3, f.rNext1)
                ask_ahead(f, f.rNext1)
            for i in cutlass.range_constexpr(cute.size(f.rTicket0.shape)):
                f.rTicket0[i] = f.rNext0[i]
                f.rTicket1[i] = f.rNext1[i]
        first_chunk, end_chunk = Int32(0), Int32(0)
        if begin == 0 and end == all_tiles:
            end_chunk = Int32(CHUNKS - 1)
        if cutlass.const_expr(joins):
            if mRequests[request, 3] < 0:
                first_chunk = f.rank * (HALF // SEGMENT)
                end_chunk = first_chunk + HALF // SEGMENT
        if request + 1 < stop:
            ask_queries_ahead(f, request + 1)
            start, context = mRequests[request + 1, 0], mRequests[request + 1, 1]
    if first_chunk < end_chunk:
        store(f, stop - 1, first_chunk, end_chunk, phase_out)
