"""The MLA drafter's backbone written out head by head in fp64, un-absorbed, from the formulas alone.

It imports nothing of the package: an oracle for sizes that the conformance data does not reach. Weights come by stored name.
"""

import math

import torch

Weights = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def inverse_frequency(i: int, rope: dict[str, float], dim: int) -> float:
    """YaRN: turn i of `dim / 2`, slowed down by `factor` where it makes few rotations over the original length."""
    theta, length = rope["rope_theta"], rope["original_max_position_embeddings"]

    def crossing(rotations: float) -> float:
        return dim * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = max(math.floor(crossing(rope["beta_fast"])), 0), min(math.ceil(crossing(rope["beta_slow"])), dim - 1)
    ramp = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
    return theta ** (-2 * i / dim) * ((1 - ramp) + ramp / rope["factor"])


def turn(x: torch.Tensor, position: int, rope: dict[str, float]) -> torch.Tensor:
    """Rotate neighbours (2i, 2i+1) of the last dim as complex numbers."""
    dim = x.shape[-1]
    angle = torch.tensor([position * inverse_frequency(i, rope, dim) for i in range(dim // 2)], dtype=torch.float64)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], dim // 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def hidden_states(raw: dict, weights: Weights, taps: torch.Tensor, ids: torch.Tensor, anchor_position: int) -> torch.Tensor:
    """Final hidden states [S, D], fp64, of one block `ids` [S] behind context features `taps` [T, n_taps * D]."""
    w = {name: value.double() for name, value in weights.items()}
    eps, heads, rope = raw["rms_norm_eps"], raw["num_attention_heads"], raw["rope_parameters"]
    nope, rotary, value_dim, c = (raw[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    m = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
    scale = m * m / math.sqrt(nope + rotary)
    first = anchor_position - len(taps)
    context = rms(taps.double() @ w["context_proj.weight"].T, w["context_norm.weight"], eps)
    h = w["embed_tokens.weight"][ids]
    for layer in range(raw["num_hidden_layers"]):

        def of(name: str, layer: int = layer) -> torch.Tensor:
            return w[f"layers.{layer}.{name}.weight"]

        x = rms(h, of("input_layernorm"), eps)
        z = torch.cat((context, x)) @ of("self_attn.kv_a_proj_with_mqa").T  # the context's rows skip input_layernorm
        latent = rms(z[:, :c], of("self_attn.kv_a_layernorm"), eps)
        shared_key = torch.stack([turn(row[c:], first + t, rope) for t, row in enumerate(z)])
        q = rms(x @ of("self_attn.q_a_proj").T, of("self_attn.q_a_layernorm"), eps) @ of("self_attn.q_b_proj").T
        up = latent @ of("self_attn.kv_b_proj").T
        per_query, per_key, outputs = nope + rotary, nope + value_dim, []
        for head in range(heads):
            query = q[:, head * per_query : (head + 1) * per_query]
            turned = torch.stack([turn(row, anchor_position + s, rope) for s, row in enumerate(query[:, nope:])])
            key, value = up[:, head * per_key : (head + 1) * per_key].split([nope, value_dim], -1)
            scores = scale * (query[:, :nope] @ key.T + turned @ shared_key.T)
            outputs.append(scores.softmax(-1) @ value)
        h = h + torch.cat(outputs, -1) @ of("self_attn.o_proj").T
        y = rms(h, of("post_attention_layernorm"), eps)
        gate = y @ of("mlp.gate_proj").T
        h = h + (gate * torch.sigmoid(gate) * (y @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    return rms(h, w["final_norm.weight"], eps)
