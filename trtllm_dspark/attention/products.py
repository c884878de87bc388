"""Matrix products of a draft step: which there are, and how plain torch computes them."""

import torch

from cute_kernels.few_row_linear import Product
from cute_kernels.few_row_linear.config import SILU_MUL
from cute_kernels.reference.few_row_linear import few_row_linear
from trtllm_dspark.config import DraftConfig


def plain_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The twin, but what it writes for each head goes into `out` without a copy where no gradient is asked for."""
    if out is None or weight.ndim == 2 or torch.is_grad_enabled():
        return few_row_linear(x, weight, out)
    torch.bmm(x.flatten(0, -3).transpose(0, 1), weight.transpose(1, 2), out=out.flatten(0, -3).transpose(0, 1))
    return out


def multiplied(config: DraftConfig, heads: int) -> tuple[Product, ...]:
    """Every product of a step of an MLA draft by a weight in the draft's dtype.

    Args:
        heads: H on this rank, which then holds as large a share of the MLP's columns.
    """
    assert config.q_lora_rank and config.kv_lora_rank and config.qk_nope_head_dim and config.v_head_dim
    hidden, c, ranks = config.hidden_size, config.kv_lora_rank, max(1, config.num_heads // heads)
    inner = config.intermediate_size // ranks
    found = [
        Product(hidden, config.num_taps * config.target_hidden_size),
        Product(config.num_layers * config.latent_width, hidden),
        Product(config.q_lora_rank, hidden),
        Product(config.latent_width, hidden),
        Product(heads * config.qk_head_dim, config.q_lora_rank),
        Product(c, config.qk_nope_head_dim, heads, transposed=True),
        Product(config.v_head_dim, c, heads),
        Product(hidden, heads * config.v_head_dim),
        Product(inner, hidden, form=SILU_MUL),
        Product(hidden, inner),
        Product(config.vocab_size, hidden),
    ]
    return tuple(dict.fromkeys(found))
