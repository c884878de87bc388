"""The products of a draft step beside their twins, for the self-check."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from cute_kernels.few_row_linear import Product
from cute_kernels.few_row_linear.config import LINEAR, SILU_MUL
from cute_kernels.reference.few_row_linear import few_row_linear, few_row_silu_mul
from trtllm_dspark.attention.finding import Finding, finding, poison, random, worst
from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.attention.products import multiplied
from trtllm_dspark.config import DraftConfig

ROWS = (16, 64)  # of the first product of each form, beside a block's: most that a kernel takes, and more
MAX_WEIGHTS = 1 << 24  # of a product: larger ones are checked with fewer outputs


def check_linear(operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator) -> Finding:
    """Every product of a step, written where it is allocated and between columns that are not its own; the worst of them."""
    findings = []
    for product, rows in _products(config, shape, LINEAR):
        weight, x = _weight(generator, product, shape.dtype), _activations(generator, product, rows, shape.dtype)
        exact, plain = few_row_linear(x.double(), weight.double()), few_row_linear(x, weight)
        poison(plain)
        findings.append(finding("linear", operations.linear(x, weight), exact, plain))
        wide = [torch.nn.functional.pad(value, (8, 8), value=torch.nan) for value in (plain, exact, plain)]
        wide[0].fill_(torch.nan)
        operations.linear(x, weight, wide[0][..., 8:-8])
        findings.append(finding("linear", *wide))
    return worst(findings)


def check_silu_mul(operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator) -> Finding:
    """The inside of the MLP."""
    findings = []
    for product, rows in _products(config, shape, SILU_MUL):
        gate, up = (_weight(generator, product, shape.dtype) for _ in "ab")
        x = _activations(generator, product, rows, shape.dtype)
        exact, plain = few_row_silu_mul(x.double(), gate.double(), up.double()), few_row_silu_mul(x, gate, up)
        poison(plain)
        findings.append(finding("silu_mul", operations.silu_mul(x, gate, up), exact, plain))
    return worst(findings)


def _products(config: DraftConfig, shape: DraftShape, form: str) -> Iterator[tuple[Product, int]]:
    """(product, rows): each of a step for one request, the first for more."""
    for index, product in enumerate(product for product in multiplied(config, shape.heads) if product.form == form):
        outputs = min(product.outputs, max(1, MAX_WEIGHTS // (8 * product.inner * product.groups)) * 8)
        for rows in (shape.block_rows, *(() if index else ROWS)):
            yield replace(product, outputs=outputs), rows


def _weight(generator: torch.Generator, product: Product, dtype: torch.dtype) -> torch.Tensor:
    """[N, K], or [G, N, K]; of a size that keeps that of what it multiplies."""
    lead = (product.groups,) if product.groups > 1 or product.transposed else ()
    size = (product.inner, product.outputs) if product.transposed else (product.outputs, product.inner)
    made = random(generator, (*lead, *size), dtype) * product.inner**-0.5
    return made.mT if product.transposed else made


def _activations(generator: torch.Generator, product: Product, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[M, K], or [M, G, K]: a view into rows that are wider, as the queries are."""
    lead = (product.groups,) if product.groups > 1 or product.transposed else ()
    return random(generator, (rows, *lead, product.inner + 64), dtype)[..., : product.inner]
