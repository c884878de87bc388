"""Angles of the drafters' rotary embeddings, plain and YaRN, and the softmax scale that goes with them.

inv_freq is fp32 and stays fp32 when a model is cast: at bf16 it moves keys by 0.4 after 300 tokens. There is no table, so
no position is ever past its end, and memory does not grow with max_position_embeddings.

Source: YaRN, arXiv 2309.00071; transformers 5.17.0 `modeling_rope_utils.py` and `models/deepseek_v3` for the meaning of
the config keys; TorchSpec 0d741940 for the softmax scale of the MLA drafter.
"""

import math

import torch

from trtllm_dspark.config import DraftConfig, RopeConfig


def yarn_mscale(factor: float, weight: float) -> float:
    """0.1 * weight * ln(factor) + 1, and 1 where the context is not extended."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """The angle per position of each rotary pair.

    Args:
        rope: the checkpoint's rope settings. dim: rotated lanes, even.
    Returns:
        [dim / 2], fp32, computed in fp64.
    """
    index = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    plain = rope.theta ** (-2.0 * index / dim)
    if rope.rope_type == "default":
        return plain.float()
    length = rope.original_max_position_embeddings
    assert length is not None, f"a yarn RopeConfig without original_max_position_embeddings: {rope}"

    def pair_with(rotations: float) -> float:  # the pair that turns this often over the original length
        return dim * math.log(length / (2.0 * math.pi * rotations)) / (2.0 * math.log(rope.theta))

    low = max(math.floor(pair_with(rope.beta_fast)), 0)
    high = min(math.ceil(pair_with(rope.beta_slow)), dim - 1)
    ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return (plain * (1.0 - ramp + ramp / rope.factor)).float()


def rotary_multiplier(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 for plain RoPE; attention_factor, else the ratio of mscales, for YaRN."""
    if rope.rope_type == "default":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    over = yarn_mscale(rope.factor, 1.0 if rope.mscale is None else rope.mscale)
    return over / yarn_mscale(rope.factor, 0.0 if rope.mscale_all_dim is None else rope.mscale_all_dim)


def softmax_scale(config: DraftConfig) -> float:
    """(nope + rope)^-1/2 * m^2 for MLA, with m = mscale(factor, mscale_all_dim); head_dim^-1/2 for GQA.

    The MLA scale is that of the un-absorbed head (192), not of the 576-wide latent.
    """
    if config.family == "gqa":
        assert config.head_dim is not None
        return config.head_dim**-0.5
    m = 1.0
    if config.rope.rope_type == "yarn" and config.rope.mscale_all_dim:
        m = yarn_mscale(config.rope.factor, config.rope.mscale_all_dim)
    return config.qk_head_dim**-0.5 * m * m


class RotaryEmbedding:
    """cos and sin of absolute positions. Not a module: no cast of the model reaches inv_freq."""

    def __init__(self, rope: RopeConfig, dim: int) -> None:
        self.dim = dim
        self.multiplier = rotary_multiplier(rope)
        self.inv_freq = inverse_frequencies(rope, dim)  # [dim / 2], fp32, on the CPU
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin times the multiplier.

        Args:
            positions: [...], integer, absolute.
        Returns:
            two tensors [..., dim / 2], fp32, on the positions' device.
        """
        inv_freq = self._on_device.get(positions.device)
        if inv_freq is None:
            inv_freq = self._on_device[positions.device] = self.inv_freq.to(positions.device)
        angle = positions.unsqueeze(-1).float() * inv_freq
        if self.multiplier == 1.0:
            return angle.cos(), angle.sin()
        return angle.cos() * self.multiplier, angle.sin() * self.multiplier
