"""Whether a backend computes right on this very device: each operation against its plain-torch twin, in milliseconds.

A part that was never measured is trusted because of this and of nothing else. It runs once for each shape, before any
capture; the outcome is kept for the process and logged once.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from cute_kernels.reference.add_rms_norm import add_rms_norm
from cute_kernels.reference.block_attention import block_attention
from cute_kernels.reference.context_append import context_append, finish_latents
from cute_kernels.reference.markov_chain import markov_chain
from cute_kernels.reference.query_rope import query_rope
from trtllm_dspark.attention.finding import Finding, finding, poison, random, worst
from trtllm_dspark.attention.operations import DraftShape, Operations, normalised
from trtllm_dspark.attention.product_check import check_linear, check_silu_mul
from trtllm_dspark.config import DraftConfig

log = logging.getLogger(__name__)

SCALE = 192**-0.5
VOCABULARY = 1009
STEPS = 3
BATCHES = (5, 9, 33, 65, 129)  # of the Markov chain: a kernel takes other tiles for larger ones
TIMED_BATCH, TIMED_CONTEXT, TIMED_RUNS = 8, 4096, 15
NOISE = 1.05  # times that differ by less are a tie


@dataclass(frozen=True)
class SelfCheck:
    """What the check of a backend found. milliseconds: of the whole check, a first compilation included."""

    findings: tuple[Finding, ...]
    milliseconds: float

    def reason(self) -> str | None:
        """None where all passed, else which did not and by how much."""
        wrong = [str(finding) for finding in self.findings if not finding.passed]
        return f"failed its self-check: {'; '.join(wrong)}" if wrong else None


def self_check(operations: Operations, config: DraftConfig, shape: DraftShape, device: torch.device) -> SelfCheck:
    """Run every operation of a backend beside its twin on small inputs of the deployment's shape.

    Ragged contexts with page edges, windowed ones, shuffled pages; NaN in every row that must not be read and in the memory
    that results are allocated from.
    """
    start = time.perf_counter()
    checks = [
        check_block_attention,
        _check_context_append,
        _check_query_rope,
        _check_finish_latents,
        _check_add_rms_norm,
        check_linear,
        check_silu_mul,
    ]
    if operations.markov_chain is not None and config.markov_rank:
        checks.append(_check_markov_chain)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        findings = tuple(check(operations, config, shape, generator) for check in checks)
    return SelfCheck(findings, 1e3 * (time.perf_counter() - start))


def check_block_attention(
    operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator
) -> Finding:
    """The attention of the self-check alone. `self_check` runs it first, under no_grad, with a generator of seed 0.

    Ragged requests, then equal ones, as many as each of `Operations.batches` says; the worst of them.
    """
    equal = [[2 * shape.page_size + 3] * count for count in operations.batches(shape, generator.device)]
    findings = []
    for lengths in (_edge_lengths(shape.page_size), *equal):
        case = _attention_case(config, shape, generator, lengths, starts=lengths not in equal)
        poison(case["q"][..., : case["value_width"]], case["q"])
        found = _run(operations, case)
        exact = block_attention(**_wider(case))
        assert isinstance(exact, torch.Tensor)
        findings.append(finding("block_attention", found, exact, _in_own_dtype(case)))
    return worst(findings)


def _check_context_append(
    operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator
) -> Finding:
    c, width, layers = _latent(config), config.latent_width, config.num_layers
    tokens, pages = 2 * shape.page_size + 5, 4
    z = random(generator, (tokens, layers, width), shape.dtype)
    weight = 1 + random(generator, (layers, c), shape.dtype) / 8
    cos, sin = _angles(generator, (tokens, (width - c) // 2))
    slots = torch.randperm(pages * shape.page_size, generator=generator, device=generator.device)[:tokens]
    slots[::7] = -1
    pools = [
        torch.full((layers, pages, shape.page_size, width), torch.nan, dtype=dtype, device=generator.device)
        for dtype in (shape.dtype, torch.float64, shape.dtype)
    ]
    operations.context_append(z, weight, cos, sin, slots, pools[0].unbind(0), config.rms_norm_eps)
    context_append(z.double(), weight.double(), cos, sin, slots, pools[1].unbind(0), config.rms_norm_eps)
    context_append(z, weight, cos, sin, slots, pools[2].unbind(0), config.rms_norm_eps)
    return finding("context_append", *pools)


def _check_query_rope(operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator) -> Finding:
    c, width, batch = _latent(config), config.latent_width, 3
    rotary = random(generator, (batch, shape.block_rows, shape.heads, 3 * (width - c)), shape.dtype)[..., 2 * (width - c) :]
    cos, sin = _angles(generator, (batch, shape.block_rows, (width - c) // 2))
    outs = [
        torch.full((batch, shape.block_rows, shape.heads, width), torch.nan, dtype=dtype, device=generator.device)
        for dtype in (shape.dtype, torch.float64, shape.dtype)
    ]
    operations.query_rope(rotary, cos, sin, outs[0])
    query_rope(rotary.double(), cos, sin, outs[1])
    query_rope(rotary, cos, sin, outs[2])
    return finding("query_rope", *outs)


def _check_finish_latents(
    operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator
) -> Finding:
    c, width, batch = _latent(config), config.latent_width, 3
    z = random(generator, (batch, shape.block_rows, width), shape.dtype)
    weight = 1 + random(generator, (c,), shape.dtype) / 8
    cos, sin = _angles(generator, (batch, shape.block_rows, (width - c) // 2))
    poison(z)
    found = operations.finish_latents(z, weight, cos, sin, config.rms_norm_eps)
    exact = finish_latents(z.double(), weight.double(), cos, sin, config.rms_norm_eps)
    return finding("finish_latents", found, exact, finish_latents(z, weight, cos, sin, config.rms_norm_eps))


def _check_add_rms_norm(operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator) -> Finding:
    """With a residual and without, at every width that a step normalises; the worst of them."""
    findings = []
    for size, with_residual in normalised(config):
        x, weight = random(generator, (5, size), shape.dtype), 1 + random(generator, (size,), shape.dtype) / 8
        residual = random(generator, (5, size), shape.dtype) if with_residual else None
        wide = None if residual is None else residual.double()
        poison(x, x)
        found = operations.add_rms_norm(x, weight, config.rms_norm_eps, residual)
        exact = add_rms_norm(x.double(), weight.double(), config.rms_norm_eps, wide)
        plain = add_rms_norm(x, weight, config.rms_norm_eps, residual)
        findings += [finding("add_rms_norm", *trio) for trio in zip(found, exact, plain, strict=True)]
    return worst(findings)


def _check_markov_chain(operations: Operations, config: DraftConfig, shape: DraftShape, generator: torch.Generator) -> Finding:
    """On small integers, where sums are exact: tokens and codes must be the twin's. error: the share that is not."""
    assert operations.markov_chain is not None

    def integers(*size: int) -> torch.Tensor:
        return torch.randint(-3, 4, size, generator=generator, device=generator.device).to(shape.dtype)

    rank, wrong = config.markov_rank, 0.0
    w1, w2 = integers(VOCABULARY, rank), integers(VOCABULARY, rank)
    for batch in BATCHES:
        base = integers(batch, STEPS, VOCABULARY)
        anchors = torch.randint(VOCABULARY, (batch,), generator=generator, device=generator.device)
        anchors[:2] = torch.tensor([-1, VOCABULARY], device=generator.device)  # no tokens: they get no bias
        for dtype in {shape.dtype, torch.float32}:  # the target may give its logits in another dtype than the draft's
            codes, right = (torch.full((batch, STEPS, rank), torch.nan, dtype=shape.dtype, device=base.device) for _ in "ab")
            found = operations.markov_chain(base.to(dtype), anchors, w1, w2, codes)
            exact = markov_chain(base.float(), anchors, w1, w2, right)
            wrong = max(wrong, (found != exact).float().mean().item(), (codes != right).float().mean().item())
    return Finding("markov_chain", wrong, 0.0)


