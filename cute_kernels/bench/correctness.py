"""The gate: nobody has a speed whose results are not right on the very inputs that are timed.

A result's buffer is NaN before (-1 where it holds tokens). Afterwards every element that has to be written must be finite,
every other one untouched, and the worst row must be within twice the error of plain torch in the same dtype, plus half a unit
in the last place. Errors of a row are relative: |found - truth| / |truth|, Euclidean, against the twin in fp32. Rows and not
whole tensors, so that one wrong head or one lost token shows; a linear layer's rows in tiles of TILE outputs. Runs on any
device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.bench.cases import (
    DTYPE,
    BlockAttentionCase,
    Case,
    ContextAppendCase,
    FewRowLinearCase,
    Inputs,
    MarkovChainCase,
    QueryRopeCase,
)
from cute_kernels.few_row_linear.config import SILU_MUL
from cute_kernels.reference.block_attention import block_attention
from cute_kernels.reference.context_append import context_append
from cute_kernels.reference.few_row_linear import few_row_linear, few_row_silu_mul
from cute_kernels.reference.markov_chain import markov_chain
from cute_kernels.reference.query_rope import query_rope

FEW = 4  # requests that are all compared; of more, the first, the middle one, the last, the longest and the shortest
TILE = 64  # outputs of a linear layer that are compared together: in a whole row one wrong tile of thousands would not show
ROUNDING = torch.finfo(DTYPE).eps / 2
Pick = Callable[[torch.Tensor], torch.Tensor]
"""From a result to a part of it."""


@dataclass(frozen=True)
class Yardstick:
    """What a result on one set is held against.

    Attributes:
        checked: which rows are compared with the truth, in words. truth: [rows, N], fp32; token ids for markov_chain.
        rows: the compared rows of a result, as the truth. baseline: plain torch's error. allowed: the largest error.
        written: what must have been written. untouched: what must not, None where everything must.
    """

    checked: str
    truth: torch.Tensor
    rows: Pick
    baseline: float
    allowed: float
    written: Pick = lambda result: result
    untouched: Pick | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a contestant is right, and how nearly.

    Attributes:
        complaint: None where it is right. error: of the worst row; None where it could not be measured.
        baseline, allowed, checked: see `Yardstick`.
    """

    complaint: str | None
    error: float | None
    baseline: float
    allowed: float
    checked: str


def yardstick(case: Case, inputs: Inputs) -> Yardstick:
    """The yardstick of a case on one of its sets."""
    return YARDSTICKS[case.kernel](case, inputs)


def poison(result: torch.Tensor) -> None:
    """Make a result's buffer hold what no right result holds."""
    result.fill_(torch.nan if result.is_floating_point() else -1)


def judge(yardstick: Yardstick, result: torch.Tensor) -> Verdict:
    """Hold one result against its yardstick."""

    def verdict(complaint: str | None, error: float | None = None) -> Verdict:
        return Verdict(complaint, error, yardstick.baseline, yardstick.allowed, yardstick.checked)

    written = yardstick.written(result)
    missing = int((~written.isfinite() if result.is_floating_point() else written < 0).sum())
    if missing:
        return verdict(f"{missing} of {written.numel()} elements are not written or not finite")
    if yardstick.untouched is not None and not bool(yardstick.untouched(result).isnan().all()):
        return verdict("elements changed that belong to others")
    found = yardstick.rows(result)
    if not result.is_floating_point():
        error = float((found != yardstick.truth).double().mean())
        return verdict(f"{error:.1%} of the tokens are wrong" if error > yardstick.allowed else None, error)
    error = worst_row(found, yardstick.truth)
    if error <= yardstick.allowed:
        return verdict(None, error)
    return verdict(
        f"error {error:.2e}, at most {yardstick.allowed:.2e} is allowed (plain torch: {yardstick.baseline:.2e})", error
    )


