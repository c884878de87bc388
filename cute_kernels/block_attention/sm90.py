"""The sm90 schedule: TMA and wgmma, two warpgroups that compute and a warp that fetches, Hopper only, c = 512 and r = 64.

A block owns 64 packed rows and walks the tiles of its part, 64 tokens each. Tiles of the context begin at positions that 64
divides, so that a tile is one box of a page of 64 or 128, or two pages of 32; the S rows of the block are a tile of their own
behind them. What a box holds past the pool or the block arrives as zeros. Two token tiles and the queries fill the shared
memory: 3 x 72 KB, and 8 KB of weights; the other weights lie where the queries' rotary part was, which stays in registers.

Warpgroup 0 (left) scores the even tiles of a request, warpgroup 1 (right) the odd ones. Left sums the value columns 0..255 of
all tiles, right 256..511, so that each needs the other's weights. Tiles are summed in order:

    left    softmax of tile 0, write P0                     arrive FIRST    (reference, shrink and weights of tile 0)
            O += P0 V0                                      wait SECOND
            O += P1 V1; score the next tile 0
    right   maximum of tile 1                               wait FIRST
            O += P0 V0, meanwhile softmax of tile 1,
            write P1                                        arrive SECOND   (the same of tile 1)
            O += P1 V1; score the next tile 1

The last tile of a request may have no partner; then right has no softmax, and arrives at SECOND at once.

This order takes two meetings a pair, and no weight is scaled after it was rounded. It is possible because the reference that
weights are measured against rises only where a row's maximum passes it by more than LAZY = 8 powers of two: weights stay below
256, sums below 2^8 times what they would be, and the result is the same. Were it the maximum itself, right would have to scale
its sums between the two products of every pair, and wait for the first to retire. Where it does rise, which after the first
tiles is seldom, that is what happens.

The fetching warp follows the table and fills a buffer's halves (columns 0..255, and 256..575) as they are released, left's by
left, right's by right. Where many row tiles read the same pages, each block also asks its slice of the next two tiles into L2,
so that a copy finds them there; only the first two of a part come unasked. The queries of the next request are asked ahead
too, and fetched when the last scores of this one have retired, but for their rotary part, in whose place P1 still is.
Registers are moved from its warpgroup to the other two.

It also stores. The rows of a whole request are rounded and laid where the second tile of a pair was, each warpgroup's columns
where its own values were; from there the fetching warp copies them out while the next request's first tile is scored, and only
then fills that buffer. Where the next request has but one tile, its scores wait for that.

Why no barrier is overrun: a warpgroup arrives at one for the second time only after it has waited for another at which the
other warpgroup arrived after it had waited for the first: FIRST(n) < SECOND(n) < FIRST(n + 1). What the warpgroups tell each
other at a request's end, both read before they arrive at the next request's FIRST or SECOND, and write behind one of them.

Why no tile is overwritten while it is read: a half of a buffer is read by the warpgroup that sums it, which releases it after
its own product with it retired, and by the scores, which retired before their scorer arrived at FIRST or SECOND, for which the
releasing one has waited. The queries are released by both when their last scores of a request have retired, the rotary part's
place by left at the end, when the last product with P1 has; right writes P1 after FIRST, at which left arrived with its rotary
part in registers. Rows that wait to be stored are overwritten by a second tile, which the fetching warp fills after it has
seen them read; or by the rows of a request of one tile, whose rotary part it does not fetch before. P0 is overwritten by left
after a refill of buffer 0 has landed, hence after right released it, hence after right's product with P0 retired; P1 by right
after the same of buffer 1 and left. The phase of a buffer's barriers turns with each score.

The launch is a dependent one: a block sets up its barriers while the kernel before it, whatever that is, ends. Then every
block, one without work too, waits for that kernel (griddepcontrol.wait) before it reads or writes global memory. Plan and
merge do the same, so that the end of one of these kernels means the end of all before it: the queries are there, the plan is
there, and no earlier reader is left of the output or of the pieces that this one writes. A kernel behind that is launched as
usual waits for the end of this one. The copies' descriptors, fetched before the wait, are arguments of the launch.

A row that is not live (before the start, past the end; unread pages may hold NaN) is masked in the scores and zeroed in shared
memory before the value product, each warpgroup its own columns, after the tile's scores retired. Behind the block's rows a
copy has left zeros. Only pairs that may hold an edge of the context run the code for it.

A whole request is written to the output; a piece from registers, as the tensor cores leave it, and `sm90_combine` merges
pieces.

Where the list gives every request two parts, 2i and 2i + 1, their blocks are a cluster and leave no pieces: they are joined.
Each has half of the tokens. The first finishes columns 0..255, which left holds in both, the second 256..511, which right
holds. So the first block's right and the second's left send their sums, and what these are measured against, to the same
warpgroup of the other block, which adds them to its own:

    sender     sums to where the tokens were     wait READY     copy to the other block's memory, where its queries were
    receiver                                     wait RECEIVED  add, lay out to be stored

READY is the other block's left saying that all its scores and products have retired; RECEIVED counts the bytes that arrive.
The blocks meet at the start, so that the other's barriers are set up, and at the end, so that neither's memory goes while the
other copies from it. A part of a joined request holds nothing else: each barrier is used once. The second part of a request of
one tile is empty, and such a request is not joined. The kernel for lists that cannot be joined (`may_join`) is compiled
without all this and launched without clusters.

    sm90_kernel.py    memory, barriers, who does what     sm90_finish.py       the end of a request
    sm90_producer.py  what is fetched when                sm90_tiles.py        masks, softmax, views of fragments
    sm90_compute.py   requests of a part                  sm90_descriptors.py  what the tensor cores read
    sm90_roles.py     a pair of tiles                     sm90_ptx.py          instructions
"""

from typing import Any

from cute_kernels.block_attention.config import NAME, SM90_UNIT, BlockAttentionConfig
from cute_kernels.block_attention.operands import fake_operands
from cute_kernels.errors import UnsupportedKernelError


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    from cute_kernels.block_attention.sm90_kernel import BlockAttentionSm90

    return BlockAttentionSm90


def compile_for(config: BlockAttentionConfig, arch: str, options: str = "", *, joins: bool = True) -> Any:
    """Compile for sm_90a; needs no GPU. `options`: more flags of the compiler. `joins`: see `may_join`."""
    why = config.sm90_reason(arch)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the portable schedule.")
    from cutlass import cute

    options = f"--gpu-arch {arch} --enable-tvm-ffi {options}"
    return cute.compile(kernel_class()(config, joins), *fake_operands(config, SM90_UNIT), options=options)
