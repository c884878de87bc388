"""What the roles of the sm100 schedule agree on: where barriers and buffers lie, and what of a tile is live.

Imports the compiler.
"""

from types import SimpleNamespace

from cutlass import Int32, cute

from cute_kernels.block_attention.config import SEGMENT, SM100_BLOCK
from cute_kernels.block_attention.extent import context_tiles, span

CHUNKS = 9  # of 64 columns in a latent, 8 of them values
ROWS = 64  # of a tile of 128 packed rows those of one block; and of its 128 tokens the keys that one block holds
BLOCK_BYTES = ROWS * SEGMENT * 2  # 64 rows of 64 elements
VALUE_CHUNKS = 4  # two halves of a block's value columns by two halves of a tile's tokens, two blocks of memory each
VALUE_BYTES = 2 * BLOCK_BYTES
SHIFT = SM100_BLOCK.bit_length() - 1  # positions are not negative: a shift divides

# Barriers, 8 bytes each, the same places in both blocks. At a barrier of the leader's two, marked L, both blocks arrive
LANDED_KEYS = 0  # L; CHUNKS of them
FREE_KEYS = LANDED_KEYS + CHUNKS
LANDED_VALUES = FREE_KEYS + CHUNKS  # L; VALUE_CHUNKS of them
FREE_VALUES = LANDED_VALUES + VALUE_CHUNKS
LANDED_EDGE = FREE_VALUES + VALUE_CHUNKS  # values of a tile that holds an edge, of this block
LANDED_QUERIES = LANDED_EDGE + 1  # L
FREE_QUERIES = LANDED_QUERIES + 1
SCORED = FREE_QUERIES + 1  # of two tiles in turn
WEIGHED = SCORED + 2  # L; a warp of either block that has written its weights
SUMMED = WEIGHED + 1
BARRIERS = SUMMED + 1
WEIGHING_WARPS = 4  # of a block

# Columns of tensor memory, 128 lanes of 4 bytes. Lanes 0..63 hold the first half of a product's columns, 64..127 the other half
SUMS = 0  # of two products of 256 value columns, 128 columns each
SCORES = 256  # of two tiles in turn, 64 columns each
ALL_COLUMNS = 512  # what is allocated: a power of 2


@cute.jit
def span_of(mRequests: cute.Tensor, p: SimpleNamespace, request: Int32):
    """(start, context, tiles of the request, first and end of those that the part `p` holds)."""
    start, context = mRequests[request, 0], mRequests[request, 1]
    all_tiles = context_tiles(start, context, SM100_BLOCK) + 1
    begin, end = span(request, all_tiles, p.first_request, p.first_tile, p.last_request, p.last_tile)
    return start, context, all_tiles, begin, end
