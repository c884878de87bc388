"""Tiles of a request and what of a tile is live, where tiles begin at positions that their size divides. Imports the compiler.

`tokens`: of a tile, a power of 2; positions are not negative, so that a shift divides where // would take five instructions.
"""

import cutlass
from cutlass import Int32, cute


@cute.jit
def context_tiles(start: Int32, context: Int32, tokens: cutlass.Constexpr[int]) -> Int32:
    """Tiles of a context; the block's tile comes behind them."""
    shift, tiles = tokens.bit_length() - 1, Int32(0)
    if context > 0:
        tiles = ((start + context + tokens - 1) >> shift) - (start >> shift)
    return tiles


@cute.jit
def span(
    request: Int32, all_tiles: Int32, first_request: Int32, first_tile: Int32, last_request: Int32, last_tile: Int32
) -> tuple[Int32, Int32]:
    """(first, end) of a request's tiles that a part holds."""
    begin, end = Int32(0), all_tiles
    if request == first_request:
        begin = first_tile
    if request == last_request:
        end = last_tile
    return begin, end


@cute.jit
def live_columns(start: Int32, context: Int32, block_rows: Int32, tile: Int32, tokens: cutlass.Constexpr[int]):
    """(first, end) of a tile's tokens that are live; a tile of which not all are holds an edge."""
    shift = tokens.bit_length() - 1
    position = ((start >> shift) + tile) << shift
    first, end = Int32(0), block_rows
    if context > 0 and position < start + context:
        first, end = start - position, start + context - position
        if first < 0:
            first = Int32(0)
        if end > tokens:
            end = Int32(tokens)
    return first, end