def worst_row(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest relative Euclidean error of a row. Both: [rows, N]."""
    return float(((found.float() - truth).norm(dim=-1) / truth.norm(dim=-1)).max())


def _bounded(checked: str, truth: torch.Tensor, plain: torch.Tensor, rows: Pick, **parts: Any) -> Yardstick:
    """With the bound that plain torch's own result gives."""
    baseline = worst_row(plain, truth)
    return Yardstick(checked, truth, rows, baseline, 2 * baseline + ROUNDING, **parts)


def _block_attention(case: BlockAttentionCase, inputs: Inputs) -> Yardstick:
    lengths, picked = case.lengths, list(range(case.batch))
    if case.batch > FEW:
        extremes = (lengths.index(max(lengths)), lengths.index(min(lengths)))
        picked = sorted({0, case.batch // 2, case.batch - 1, *extremes})
    truth = torch.empty(len(picked), *inputs["out"].shape[1:], dtype=torch.float32, device=inputs["out"].device)
    plain = torch.empty_like(truth)
    for index, b in enumerate(picked):
        pages = inputs["pages"][inputs["page_table"][b].long()]  # of this request alone, in order
        one = {
            "q": inputs["q"][b : b + 1],
            "block_latents": inputs["block_latents"][b : b + 1],
            "pages": pages,
            "page_table": torch.arange(len(pages), device=pages.device)[None],
            "context_len": inputs["context_len"][b : b + 1],
        }
        wide = {name: x.float() if x.is_floating_point() else x for name, x in one.items()}
        block_attention(**wide, scale=case.scale, value_width=case.value_width, out=truth[index : index + 1])
        latents = torch.cat((pages.flatten(0, 1)[: lengths[b]], inputs["block_latents"][b]))
        scores = case.scale * (inputs["q"][b] @ latents.mT)
        plain[index] = scores.softmax(-1) @ latents[:, : case.value_width]

    def rows(result: torch.Tensor) -> torch.Tensor:
        return result[picked].flatten(0, 2)

    checked = f"request{'s' * (len(picked) > 1)} {', '.join(map(str, picked))} of {case.batch}"
    return _bounded(checked, truth.flatten(0, 2), plain.flatten(0, 2), rows)


def _context_append(case: ContextAppendCase, inputs: Inputs) -> Yardstick:
    slots = inputs["slots"]
    others = torch.ones(inputs["pool"].shape[1] * case.page_size, dtype=torch.bool, device=slots.device)
    others[slots] = False

    def rows(result: torch.Tensor) -> torch.Tensor:
        return result.flatten(1, 2)[:, slots].flatten(0, 1)

    def twin(dtype: torch.dtype) -> torch.Tensor:
        pool = torch.full_like(inputs["pool"], torch.nan, dtype=dtype)
        weight = inputs["norm_weight"].to(dtype)
        context_append(inputs["z"].to(dtype), weight, inputs["cos"], inputs["sin"], slots, list(pool), case.eps)
        return rows(pool)

    return _bounded(
        f"all {case.tokens} tokens",
        twin(torch.float32),
        twin(DTYPE),
        rows,
        written=rows,
        untouched=lambda result: result.flatten(1, 2)[:, others],
    )


def _query_rope(case: QueryRopeCase, inputs: Inputs) -> Yardstick:
    def written(result: torch.Tensor) -> torch.Tensor:
        return result[..., case.latent :]

    def rows(result: torch.Tensor) -> torch.Tensor:
        return written(result).flatten(0, 2)

    def twin(dtype: torch.dtype) -> torch.Tensor:
        out = torch.full_like(inputs["out"], torch.nan, dtype=dtype)
        query_rope(inputs["rotary"].to(dtype), inputs["cos"], inputs["sin"], out)
        return rows(out)

    return _bounded(
        f"all {case.batch * case.rows} rows",
        twin(torch.float32),
        twin(DTYPE),
        rows,
        written=written,
        untouched=lambda result: result[..., : case.latent],
    )


def _markov_chain(case: MarkovChainCase, inputs: Inputs) -> Yardstick:
    """Sums are exact, so that plain torch makes no error and none is allowed."""
    return Yardstick(f"all {case.batch * case.steps} tokens", markov_chain(**inputs), lambda result: result, 0.0, 0.0)


def _few_row_linear(case: FewRowLinearCase, inputs: Inputs) -> Yardstick:
    twin: Callable[..., torch.Tensor] = few_row_silu_mul if case.form == SILU_MUL else few_row_linear
    tile = math.gcd(case.outputs, TILE)

    def rows(result: torch.Tensor) -> torch.Tensor:
        return result.reshape(-1, tile)

    truth = twin(**{name: x.float() for name, x in inputs.items()})
    return _bounded(f"all {case.rows * case.groups} rows, {tile} outputs at a time", rows(truth), rows(twin(**inputs)), rows)


YARDSTICKS: dict[str, Callable[[Any, Inputs], Yardstick]] = {
    "block_attention": _block_attention,
    "context_append": _context_append,
    "query_rope": _query_rope,
    "markov_chain": _markov_chain,
    "few_row_linear": _few_row_linear,
}
