"""Angles, multipliers and softmax scales of both families; tables from `tests/data/oracle`."""

import published
import pytest
import torch
from oracle_run import DATA
from safetensors.torch import load_file
from small_drafts import small_model

from cute_kernels.reference.rotation import rms_norm, rotate_adjacent, rotate_half_split
from trtllm_dspark.config import DraftConfig, RopeConfig
from trtllm_dspark.model.rope import RotaryEmbedding, inverse_frequencies, rotary_multiplier, softmax_scale

MLA_VECTOR = {
    0: 1.0, 8: 0.0668740, 14: 0.00879429, 16: 0.00407828, 18: 0.00167335, 20: 6.47243e-4, 23: 1.23910e-4, 26: 4.75266e-6,
    31: 8.76441e-7,
}  # fmt: skip
GQA_VECTOR = {
    0: 1.0, 8: 0.1, 16: 0.01, 20: 0.00316228, 22: 0.0015217968, 24: 7.11538e-4, 27: 2.08821e-4, 31: 2.75680e-5,
}  # fmt: skip


def config(name: str) -> DraftConfig:
    return DraftConfig.from_dict(published.CONFIGS[name][0], require_block_size=False)


def rotary(name: str) -> RotaryEmbedding:
    return RotaryEmbedding(config(name).rope, 64)


@pytest.mark.parametrize(("name", "vector"), [("inferact", MLA_VECTOR), ("radixark-yarn", GQA_VECTOR)])
def test_yarn_frequencies_equal_the_published_vectors(name: str, vector: dict[int, float]) -> None:
    found = inverse_frequencies(config(name).rope, 64)
    assert found.dtype == torch.float32
    assert [float(found[i]) for i in vector] == pytest.approx(list(vector.values()), rel=1e-5)


def test_plain_rope_has_plain_frequencies() -> None:
    found = inverse_frequencies(config("radixark").rope, 64)
    assert found.tolist() == pytest.approx([10000.0 ** (-2 * i / 64) for i in range(32)], rel=1e-6)


@pytest.mark.parametrize(("name", "vector"), [("inferact", MLA_VECTOR), ("radixark-yarn", GQA_VECTOR)])
def test_control_unstretched_frequencies_are_not_the_vectors(name: str, vector: dict[int, float]) -> None:
    plain = inverse_frequencies(RopeConfig(rope_type="default", theta=config(name).rope.theta), 64)
    assert [float(plain[i]) for i in vector] != pytest.approx(list(vector.values()), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "multiplier", "scale"),
    [("inferact", 1.0, 0.1308608), ("radixark-yarn", 1.2772589, 0.125), ("radixark", 1.0, 0.125)],
)
def test_multiplier_and_softmax_scale(name: str, multiplier: float, scale: float) -> None:
    assert rotary_multiplier(config(name).rope) == pytest.approx(multiplier, rel=1e-6)
    assert softmax_scale(config(name)) == pytest.approx(scale, rel=1e-6)


def test_attention_factor_is_the_multiplier_where_the_config_says_one() -> None:
    rope = config("radixark-yarn").rope.model_copy(update={"attention_factor": 1.5})
    assert rotary_multiplier(rope) == 1.5


@pytest.mark.parametrize("theta", [50000, 10000])
def test_mla_angles_equal_the_peer_up_to_a_million_positions(theta: int) -> None:
    stored = load_file(DATA / "rope_real.safetensors")
    rope = config("inferact").rope.model_copy(update={"theta": float(theta)})
    found = RotaryEmbedding(rope, 64)
    torch.testing.assert_close(found.inv_freq, stored[f"mla.theta{theta}.inv_freq"], rtol=2e-6, atol=0)
    positions = stored["positions"]
    for ours, name in zip(found.angles(positions), ("cos", "sin"), strict=True):
        error = (ours - stored[f"mla.theta{theta}.{name}_fp64angle"]).abs().amax(-1)
        # fp32 angles: the rounding of the position's product, half an ulp of the angle and of inv_freq
        assert bool((error <= 1e-6 + positions * 2.0**-23).all()), error


