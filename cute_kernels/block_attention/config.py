"""What is fixed before a launch: tiles, the kernel's configuration, and how many parts share the work. Pure Python."""

from dataclasses import dataclass
from typing import Any

NAME = "block_attention"
BLOCK_M = 32  # packed rows (block row, head) of a tile
BLOCK_N = 32  # tokens of a tile
WARPS_M, WARPS_K = BLOCK_M // 16, 4  # a warp owns 16 rows, and a quarter of the latent's elements
THREADS = 32 * WARPS_M * WARPS_K
STAGES = 2
SM90_BLOCK = 64  # packed rows, and tokens, of a tile of the sm90 schedule
SM90_PAGE_SIZES = (32, 64, 128)
SM90_UNIT = 128  # fp32 values of a piece that a warp of the sm90 schedule stores in two turns: 8 rows by 16 columns
SM90_UNITS = 256  # of a row tile: by half of the columns, warp, row of a thread's two, and pair of groups of 8 columns
SM100_BLOCK = 128  # packed rows, and tokens, of a tile of the sm100 schedule: 64 rows for each of two blocks that share it
SM100_PAGE_SIZES = (32, 64, 128)
SEGMENT = 64  # elements of a swizzled row segment, 128 bytes
VECTOR = 8  # elements of a 16-byte copy
SCORE_PITCH = BLOCK_N + 4  # fp32 elements from a row of partial scores to the next, off the banks
PAGE_SIZES = (16, 32, 64, 128)
MAX_BLOCK_ROWS, MAX_HEADS = 16, 128
ITEM_COST = 2  # what starting on a request costs, in tiles
SM90_ITEM_COST = 3  # of the sm90 schedule, measured: its pipeline drains and fills, one more piece is stored and merged
SM100_ITEM_COST = 3  # of the sm100 schedule, a guess: nothing of it was measured
MIN_QUANTUM = 2  # least cost of a part, and least tiles for which a request is cut into more
FULL_ENOUGH = 0.9  # share of the multiprocessors that must have work for one more wave not to be tried
MAX_WAVES = 4


@dataclass(frozen=True)
class Schedule:
    """How a kernel cuts the work: what its plan and its workspace must know of it.

    Attributes:
        name: as `block_attention` takes it. block_rows: packed rows of a tile. block_tokens: tokens of a tile.
        item_cost: what starting on a request costs, in tiles. min_quantum: least cost, and least tiles, worth a part.
        aligned: tiles begin at positions that block_tokens divides, the block is a tile of its own behind them. Else the
            first tile begins at the context's first token, and the block follows the context without a gap.
        joins: whether it merges the two parts of a request itself, where `may_join` says that there may be such.
        blocks: thread blocks, each on a multiprocessor of its own, that share a tile.
    """

    name: str
    block_rows: int
    block_tokens: int
    item_cost: int = ITEM_COST
    min_quantum: int = MIN_QUANTUM
    aligned: bool = False
    joins: bool = False
    blocks: int = 1


PORTABLE = Schedule("portable", BLOCK_M, BLOCK_N)
SM90 = Schedule("sm90", SM90_BLOCK, SM90_BLOCK, SM90_ITEM_COST, aligned=True, joins=True)
SM100 = Schedule("sm100", SM100_BLOCK, SM100_BLOCK, SM100_ITEM_COST, aligned=True, blocks=2)
SCHEDULES = {schedule.name: schedule for schedule in (PORTABLE, SM90, SM100)}


