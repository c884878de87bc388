"""One layer at the published head geometry (64 heads, 512 + 64 latent, 128 + 64 query, 128 value) against an fp64 oracle.

hidden_size and the vocabulary are smaller than published; nothing in the attention is. The oracle is un-absorbed and shares
no code with the package.
"""

from functools import cache

import plain_mla
import published
import pytest
import small_drafts
import torch
from mistakes import MISTAKES

from trtllm_dspark.model.mla import MLADSparkForCausalLM, per_head
from trtllm_dspark.propose import Drafter

CHANGES = dict(
    hidden_size=512, intermediate_size=256, num_hidden_layers=1, num_attention_heads=64, num_key_value_heads=64,
    q_lora_rank=384, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, target_hidden_size=512,
    max_position_embeddings=1 << 20, block_size=7,
)  # fmt: skip
RAW = published.tiny("mla", **CHANGES)
CONTEXT, ANCHOR = 131, 42
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@cache
def weights() -> dict[str, torch.Tensor]:
    """Stored in bf16, exactly: both dtypes load the same numbers. Keys and values are large enough for a sharp softmax."""
    made = small_drafts.weights(RAW)
    made["layers.0.self_attn.q_b_proj.weight"] *= 2.0
    made["layers.0.self_attn.o_proj.weight"] *= 3.0
    return {name: value.bfloat16().float() for name, value in made.items()}


@cache
def model(dtype: torch.dtype) -> MLADSparkForCausalLM:
    return small_drafts.small_model(dtype=dtype, tensors=weights(), **CHANGES)


def features() -> torch.Tensor:
    return small_drafts.taps(model(torch.float32), CONTEXT).bfloat16().float()


@cache
def expected() -> torch.Tensor:
    ids = torch.tensor([ANCHOR] + [RAW["mask_token_id"]] * 6)
    return plain_mla.hidden_states(RAW, weights(), features(), ids, CONTEXT)


def relative_error(drafter: Drafter) -> float:
    """Of the hidden states, in the norm: |ours - oracle| / |oracle|."""
    small_drafts.feed(drafter, "request", features(), tokens=CONTEXT + 8)
    ours = drafter.propose(["request"], torch.tensor([ANCHOR]), 7).hidden[0].double()
    return float((ours - expected()).norm() / expected().norm())


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_hidden_states_equal_the_unabsorbed_fp64_oracle(dtype: torch.dtype) -> None:
    drafter = small_drafts.small_drafter(model(dtype), page_size=64, num_pages=4)
    assert relative_error(drafter) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", MISTAKES)
def test_control_a_mistake_is_far_from_the_oracle(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = small_drafts.small_drafter(model(dtype), page_size=64, num_pages=4)
    MISTAKES[name](monkeypatch, drafter)
    assert relative_error(drafter) > 2 * LIMITS[dtype]


def test_the_scale_is_that_of_the_192_wide_head() -> None:
    assert model(torch.float32).scale == pytest.approx(0.1308608, rel=1e-6)
    assert model(torch.float32).config.latent_width == 576


@pytest.mark.parametrize("lead", [(3,), (2, 5), (0, 7), (1, 1)])
def test_a_row_is_projected_alike_in_any_company(lead: tuple[int, ...]) -> None:
    """On a CPU rows are padded to whole groups, elsewhere they are not: the same shapes and values, also of nothing."""
    weight, x = torch.randn(4, 8, 6, dtype=torch.float64), torch.randn(*lead, 4, 6, dtype=torch.float64)
    expected = torch.einsum("...hi,hoi->...ho", x, weight)
    assert per_head(x, weight).shape == expected.shape
    torch.testing.assert_close(per_head(x, weight), expected)
    unpadded = per_head(x.to("meta"), weight.to("meta"))  # the path of every device but the CPU
    assert unpadded.shape == expected.shape
