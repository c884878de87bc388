"""Both models in the form that training needs: many blocks a sequence under one mask, and a target that decodes on latents.

Shapes: B sequences, T tokens, A anchors a sequence, S block rows, H heads, D hidden, L layers, V vocabulary,
W = c + r, the width of a latent.
"""

from typing import Any

import torch
import torch.nn.functional as F

from cute_kernels.reference.context_append import finish_latents
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.model.mla import MLADSparkForCausalLM

PREFILL_ROWS = 64  # sequences whose prompts are run together: bounds the memory of their scores


# ---------------------------------------------------------------------------------------------------------------- drafter
def draft_blocks(
    model: MLADSparkForCausalLM, lm_head: torch.Tensor, taps: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft behind many anchors of each sequence at once; the tokens inside a block are teacher-forced.

    The rows of the block at p see the context strictly before p and their own block in both directions: what serving
    computes one block at a time.

    Args:
        model: the drafter. lm_head: [V, D], the target's. taps: [B, T, n_taps * D], ids: [B, T], of whole sequences.
        anchors: [B, A], positions in 0 .. T - S - 1.
    Returns:
        logits [B, A, S, V], fp32, with the Markov bias: row k predicts the token at p + k + 1; confidence logits [B, A, S].
    """
    config, rows = model.config, model.config.block_size
    value_width = model.latent_norm.shape[-1]
    z = model.context_latents(model.project_context(taps))
    cos, sin = model.rope.angles(torch.arange(ids.shape[1], device=ids.device))
    context = finish_latents(z, model.latent_norm, cos[:, None], sin[:, None], config.rms_norm_eps)  # [B, T, L, W]
    hidden_from_block = torch.arange(ids.shape[1], device=ids.device) >= anchors[..., None]  # [B, A, T]

    def attend(layer: int, q: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        q = (q * model.scale).unflatten(1, (-1, rows))
        before, own = context[:, :, layer], latents.unflatten(1, (-1, rows))
        over_context = torch.einsum("bashw,btw->basht", q, before).float()
        over_context = over_context.masked_fill(hidden_from_block[:, :, None, None], -torch.inf)
        over_own = torch.einsum("bashw,bazw->bashz", q, own).float()
        top = torch.maximum(over_context.amax(-1, keepdim=True), over_own.amax(-1, keepdim=True)).detach()
        on_context, on_own = (over_context - top).exp(), (over_own - top).exp()
        total = on_context.sum(-1, keepdim=True) + on_own.sum(-1, keepdim=True)
        weighted = torch.einsum("basht,btc->bashc", on_context.to(q.dtype), before[..., :value_width].to(q.dtype))
        weighted = weighted + torch.einsum("bashz,bazc->bashc", on_own.to(q.dtype), own[..., :value_width].to(q.dtype))
        return (weighted / total).flatten(1, 2).to(q.dtype)

    positions = anchors[..., None] + torch.arange(rows, device=ids.device)  # [B, A, S]
    block = F.pad(ids.gather(1, anchors)[..., None], (0, rows - 1), value=config.mask_token_id)
    hidden = model(model.embed_tokens(block.flatten(1)), positions.flatten(1), attend)
    previous = ids.gather(1, positions.flatten(1))
    logits = F.linear(hidden, lm_head).float() + model.markov_head(previous).float()
    confidence = model.confidence_head(hidden, model.markov_head.code(previous)).float()
    return logits.unflatten(1, (-1, rows)), confidence.unflatten(1, (-1, rows))


# ----------------------------------------------------------------------------------------------------------------- target
def target_hidden(lm: Any, ids: torch.Tensor, target_layer_ids: list[int]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The target's taps [B, T, n_taps * D] (None without any) and its final hidden states [B, T, D].

    Layer by layer, because the model's own forward builds a mask with a host sync, which a CUDA graph cannot hold.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    h, taps = lm.model.embed_tokens(ids), []
    angles = lm.model.rotary_emb(h, position_ids=positions)
    for index, layer in enumerate(lm.model.layers):
        h = layer(h, attention_mask=None, position_ids=positions, position_embeddings=angles)
        if index in target_layer_ids:
            taps.append(h)
    return torch.cat(taps, -1) if taps else None, lm.model.norm(h)


def latent_twin(lm: Any) -> MLADSparkForCausalLM:
    """The target's layers in the drafter's class: an MLA layer is the same in both, and here it is absorbed."""
    c, device, dtype = lm.config, lm.device, lm.dtype
    widths = "hidden_size intermediate_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank"
    widths += " qk_nope_head_dim qk_rope_head_dim v_head_dim vocab_size max_position_embeddings rms_norm_eps"
    config = DraftConfig.from_dict(
        {name: getattr(c, name) for name in widths.split()}
        | dict(architectures=["K3DSparkModel"], model_type="k3_dspark", rope_parameters=dict(c.rope_parameters))
        | dict(target_layer_ids=[0], mask_token_id=0, block_size=1, markov_rank=0, enable_confidence_head=False)
    )
    twin = MLADSparkForCausalLM.empty(config, device=device, dtype=dtype, attention_backend="VANILLA")
    values, bindings = dict(lm.model.state_dict()), twin.bindings()
    values["final_norm.weight"] = values["norm.weight"]
    twin.fill(lambda name, dim: values[name] if name in values else torch.zeros_like(bindings[name].tensor))
    return twin.requires_grad_(False)


@torch.no_grad()
def roll_out(
    twin: MLADSparkForCausalLM,
    lm_head: torch.Tensor,
    prompts: torch.Tensor,
    new_tokens: int,
    temperature: torch.Tensor | None = None,
) -> torch.Tensor:
    """Continue each prompt by exactly `new_tokens` tokens of the target's own.

    Args:
        twin: of `latent_twin`. lm_head: [V, D]. prompts: [B, T].
        temperature: [B, 1], 0 is greedy; None: all greedy.
    Returns:
        [B, T + new_tokens].
    """
    batch, length = prompts.shape
    layers, value_width = twin.latent_norm.shape
    ids = F.pad(prompts, (0, new_tokens))
    cache = twin.latent_proj.new_empty(layers, batch, length + new_tokens, twin.latent_proj.shape[1])

    def run(part: slice, first: int, stop: int) -> torch.Tensor:
        """Final hidden states of the tokens at first .. stop-1, whose latents go into the cache."""
        positions = torch.arange(first, stop, device=ids.device)
        later = torch.arange(stop, device=ids.device) > positions[:, None]

        def attend(layer: int, q: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
            cache[layer, part, first:stop] = latents
            keys = cache[layer, part, :stop]
            scores = torch.einsum("bshw,btw->bsht", q * twin.scale, keys)
            weights = scores.masked_fill(later[:, None], -torch.inf).softmax(-1)
            return torch.einsum("bsht,btc->bshc", weights, keys[..., :value_width])

        tokens = ids[part, first:stop]
        return twin(twin.embed_tokens(tokens), positions.expand_as(tokens), attend)

    everything = slice(0, batch)
    rows = [slice(start, start + PREFILL_ROWS) for start in range(0, batch, PREFILL_ROWS)]
    hidden = torch.cat([run(part, 0, length)[:, -1] for part in rows])
    for position in range(length, length + new_tokens):
        logits = F.linear(hidden, lm_head).float()
        if temperature is not None:  # the largest of logits + Gumbel noise is a sample
            uniform = torch.rand_like(logits).clamp_(1e-9, 1 - 1e-7)
            logits = logits - temperature * torch.log(-torch.log(uniform))
        ids[:, position] = logits.argmax(-1)
        if position + 1 < length + new_tokens:
            hidden = run(everything, position, position + 1)[:, 0]
    return ids