@dataclass(frozen=True)
class BlockAttentionConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        value_width: c, elements of the latent that are also the value. rotary: r, further elements of the key.
        page_size: P, tokens. dtype: bfloat16 or float16.
    """

    value_width: int
    rotary: int
    page_size: int
    dtype: str

    @property
    def width(self) -> int:
        """W = c + r."""
        return self.value_width + self.rotary

    @property
    def segments(self) -> int:
        """128-byte segments of a row in shared memory; the last may be part zeros."""
        return -(-self.width // SEGMENT)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block: the token tiles and the partial scores."""
        return STAGES * BLOCK_N * self.segments * SEGMENT * 2 + WARPS_K * BLOCK_M * SCORE_PITCH * 4

    def reason(self) -> str | None:
        """None where this can be compiled, else what is wrong with it."""
        if self.dtype not in ("bfloat16", "float16"):
            return f"dtype must be bfloat16 or float16, it is {self.dtype}"
        if self.page_size not in PAGE_SIZES:
            return f"page size must be one of {', '.join(map(str, PAGE_SIZES))}, it is {self.page_size}"
        if self.value_width < SEGMENT or self.value_width % SEGMENT or self.value_width > 512:
            return f"value_width must be a multiple of {SEGMENT} up to 512, it is {self.value_width}"
        if self.rotary < VECTOR or self.rotary % VECTOR or self.rotary > SEGMENT:
            return f"the key must be wider than the value by a multiple of {VECTOR} up to {SEGMENT}, it is by {self.rotary}"
        return None

    def sm90_reason(self, arch: str) -> str | None:
        """None where the sm90 schedule takes this on a compile target, else why not."""
        if arch != "sm_90a":
            return f"the sm90 schedule needs sm_90a, this is {arch}"
        if (self.value_width, self.rotary) != (512, SEGMENT):
            return f"the sm90 schedule needs c = 512 and r = {SEGMENT}, they are {self.value_width} and {self.rotary}"
        if self.page_size not in SM90_PAGE_SIZES:
            return f"the sm90 schedule needs pages of {', '.join(map(str, SM90_PAGE_SIZES))} tokens, they have {self.page_size}"
        return self.reason()

    def sm100_reason(self, arch: str) -> str | None:
        """None where the sm100 schedule takes this on a compile target, else why not."""
        if arch != "sm_100a":
            return f"the sm100 schedule needs sm_100a, this is {arch}"
        if (self.value_width, self.rotary) != (512, SEGMENT):
            return f"the sm100 schedule needs c = 512 and r = {SEGMENT}, they are {self.value_width} and {self.rotary}"
        if self.page_size not in SM100_PAGE_SIZES:
            sizes = ", ".join(map(str, SM100_PAGE_SIZES))
            return f"the sm100 schedule needs pages of {sizes} tokens, they have {self.page_size}"
        return self.reason()

    def reason_of(self, schedule: str, arch: str) -> str | None:
        """None where the schedule of this name takes this on a compile target, else why not."""
        reasons = {SM90.name: self.sm90_reason, SM100.name: self.sm100_reason}
        return reasons[schedule](arch) if schedule in reasons else self.reason()


def candidates(config: BlockAttentionConfig, arch: str) -> tuple[str, ...]:
    """Names of the schedules worth a trial on a compile target, the trusted one first.

    What stands behind the first was never run on its device here: it is to be taken only where it passed a check against
    the twin on that very device and was faster there.
    """
    if config.sm90_reason(arch) is None:
        return (SM90.name,)
    if config.sm100_reason(arch) is None:
        return (PORTABLE.name, SM100.name)
    return (PORTABLE.name,)


def may_join(batch: Any, parts: Any) -> Any:
    """Whether a work list may give every request two parts, 2i and 2i + 1. With more parts for each they would be too long."""
    return (parts % 2 == 0) & (2 * batch <= parts) & (parts < 3 * batch)


def pick_schedule(config: BlockAttentionConfig, arch: str) -> str:
    """Name of the schedule that is trusted with a configuration on a compile target."""
    return candidates(config, arch)[0]


def shape_reason(block_rows: int, heads: int) -> str | None:
    """None where S rows and H heads are covered, else what is wrong with them."""
    if not 1 <= block_rows <= MAX_BLOCK_ROWS:
        return f"block rows must be 1 to {MAX_BLOCK_ROWS}, there are {block_rows}"
    if not 1 <= heads <= MAX_HEADS:
        return f"heads must be 1 to {MAX_HEADS}, there are {heads}"
    return None


def num_parts(block_rows: int, heads: int, num_sms: int, schedule: Schedule = PORTABLE) -> int:
    """Into how many parts the tokens of a batch are cut: the grid is (row tiles, parts), whatever the lengths are.

    One wave of blocks where that fills the device, else the number of waves, up to MAX_WAVES, that fills it best.

    Args:
        block_rows: S. heads: H. num_sms: multiprocessors of the device; one block runs on each. schedule: its tiles.
    """
    row_tiles = -(-block_rows * heads // schedule.block_rows)
    places = max(num_sms // schedule.blocks, 1)  # for the blocks of a tile
    best, best_filled = 1, 0.0
    for wave in range(1, MAX_WAVES + 1):
        parts = wave * places // row_tiles
        filled = parts * row_tiles / (wave * places)
        if filled > best_filled:
            best, best_filled = parts, filled
        if best_filled >= FULL_ENOUGH:
            break
    return best


def workspace_shapes(
    max_batch: int, block_rows: int, heads: int, value_width: int, num_sms: int, schedule: Schedule = PORTABLE
) -> dict[str, tuple[int, ...]]:
    """Shapes of a workspace's tensors: `requests` and `boundaries` are int32, the others fp32."""
    parts, rows = num_parts(block_rows, heads, num_sms, schedule), block_rows * heads
    piece = (rows, value_width)
    if schedule is SM90:
        piece = (-(-rows // SM90_BLOCK) * SM90_UNITS, SM90_UNIT)
    return {
        "requests": (max_batch, 4),
        "boundaries": (parts + 1, 4),
        "partial_out": (2 * parts, *piece),
        "partial_lse": (2 * parts, rows),
    }
