"""What a draft context in fp8 would cost in acceptance, measured on the tiny pair with the embedded engine. No GPU needed.

    python examples/fp8_latents.py [--prompts 24]

Rounding only: rows are rounded as they are written and kept as fp32, so that the pool holds the values that a smaller one would
hold and nothing else changes. The block's own latents never enter the pool and stay as they are; all arithmetic is fp32.
Pools: fp32; bf16; fp8, which is e4m3 with one fp32 scale a token for the latent part and bf16 for the rotary part. A pool of
zeros is the control: it shows what acceptance is worth where the context is lost.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from cute_kernels.reference.context_append import context_append
from trtllm_dspark.attention import vanilla
from trtllm_dspark.attention.operations import ContextAppend
from trtllm_dspark.cli import build_parser
from trtllm_dspark.commands.pair import Pair, load_pair
from trtllm_dspark.context.draft_context import DraftContext
from trtllm_dspark.context.pool import ContextPool
from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.requests import Completion, SamplingParams
from trtllm_dspark.evaluation.lossless import compare_greedy
from trtllm_dspark.evaluation.measure import measure, run_interleaved
from trtllm_dspark.evaluation.stdlib_text import held_out_prompts
from trtllm_dspark.propose import Drafter
from trtllm_dspark.provenance import provenance

E4M3_MAX = 448.0
LATENT, ROTARY = 512, 64  # c and r of Kimi-K3's drafter, for which bytes are counted
TMA_STRIDE = 16  # bytes that every stride of a tensor map is a multiple of
RECORDED = 4  # prompts whose attention is compared
NORMAL_CONTEXT, NORMAL_ROWS, NORMAL_HEADS = 4096, 8, 64

Rounding = Callable[[torch.Tensor, int], torch.Tensor]
"""(finished rows [n, W], c) -> what a pool would give back of them."""


def token_scale(latents: torch.Tensor) -> torch.Tensor:
    """[n, c] -> [n, 1], fp32: largest magnitude of each token / 448. A token of zeros has a scale that divides it."""
    return latents.float().abs().amax(-1, keepdim=True).clamp(min=E4M3_MAX * torch.finfo(torch.float32).tiny) / E4M3_MAX


def round_e4m3(latents: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The nearest scale * e4m3 of each element, in the latents' dtype. scale: broadcastable to them."""
    return ((latents / scale).to(torch.float8_e4m3fn).float() * scale).to(latents.dtype)


def as_it_is(rows: torch.Tensor, width: int) -> torch.Tensor:
    return rows


def to_bf16(rows: torch.Tensor, width: int) -> torch.Tensor:
    return rows.bfloat16().to(rows.dtype)


def to_fp8(rows: torch.Tensor, width: int) -> torch.Tensor:
    """e4m3 with a scale a token for the first `width` columns, bf16 for the others."""
    latents, rotary = rows[:, :width], rows[:, width:]
    return torch.cat((round_e4m3(latents, token_scale(latents)), to_bf16(rotary, width)), -1)


def lost(rows: torch.Tensor, width: int) -> torch.Tensor:
    return torch.zeros_like(rows)


@dataclass(frozen=True)
class Pool:
    """One way to keep a token. token_bytes: of one layer at Kimi-K3's widths; None for the control."""

    name: str
    rounding: Rounding
    token_bytes: int | None


POOLS = (
    Pool("fp32", as_it_is, 4 * (LATENT + ROTARY)),
    Pool("bf16", to_bf16, 2 * (LATENT + ROTARY)),
    Pool("fp8", to_fp8, LATENT + 4 + 2 * ROTARY),
    Pool("zeros (control)", lost, None),
)


def rounding_append(rounding: Rounding) -> ContextAppend:
    """`context_append` into a pool that gives back rounded rows."""

    def append(
        z: torch.Tensor,
        norm_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        pools: Sequence[torch.Tensor],
        eps: float,
    ) -> None:
        context_append(z, norm_weight, cos, sin, slots, pools, eps)
        written = slots[slots >= 0].long()
        for pool in pools:
            rows = pool.view(-1, pool.shape[-1])
            rows[written] = rounding(rows[written], norm_weight.shape[-1])

    return append


def engine_over(pair: Pair, rounding: Rounding) -> Engine:
    """The pair's engine with a pool of its own. The model and the target are shared."""
    assert pair.spec is not None and pair.spec.drafter is not None
    model, context, lm_head = pair.spec.drafter.model, pair.spec.drafter.context, pair.spec.drafter.lm_head
    pool = ContextPool.allocate(context.pool.layout, context.pool.num_pages)
    # the embedded engine writes with what its context was given, not with the model's backend
    drafter = Drafter(model, DraftContext(pool, rounding_append(rounding)), lm_head)
    return Engine(pair.target, drafter, num_drafts=pair.num_drafts, max_batch=1)


# ------------------------------------------------------------------------------------------------------------ attention
@dataclass(frozen=True)
class Attention:
    """Operands of one attention of one request: q [1, S, H, W], block [1, S, W], context [n, W], n >= 1; c is width."""

    q: torch.Tensor
    block: torch.Tensor
    context: torch.Tensor
    scale: float
    width: int

    def over(self, context: torch.Tensor) -> torch.Tensor:
        """[S * H, c]: the same with other context rows, which are one page."""
        table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([len(context)], dtype=torch.int32)
        out = vanilla.block_attention(
            self.q, self.block, context[None], table, length, scale=self.scale, value_width=self.width
        )
        return out.flatten(0, 2)


