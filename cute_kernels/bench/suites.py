"""Which cases a suite holds, and what is asked of ours there. Shapes of Kimi-K3's MLA drafter: 64 heads or a rank's share.

`kernels` is a look at the kernels that every GPU has. `hopper` is for one H200: `block_attention` beside the two peers that
count there, over the context for the plot, the Markov chain, and the linear layers of a step.
"""

from dataclasses import dataclass

from cute_kernels.bench.cases import (
    BlockAttentionCase,
    Case,
    ContextAppendCase,
    FewRowLinearCase,
    MarkovChainCase,
    QueryRopeCase,
)
from cute_kernels.few_row_linear.config import SILU_MUL

BEST_PEER, FLOOR = "the best peer", "the floor"


@dataclass(frozen=True)
class Target:
    """What is asked of ours on a case.

    Attributes:
        at_least: the time of `beside` over ours. beside: BEST_PEER, FLOOR, or another case, as the same contestant does it.
    """

    case: Case
    at_least: float
    beside: Case | str = BEST_PEER


@dataclass(frozen=True)
class Suite:
    """Cases in the order in which they are timed.

    Attributes:
        left_out: kernel and name of each contestant that is not timed here.
    """

    cases: tuple[Case, ...]
    targets: tuple[Target, ...] = ()
    left_out: frozenset[tuple[str, str]] = frozenset()


def products(rows: int) -> tuple[FewRowLinearCase, ...]:
    """Every linear layer of a step of so many rows."""
    return (
        FewRowLinearCase("q_a", 1536, 7168, rows),
        FewRowLinearCase("kv_a", 576, 7168, rows),
        FewRowLinearCase("q_b", 12288, 1536, rows),
        FewRowLinearCase("absorb", 512, 128, rows, groups=64, transposed=True),
        FewRowLinearCase("unabsorb", 128, 512, rows, groups=64),
        FewRowLinearCase("o", 7168, 8192, rows),
        FewRowLinearCase("gate_up", 14336, 7168, rows, form=SILU_MUL),
        FewRowLinearCase("down", 7168, 14336, rows),
        FewRowLinearCase("context_proj", 7168, 35840, rows),
        FewRowLinearCase("context_latents", 2880, 7168, rows),
        FewRowLinearCase("head", 163840, 7168, rows),
    )


KERNELS: tuple[Case, ...] = (
    BlockAttentionCase(1, 1024),
    BlockAttentionCase(1, 8192),
    BlockAttentionCase(8, 8192),
    BlockAttentionCase(64, 1024),
    BlockAttentionCase(64, 8192),
    BlockAttentionCase(1, 8192, heads=8),
    BlockAttentionCase(64, 8192, heads=8),
    ContextAppendCase(8),
    ContextAppendCase(512),
    ContextAppendCase(8192),
    QueryRopeCase(1),
    QueryRopeCase(64),
    *(MarkovChainCase(batch) for batch in (1, 8, 64)),
)
HOPPER_TARGETS = (
    Target(BlockAttentionCase(8, 65536), 1.0),
    Target(BlockAttentionCase(64, 8192), 1.04),
    Target(BlockAttentionCase(32, 8192), 1.04),
    Target(BlockAttentionCase(128, 4096), 1.04),
    Target(BlockAttentionCase(8, 8192), 1.08),
    Target(BlockAttentionCase(1, 65536), 1.08),
    Target(BlockAttentionCase(64, 1024), 1.12),
    Target(BlockAttentionCase(1, 8192), 1.25),
    Target(BlockAttentionCase(8, 1024), 1.25),
    Target(BlockAttentionCase(1, 1024), 1.6),
    Target(BlockAttentionCase(64, 8192, heads=16), 1.04),
    Target(BlockAttentionCase(64, 8192, heads=8), 1.03),
    Target(BlockAttentionCase(64, 8192, heads=4), 1.03),
    Target(BlockAttentionCase(64, 8192, rows=1), 1.03),
    Target(BlockAttentionCase(64, 1024, heads=8), 1.3),
    Target(BlockAttentionCase(1, 8192, heads=8), 1.3),
    Target(BlockAttentionCase(64, 65536, shortest=256), 1.1),
    Target(BlockAttentionCase(64, 8192, page_size=32), 1 / 1.1, BlockAttentionCase(64, 8192)),
    Target(BlockAttentionCase(64, 8192, page_size=128), 1 / 1.1, BlockAttentionCase(64, 8192)),
    Target(MarkovChainCase(1), 1.5),
    Target(MarkovChainCase(1), 1 / 1.3, FLOOR),
    Target(MarkovChainCase(64), 1.5),
    Target(MarkovChainCase(64), 1 / 1.3, FLOOR),
)
SWEEP = tuple(BlockAttentionCase(batch, context) for batch in (1, 8) for context in (1024 << step for step in range(8)))
HOPPER: tuple[Case, ...] = (
    *(target.case for target in HOPPER_TARGETS),
    BlockAttentionCase(64, 8192, heads=12),
    *SWEEP,
    *(MarkovChainCase(batch) for batch in (8, 16, 32, 128, 256)),
    *products(8),
    *products(16),
)
SUITES = {
    "kernels": Suite(KERNELS),
    "hopper": Suite(
        tuple(dict.fromkeys(HOPPER)),
        HOPPER_TARGETS,
        frozenset(("block_attention", name) for name in ("ours, portable", "torch", "flashinfer fa2")),
    ),
}


def select(suite: str, only: str = "") -> list[Case]:
    """The cases of a suite whose kernel and label, with a space between them, contain `only`."""
    return [case for case in SUITES[suite].cases if only in f"{case.kernel} {case.label}"]
