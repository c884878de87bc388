"""The sm100 schedule: TMA, tcgen05 and tensor memory, two blocks a tile; Blackwell (sm_100a) only, c = 512 and r = 64.

It has never run on a GPU. It compiles without spills, and ran in an emulator of its PTX that knows the instructions from the
PTX ISA: products, copies and their barriers early, late and in random order, against the twin. So it is no one's first choice
(`config.pick_schedule`), only a candidate that may earn its place on the device itself (`config.candidates`).

A cluster of two blocks owns 128 packed rows, 64 each, and walks the tiles of its part, 128 tokens each. Tiles begin where 128
divides; the S rows of the block are a tile of their own behind the context's. Where a request has fewer rows than 128 the
others are zeros: their products are wasted, but a token's 1,152 bytes at 8 TB/s take longer than its products with 128 rows
at 2.2 PFLOP/s. Each product (tcgen05.mma, cta_group::2, M = 128) is issued once, by the first block, for both blocks' tensor
cores:

    scores  128 rows x 128 tokens   a block holds 64 rows of the queries and the keys of 64 of the tokens
    sums    128 rows x 512 columns  a block holds 64 rows of the weights, and of all tokens 256 of the value columns

Each block fetches what it holds, so that a latent comes once as a key and once as values. A result lies in the tensor memory
of the block that has its rows: lanes 0..63 have the first half of the product's columns, lanes 64..127 the second. Of 512
columns the sums take 256, the scores of two tiles 64 each. Queries (72 KB), keys (72 KB) and values (64 KB) of one tile and
the weights (16 KB) fill the shared memory; chunks of keys and values are refilled one by one as products have read them.

    warps 0..3   of each block: scores to weights, sums to a new reference where it rises, results    sm100_weights.py
    warp 4       of each block: fetches queries and keys                                               sm100_producer.py
    warp 5       of each block: fetches values                                                         sm100_producer.py
    warp 6       of the first block: issues scores(0), then scores(i + 1), sums(i) ..., sums(last)     sm100_products.py

While tile i becomes weights, the tensor cores score tile i + 1. The reference that weights are measured against rises only
where a row's maximum passes it by more than LAZY = 8 powers of two, as in the sm90 schedule: what is summed is rarely
touched.

Barriers, in the order of a tile's life. A block's own copy of each; at those marked L only the first block's counts, for
both:

    LANDED_QUERIES, LANDED_KEYS, LANDED_VALUES   L; bytes of both blocks' copies
    SCORED     the scores are in tensor memory; told to both blocks
    WEIGHED    L; all 8 warps of both have read the scores, written the weights and moved the sums
    SUMMED     the sums hold the tile; the weights have been read; told to both
    FREE_*     products have read the chunk; told to both

Why no barrier is overrun. Products are issued in order by one thread. It waits for WEIGHED of every tile; a warp that weighs
waits for SCORED of every tile, and for SUMMED of every tile, at the next one or at the end of its request, before it arrives
at WEIGHED again. So scores(i + 2) is issued after WEIGHED(i), which all arrived at after SCORED(i); sums(i + 1) after
WEIGHED(i + 1), hence after all waited for SUMMED(i). A copy is issued after its chunk was free, hence after the products
waited for what had landed.

Why nothing is overwritten while it is read. Scores of tile i + 2 take the place of those of tile i, which were read before
WEIGHED(i). Weights are written, and sums moved, after SUMMED of the tile before. The sums of a request's first tile overwrite
those of the request before, which were written out before any of its warps arrived at WEIGHED of that tile. Threads tell one
another of tensor memory between fence::before_thread_sync and fence::after_thread_sync; a commit has the first in it.

A row that is not live (before the start, past the end; unread pages may hold NaN) is masked in the scores, and zeroed in the
values before the product. Only a tile that holds an edge runs the code for it: its values' bytes count at a barrier of the
block that they land in (LANDED_EDGE), whose weighing warps wait for it, clear rows and then arrive at WEIGHED; LANDED_VALUES
of such a tile the first block arrives at without bytes. One such barrier is enough: values of the next tile are asked for
after WEIGHED of this one.

The launch is a dependent one, as the sm90 schedule's is: every block waits for the kernel before it (griddepcontrol.wait)
before it reads or writes global memory. It lets the next one start after tensor memory was allocated, so that no later kernel
holds it. The last act is a meeting of both blocks: neither ends while the other's products or arrivals may reach for its
memory; for the same reason the fetching warps wait for the last releases.

A whole request is written to the output, a piece to the workspace, both row by row; `combine` merges pieces.

Source: which operand halves a block of a pair holds and where results lie, NVIDIA/cutlass
include/cute/atom/mma_traits_sm100.hpp; splitting keys by tokens and values by columns,
examples/python/CuTeDSL/cute/blackwell/kernel/attention/mla/mla_decode_fp16.py; both at 7107b05. The rest is the PTX ISA's
chapter on tcgen05.
"""

from typing import Any

from cute_kernels.block_attention.config import NAME, BlockAttentionConfig
from cute_kernels.block_attention.operands import fake_operands
from cute_kernels.errors import UnsupportedKernelError


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    from cute_kernels.block_attention.sm100_kernel import BlockAttentionSm100

    return BlockAttentionSm100


def compile_for(config: BlockAttentionConfig, arch: str, options: str = "") -> Any:
    """Compile for sm_100a; needs no GPU. `options`: more flags of the compiler."""
    why = config.sm100_reason(arch)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the portable schedule.")
    from cutlass import cute

    options = f"--gpu-arch {arch} --enable-tvm-ffi {options}"
    return cute.compile(kernel_class()(config), *fake_operands(config, config.value_width), options=options)
