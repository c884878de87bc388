"""What a draft checkpoint holds: the name and shape of every tensor, by config.

Canonical names are those of the MLA checkpoint without `model.`; the GQA family's own words are aliases:

    fc -> context_proj    hidden_norm -> context_norm    norm -> final_norm
    markov_w1, markov_w2 -> markov_head.*                confidence_proj -> confidence_head.proj
"""

from dataclasses import dataclass

from trtllm_dspark.config import DraftConfig

ALIASES = {
    "fc.": "context_proj.",
    "hidden_norm.": "context_norm.",
    "norm.": "final_norm.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence_proj.": "confidence_head.proj.",
}


@dataclass(frozen=True)
class TensorSpec:
    """What a draft of some config must hold under one canonical name."""

    shape: tuple[int, ...]
    required: bool = True  # False: the target's own tensor serves where the file has none


def canonical_name(stored: str) -> str:
    """The name under which a stored tensor is known here: without `model.`, in the MLA checkpoint's words."""
    name = stored.removeprefix("model.")
    for prefix, ours in ALIASES.items():
        if name.startswith(prefix) and not name.removeprefix(prefix)[:1].isdigit():
            return ours + name.removeprefix(prefix)
    return name


def tensor_table(config: DraftConfig) -> dict[str, TensorSpec]:
    """Canonical name -> shape ([out, in] for a projection) for every tensor that a draft of this config may hold.

    The published MLA draft has 68 required names, the GQA one 62. `lm_head` is always the target's, and `embed_tokens`
    is for GQA: both are listed, and not required there.
    """
    d, f, v, heads = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (d, config.num_taps * config.target_hidden_size),
        "context_norm.weight": (d,),
        "final_norm.weight": (d,),
    }
    if config.per_tap_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(config.num_taps)}
    if config.markov_rank:
        shapes |= {f"markov_head.markov_{w}.weight": (v, config.markov_rank) for w in ("w1", "w2")}
    if config.confidence_head:
        shapes["confidence_head.proj.weight"] = (1, d + (config.markov_rank if config.confidence_with_markov else 0))
        if config.confidence_bias:
            shapes["confidence_head.proj.bias"] = (1,)
    if config.family == "mla":
        q_rank, kv_rank = config.q_lora_rank or 0, config.kv_lora_rank or 0
        nope, v_dim = config.qk_nope_head_dim or 0, config.v_head_dim or 0
        attention: dict[str, tuple[int, ...]] = {
            "q_a_proj": (q_rank, d),
            "q_a_layernorm": (q_rank,),
            "q_b_proj": (heads * config.qk_head_dim, q_rank),  # per head: nope rows, then rope rows
            "kv_a_proj_with_mqa": (config.latent_width, d),  # latent rows, then rope rows
            "kv_a_layernorm": (kv_rank,),
            "kv_b_proj": (heads * (nope + v_dim), kv_rank),  # per head: key rows, then value rows
            "o_proj": (d, heads * v_dim),
        }
    else:
        dim = config.qk_head_dim
        attention = {
            "q_proj": (heads * dim, d),
            "k_proj": (config.num_kv_heads * dim, d),
            "v_proj": (config.num_kv_heads * dim, d),
            "o_proj": (d, heads * dim),
            "q_norm": (dim,),
            "k_norm": (dim,),
        }
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        shapes |= {f"{at}{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{at}mlp.{name}.weight": (f, d) for name in ("gate_proj", "up_proj")}
        shapes[f"{at}mlp.down_proj.weight"] = (d, f)
    table = {name: TensorSpec(shape) for name, shape in shapes.items()}
    table["embed_tokens.weight"] = TensorSpec((v, d), required=config.family == "mla")
    table["lm_head.weight"] = TensorSpec((v, d), required=False)
    return table
