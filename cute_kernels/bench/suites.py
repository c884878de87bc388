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
        *(MarkovChainCase(batch) for batch in (1, 8, 64)),
    ),
    "hopper": (
        *(
            BlockAttentionCase(batch, context)
            for batch, context in (
                (8, 65536),
                (64, 8192),
                (32, 8192),
                (128, 4096),
                (8, 8192),
                (1, 65536),
                (64, 1024),
                (1, 8192),
                (8, 1024),
                (1, 1024),
            )
        ),
        *(BlockAttentionCase(64, 8192, heads=heads) for heads in (16, 8, 4)),
        BlockAttentionCase(64, 8192, rows=1),
        BlockAttentionCase(64, 1024, heads=8),
        BlockAttentionCase(1, 8192, heads=8),
        *(BlockAttentionCase(64, 8192, page_size=page_size) for page_size in (32, 128)),
        *(MarkovChainCase(batch) for batch in (1, 8, 16, 32, 64, 128, 256)),
    ),
}


def select(suite: str, only: str = "") -> list[Case]:
    """The cases of a suite whose kernel and label, with a space between them, contain `only`."""
    return [case for case in SUITES[suite] if only in f"{case.kernel} {case.label}"]
