"""The whole draft step at Kimi-K3's geometry with random weights: this drafter against a composition of libraries, one GPU.

    python examples/bench_step.py [--batch 1 8 64] [--context 8192] [--rounds 20] [--out FILE.json]

A step writes B * 8 context rows, runs blocks of 8 rows behind B anchors through 5 layers over a paged context, and chains 7
tokens (V = 163,840, rank 256). Both contestants are one CUDA graph over the same weights. The composition takes cuBLAS for
every matrix product, FlashInfer's paged MLA (fa3; its plan is made outside the clock, and the block's latents are written
behind the context as it needs them), torch's fused RMSNorm, complex products for RoPE, index writes for pages, and a product,
an addition and an argmax for each Markov step. Without flashinfer only the floor is compared with. Both are first held against
the step in fp32.
"""

import argparse
import copy
import importlib.util
import json
import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from trtllm_dspark.attention import vanilla
from trtllm_dspark.attention.operations import Operations
from trtllm_dspark.attention.policy import BackendChoice
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.provenance import provenance
from trtllm_dspark.step import CapturedStep, StepBuffers, draft_block, extend_rows

GPU, DTYPE, PAGE, ROWS, DRAFTS = torch.device("cuda"), torch.bfloat16, 64, 8, 7
COPY, MATMUL = 4.3e12, 790e12  # bytes and FLOP a second of an H200, as measured; see examples/results
NEAR = 1.25  # times the composition's error against fp32, which ours may not pass
LARGEST = 5e-2  # the same where there is no composition
K3 = {  # the geometry of Inferact/Kimi-K3-DSpark, with 8 rows a block
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 1 << 20,
    "num_hidden_layers": 5,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "rope_theta": 50000.0,
    "num_target_layers": 5,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "block_size": ROWS,
    "mask_token_id": 163837,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def random_model() -> tuple[MLADSparkForCausalLM, torch.Tensor]:
    """The draft and a target's output head, with values that keep activations near 1."""
    model = MLADSparkForCausalLM.empty(DraftConfig.from_dict(K3), device=GPU, dtype=DTYPE)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.1) if parameter.dim() == 1 else parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    head = torch.empty(model.config.vocab_size, model.config.hidden_size, dtype=DTYPE, device=GPU).normal_(0.0, 0.01)
    return model.requires_grad_(False).eval(), head


