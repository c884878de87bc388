"""What is fixed before a launch: schedules, the kernel's configuration, and which of them a call gets. Pure Python."""

from dataclasses import dataclass

from cute_kernels.arch import ARCHES

NAME = "markov_chain"
VECTOR = 8  # elements of 16 bytes
COLUMNS = 8  # requests of a group of the portable schedule
ID_BITS = 31  # of a key, below the value
GROUPS = (1, 4, 8)  # of COLUMNS requests in a block of the portable schedule
BASES = {"bfloat16": 2, "float16": 2, "float32": 4}  # of the base logits, with their bytes

PORTABLE, SM90 = "portable", "sm90"
SM90_ARCH = "sm_90a"
BLOCK = 64  # requests of a group of the sm90 schedule, and rows of W2 of its tile
SM90_GROUPS = (1, 2, 4)  # of BLOCK requests in a block of the sm90 schedule
SM90_BATCHES = tuple(groups * BLOCK for groups in SM90_GROUPS)  # the largest of each configuration
SEGMENT = 128  # bytes of a swizzled row of shared memory
MAX_STAGES = 6  # tiles of W2 in flight
HEADER_BYTES = 2048  # of its shared memory: barriers, previous ids
RESERVED_BYTES = 1024  # of every block's shared memory on sm_90 and later


@dataclass(frozen=True)
class MarkovChainConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        rank: R. groups: of 8 requests that a block takes, of 64 in the sm90 schedule. base: dtype of the base logits.
        dtype: of W1 and W2, bfloat16 or float16. codes: whether W1 of the previous tokens is written out.
        schedule: portable or sm90.
    """

    rank: int
    groups: int
    base: str
    dtype: str
    codes: bool = False
    schedule: str = PORTABLE

    def reason(self) -> str | None:
        """None where this can be compiled, else what is wrong with it."""
        if self.dtype not in ("bfloat16", "float16"):
            return f"W1 and W2 must be bfloat16 or float16, they are {self.dtype}"
        if self.base not in BASES:
            return f"base logits must be one of {', '.join(BASES)}, they are {self.base}"
        if self.rank < VECTOR or self.rank % VECTOR or self.rank > 512:
            return f"rank must be a multiple of {VECTOR} up to 512, it is {self.rank}"
        if self.schedule not in (PORTABLE, SM90):
            return f"schedule must be {PORTABLE} or {SM90}, it is {self.schedule}"
        known = SM90_GROUPS if self.schedule == SM90 else GROUPS
        if self.groups not in known:
            return f"groups must be one of {known}, it is {self.groups}"
        if self.schedule == SM90 and self.rank % BLOCK:
            return f"the sm90 schedule needs a rank that {BLOCK} divides, it is {self.rank}"
        if self.schedule == SM90 and self.stages()[1] < 2:
            return f"the sm90 schedule has no room for {self.groups * BLOCK} codes of rank {self.rank} beside its tiles"
        return None

    def stages(self) -> tuple[int, int]:
        """Buffers of the sm90 schedule: tiles of W2, and slots for BLOCK by BLOCK base logits.

        As many tiles as fit together with their base logits; where fewer than two do, two tiles and what slots are left.
        """
        tile, slot = 2 * BLOCK * self.rank, BASES[self.base] * BLOCK * BLOCK
        left = ARCHES[SM90_ARCH].shared_bytes - RESERVED_BYTES - HEADER_BYTES - self.groups * tile  # codes are as large
        tiles = max(2, min(MAX_STAGES, left // (tile + self.groups * slot)))
        return tiles, min(tiles * self.groups, max(0, left - tiles * tile) // slot)


def groups_for(batch: int) -> int:
    """Groups of 8 requests in a block: the fewest of `GROUPS` that hold the batch, else the most."""
    return next((groups for groups in GROUPS if groups * COLUMNS >= batch), GROUPS[-1])


def sm90_config(rank: int, batch: int, base: str, dtype: str, codes: bool) -> MarkovChainConfig | None:
    """For the sm90 schedule: the fewest groups of 64 that hold the batch, else the most that fit. None where none does."""
    found = None
    for groups in SM90_GROUPS:
        config = MarkovChainConfig(rank, groups, base, dtype, codes, SM90)
        if config.reason() is None:
            found = config
            if groups * BLOCK >= batch:
                break
    return found