def _in_own_dtype(case: dict[str, Any]) -> torch.Tensor:
    """What plain torch makes of it in the inputs' dtype: a multiple of its error is what a kernel is allowed."""
    q, pages, width = case["q"], case["pages"], case["value_width"]
    out = q.new_empty(*q.shape[:-1], width)
    for b, (start, stop) in enumerate(zip(case["context_start"].tolist(), case["context_len"].tolist(), strict=True)):
        at = torch.arange(start, stop, device=q.device)
        context = pages[case["page_table"][b, at // pages.shape[1]].long(), at % pages.shape[1]]
        keys = torch.cat((context, case["block_latents"][b]))
        out[b] = (case["scale"] * (q[b] @ keys.T)).softmax(-1) @ keys[:, :width]
    return out


def _edge_lengths(page_size: int) -> list[int]:
    return [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 5, 700]


def _attention_case(
    config: DraftConfig, shape: DraftShape, generator: torch.Generator, lengths: list[int], *, starts: bool = False
) -> dict[str, Any]:
    """Arguments of a call: shuffled pages; NaN wherever no live token lies."""
    device, width, size = generator.device, config.latent_width, shape.page_size
    batch, live = len(lengths), [-(-length // size) for length in lengths]
    ids = torch.randperm(sum(live) + 2, generator=generator, device=device).int()
    table = torch.full((batch, max(max(live), 1)), -1, dtype=torch.int32, device=device)
    pages = torch.full((len(ids), size, width), torch.nan, dtype=shape.dtype, device=device)
    first = [length // 3 if starts and b % 2 else 0 for b, length in enumerate(lengths)]
    taken = 0
    for b, (length, count) in enumerate(zip(lengths, live, strict=True)):
        table[b, :count] = ids[taken : taken + count]
        taken += count
        at = torch.arange(first[b], length, device=device)
        pages[table[b, at // size].long(), at % size] = random(generator, (len(at), width), shape.dtype)
    return {
        "q": random(generator, (batch, shape.block_rows, shape.heads, width), shape.dtype),
        "block_latents": random(generator, (batch, shape.block_rows, width), shape.dtype),
        "pages": pages,
        "page_table": table,
        "context_len": torch.tensor(lengths, dtype=torch.int32, device=device),
        "context_start": torch.tensor(first, dtype=torch.int32, device=device),
        "scale": SCALE,
        "value_width": _latent(config),
    }


def _run(operations: Operations, case: dict[str, Any]) -> torch.Tensor:
    plan = operations.plan(
        case["context_len"],
        case["context_start"],
        block_rows=case["q"].shape[1],
        heads=case["q"].shape[2],
        value_width=case["value_width"],
        pages=case["pages"],
        page_table=case["page_table"],
    )
    return operations.block_attention(**case, plan=plan)


def _wider(case: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in case.items()
    }


def measure_block_attention(operations: Operations, config: DraftConfig, shape: DraftShape, device: torch.device) -> float:
    """Microseconds of one layer's attention at the deployment's shape, planning included: the median of some runs."""
    generator = torch.Generator(device).manual_seed(0)
    case = _attention_case(config, shape, generator, [TIMED_CONTEXT] * TIMED_BATCH)
    with torch.no_grad():
        _run(operations, case)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_RUNS + 1)]
        for mark in marks[:-1]:
            mark.record()
            _run(operations, case)
        marks[-1].record()
        torch.cuda.synchronize(device)
    times = sorted(1e3 * before.elapsed_time(after) for before, after in pairwise(marks))
    return times[len(times) // 2]


def _latent(config: DraftConfig) -> int:
    assert config.kv_lora_rank is not None, f"a self-check of a draft that is not MLA: {config}"
    return config.kv_lora_rank


def _angles(generator: torch.Generator, size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    angle = 100 * torch.rand(size, generator=generator, device=generator.device)
    return angle.cos(), angle.sin()


def numbered(device: torch.device) -> torch.device:
    """A CUDA device with its index: what is kept for it then holds where another one is current."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def checked_reason(
    name: str, make: Callable[[], Operations], config: DraftConfig, shape: DraftShape, device: torch.device
) -> str | None:
    """`SelfCheck.reason` of a backend for this shape; run once for each in a process, again where it could not finish."""
    try:
        return _outcome(name, make, config, shape, numbered(device)).reason()
    except Exception as error:  # whatever a kernel does on a part that nobody has tried
        log.warning("self-check of %s on %s: %s: %s", name, device, type(error).__name__, error)
        return f"failed its self-check: {type(error).__name__}: {error}"


@lru_cache(maxsize=64)
def _outcome(
    name: str, make: Callable[[], Operations], config: DraftConfig, shape: DraftShape, device: torch.device
) -> SelfCheck:
    outcome = self_check(make(), config, shape, device)
    worst = "; ".join(f"{f.operation} {f.error:.1e} of {f.allowed:.1e}" for f in outcome.findings)
    verdict = outcome.reason() or "passed"
    log.info("self-check of %s on %s in %.0f ms: %s (%s)", name, device, outcome.milliseconds, verdict, worst)
    return outcome
