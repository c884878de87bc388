"""Public bugs of DSpark configs, one test or more each, by bug id. Each docstring says on what the test would fail."""

import pytest
from published import INFERACT, RADIXARK, RADIXARK_YARN, tiny, write_config, write_tiny

from trtllm_dspark.checkpoint import DraftCheckpoint
from trtllm_dspark.config import DraftConfig, RopeConfig
from trtllm_dspark.errors import DSparkError, UnsupportedError
from trtllm_dspark.tensor_names import tensor_table


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_c01_fewer_drafts_than_the_block_are_legal(num_drafts):
    """Fails where start-up refuses a draft length below the trained block, or where it shrinks the block to it."""
    config = DraftConfig.from_dict(tiny(), max_draft_len=num_drafts)
    assert config.check_num_drafts(num_drafts) == num_drafts
    assert config.block_size == 4
    assert config.notes == ()


def test_c02_more_drafts_than_the_block_are_refused():
    """Fails where K past the block is accepted, clamped, or refused without naming K, block and layout."""
    raw = tiny(block_size=5)
    config = DraftConfig.from_dict(raw)
    assert config.check_num_drafts(5) == 5
    with pytest.raises(DSparkError, match=r"at most 5, came K=7.*block_size is 5, layout anchor-first"):
        config.check_num_drafts(7)
    with pytest.raises(DSparkError, match="came K=7"):
        DraftConfig.from_dict(raw, max_draft_len=7)


def test_c02_fill_in_layout_gives_one_draft_fewer():
    """Fails where K = block is accepted in the fill-in layout, whose row 0 predicts nothing."""
    config = DraftConfig.from_dict(tiny(block_size=5, sample_from_anchor=False))
    assert config.check_num_drafts(4) == 4
    with pytest.raises(DSparkError, match=r"at most 4, came K=5.*block_size is 5, layout fill-in"):
        config.check_num_drafts(5)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "3", None])
def test_c02_a_number_of_drafts_is_a_positive_integer(bad):
    """Fails where True counts as 1, or where 0 drafts reach the drafter."""
    with pytest.raises(DSparkError, match="at least 1"):
        DraftConfig.from_dict(tiny()).check_num_drafts(bad)


def test_c04_block_size_is_never_made_up():
    """Fails where the published config, which has no block_size, is given a built-in 7."""
    with pytest.raises(DSparkError, match=r"block_size.*max_draft_len"):
        DraftConfig.from_dict(INFERACT)
    config = DraftConfig.from_dict(INFERACT, max_draft_len=5)
    assert config.block_size == config.max_drafts == 5
    assert config.notes == ("block_size is not in the config: taken as 5 from max_draft_len=5",)


def test_c04_family_never_comes_from_the_path(tmp_path):
    """Fails where a folder called dspark makes a DSpark draft, or one called dflash unmakes it."""
    other = tiny("gqa", architectures=["DFlashDraftModel"])
    with pytest.raises(UnsupportedError, match="looks like a DFlash draft"):
        DraftConfig.from_pretrained(write_config(tmp_path / "kimi-k3-dspark", other))
    config = DraftConfig.from_pretrained(write_config(tmp_path / "qwen3-dflash-gqa", tiny()))
    assert config.family == "mla"


def test_c05_layout_comes_from_the_checkpoint_and_is_said():
    """Fails where a fill-in checkpoint is read as anchor-first, or where nothing tells which layout was taken."""
    for flag in ("sample_from_anchor", "shift_label", "query_zero_predicts_next"):
        config = DraftConfig.from_dict(tiny("gqa", **{flag: False}))
        assert config.sample_from_anchor is False
        assert any("fill-in" in note for note in config.notes)
    assert DraftConfig.from_dict(tiny("gqa")).sample_from_anchor is True  # implied by the architecture


def test_c05_layout_can_be_overridden_and_is_said():
    """Fails where a checkpoint that declares the wrong layout, or none, cannot be put right."""
    config = DraftConfig.from_dict(tiny(), sample_from_anchor=False)
    assert (config.sample_from_anchor, config.max_drafts) == (False, 3)
    assert config.notes == ("block layout overridden: K3DSparkModel is anchor-first, using fill-in (row 0 predicts nothing)",)
    config = DraftConfig.from_dict(tiny(sample_from_anchor=False), sample_from_anchor=True)
    assert config.max_drafts == 4 and len(config.notes) == 1


MOVED = (
    "mask_token_id target_layer_ids num_target_layers enable_confidence_head confidence_head_with_markov markov_rank "
    "markov_head_type"
).split()


@pytest.mark.parametrize("place", ["dflash_config", "dspark_config"])
@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_c07_nested_keys_are_the_flat_ones(place, family):
    """Fails where a reader looks in one place only and so loses the heads, the taps or the mask."""
    raw = tiny(family)
    want = DraftConfig.from_dict(raw)
    nested = dict(raw.pop("dflash_config", {}))
    nested |= {key: raw.pop(key) for key in MOVED if key in raw}
    assert DraftConfig.from_dict(raw | {place: nested}) == want
    assert DraftConfig.from_dict(raw | nested) == want
    assert DraftConfig.from_dict(raw | {f"dspark_{key}": value for key, value in nested.items()}) == want
    with pytest.raises(UnsupportedError, match="causal"):
        DraftConfig.from_dict(raw | {place: nested | {"causal": True}})


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("mask_token_id", 3),
        ("target_layer_ids", [1, 3]),
        ("markov_rank", 4),
        ("enable_confidence_head", False),
        ("block_size", 3),
    ],
)
@pytest.mark.parametrize("place", ["dflash_config", "dspark_config"])
def test_c07_two_places_that_disagree_are_printed(key, other, place):
    """Fails where the first place read wins in silence."""
    raw = tiny()
    DraftConfig.from_dict(raw | {place: {key: raw[key]}})  # said twice is fine
    with pytest.raises(DSparkError) as caught:
        DraftConfig.from_dict(raw | {place: {key: other}})
    assert f"{raw[key]!r} at {key}" in str(caught.value)
    assert f"{other!r} at {place}.{key}" in str(caught.value)


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_c08_taps_are_never_made_up(family):
    """Fails where a formula over the target's depth stands in for missing taps."""
    raw = tiny(family, drop=("target_layer_ids", "num_target_layers"))
    if family == "gqa":
        raw["dflash_config"] = {"mask_token_id": 127}
    with pytest.raises(DSparkError, match="target_layer_ids is required and has no default"):
        DraftConfig.from_dict(raw)


