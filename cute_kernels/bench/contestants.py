"""Who is timed on a case: ours first, then each peer. A peer in plain torch is written as well as plain torch allows.

What a peer may prepare outside the clock is to its advantage and said in its note: index arithmetic, tables of angles. A plan
that is made on the device once a step is timed both ways, and each way is held against those who do the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from cute_kernels.bench import flash_mla, flashinfer_mla
from cute_kernels.bench.cases import (
    BlockAttentionCase,
    ContextAppendCase,
    FewRowLinearCase,
    Inputs,
    MarkovChainCase,
    QueryRopeCase,
)
from cute_kernels.block_attention import BlockAttentionConfig, BlockAttentionWorkspace, block_attention, plan_block_attention
from cute_kernels.block_attention.config import pick_schedule
from cute_kernels.context_append import context_append
from cute_kernels.few_row_linear import few_row_linear, few_row_silu_mul
from cute_kernels.few_row_linear.config import SILU_MUL
from cute_kernels.markov_chain import markov_chain
from cute_kernels.query_rope import query_rope
from cute_kernels.support import arch_name

Call = Callable[[], torch.Tensor]
"""One call on one set; gives the tensor that holds the result, however it got there."""


@dataclass(frozen=True)
class Contestant:
    """One way to compute a case.

    Attributes:
        name: in tables. prepare: (case, sets) -> one call a set; what it does itself is outside the clock.
        ours: whether a wrong result makes every speed of the case meaningless. note: what a reader must know.
        package: that must be importable, None for none. capability: the only (major, minor) it runs on, None for all.
        uncovered: (case) -> None where it covers the case, else what it needs; None: it covers all.
        planned: "each call" or "once" where it plans on the device, None where it has no such plan.
    """

    name: str
    prepare: Callable[[Any, list[Inputs]], list[Call]]
    ours: bool = False
    note: str = ""
    package: str | None = None
    capability: tuple[int, int] | None = None
    uncovered: Callable[[Any], str | None] | None = None
    planned: str | None = None

    def absent(self, case: Any, device: torch.device) -> str | None:
        """None where it can be tried, else why not."""
        if self.uncovered is not None and (need := self.uncovered(case)) is not None:
            return need
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.capability is not None and torch.cuda.get_device_capability(device) != self.capability:
            return f"needs sm_{self.capability[0]}{self.capability[1]}"
        return None


def our_attention(
    case: BlockAttentionCase, sets: list[Inputs], *, plan_each_call: bool, schedule: str | None = None
) -> list[Call]:
    """Attention and combine in every call, and the plan too or once for all. schedule None: what a drafter would take."""
    first, device = sets[0], sets[0]["q"].device
    if schedule is None and device.type == "cuda":  # elsewhere the call itself says what it needs
        config = BlockAttentionConfig(case.value_width, case.width - case.value_width, case.page_size, "bfloat16")
        schedule = pick_schedule(config, arch_name(device))
    workspace = BlockAttentionWorkspace.allocate(
        max_batch=case.batch,
        block_rows=case.rows,
        heads=case.heads,
        value_width=case.value_width,
        device=device,
        schedule=schedule or "portable",
    )
    max_context = first["page_table"].shape[1] * case.page_size
    plan = partial(plan_block_attention, first["context_len"], workspace=workspace, max_context=max_context)
    plan()
    operands = ("q", "block_latents", "pages", "page_table", "context_len", "out")

    def call(inputs: Inputs) -> torch.Tensor:
        if plan_each_call:
            plan()
        given = {name: inputs[name] for name in operands}
        block_attention(**given, scale=case.scale, value_width=case.value_width, plan=workspace)
        return inputs["out"]

    return [partial(call, inputs) for inputs in sets]


def ragged(case: BlockAttentionCase) -> str | None:
    """What plain torch's attention needs, None where the case has it."""
    return None if case.shortest is None else "needs contexts of one length"


