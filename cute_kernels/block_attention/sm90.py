"""The sm90 schedule: TMA and wgmma, two warpgroups in a seesaw, Hopper only, c = 512 and r = 64.

A block owns 64 packed rows and walks the tiles of its part, 64 tokens each. Tiles of the context begin at positions that 64
divides, so that a tile is one box of a page of 64 or 128, or two pages of 32; the S rows of the block are a tile of their own
behind them. What a box holds past the pool or the block arrives as zeros. Two token tiles and the queries fill the shared
memory: 3 x 72 KB, and 8 KB of probabilities; the other probabilities lie where the queries' rotary part was, which stays in
registers.

Warpgroup 0 (left) scores the even tiles of a request, warpgroup 1 (right) the odd ones. Left sums the value columns 0..255 of
all tiles, right 256..511, so that each needs the other's probabilities. While one does its softmax, the other multiplies. A
pair of tiles, in order:

    left    softmax of tile 0                               arrive FIRST     (running maximum, scale of tile 0)
            O += P0 V0; refill tile 0, left half            wait SECOND
            scale P0 and O by tile 1's scale, write P0      arrive P0, wait P1
            O += P1 V1; score the next tile 0; refill tile 1, left half
    right   wait FIRST; softmax of tile 1                   arrive SECOND
            write P1; O += P1 V1                            wait P0
            O += P0 V0                                      arrive P1
            refill tile 1 and tile 0, right halves; score the next tile 1

The last tile of a request may have no partner; then right has no softmax and P1 is not used.

What comes into a buffer next is looked up in the page table by the first warp of each warpgroup, which issues the copies, while
a value product runs: a miss would stall the softmax. The copies are issued by one thread, without a branch that tells the
context from the block. Waits for a buffer spin. At the end four threads of a row trade their columns, so that a store of the
output is 16 bytes.

Why no barrier is overrun: a warpgroup arrives at one for the second time only after it has waited for another at which the
other warpgroup arrived after it had waited for the first: FIRST(n) < SECOND(n) < P0(n) < P1(n) < FIRST(n + 1). Where P1 is left
out, the request ends, and barriers of the whole block follow. SECOND also says that right has done with P0 of the pair before.

Why no tile is overwritten while it is read: a half of a buffer (columns 0..255, or 256..575) is filled only by the warpgroup
that sums it, after its own product with it retired. The other reader, the scores, retired before its scorer arrived at FIRST or
SECOND, for which the filler has waited. Each use of a buffer is followed by one fill of it: from the same request while that
has a tile for it, then from the next request, whose first two tiles thus come early; where a request does not use the second
buffer, the fill comes at its end. The phase of a buffer's barriers therefore turns with each score. The next request's queries
are fetched after the last SECOND, when all scores have retired, their rotary part when the last P1 was read.

The launch is a dependent one: a block sets up its barriers while the kernel before it, whatever that is, ends. Then every
block, one without work too, waits for that kernel (griddepcontrol.wait) before it reads or writes global memory. Plan and merge
do the same, so that the end of one of these kernels means the end of all before it: the queries are there, the plan is there,
and no earlier reader is left of the output or of the pieces that this one writes. A kernel behind that is launched as usual
waits for the end of this one. The copies' descriptors, fetched before the wait, are arguments of the launch.

A row that is not live (before the start, past the end; unread pages may hold NaN) is masked in the scores and zeroed in
shared memory before the value product, each warpgroup its own columns, after the tile's scores retired.
"""

from typing import Any

from cute_kernels.block_attention.config import NAME, BlockAttentionConfig
from cute_kernels.block_attention.operands import fake_operands
from cute_kernels.errors import UnsupportedKernelError


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    from cute_kernels.block_attention.sm90_kernel import BlockAttentionSm90

    return BlockAttentionSm90


def compile_for(config: BlockAttentionConfig, arch: str, options: str = "") -> Any:
    """Compile for sm_90a; needs no GPU. `options`: more flags of the compiler."""
    why = config.sm90_reason(arch)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the portable schedule.")
    from cutlass import cute

    options = f"--gpu-arch {arch} --enable-tvm-ffi {options}"
    return cute.compile(kernel_class()(config), *fake_operands(config), options=options)
