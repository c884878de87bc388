"""The thread that issues the products of the sm100 schedule, for both blocks of a cluster. Imports the compiler."""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, cute

from cute_kernels.block_attention import sm100_ptx as ptx
from cute_kernels.block_attention import sm100_tiles as tiles
from cute_kernels.block_attention.config import SEGMENT, SM100_BLOCK
from cute_kernels.block_attention.sm100_tiles import BLOCK_BYTES, CHUNKS, VALUE_BYTES

STEP = 16  # summed elements of a product
STEPS = SEGMENT // STEP
STEP_BYTES = STEP * 2  # in an operand whose rows hold the summed elements
STEP_ROWS_BYTES = STEP * SEGMENT * 2  # in an operand whose rows are the summed elements


@cute.jit
def score(m: SimpleNamespace, number: Int32):
    """Issue the scores of the part's tile of this number, chunk by chunk as its keys land."""
    stage = number & 1
    target = m.tensor_at + (tiles.SCORES + SM100_BLOCK // 2 * stage)
    for c in cutlass.range_constexpr(CHUNKS):
        ptx.wait(m.bars + 8 * (tiles.LANDED_KEYS + c), stage)
        for k in cutlass.range_constexpr(STEPS):
            a = ptx.rows_descriptor(m.queries_at + c * BLOCK_BYTES + k * STEP_BYTES)
            b = ptx.rows_descriptor(m.keys_at + c * BLOCK_BYTES + k * STEP_BYTES)
            ptx.multiply(target, a, b, m.score, c + k > 0)
        ptx.commit(m.bars + 8 * (tiles.FREE_KEYS + c))
    ptx.commit(m.bars + 8 * (tiles.SCORED + stage))


@cute.jit
def add(m: SimpleNamespace, number: Int32, is_added: Int32):
    """Issue the value products of a tile, when both blocks have written its weights, chunk by chunk as its values land."""
    ptx.wait(m.bars + 8 * tiles.WEIGHED, number & 1)
    ptx.after_meeting()
    for half in cutlass.range_constexpr(2):
        for side in cutlass.range_constexpr(2):
            c = 2 * half + side
            ptx.wait(m.bars + 8 * (tiles.LANDED_VALUES + c), number & 1)
            for k in cutlass.range_constexpr(STEPS):
                a = ptx.rows_descriptor(m.weights_at + side * BLOCK_BYTES + k * STEP_BYTES)
                b = ptx.columns_descriptor(m.values_at + c * VALUE_BYTES + k * STEP_ROWS_BYTES, BLOCK_BYTES)
                ptx.multiply(m.tensor_at + (tiles.SUMS + 128 * half), a, b, m.add, is_added if side + k == 0 else 1)
            ptx.commit(m.bars + 8 * (tiles.FREE_VALUES + c))
    ptx.commit(m.bars + 8 * tiles.SUMMED)


@cute.jit
def issue(m: SimpleNamespace, part: SimpleNamespace, mRequests: cute.Tensor):
    """All products of a part: the scores of a tile come before the value products of the one before it."""
    scored, added, phase_q = Int32(0), Int32(0), Int32(0)
    for request in cutlass.range(part.first_request, part.stop, unroll=1):
        _, _, _, begin, end = tiles.span_of(mRequests, part, request)
        ptx.wait(m.bars + 8 * tiles.LANDED_QUERIES, phase_q)
        phase_q = phase_q ^ 1
        for tile in cutlass.range(begin, end + 1, unroll=1):
            if tile < end:
                score(m, scored)
                scored = scored + 1
            if tile == end - 1:
                ptx.commit(m.bars + 8 * tiles.FREE_QUERIES)
            if tile > begin:
                add(m, added, Int32(tile > begin + 1))
                added = added + 1