def test_gqa_angles_carry_the_multiplier() -> None:
    stored = load_file(DATA / "rope_real.safetensors")
    found = rotary("radixark-yarn")
    torch.testing.assert_close(found.inv_freq, stored["gqa.inv_freq"], rtol=2e-6, atol=0)
    cos, sin = found.angles(stored["positions"])
    for ours, name in ((cos, "cos"), (sin, "sin")):
        error = (ours - stored[f"gqa.{name}_fp32"][:, :32]).abs().amax(-1)
        assert bool((error <= 1e-6 + stored["positions"] * 2.0**-22).all()), error
    assert float(cos[0, 0]) == pytest.approx(float(stored["gqa.cos_multiplier"]), rel=1e-6)


def test_small_table_equals_the_peer() -> None:
    stored = load_file(DATA / "mla" / "rope.safetensors")
    draft = DraftConfig.from_pretrained(DATA / "mla" / "ckpt")
    cos, sin = RotaryEmbedding(draft.rope, 16).angles(torch.arange(512))
    torch.testing.assert_close(cos, stored["cos"], rtol=0, atol=5e-5)
    torch.testing.assert_close(sin, stored["sin"], rtol=0, atol=5e-5)
    assert softmax_scale(draft) == pytest.approx(float(stored["softmax_scale"]), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_angles_are_fp32_whatever_the_positions(dtype: torch.dtype) -> None:
    cos, sin = rotary("inferact").angles(torch.tensor([[0, 1], [5, 1 << 20]], dtype=dtype))
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (2, 2, 32)


def test_frequencies_stay_fp32_when_the_model_is_cast() -> None:
    model = small_model()
    before = model.rope.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.rope.inv_freq.dtype == torch.float32 and torch.equal(model.rope.inv_freq, before)
    assert model.context_proj.weight.dtype == torch.bfloat16
    published_ones = rotary("inferact").inv_freq
    moved = published_ones.bfloat16().float() - published_ones
    assert float((300 * moved).abs().max()) > 0.1  # control: what the cast would have done after 300 tokens


def test_pairings_are_permutations_of_each_other_and_must_not_be_mixed() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, generator=generator)
    cos, sin = rotary("inferact").angles(torch.tensor([5, 3]))
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))  # adjacent lanes -> halves
    torch.testing.assert_close(rotate_adjacent(q, cos[0], sin[0])[order], rotate_half_split(q[order], cos[0], sin[0]))
    right = rotate_adjacent(q, cos[0], sin[0]) @ rotate_adjacent(k, cos[1], sin[1])
    mixed = rotate_adjacent(q, cos[0], sin[0]) @ rotate_half_split(k, cos[1], sin[1])
    assert abs(float(right - mixed)) > 1e-2


def test_adjacent_rotation_by_hand() -> None:
    quarter = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])  # pair 0 turns by 90 degrees, pair 1 stays
    lanes = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rotate_adjacent(lanes, *quarter).tolist() == [-2.0, 1.0, 3.0, 4.0]
    assert rotate_half_split(lanes, *quarter).tolist() == [-3.0, 2.0, 1.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rotation_and_norm_return_to_the_dtype_of_their_input(dtype: torch.dtype) -> None:
    cos, sin = rotary("inferact").angles(torch.arange(3))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for rotate in (rotate_adjacent, rotate_half_split):
        assert rotate(x, cos, sin).dtype == dtype
    assert rms_norm(x, torch.ones(64, dtype=dtype), 1e-5).dtype == dtype


def test_rms_norm_statistics_are_fp32_and_eps_is_inside_the_root() -> None:
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # its square overflows fp16
    assert rms_norm(x, torch.full((4096,), 2.0, dtype=torch.float16), 1e-5).unique().tolist() == [2.0]
    tiny = torch.full((1, 8), 1e-3)
    assert float(rms_norm(tiny, torch.ones(8), 1e-5)[0, 0]) == pytest.approx(1e-3 / (1e-6 + 1e-5) ** 0.5, rel=1e-6)


def test_rms_norm_rounds_before_the_weight() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((64, 32), (32,)))
    unit = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(rms_norm(x, weight, 1e-5), unit.bfloat16() * weight)
    assert not torch.equal((unit * weight.float()).bfloat16(), unit.bfloat16() * weight)  # control: rounded once, at the end