def test_c08_tap_count_is_checked_against_the_projection(tmp_path):
    """Fails where three taps are taken for a projection that was trained on two."""
    checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / "d", tiny()))
    three = DraftConfig.from_dict(tiny(target_layer_ids=[0, 1, 2], num_target_layers=3))
    (problem,) = checkpoint.problems(three)
    assert problem.startswith("context_proj.weight must be [64, 192], came [64, 128]")
    assert "3 taps x target hidden size 64" in problem
    assert checkpoint.problems(DraftConfig.from_dict(tiny())) == []


@pytest.mark.parametrize("family", ["mla", "gqa"])
@pytest.mark.parametrize("taps", [[0, 4], [-1, 2], [2, 2], [2, 0], [0, 99]])
def test_c10_taps_outside_the_target_are_refused_with_the_range(family, taps):
    """Fails where the number of layers, a negative, a repeated or an unsorted id passes as a tap."""
    raw = tiny(family)
    (raw["dflash_config"] if family == "gqa" else raw)["target_layer_ids"] = taps
    with pytest.raises(DSparkError, match=r"valid ids are 0\.\.3") as caught:
        DraftConfig.from_dict(raw)
    assert str(taps) in str(caught.value)


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_c10_the_last_layer_is_a_tap(family):
    """Fails where the range check is one short."""
    raw = tiny(family)
    (raw["dflash_config"] if family == "gqa" else raw)["target_layer_ids"] = [0, 3]
    config = DraftConfig.from_dict(raw)
    assert config.target_layer_ids == (0, 3)
    config.check_target(hidden_size=64, vocab_size=128, num_layers=4)


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_c18_mask_id_is_required_and_in_the_vocabulary(family):
    """Fails where a missing mask id becomes pad, eos or -1, or where an id past the embedding passes."""

    def with_mask(value):
        raw = tiny(family)
        (raw["dflash_config"] if family == "gqa" else raw)["mask_token_id"] = value
        return raw

    for last in (0, 127):
        assert DraftConfig.from_dict(with_mask(last)).mask_token_id == last
    for bad in (-1, 128, 163837):
        with pytest.raises(DSparkError, match=rf"mask_token_id.*0\.\.127; came {bad}\b"):
            DraftConfig.from_dict(with_mask(bad))
    for bad in (True, 5.0, "5"):
        with pytest.raises(DSparkError, match="mask_token_id"):
            DraftConfig.from_dict(with_mask(bad))
    with pytest.raises(DSparkError, match="mask_token_id or noise_token_id is required"):
        DraftConfig.from_dict(with_mask(None) | {"pad_token_id": 1, "eos_token_id": 2})


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_c22_no_tensor_is_sized_from_max_position_embeddings(family):
    """Fails where the checkpoint's claim of a length changes any shape, or caps the block."""
    short = DraftConfig.from_dict(tiny(family, max_position_embeddings=2))
    long = DraftConfig.from_dict(tiny(family, max_position_embeddings=1048576))
    assert tensor_table(short) == tensor_table(long)
    assert short.max_drafts == long.max_drafts == 4


def test_c23_rope_and_eps_are_the_checkpoints():
    """Fails where YaRN constants or the norm's eps are written in code: each of these configs wants its own."""
    plain = DraftConfig.from_dict(tiny(drop=("rope_parameters",), rope_scaling=None))
    assert plain.rope == RopeConfig(rope_type="default", theta=50000.0)
    assert DraftConfig.from_dict(RADIXARK).rope.rope_type == "default"
    yarn = DraftConfig.from_dict(RADIXARK_YARN).rope
    assert (yarn.rope_type, yarn.factor, yarn.original_max_position_embeddings) == ("yarn", 16.0, 65536)
    mla = DraftConfig.from_dict(INFERACT, max_draft_len=7).rope
    assert (mla.factor, mla.original_max_position_embeddings, mla.mscale, mla.mscale_all_dim) == (32.0, 32768, 1.0, 1.0)
    with pytest.raises(UnsupportedError, match=r"'linear'.*'default' and 'yarn'"):
        DraftConfig.from_dict(tiny(drop=("rope_parameters",), rope_scaling={"type": "linear", "factor": 2.0}))
    for eps in (1e-5, 1e-6):
        assert DraftConfig.from_dict(tiny(rms_norm_eps=eps)).rms_norm_eps == eps


def test_c23_every_row_of_the_block_proposes():
    """Fails where row 0 is dropped: 6 proposals of a block of 7."""
    assert DraftConfig.from_dict(RADIXARK).max_drafts == 7