def relative_errors(calls: Sequence[Attention], rounding: Rounding) -> torch.Tensor:
    """||rounded - exact|| / ||exact|| of every row and head of every call, one vector."""
    found = []
    for call in calls:
        exact = call.over(call.context)
        off = call.over(rounding(call.context, call.width)) - exact
        found.append(off.norm(dim=-1) / exact.norm(dim=-1))
    return torch.cat(found)


def attention_of_runs(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Attention]:
    """Every attention, of all layers, in the drafting of these prompts, one request at a time."""
    assert engine.drafter is not None
    model, calls = engine.drafter.model, []

    def recording(
        q: torch.Tensor,
        block_latents: torch.Tensor,
        pages: torch.Tensor,
        page_table: torch.Tensor,
        context_len: torch.Tensor,
        *,
        scale: float,
        value_width: int,
        layer: int = 0,
        context_start: torch.Tensor | None = None,
        plan: object = None,
    ) -> torch.Tensor:
        assert len(q) == 1 and (context_start is None or not context_start.any())
        context = pages[page_table[0].long()].flatten(0, 1)[: int(context_len[0])]
        call = Attention(q.clone(), block_latents.clone(), context, scale, value_width)
        calls.append(call)
        return call.over(context).view(*q.shape[:-1], value_width)

    usual = model.backend
    model.use_backend(replace(usual, operations=replace(usual.operations, block_attention=recording)))
    for prompt in prompts:
        engine.generate([prompt], params)
    model.use_backend(usual)
    return calls


def normal_attention() -> list[Attention]:
    """One request at Kimi-K3's widths, all operands standard normal."""
    generator = torch.Generator().manual_seed(0)
    width = LATENT + ROTARY
    q = torch.randn(1, NORMAL_ROWS, NORMAL_HEADS, width, generator=generator)
    block = torch.randn(1, NORMAL_ROWS, width, generator=generator)
    context = torch.randn(NORMAL_CONTEXT, width, generator=generator)
    return [Attention(q, block, context, scale=192**-0.5, width=LATENT)]


# -------------------------------------------------------------------------------------------------------------- figures
def paired_change(ours: Sequence[Completion], base: Sequence[Completion], num_drafts: int) -> tuple[float, float]:
    """Mean over prompts of accept_len's relative change, and its standard error: the prompts' own spread cancels."""
    lengths = [[measure([c], num_drafts).acceptance.accept_len for c in completions] for completions in (ours, base)]
    changes = [new / old - 1 for new, old in zip(*lengths, strict=True)]
    return statistics.fmean(changes), statistics.stdev(changes) / math.sqrt(len(changes))


def main() -> int:
    """Print the table. Returns 1 where a text differs from the target's own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts of `trtllm-dspark eval` (default 24)")
    count = parser.parse_args().prompts
    if count < 2:
        parser.error(f"--prompts must be 2 or more, it is {count}: an error of a mean takes two")
    options = ["--prompts", str(count), "--device", "cpu", "--dtype", "float32", "--attention-backend", "VANILLA"]
    arguments = build_parser().parse_args(["eval", *options])
    pair = load_pair(arguments)
    prompts = held_out_prompts(pair.target.tokenizer, arguments.prompts, arguments.prompt_tokens)
    params = SamplingParams(arguments.max_new_tokens)

    engines = [engine_over(pair, pool.rounding) for pool in POOLS]
    *runs, alone = run_interleaved([*engines, pair.plain], prompts, params)
    recorded, normal = attention_of_runs(engines[0], prompts[:RECORDED], params), normal_attention()

    table = Table(
        "pool", "bytes", "in one row", "accept_len", "verifications", "change on bf16", "first 16", "texts", "own", "normal"
    )
    base, faults = runs[[pool.name for pool in POOLS].index("bf16")].completions, 0
    for pool, run in zip(POOLS, runs, strict=True):
        result = measure(run.completions, pair.num_drafts)
        mean, stderr = paired_change(run.completions, base, pair.num_drafts)
        pairs = zip(prompts, alone.completions, run.completions, strict=True)
        found = [compare_greedy(pair.target, prompt, plain.tokens, spec.tokens) for prompt, plain, spec in pairs]
        faults += sum(divergence is not None and not divergence.excused for divergence in found)
        errors = [relative_errors(calls, pool.rounding) for calls in (recorded, normal)]
        stride = "" if pool.token_bytes is None else str(-(-pool.token_bytes // TMA_STRIDE) * TMA_STRIDE)
        table.add_row(
            pool.name,
            "" if pool.token_bytes is None else str(pool.token_bytes),
            stride,
            f"{result.acceptance.accept_len:.3f} ± {result.accept_len_stderr:.3f}",
            str(result.acceptance.verifications),
            f"{mean:+.2%} ± {stderr:.2%}",
            f"{result.accept_len_first16:.3f}",
            f"{found.count(None)} of {len(found)}",
            *(f"{float(error.median()):.1e}, {float(error.max()):.1e}" for error in errors),
        )
    console = Console(highlight=False, width=180)
    console.print(table)
    contexts = [len(call.context) for call in recorded]
    console.print(
        "bytes: a token and layer at Kimi-K3's widths, 512 + 64. in one row: padded to a stride that TMA takes.\n"
        "change on bf16: mean over prompts. texts: identical to target-only.\n"
        f"own: relative error of attention, median and worst row, in {len(recorded)} attentions of {RECORDED} prompts,\n"
        f"contexts of {min(contexts)} to {max(contexts)}. normal: the same of normal operands, context {NORMAL_CONTEXT}."
    )
    console.print_json(json.dumps(provenance()))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