def torch_attention(case: BlockAttentionCase, sets: list[Inputs]) -> list[Call]:
    """Gather the pages, then two matrix products over the context and two over the block: nothing is concatenated."""
    context, value = case.context, case.value_width
    live = sets[0]["page_table"][:, : -(-context // case.page_size)].reshape(-1)

    def call(inputs: Inputs) -> torch.Tensor:
        q, block, out = inputs["q"].flatten(1, 2), inputs["block_latents"], inputs["out"].flatten(1, 2)
        latents = inputs["pages"].index_select(0, live).view(case.batch, -1, case.width)[:, :context]
        scores = q.new_empty(case.batch, q.shape[1], context + case.rows)
        scores[..., :context].baddbmm_(q, latents.mT, beta=0, alpha=case.scale)
        scores[..., context:].baddbmm_(q, block.mT, beta=0, alpha=case.scale)
        weights = scores.softmax(-1)
        torch.bmm(weights[..., :context], latents[..., :value], out=out)
        out.baddbmm_(weights[..., context:], block[..., :value])
        return inputs["out"]

    return [partial(call, inputs) for inputs in sets]


def our_append(case: ContextAppendCase, sets: list[Inputs]) -> list[Call]:
    operands = ("z", "norm_weight", "cos", "sin", "slots", "pools", "eps")

    def call(inputs: Inputs) -> torch.Tensor:
        context_append(**{name: inputs[name] for name in operands})
        return inputs["pool"]

    return [partial(call, inputs) for inputs in sets]


def torch_append(case: ContextAppendCase, sets: list[Inputs]) -> list[Call]:
    """All layers at once; the rotation is one complex product."""
    turns = [torch.complex(inputs["cos"], inputs["sin"])[:, None] for inputs in sets]

    def call(inputs: Inputs, turn: torch.Tensor) -> torch.Tensor:
        latent, rotary = inputs["z"].split([case.latent, case.rotary], -1)
        normed = F.rms_norm(latent, (case.latent,), eps=case.eps) * inputs["norm_weight"]
        rows = inputs["pool"].flatten(1, 2)  # [L, slots, W]
        rows[:, inputs["slots"], : case.latent] = normed.transpose(0, 1)
        rows[:, inputs["slots"], case.latent :] = _turned(rotary, turn).to(rotary.dtype).transpose(0, 1)
        return inputs["pool"]

    return [partial(call, inputs, turn) for inputs, turn in zip(sets, turns, strict=True)]


def our_rope(case: QueryRopeCase, sets: list[Inputs]) -> list[Call]:
    def call(inputs: Inputs) -> torch.Tensor:
        query_rope(inputs["rotary"], inputs["cos"], inputs["sin"], inputs["out"])
        return inputs["out"]

    return [partial(call, inputs) for inputs in sets]


def torch_rope(case: QueryRopeCase, sets: list[Inputs]) -> list[Call]:
    """One complex product, rounded as it is copied into place."""
    turns = [torch.complex(inputs["cos"], inputs["sin"])[:, :, None] for inputs in sets]

    def call(inputs: Inputs, turn: torch.Tensor) -> torch.Tensor:
        inputs["out"][..., case.latent :].copy_(_turned(inputs["rotary"], turn))
        return inputs["out"]

    return [partial(call, inputs, turn) for inputs, turn in zip(sets, turns, strict=True)]


def _turned(rotary: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Adjacent pairs rotated, fp32. rotary: [..., r]. turn: broadcastable to [..., r/2], complex."""
    pairs = torch.view_as_complex(rotary.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2)


def our_chain(case: MarkovChainCase, sets: list[Inputs], *, schedule: str | None = None) -> list[Call]:
    return [partial(markov_chain, **inputs, schedule=schedule) for inputs in sets]


def torch_chain(case: MarkovChainCase, sets: list[Inputs]) -> list[Call]:
    """A row of W1, a product with W2, an addition in place and an argmax for each step."""

    def call(inputs: Inputs) -> torch.Tensor:
        previous, tokens = inputs["anchors"], []
        for k in range(case.steps):
            logits = F.linear(F.embedding(previous, inputs["w1"]), inputs["w2"]).add_(inputs["base_logits"][:, k])
            previous = logits.argmax(-1)
            tokens.append(previous)
        return torch.stack(tokens, 1)

    return [partial(call, inputs) for inputs in sets]


def our_linear(case: FewRowLinearCase, sets: list[Inputs]) -> list[Call]:
    product: Callable[..., torch.Tensor] = few_row_silu_mul if case.form == SILU_MUL else few_row_linear
    return [partial(product, **inputs) for inputs in sets]


def torch_linear(case: FewRowLinearCase, sets: list[Inputs]) -> list[Call]:
    """One product, batched where groups have weights of their own; for a gated MLP two, SiLU and a multiplication."""

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) if weight.ndim == 2 else torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)

    def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    return [partial(gated if case.form == SILU_MUL else linear, **inputs) for inputs in sets]


ANGLES_MADE = "The complex angles are made outside the clock."
EACH_CALL, ONCE = "each call", "once"
FLASHMLA = "finds the block's latents in its pages: writing them there is not in the clock."
FLASHINFER = (
    "FlashInfer's BatchMLAPagedAttentionWrapper, plan() outside the clock, as it is host work; it finds the block's latents in "
    "its pages: writing them there is not in the clock either."
)
CONTESTANTS: dict[str, tuple[Contestant, ...]] = {
    "block_attention": (
        Contestant(
            "ours",
            partial(our_attention, plan_each_call=True),
            ours=True,
            note="Plan, attention, combine each call.",
            planned=EACH_CALL,
        ),
        Contestant(
            "ours, planned once",
            partial(our_attention, plan_each_call=False),
            ours=True,
            note="The plan outside the clock, as a step's later layers find it.",
            planned=ONCE,
        ),
        Contestant(
            "ours, portable",
            partial(our_attention, plan_each_call=True, schedule="portable"),
            ours=True,
            note="Plan, attention, combine each call.",
            planned=EACH_CALL,
        ),
        Contestant(
            "torch",
            torch_attention,
            note="Gathers the pages, two matrix products in bf16; knows the lengths on the host.",
            uncovered=ragged,
        ),
        Contestant(
            "flashmla",
            partial(flash_mla.prepare, plan_each_call=True),
            note=f"FlashMLA's dense decode; metadata, attention, combine each call; it {FLASHMLA}",
            package="flash_mla",
            capability=(9, 0),
            uncovered=flash_mla.uncovered,
            planned=EACH_CALL,
        ),
        Contestant(
            "flashmla, planned once",
            partial(flash_mla.prepare, plan_each_call=False),
            note=f"FlashMLA's dense decode, its metadata outside the clock; it {FLASHMLA}",
            package="flash_mla",
            capability=(9, 0),
            uncovered=flash_mla.uncovered,
            planned=ONCE,
        ),
        Contestant("flashinfer fa2", partial(flashinfer_mla.prepare, backend="fa2"), note=FLASHINFER, package="flashinfer"),
        Contestant(
            "flashinfer fa3",
            partial(flashinfer_mla.prepare, backend="fa3"),
            note=FLASHINFER,
            package="flashinfer",
            capability=(9, 0),
        ),
    ),
    "context_append": (
        Contestant("ours", our_append, ours=True),
        Contestant("torch", torch_append, note=f"rms_norm, a complex product, two scatters. {ANGLES_MADE}"),
    ),
    "query_rope": (
        Contestant("ours", our_rope, ours=True),
        Contestant("torch", torch_rope, note=f"A complex product, rounded by the copy. {ANGLES_MADE}"),
    ),
    "markov_chain": (
        Contestant("ours", our_chain, ours=True),
        Contestant("ours, portable", partial(our_chain, schedule="portable"), ours=True),
        Contestant("torch", torch_chain, note="linear in bf16, addition in place, argmax, for each step."),
    ),
    "few_row_linear": (
        Contestant(
            "ours",
            our_linear,
            ours=True,
            note="A launch fetches its first weights while the one before it ends, as in a step.",
        ),
        Contestant(
            "torch",
            torch_linear,
            note="linear, or bmm whose result lies group by group; for a gated MLP silu(linear) * linear.",
        ),
    ),
}
