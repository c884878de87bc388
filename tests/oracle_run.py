"""Run the real drafter on the conformance data: real loader, paged context, VANILLA, and every value it has a name for."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter

torch.set_num_threads(1)  # at these sizes threads only wait for each other
DATA = Path(__file__).parent / "data" / "oracle"
CASES = ("ctx000", "ctx037", "ctx037_b8", "multi_step")
Values = dict[str, torch.Tensor]


def load_case(name: str) -> Values:
    return load_file(DATA / "mla" / "cases" / f"{name}.safetensors")


@cache
def load_model(dtype: torch.dtype) -> MLADSparkForCausalLM:
    """The stored checkpoint by the real loader; shared, so what a test changes in it, it changes back."""
    return MLADSparkForCausalLM.from_pretrained(DATA / "mla" / "ckpt", dtype=dtype)


def load_drafter(dtype: torch.dtype, *, page_size: int = 16, num_pages: int = 8) -> Drafter:
    """The stored checkpoint and lm_head in `dtype`, over a pool of its own that starts as NaN."""
    model = load_model(dtype)
    pool = ContextPool.allocate(PoolLayout.of(model.config, page_size=page_size, dtype=dtype), num_pages)
    lm_head = load_file(DATA / "mla" / "target_side.safetensors")["lm_head.weight"].to(dtype)
    return Drafter(model, DraftContext(pool), lambda hidden: F.linear(hidden, lm_head))


def run_case(name: str, drafter: Drafter) -> Values:
    """All `out.*` of a case, in fp32. Earlier requests come first, so that its pages are out of order and not adjacent."""
    case, context = load_case(name), drafter.context
    context.admit("first", 3 * context.page_size)
    context.admit("other", 2 * context.page_size)
    context.release("first")
    context.admit("case", 64)
    if name != "multi_step":
        feature = drafter.model.project_context(case["in.target_features"].to(drafter.model.context_proj.weight.dtype))
        out = _step(drafter, case["in.target_features"], 0, case["in.draft_ids"], case["in.tf_prev_tokens"])
        return {"out.context_feature": feature.float()} | out
    found, done = {}, 0
    for index, at in enumerate(case["in.step_anchor_pos"].tolist()):
        ids = torch.full((7,), drafter.model.config.mask_token_id)
        ids[0] = case["in.token_ids"][at]
        out = _step(drafter, case["in.taps"][done:at], done, ids, None)
        found |= {f"s{index}.{key}": value for key, value in out.items()}
        done = at
    return found


def _step(drafter: Drafter, taps: torch.Tensor, first: int, ids: torch.Tensor, forced: torch.Tensor | None) -> Values:
    """Extend the request's context by `taps` and draft a block behind it. forced: previous tokens of the tf outputs."""
    model, rows = drafter.model, len(ids)
    if len(taps):
        drafter.extend([Segment("case", first, len(taps))], taps)
    with recorded(model) as seen:
        proposal = drafter.propose(["case"], ids[:1], rows, block_rows=rows, keep_logits=True)
    hidden = proposal.hidden[0]
    out: Values = dict(seen)
    length, page_size = drafter.context.length("case"), drafter.context.page_size
    slots = drafter.context.requests["case"].slots(0, length)
    for layer, pages in enumerate(drafter.context.pool.views):
        out[f"out.ctx_latent.{layer}"] = (
            torch.stack([pages[s // page_size, s % page_size] for s in slots])
            if slots
            else (pages.new_zeros(0, pages.shape[-1]))
        )
    out["out.final_hidden"], out["out.base_logits"] = hidden, drafter.lm_head(hidden)
    out["out.chain_tokens"], out["out.corrected_logits"] = proposal.tokens[0], proposal.logits[0]
    out["out.confidence"] = proposal.confidence[0]
    previous = torch.cat((ids[:1], proposal.tokens[0, :-1]))
    out["out.confidence_logits"] = model.confidence_head(hidden, model.markov_head.code(previous))
    if forced is not None:
        logits = out["out.base_logits"].float() + model.markov_head(forced)
        out["out.tf_logits"], out["out.tf_probs_t07"] = logits, (logits / 0.7).softmax(-1)
        out["out.tf_confidence_logits"] = model.confidence_head(hidden, model.markov_head.code(forced))
    return {key: value if value.dtype == torch.int64 else value.float() for key, value in out.items()}


@contextmanager
def recorded(model: MLADSparkForCausalLM) -> Iterator[Values]:
    """What passes through the layers of one request's block while the context is open, under the data's names."""
    seen: Values = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.__setitem__(name, output[0].detach())

    def keep_input(name: str) -> Callable[..., None]:
        """What a module is given; of the residual stream's norms, the stream with the addition that they make."""
        return lambda module, inputs: seen.__setitem__(name, sum(part for part in inputs if part is not None)[0].detach())

    attend, heads = model.backend.block_attention, model.config.num_heads

    def recording_attention(q: torch.Tensor, block_latents: torch.Tensor, **rest: object) -> torch.Tensor:
        layer = rest["layer"]
        seen[f"out.block_latent.{layer}"] = block_latents[0].detach()
        projected, rotary = seen.pop(f"q_b.{layer}").unflatten(-1, (heads, -1)), model.config.qk_rope_head_dim
        seen[f"out.q.{layer}"] = torch.cat((projected[..., :-rotary], q[0, ..., -rotary:]), -1)
        return attend(q, block_latents, **rest)

    backend = model.backend
    with ExitStack() as stack:
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            after = model.layers[index + 1].input_layernorm if index + 1 < len(model.layers) else model.final_norm
            handles = (
                attention.q_b_proj.register_forward_hook(keep(f"q_b.{index}")),
                attention.o_proj.register_forward_hook(keep(f"out.attn_out.{index}")),
                attention.o_proj.register_forward_pre_hook(keep_input(f"attn_heads.{index}")),
                layer.mlp.register_forward_hook(keep(f"out.mlp_out.{index}")),
                after.register_forward_pre_hook(keep_input(f"out.residual.{index}")),
            )
            for handle in handles:
                stack.callback(handle.remove)
        model.backend = replace(backend, operations=replace(backend.operations, block_attention=recording_attention))
        stack.callback(lambda: setattr(model, "backend", backend))
        yield seen
    for index in range(len(model.layers)):
        seen[f"out.attn_heads.{index}"] = seen.pop(f"attn_heads.{index}").unflatten(-1, (heads, -1))
