"""What is timed: for each kernel a dataclass with its shape, its bytes and FLOP, and how its inputs are made.

All in bf16. FLOP are those of matrix products: what else there is does not run on the tensor cores, whose speed they are
held against. Bytes are those that must move, each counted once a step. Inputs come in sets, so that a graph of several calls
does not find what it reads in L2.

B requests, S block rows, H heads, T tokens, L layers, P tokens of a page, W = c + r, V vocabulary, R rank, K steps; of a linear
layer M rows, G groups, N outputs of K.
"""

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from cute_kernels.few_row_linear.config import LINEAR, SILU_MUL

DTYPE, ITEMSIZE = torch.bfloat16, 2
SPARE_PAGES = 2  # in no table
Inputs = dict[str, Any]
"""One set: tensors by name, results' buffers included."""


class Case(Protocol):
    """What the bench asks of a case.

    Attributes:
        kernel: its name, as in `cute_kernels`. label: the shape. flop: of matrix products. bytes: read and written.
    """

    kernel: ClassVar[str]

    @property
    def label(self) -> str: ...
    @property
    def flop(self) -> int: ...
    @property
    def bytes(self) -> int: ...

    def sets(self, count: int, device: torch.device) -> list[Inputs]:
        """So many sets of inputs, the same in every run."""
        ...


