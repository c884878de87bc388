"""The published Kimi-K3 drafts as data: configs, tensor layouts, sizes; and tiny drafts of the same two dialects.

Layouts are written out here from the config's own keys, not taken from `trtllm_dspark.tensor_names`: the tests compare the two.
"""

import copy
import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INFERACT: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000.0,
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "draft_vocab_size": 163840,
    "_torchspec_version": "0.1.0",
    "torch_dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

RADIXARK: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 7,
    "bos_token_id": 163584,
    "confidence_head_with_markov": True,
    "dflash_config": {"mask_token_id": 163824, "target_layer_ids": [7, 23, 51, 67, 83]},
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "eos_token_id": 163586,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "max_position_embeddings": 1048576,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 5,
    "num_key_value_heads": 16,
    "num_target_layers": 93,
    "pad_token_id": 163839,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "5.12.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 163840,
}

RADIXARK_YARN: dict[str, Any] = RADIXARK | {
    "rope_parameters": {
        "factor": 16.0,
        "original_max_position_embeddings": 65536,
        "rope_theta": 10000.0,
        "rope_type": "yarn",
    }
}

# name -> (config, sort keys?, SHA-256 of config.json)
CONFIGS = {
    "inferact": (INFERACT, False, "5a3c2f4f91c965ed93b14de5f12a4e9c17fd98d8c99916ed2deb26ce8702f970"),
    "radixark": (RADIXARK, True, "6aed20890d95cd69cf2ec006d1f30506fbd4f3091d44ca8e8b93e9fc7d50928f"),
    "radixark-yarn": (RADIXARK_YARN, True, "410dd228c75ff91b57af8a1581d44d2ea096d5604f0d37fbd400470e90d961d3"),
}
# name -> (__metadata__, header bytes, file bytes, tensors)
WEIGHTS = {
    "inferact": ({"torchspec_version": "0.1.0"}, 7_520, 7_124_633_450, 68),
    "radixark": ({"format": "pt"}, 6_648, 4_498_585_858, 62),
}

TINY_MLA: dict[str, Any] = INFERACT | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 128,
    "draft_vocab_size": 128,
    "max_position_embeddings": 512,
    "num_target_layers": 2,
    "target_hidden_size": 64,
    "target_num_hidden_layers": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 127,
    "markov_rank": 8,
    "block_size": 4,
}
TINY_GQA: dict[str, Any] = RADIXARK_YARN | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 2]},
    "markov_rank": 8,
    "block_size": 4,
}


def tiny(family: str = "mla", drop: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """A tiny raw config of either dialect, with keys changed or dropped."""
    raw = copy.deepcopy(TINY_MLA if family == "mla" else TINY_GQA) | changes
    return {key: value for key, value in raw.items() if key not in drop}


def config_text(name: str) -> str:
    """The published `config.json`, byte for byte."""
    raw, sort, _ = CONFIGS[name]
    return json.dumps(raw, indent=2, sort_keys=sort) + "\n"


def write_config(folder: Path, raw: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    return folder


def layout(raw: dict[str, Any]) -> dict[str, list[int]]:
    """Stored name -> shape of a draft with this config, heads on, in the family's own names."""
    d, f, v, r = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"], raw["markov_rank"]
    heads, mla = raw["num_attention_heads"], raw["model_type"] == "k3_dspark"
    taps = len((raw if mla else raw["dflash_config"])["target_layer_ids"])
    proj, context_norm, final_norm = ("context_proj", "context_norm", "final_norm") if mla else ("fc", "hidden_norm", "norm")
    shapes: dict[str, list[int]] = {f"{proj}.weight": [d, taps * d]}
    shapes |= {f"{context_norm}.weight": [d], f"{final_norm}.weight": [d]}
    shapes |= {"markov_head.markov_w1.weight": [v, r], "markov_head.markov_w2.weight": [v, r]}
    shapes |= {"confidence_head.proj.weight": [1, d + r], "confidence_head.proj.bias": [1]}
    if mla:
        shapes["embed_tokens.weight"] = [v, d]
    for i in range(raw["num_hidden_layers"]):
        at = f"layers.{i}"
        shapes |= {f"{at}.input_layernorm.weight": [d], f"{at}.post_attention_layernorm.weight": [d]}
        shapes |= {f"{at}.mlp.gate_proj.weight": [f, d], f"{at}.mlp.up_proj.weight": [f, d]}
        shapes[f"{at}.mlp.down_proj.weight"] = [d, f]
        if mla:
            q, kv, nope, rope, vd = (
                raw[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            )
            attention = {
                "q_a_proj": [q, d],
                "q_a_layernorm": [q],
                "q_b_proj": [heads * (nope + rope), q],
                "kv_a_proj_with_mqa": [kv + rope, d],
                "kv_a_layernorm": [kv],
                "kv_b_proj": [heads * (nope + vd), kv],
                "o_proj": [d, heads * vd],
            }
        else:
            dim, kv_heads = raw["head_dim"], raw["num_key_value_heads"]
            attention = {
                "q_proj": [heads * dim, d],
                "k_proj": [kv_heads * dim, d],
                "v_proj": [kv_heads * dim, d],
                "o_proj": [d, heads * dim],
                "q_norm": [dim],
                "k_norm": [dim],
            }
        shapes |= {f"{at}.self_attn.{name}.weight": shape for name, shape in attention.items()}
    return shapes


def header_bytes(shapes: dict[str, list[int]], metadata: dict[str, str], dtype: str = "BF16") -> tuple[bytes, int]:
    """(length prefix and padded JSON header, bytes of tensors) of a 16-bit file whose tensors lie in name order."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in sorted(shapes):
        size = 2
        for n in shapes[name]:
            size *= n
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def write_sparse(path: Path, shapes: dict[str, list[int]], metadata: dict[str, str] | None = None) -> Path:
    """A bf16 safetensors file of the right size, with holes where the tensors are: no disk is used for them."""
    head, size = header_bytes(shapes, metadata or {"format": "pt"})
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    return path


def write_published(folder: Path, name: str) -> Path:
    """`config.json` and a sparse `model.safetensors` of the published size, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config_text(name))
    weights = name.removesuffix("-yarn")
    write_sparse(folder / "model.safetensors", layout(CONFIGS[name][0]), WEIGHTS[weights][0])
    return folder


def tiny_tensors(raw: dict[str, Any], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of a draft with this config, by stored name."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in layout(raw).items()}


def write_tiny(folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A real tiny checkpoint in `folder`."""
    write_config(folder, raw)
    save_file(tiny_tensors(raw) if tensors is None else tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_sharded(folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """The same in `shards` files and an index."""
    write_config(folder, raw)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
