"""Real but untrained targets of several architectures, built from a config, and drafts of random weights that fit them."""

from pathlib import Path

import torch
from published import tiny, tiny_tensors, write_tiny
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from trtllm_dspark.engine.target import HuggingFaceTarget

SHARED = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # wide: an untrained target with narrow weights repeats one token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
RECURRENT = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHARED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHARED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHARED, sliding_window=8)),
    "qwen3-next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SHARED, **RECURRENT)),
}


def random_target(name: str, tokenizer=None) -> HuggingFaceTarget:
    """An untrained target of this architecture, fp32, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ARCHITECTURES[name]().eval().requires_grad_(False)
    return HuggingFaceTarget(model, tokenizer)


def random_prompts(count: int, length: int, vocab: int = 128, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def write_random_draft(folder: Path, scale: float = 0.1, **changes) -> Path:
    """A tiny MLA draft that fits `random_target`: hidden 64, 128 tokens, 4 layers, block 4. Weights random."""
    raw = tiny(**changes)
    return write_tiny(folder, raw, {name: tensor * scale for name, tensor in tiny_tensors(raw).items()})
