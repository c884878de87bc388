"""The products of a draft step beside their twins, for the self-check."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from cute_kernels.few_row_linear import Product
from cute_kernels.few_row_linear.config import (
    HOPPER_MULTIPROCESSORS,
    LINEAR,
    MAX_ROWS,
    SILU_MUL,
    VECTOR,
    pick_split,
    tile_outputs,
)
from cute_kernels.reference.few_row_linear import few_row_linear, few_row_silu_mul
from trtllm_dspark.attention.finding import Finding, finding, poison, random, worst
from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.attention.products import multiplied
from trtllm_dspark.config import DraftConfig

MORE_ROWS = 64  # than a kernel takes; tried on the first product of each form
TURNS = 2  # tiles of a block: a product that has more is checked with fewer outputs
EDGE = 64  # outputs that are compared at the start, in the middle and at the end


def check_linear(operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator) -> Finding:
    """Every product of a step, written where it is allocated and between columns that are not its own; the worst of them."""
    findings = []
    for product, rows in _products(config, shape, LINEAR, generator.device):
        weight, x = _weight(generator, product, shape.dtype), _activations(generator, product, rows, shape.dtype)

        def at(columns: torch.Tensor, dtype: torch.dtype, x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return few_row_linear(x.to(dtype), weight.index_select(-2, columns).to(dtype))

        poison(x.new_empty(*x.shape[:-1], product.outputs))
        findings.append(_compared("linear", operations.linear(x, weight), at))
        wide = x.new_full((*x.shape[:-1], product.outputs + 16), torch.nan)
        operations.linear(x, weight, wide[..., 8:-8])
        findings.append(_compared("linear", wide[..., 8:-8], at))
        if not (wide[..., :8].isnan().all() and wide[..., -8:].isnan().all()):
            findings.append(Finding("linear", torch.inf, findings[-1].allowed))
    return worst(findings)


def check_silu_mul(operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator) -> Finding:
    """The inside of the MLP."""
    findings = []
    for product, rows in _products(config, shape, SILU_MUL, generator.device):
        gate, up = (_weight(generator, product, shape.dtype) for _ in "ab")
        x = _activations(generator, product, rows, shape.dtype)

        def at(
            columns: torch.Tensor,
            dtype: torch.dtype,
            x: torch.Tensor = x,
            gate: torch.Tensor = gate,
            up: torch.Tensor = up,
        ) -> torch.Tensor:
            halves = (weight.index_select(-2, columns).to(dtype) for weight in (gate, up))
            return few_row_silu_mul(x.to(dtype), *halves)

        poison(x.new_empty(*x.shape[:-1], product.outputs))
        findings.append(_compared("silu_mul", operations.silu_mul(x, gate, up), at))
    return worst(findings)


def _compared(operation: str, found: torch.Tensor, at: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Finding:
    """The first, middle and last outputs beside their twin's; an element that was not written counts wherever it is."""
    outputs = found.shape[-1]
    edges = (range(min(start, outputs), min(start + EDGE, outputs)) for start in (0, outputs // 2, max(0, outputs - EDGE)))
    columns = torch.tensor(sorted({column for edge in edges for column in edge}), device=found.device)
    seen = finding(operation, found.index_select(-1, columns), at(columns, torch.float64), at(columns, found.dtype))
    return seen if bool(found.isfinite().all()) else Finding(operation, torch.inf, seen.allowed)


def _products(config: DraftConfig, shape: DraftShape, form: str, device: torch.device) -> Iterator[tuple[Product, int]]:
    """(product, rows): each of a step for one request, for the most rows that a kernel takes, and the first for more."""
    multiprocessors = HOPPER_MULTIPROCESSORS[0]
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for index, product in enumerate(product for product in multiplied(config, shape.heads) if product.form == form):
        for rows in dict.fromkeys((shape.block_rows, MAX_ROWS, *(() if index else (MORE_ROWS,)))):
            yield fewer_outputs(product, multiprocessors), rows


def fewer_outputs(product: Product, multiprocessors: int) -> Product:
    """With the fewest outputs that give every block TURNS tiles and are cut like the whole; the whole where there are none."""
    split = pick_split(product, multiprocessors)
    turn = max(1, multiprocessors // split) * tile_outputs(product.form)  # outputs of a tile a block
    for outputs in range(TURNS * turn, product.groups * product.outputs, turn):
        cut = replace(product, outputs=outputs // product.groups // VECTOR * VECTOR)
        if cut.outputs and pick_split(cut, multiprocessors) == split:
            return cut
    return product


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
