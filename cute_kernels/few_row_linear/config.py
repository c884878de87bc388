"""What is fixed before a launch: the kernel's configuration, and how many blocks share K. Pure Python."""

from dataclasses import dataclass

NAME = "few_row_linear"
ARCH = "sm_90a"
VECTOR = 8  # elements of 16 bytes
CHUNK = 64  # elements of K in a swizzled row of shared memory, 128 bytes
BLOCK = 64  # weight rows of a tile
COLUMNS = (8, 16)  # rows of x, padded
MAX_ROWS = COLUMNS[-1]
TILE_COSTS = {1: 2, 2: 4, 8: 10}  # blocks of a cluster -> what a tile costs beside its chunks, in chunks. Not 4: see README
SPLITS = tuple(TILE_COSTS)
MAX_DEPTH = 2  # chunks of a stage
PITCH = BLOCK + 4  # fp32 elements from a column of partial sums to the next, off the banks and a multiple of 16 bytes
HEADER_BYTES = 1024  # of shared memory: barriers
SHARED_BYTES = 115_712  # of a block, so that the next launch's block fits beside it: (228 KB of Hopper) / 2 - 1 KB
HOPPER_MULTIPROCESSORS = (132, 114, 78)  # of H100 and H200 SXM, H100 PCIe, H20: those that kernels are built ahead for
FULL_ENOUGH = 0.9  # share of the multiprocessors that must have work

LINEAR, SILU_MUL = "linear", "silu_mul"
FORMS = (LINEAR, SILU_MUL)


def tile_outputs(form: str) -> int:
    """Output columns of a tile: under silu_mul half its weight rows are of the gate."""
    return BLOCK // 2 if form == SILU_MUL else BLOCK


@dataclass(frozen=True)
class Product:
    """What is multiplied by.

    Attributes:
        outputs: N. inner: K. groups: G. form: linear, or silu_mul of two weights. transposed: contiguous along N.
    """

    outputs: int
    inner: int
    groups: int = 1
    form: str = LINEAR
    transposed: bool = False

    @property
    def tiles(self) -> int:
        """Of all groups."""
        return self.groups * -(-self.outputs // tile_outputs(self.form))

    def reason(self) -> str | None:
        """None where a kernel takes it, else what is wrong with it."""
        if self.inner < CHUNK or self.inner % CHUNK or self.outputs < VECTOR or self.outputs % VECTOR:
            return f"K must be a multiple of {CHUNK} and N of {VECTOR}, they are {self.inner} and {self.outputs}"
        return None


@dataclass(frozen=True)
class FewRowLinearConfig:
    """What is fixed when the kernel is compiled.

    Attributes:
        columns: rows of x, padded. split: blocks of a cluster, each with a part of K. depth: chunks of 64 of K in a stage.
        dtype: bfloat16 or float16. form: linear, or silu_mul of two weights. transposed: weights are contiguous along N.
    """

    columns: int
    split: int
    depth: int
    dtype: str
    form: str = LINEAR
    transposed: bool = False

    @property
    def outputs(self) -> int:
        """Output columns of a tile."""
        return tile_outputs(self.form)

    @property
    def own_columns(self) -> int:
        """Columns whose sums a block of a cluster completes."""
        return self.columns // self.split

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return BLOCK * CHUNK * self.depth * 2

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return self.columns * CHUNK * self.depth * 2

    @property
    def partial_floats(self) -> int:
        """Of a block's shared memory, for the partial sums that it is sent."""
        return self.columns * PITCH

    @property
    def stages(self) -> int:
        """Of the ring."""
        return (SHARED_BYTES - HEADER_BYTES - 4 * self.partial_floats - 1024) // (self.weight_bytes + self.x_bytes)

    def reason(self) -> str | None:
        """None where this can be compiled, else what is wrong with it."""
        if self.dtype not in ("bfloat16", "float16"):
            return f"dtype must be bfloat16 or float16, it is {self.dtype}"
        if self.form not in FORMS:
            return f"form must be one of {', '.join(FORMS)}, it is {self.form}"
        if self.columns not in COLUMNS or self.split not in SPLITS:
            return f"columns must be among {COLUMNS} and split among {SPLITS}, they are {self.columns} and {self.split}"
        if self.depth not in (1, MAX_DEPTH):
            return f"depth must be 1 or {MAX_DEPTH}, it is {self.depth}"
        if self.transposed and self.form == SILU_MUL:
            return "weights of silu_mul must be contiguous along K"
        return None


def columns_for(rows: int) -> int:
    """The least padding of so many rows of x, 1 to MAX_ROWS."""
    return next(columns for columns in COLUMNS if columns >= rows)


def pick_split(product: Product, multiprocessors: int) -> int:
    """Blocks that share K: of those that give nearly every multiprocessor work, so that the busiest has least; else the most.

    Does not depend on the rows of x, so that a row's sum is made in the same order whatever its company.
    """
    tiles, chunks = product.tiles, product.inner // CHUNK
    possible = [split for split in TILE_COSTS if chunks % split == 0]

    def busiest(split: int) -> int:
        rounds = -(-tiles // max(1, multiprocessors // split))
        return rounds * (chunks // split + TILE_COSTS[split])

    enough = [split for split in possible if tiles * split >= FULL_ENOUGH * multiprocessors]
    return min(enough, key=busiest, default=possible[-1])


def config_for(rows: int, product: Product, dtype: str, multiprocessors: int, split: int | None = None) -> FewRowLinearConfig:
    """The kernel of a call with so many rows of x. split None: as `pick_split` says."""
    split = pick_split(product, multiprocessors) if split is None else split
    depth = MAX_DEPTH if product.inner // CHUNK // split % MAX_DEPTH == 0 else 1
    return FewRowLinearConfig(columns_for(rows), split, depth, dtype, product.form, product.transposed)


def num_clusters(config: FewRowLinearConfig, product: Product, multiprocessors: int) -> int:
    """Clusters that share the tiles: one block a multiprocessor, or fewer."""
    return max(1, min(product.tiles, multiprocessors // config.split))