def filled(model: MLADSparkForCausalLM, batch: int, context: int) -> tuple[StepBuffers, ContextPool]:
    """Requests of equal context in shuffled pages, the last rows of it to be written by the step."""
    each = -(-(context + ROWS) // PAGE)
    pool = ContextPool.allocate(PoolLayout.of(model.config, page_size=PAGE, dtype=DTYPE), batch * each, GPU)
    for view in pool.views:
        view.normal_()
    buffers = StepBuffers.allocate(model, batch, each, rows=batch * ROWS)
    buffers.page_table.copy_(torch.randperm(batch * each, device=GPU).view(batch, each))
    buffers.context_len.fill_(context)
    buffers.positions.fill_(context)
    buffers.anchors.random_(0, model.config.vocab_size)
    buffers.taps.normal_()
    at = torch.arange(context - ROWS, context, device=GPU)
    buffers.tap_positions.copy_(at.repeat(batch))
    buffers.slots.copy_((buffers.page_table[:, at // PAGE].long() * PAGE + at % PAGE).flatten())
    return buffers, pool


class Composition:
    """The step's operations out of libraries, for fixed lengths and tables."""

    def __init__(self, model: MLADSparkForCausalLM, buffers: StepBuffers, context: int) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        table, batch = buffers.page_table, buffers.anchors.shape[0]
        steps = torch.arange(batch + 1, dtype=torch.int32, device=GPU)
        lists = {
            "qo_indptr": steps * ROWS,
            "kv_indptr": steps * table.shape[1],
            "kv_indices": table.flatten(),
            "kv_len_arr": buffers.context_len + ROWS,
        }
        self.latent = model.latent_norm.shape[1]
        self.wrapper = BatchMLAPagedAttentionWrapper(
            torch.empty(128 << 20, dtype=torch.int8, device=GPU),
            use_cuda_graph=True,
            backend="fa3",
            **{name: torch.empty_like(values) for name, values in lists.items()},
        )
        self.wrapper.plan(
            **lists,
            num_heads=model.config.num_heads,
            head_dim_ckv=self.latent,
            head_dim_kpe=model.config.latent_width - self.latent,
            page_size=PAGE,
            causal=False,
            sm_scale=model.scale,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )
        at = torch.arange(context, context + ROWS, device=GPU)
        self.block_slots = (table[:, at // PAGE].long() * PAGE + at % PAGE).flatten()

    def operations(self) -> Operations:
        return Operations(
            self.attend, context_append=self.append, query_rope=self.rope, finish_latents=self.finish,
            add_rms_norm=self.norm, markov_chain=self.chain, capturable=True, differentiable=False,
        )  # fmt: skip

    def attend(
        self, q: torch.Tensor, block_latents: torch.Tensor, pages: torch.Tensor, *rest: Any, **more: Any
    ) -> torch.Tensor:
        pages.flatten(0, 1)[self.block_slots] = block_latents.flatten(0, 1)
        parts = q.flatten(0, 2).view(-1, q.shape[2], q.shape[3]).split([self.latent, q.shape[3] - self.latent], -1)
        out = self.wrapper.run(*parts, *pages.split([self.latent, q.shape[3] - self.latent], -1))
        return out.view(*q.shape[:3], self.latent)

    def finish(self, z: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float) -> torch.Tensor:
        latent, rotary = z.split([self.latent, z.shape[-1] - self.latent], -1)
        return torch.cat((F.rms_norm(latent, (self.latent,), eps=eps) * weight, turned(rotary, cos, sin)), -1)

    def append(self, z: Any, weight: Any, cos: Any, sin: Any, slots: Any, pools: Any, eps: float) -> None:
        rows = self.finish(z, weight, cos[:, None], sin[:, None], eps)
        for layer, pages in enumerate(pools):
            pages.flatten(0, 1)[slots] = rows[:, layer]

    def rope(self, rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        out[..., self.latent :].copy_(turned(rotary, cos.unsqueeze(-2), sin.unsqueeze(-2)))

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else residual + x
        return F.rms_norm(total, weight.shape, weight, eps), total

    def chain(self, base: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: Any) -> torch.Tensor:
        previous, tokens = anchors, []
        for k in range(base.shape[1]):
            codes[:, k] = F.embedding(previous, w1)
            previous = F.linear(codes[:, k], w2).add_(base[:, k]).argmax(-1)
            tokens.append(previous)
        return torch.stack(tokens, 1)


def turned(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(rotary.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).to(rotary.dtype)


def floor_us(model: MLADSparkForCausalLM, head: torch.Tensor, batch: int, context: int) -> float:
    """Each part at its own floor, one after the other: weights read once, 5 contexts read once, W2 once for each draft."""
    config, item = model.config, DTYPE.itemsize
    rows, us = batch * ROWS, 0.0
    heads = {"embed_tokens", "markov_head", "confidence_head"}
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and n.split(".")[0] not in heads)
    for values, taken in ((matrices, rows), (head.numel(), batch * DRAFTS)):
        us += 1e6 * max(values * item / COPY, 2 * values * taken / MATMUL)
    keys, packed = context + ROWS, ROWS * config.num_heads
    flop, moved = 2176 * batch * packed * keys, 1152 * batch * keys + 2176 * batch * packed
    us += 1e6 * config.num_layers * max(flop / MATMUL, moved / COPY)
    table = config.vocab_size * config.markov_rank * item
    return us + 1e6 * DRAFTS * (table + batch * config.vocab_size * item) / COPY


def true_hidden(model: MLADSparkForCausalLM, head: torch.Tensor, buffers: StepBuffers, pool: ContextPool) -> torch.Tensor:
    """The step's hidden states in fp32, from the same weights and context."""
    wide = copy.deepcopy(model).float()
    wide.use_backend(BackendChoice("VANILLA", (), vanilla.operations()))
    pages = [view.float() for view in pool.views]
    with torch.no_grad():
        extend_rows(wide, pages, buffers.taps.float(), buffers.tap_positions, buffers.slots)
        return draft_block(wide, head.float(), buffers.view(pages), buffers.anchors, buffers.positions, DRAFTS, ROWS).hidden


def timed(steps: dict[str, CapturedStep], rounds: int) -> dict[str, float]:
    """Median microseconds of interleaved replays."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step.replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(1e3 * start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure and print a table; JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out")
    given = parser.parse_args()
    model, head = random_model()
    ours, found = model.backend, []
    print(torch.cuda.get_device_name(), ours)
    print("| B | floor us | ours us (of the floor) | composition us | ratio | error of hidden states |\n|--|--|--|--|--|--|")
    for batch in given.batch:
        buffers, pool = filled(model, batch, given.context)
        choices = {"ours": ours}
        if importlib.util.find_spec("flashinfer") is not None:
            operations = Composition(model, buffers, given.context).operations()
            choices["composition"] = replace(ours, name="composition", operations=operations)
        steps = {}
        for name, choice in choices.items():
            model.use_backend(choice)
            steps[name] = CapturedStep(model, head, pool.views, buffers, DRAFTS)
        model.use_backend(ours)
        truth = true_hidden(model, head, buffers, pool)
        off = {name: ((step.replay().hidden - truth).norm() / truth.norm()).item() for name, step in steps.items()}
        if not off["ours"] <= NEAR * off.get("composition", LARGEST):
            raise SystemExit(f"bench_step: ours must err from fp32 as the composition does, at B = {batch} they err by {off}.")
        us, floor = timed(steps, given.rounds), floor_us(model, head, batch, given.context)
        other = us.get("composition")
        ratio = f"{other:,.0f} | {other / us['ours']:.2f}" if other else "not installed | "
        errors = " / ".join(f"{value:.1e}" for value in off.values())
        print(f"| {batch} | {floor:,.0f} | {us['ours']:,.0f} ({floor / us['ours']:.2f}) | {ratio} | {errors} |", flush=True)
        found.append({"batch": batch, "context": given.context, "floor_us": floor, **us, "error_of_hidden": off})
        del steps, buffers, pool, truth
        torch.cuda.empty_cache()
    if given.out:
        with open(given.out, "w") as file:
            json.dump({"steps": found, "provenance": provenance()}, file, indent=2)


if __name__ == "__main__":
    main()