class Source:
    """Random numbers of a case, the same in every run."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal, bf16."""
        return torch.randn(shape, dtype=DTYPE, generator=self.generator, device=self.device)

    def integers(self, largest: int, *shape: int) -> torch.Tensor:
        """-largest .. largest, bf16."""
        drawn = torch.randint(-largest, largest + 1, shape, dtype=torch.int8, generator=self.generator, device=self.device)
        return drawn.to(DTYPE)

    def angles(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of random angles, fp32."""
        angles = 100 * torch.randn(shape, generator=self.generator, device=self.device)
        return angles.cos(), angles.sin()

    def permutation(self, count: int) -> torch.Tensor:
        """0 .. count-1 in random order, int64."""
        return torch.randperm(count, generator=self.generator, device=self.device)

    def unwritten(self, *shape: int) -> torch.Tensor:
        """A buffer for a result, bf16, NaN."""
        return torch.full(shape, torch.nan, dtype=DTYPE, device=self.device)


@dataclass(frozen=True)
class BlockAttentionCase:
    """S block rows of B requests over contexts in shuffled pages; non-causal.

    Attributes:
        context: tokens of each request; with `shortest` the most that one may have: lengths are then log-uniform between
            the two, the same in every run.
    """

    batch: int
    context: int
    heads: int = 64
    rows: int = 8
    page_size: int = 64
    value_width: int = 512
    rotary: int = 64
    scale: float = 192**-0.5
    shortest: int | None = None
    kernel: ClassVar[str] = "block_attention"

    @property
    def label(self) -> str:
        context = self.context if self.shortest is None else f"{self.shortest}..{self.context}"
        pages = "" if self.page_size == 64 else f" P={self.page_size}"
        return f"B={self.batch} context={context} H={self.heads} S={self.rows}{pages}"

    @property
    def width(self) -> int:
        """W."""
        return self.value_width + self.rotary

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context of each request, in tokens."""
        if self.shortest is None:
            return (self.context,) * self.batch
        drawn, low, high = random.Random(0), math.log(self.shortest), math.log(self.context)
        return tuple(round(math.exp(drawn.uniform(low, high))) for _ in range(self.batch))

    @property
    def pages_of_requests(self) -> tuple[int, ...]:
        """Live entries of each table's row: they hold the context, and the block where somebody wants it there."""
        return tuple(-(-(length + self.rows) // self.page_size) for length in self.lengths)

    @property
    def flop(self) -> int:
        """2 * S * H * (W + c) * sum of n, n = context + S: scores and values."""
        tokens = sum(self.lengths) + self.batch * self.rows
        return 2 * self.rows * self.heads * tokens * (self.width + self.value_width)

    @property
    def bytes(self) -> int:
        """W * sum of n + B * S * H * (W + c) elements: latents once, queries, results."""
        tokens, packed = sum(self.lengths) + self.batch * self.rows, self.batch * self.rows * self.heads
        return ITEMSIZE * (tokens * self.width + packed * (self.width + self.value_width))

    def sets(self, count: int, device: torch.device) -> list[Inputs]:
        """The sets differ in queries, latents and pages and share lengths and table, as the layers of a step do.

        Whatever lies outside the contexts is NaN: pages in no table, what follows the context in a request's last ones, and
        the page that fills the table's rows. A context's first and last token are twice as large as the others: one token
        among thousands would not be missed.
        """
        source, live = Source(device), self.pages_of_requests
        num_pages = sum(live) + SPARE_PAGES
        shuffled = source.permutation(num_pages)
        table = shuffled[-1].repeat(self.batch, max(live))
        for row, pages_of_request in zip(table, shuffled[:-SPARE_PAGES].split(live), strict=True):
            row[: len(pages_of_request)] = pages_of_request
        lengths = torch.tensor(self.lengths, device=device)
        dead = torch.ones(num_pages, self.page_size, 1, dtype=torch.bool, device=device)
        for row, length in zip(table, self.lengths, strict=True):
            position = torch.arange(length, device=device)
            dead[row[position // self.page_size], position % self.page_size] = False
        shared = {"page_table": table.int(), "context_len": lengths.int()}
        last = lengths - 1
        last_page = table.gather(1, last[:, None] // self.page_size)[:, 0]
        ends = torch.cat((table[:, 0], last_page)), torch.cat((torch.zeros_like(last), last % self.page_size))
        found = []
        for _ in range(count):
            pages = source.normal(num_pages, self.page_size, self.width).masked_fill_(dead, torch.nan)
            pages[ends] *= 2
            found.append(
                {
                    "q": source.normal(self.batch, self.rows, self.heads, self.width),
                    "block_latents": source.normal(self.batch, self.rows, self.width),
                    "pages": pages,
                    **shared,
                    "out": source.unwritten(self.batch, self.rows, self.heads, self.value_width),
                }
            )
        return found


@dataclass(frozen=True)
class ContextAppendCase:
    """T tokens into random slots of L layers' pages, all pools in one allocation; every token has a slot."""

    tokens: int
    layers: int = 5
    page_size: int = 64
    latent: int = 512
    rotary: int = 64
    eps: float = 1e-5
    kernel: ClassVar[str] = "context_append"
    flop: ClassVar[int] = 0

    @property
    def label(self) -> str:
        return f"tokens={self.tokens} layers={self.layers}"

    @property
    def bytes(self) -> int:
        """2 * T * L * W elements: rows read and written."""
        return 2 * self.tokens * self.layers * (self.latent + self.rotary) * ITEMSIZE

    def sets(self, count: int, device: torch.device) -> list[Inputs]:
        """`pool` is [L, num_pages, P, W], NaN all over; `pools` are its layers."""
        source, width = Source(device), self.latent + self.rotary
        num_pages = -(-self.tokens // self.page_size) + SPARE_PAGES
        found = []
        for _ in range(count):
            pool = source.unwritten(self.layers, num_pages, self.page_size, width)
            cos, sin = source.angles(self.tokens, self.rotary // 2)
            found.append(
                {
                    "z": source.normal(self.tokens, self.layers, width),
                    "norm_weight": 1 + source.normal(self.layers, self.latent) / 4,
                    "cos": cos,
                    "sin": sin,
                    "slots": source.permutation(num_pages * self.page_size)[: self.tokens],
                    "pool": pool,
                    "pools": list(pool),
                    "eps": self.eps,
                }
            )
        return found


@dataclass(frozen=True)
class QueryRopeCase:
    """The rotary part of each head of B * S rows, a view into q_b_proj's output, into the buffer of absorbed queries."""

    batch: int
    rows: int = 8
    heads: int = 64
    rotary: int = 64
    nope: int = 128
    latent: int = 512
    kernel: ClassVar[str] = "query_rope"
    flop: ClassVar[int] = 0

    @property
    def label(self) -> str:
        return f"rows={self.batch * self.rows} H={self.heads}"

    @property
    def bytes(self) -> int:
        """B * S rows: 2 * H * r elements read and written, r fp32 of cosines and sines."""
        return self.batch * self.rows * (2 * self.heads * self.rotary * ITEMSIZE + 4 * self.rotary)

    def sets(self, count: int, device: torch.device) -> list[Inputs]:
        source = Source(device)
        found = []
        for _ in range(count):
            cos, sin = source.angles(self.batch, self.rows, self.rotary // 2)
            projected = source.normal(self.batch, self.rows, self.heads, self.nope + self.rotary)
            out = source.unwritten(self.batch, self.rows, self.heads, self.latent + self.rotary)
            found.append({"rotary": projected[..., self.nope :], "cos": cos, "sin": sin, "out": out})
        return found


@dataclass(frozen=True)
class MarkovChainCase:
    """K greedy steps of B requests. The numbers are small integers: every sum is exact in bf16, ties are common."""

    batch: int
    vocabulary: int = 163_840
    rank: int = 256
    steps: int = 7
    kernel: ClassVar[str] = "markov_chain"

    @property
    def label(self) -> str:
        return f"B={self.batch} V={self.vocabulary} R={self.rank} K={self.steps}"

    @property
    def flop(self) -> int:
        """2 * B * K * V * R."""
        return 2 * self.batch * self.steps * self.vocabulary * self.rank

    @property
    def bytes(self) -> int:
        """K * V * (R + B) elements: W2 once a step, the base logits."""
        return self.steps * self.vocabulary * (self.rank + self.batch) * ITEMSIZE

    def sets(self, count: int, device: torch.device) -> list[Inputs]:
        source = Source(device)
        return [
            {
                "base_logits": source.integers(4, self.batch, self.steps, self.vocabulary),
                "anchors": torch.randint(0, self.vocabulary, (self.batch,), generator=source.generator, device=device),
                "w1": source.integers(1, self.vocabulary, self.rank),
                "w2": source.integers(1, self.vocabulary, self.rank),
            }
            for _ in range(count)
        ]


@dataclass(frozen=True)
class FewRowLinearCase:
    """M rows through a linear layer without bias, or through the inside of a gated MLP.

    Attributes:
        name: of the product, in a drafter's step. outputs, inner, groups, form, transposed: see
            `cute_kernels.few_row_linear.Product`.
    """

    name: str
    outputs: int
    inner: int
    rows: int = 8
    groups: int = 1
    form: str = LINEAR
    transposed: bool = False
    kernel: ClassVar[str] = "few_row_linear"

    @property
    def label(self) -> str:
        groups = "" if self.groups == 1 else f" G={self.groups}"
        form = "" if self.form == LINEAR else f" {self.form}"
        return f"{self.name} rows={self.rows}{groups} N={self.outputs} K={self.inner}{form}{' transposed' * self.transposed}"

    @property
    def _weights(self) -> int:
        """Elements: G * N * K, twice for a gated MLP, which has two of them."""
        return (2 if self.form == SILU_MUL else 1) * self.groups * self.outputs * self.inner

    @property
    def flop(self) -> int:
        """2 * M * G * N * K for each weight."""
        return 2 * self.rows * self._weights

    @property
    def bytes(self) -> int:
        """G * N * K elements of each weight, M * G * (K + N) of rows and results."""
        return ITEMSIZE * (self._weights + self.rows * self.groups * (self.inner + self.outputs))

    def sets(self, count: int, device: torch.device) -> list[Inputs]:
        """`weight`, or `gate` and `up`, are so small that a product is about 1: of large ones SiLU makes what ReLU does."""
        source = Source(device)
        lead = (self.groups,) if self.groups > 1 or self.transposed else ()
        stored = (self.inner, self.outputs) if self.transposed else (self.outputs, self.inner)
        found = []
        for _ in range(count):
            inputs = {"x": source.normal(self.rows, *lead, self.inner)}
            for name in ("gate", "up") if self.form == SILU_MUL else ("weight",):
                weight = source.normal(*lead, *stored).mul_(self.inner**-0.5)
                inputs[name] = weight.mT if self.transposed else weight
            found.append(inputs)
        return found
