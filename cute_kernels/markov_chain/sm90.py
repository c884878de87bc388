"""The sm90 schedule: TMA and wgmma, Hopper only, ranks that 64 divides.

A block stays on its multiprocessor for a step and walks tiles of 64 rows of W2, every `blocks`-th. One warp fetches: tiles of
W2 into a ring of buffers, and for each group of 64 requests the tile's 64 by 64 base logits into a ring of slots. Two
warpgroups read: they multiply 64 codes, in shared memory since the step's start, by a tile, D[request, id], fp32. They take the
items (tile, group) in turn, so that one finds its winners while the other multiplies. A thread has two requests of an item and
16 ids of each.

The tensor cores read the tile and the codes as they lie; the base logits arrive in the same 128-byte swizzle, in which the
eight requests that a warp reads at once lie on different banks.

Steps overlap (programmatic dependent launch): a block of the next step starts where one of this step has ended, and fills its
buffers, since of all it reads only the codes depend on the step before; for those it waits. The first step does so behind the
launch that zeroes the keys, which waits for what came before as every launch does. Odd steps walk the tiles backwards: they
begin with those that the step before left in L2. Base logits are read once and told to leave L2 first.

Barriers. Buffer s holds the tiles i with i % tiles = s, slot t the items n = i * groups + g with n % slots = t, each in order.
`full` of a buffer or slot completes once a use, by the fetching thread's arrival and the bytes; in use u = 0, 1, ... its parity
is u % 2. So does `empty`: of a buffer by 4 warps for each of the tile's items, of a slot by the 4 warps of its one reader.
Before use u the fetching warp waits for `empty` of use u - 1, parity (u - 1) % 2; before use 0 it passes, as a fresh barrier
counts as having completed odd parity. Neither side can be two uses ahead of the other, so that parities are not mistaken. No
deadlock: the fetching warp goes in the order of the items, a tile before its slots, and waits only for items before; a reader
waits only for its own item. All that is fetched is read, so that no copy is in flight when the block ends.
"""

from cute_kernels.markov_chain.config import BLOCK


def num_blocks(vocab: int, batch: int, groups: int, multiprocessors: int) -> int:
    """Blocks that share the tiles, for each set of `groups` * 64 requests: all sets are resident at once where they can be."""
    sets = -(-batch // (groups * BLOCK))
    return min(-(-vocab // BLOCK), max(1, multiprocessors // sets))


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    from cute_kernels.markov_chain.sm90_kernel import MarkovChainSm90

    return MarkovChainSm90
