"""Which cases a suite holds. Shapes of Kimi-K3's MLA drafter: 64 heads on one rank, 8 with tensor parallelism over 8."""

from cute_kernels.bench.cases import BlockAttentionCase, Case, ContextAppendCase, MarkovChainCase, QueryRopeCase

SUITES: dict[str, tuple[Case, ...]] = {
    "kernels": (
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
        MarkovChainCase(1),
        MarkovChainCase(8),
        MarkovChainCase(64),
    ),
}


def select(suite: str, only: str = "") -> list[Case]:
    """The cases of a suite whose kernel and label, with a space between them, contain `only`."""
    return [case for case in SUITES[suite] if only in f"{case.kernel} {case.label}"]
