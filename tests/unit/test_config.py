"""DraftConfig: the three published configs to the byte, every published variation, and each refusal by name."""

import copy
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import CONFIGS, INFERACT, RADIXARK, RADIXARK_YARN, config_text, tiny, write_config, write_published
from pydantic import ValidationError

from trtllm_dspark.config import DraftConfig, RopeConfig
from trtllm_dspark.errors import DSparkError, UnsupportedError


def refused(raw, *words, kind=DSparkError, **overrides):
    """Parsing raises exactly `kind`, in one line that holds every one of `words`."""
    with pytest.raises(DSparkError) as caught:
        DraftConfig.from_dict(raw, **overrides)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert "\n" not in message
    assert message.startswith("DraftConfig")
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


# --- the published three


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_is_the_published_bytes(name):
    assert hashlib.sha256(config_text(name).encode()).hexdigest() == CONFIGS[name][2]


def test_inferact_fields(tmp_path):
    config = DraftConfig.from_pretrained(write_published(tmp_path / "d", "inferact"), max_draft_len=7)
    assert (config.family, config.architecture, config.model_type) == ("mla", "K3DSparkModel", "k3_dspark")
    assert (config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads) == (7168, 14336, 5, 64)
    assert (config.q_lora_rank, config.kv_lora_rank, config.v_head_dim, config.head_dim) == (1536, 512, 128, None)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim) == (128, 64)
    assert (config.latent_width, config.qk_head_dim, config.num_taps) == (576, 192, 5)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (163840, 1048576, 1e-5)
    assert config.rope == RopeConfig(
        rope_type="yarn",
        theta=50000.0,
        factor=32.0,
        original_max_position_embeddings=32768,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    assert config.target_layer_ids == (2, 23, 47, 71, 89)
    assert (config.target_hidden_size, config.target_num_layers) == (7168, 93)
    assert (config.mask_token_id, config.markov_rank, config.markov_head_type) == (163837, 256, "vanilla")
    assert (config.confidence_head, config.confidence_with_markov, config.confidence_bias) == (True, True, True)
    assert (config.sample_from_anchor, config.block_size, config.max_drafts) == (True, 7, 7)
    assert (config.aux_stream, config.per_tap_norm, config.dtype) == ("prefix", False, "bfloat16")
    assert config.notes == ("block_size is not in the config: taken as 7 from max_draft_len=7",)


@pytest.mark.parametrize("name", ["radixark", "radixark-yarn"])
def test_radixark_fields(tmp_path, name):
    config = DraftConfig.from_pretrained(write_published(tmp_path / "d", name))
    assert (config.family, config.architecture, config.model_type) == ("gqa", "DSparkDraftModel", "qwen3")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.qk_head_dim) == (64, 16, 64, 64)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim) == (None,) * 4
    assert config.target_layer_ids == (7, 23, 51, 67, 83)
    assert config.target_num_layers == 93  # the depth here, not the number of taps
    assert (config.mask_token_id, config.block_size, config.max_drafts) == (163824, 7, 7)
    assert (config.markov_rank, config.confidence_head, config.confidence_with_markov) == (256, True, True)
    assert (config.aux_stream, config.target_hidden_size, config.notes) == ("attn_res", 7168, ())
    if name == "radixark":
        assert config.rope == RopeConfig(rope_type="default", theta=10000.0)
    else:
        want = RopeConfig(rope_type="yarn", theta=10000.0, factor=16.0, original_max_position_embeddings=65536)
        assert config.rope == want
        assert config.rope.mscale is None and config.rope.attention_factor is None
    with pytest.raises(DSparkError, match="latent_width"):
        _ = config.latent_width


def test_config_is_frozen():
    config = DraftConfig.from_dict(tiny())
    with pytest.raises(ValidationError):
        config.block_size = 9
    assert config == DraftConfig.from_dict(tiny())
    assert len({config, DraftConfig.from_dict(tiny())}) == 1


# --- other published drafts

INFERACT7 = INFERACT | {"block_size": 7}
SUPPORTED = {
    "lightseek": (
        INFERACT7 | {"target_layer_ids": [7, 31, 47, 63, 87], "fc_norm": True, "aux_hidden_stream": "attn_res"},
        {"per_tap_norm": True, "aux_stream": "attn_res", "target_layer_ids": (7, 31, 47, 63, 87)},
    ),
    "slippedjim": (INFERACT7, {"num_taps": 5, "aux_stream": "prefix"}),
    "registered under another name": (
        INFERACT7 | {"architectures": ["KimiK3DSparkMLADraftModel"]},
        {"family": "mla", "architecture": "KimiK3DSparkMLADraftModel"},
    ),
    "lithos": (
        RADIXARK_YARN | {"block_size": 8, "dflash_config": {"mask_token_id": 163824, "target_layer_ids": [7, 23, 67, 83, 91]}},
        {"block_size": 8, "max_drafts": 8, "target_layer_ids": (7, 23, 67, 83, 91)},
    ),
    "dummy of 8 layers": (
        INFERACT7 | {"target_layer_ids": [0, 1, 4, 6, 7], "target_num_hidden_layers": 8},
        {"target_layer_ids": (0, 1, 4, 6, 7), "target_num_layers": 8},
    ),
    "96 heads, rank 512, not causal": (
        INFERACT7 | {"num_attention_heads": 96, "num_key_value_heads": 96, "markov_rank": 512, "causal": False},
        {"num_heads": 96, "markov_rank": 512},
    ),
    "redhat without window, fill-in": (
        RADIXARK
        | {"num_attention_heads": 96, "block_size": 8, "dspark_bonus_anchor": True}
        | {"dflash_config": {"mask_token_id": 163824, "target_layer_ids": [24, 48, 72, 88, 92]}},
        {"sample_from_anchor": False, "max_drafts": 7, "num_heads": 96},
    ),
}
REFUSED = {
    "block5": (
        INFERACT
        | {"block_size": 5, "num_hidden_layers": 3, "causal": True}
        | {"target_layer_ids": [2, 47, 89], "num_target_layers": 3},
        ["causal"],
    ),
    "block5 as speculators writes it": (
        {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "block_size": 5},
        ["speculators_model_type", "dspark"],
    ),
    "k3.1 pro preview": (
        INFERACT7 | {"num_attention_heads": 96, "num_key_value_heads": 96, "markov_rank": 512, "is_causal": True},
        ["causal"],
    ),
    "redhat": (
        RADIXARK | {"block_size": 8, "use_sliding_window": True, "sliding_window": 2048},
        ["use_sliding_window"],
    ),
    "redhat by layer types": (
        RADIXARK | {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
        ["layer_types", "sliding_attention"],
    ),
    "fp8": (INFERACT7 | {"quantization_config": {"quant_method": "fp8"}}, ["quant_method fp8", "bf16"]),
    "nope": (INFERACT7 | {"mla_use_nope": True}, ["mla_use_nope"]),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_published_variation_is_supported(name):
    raw, want = SUPPORTED[name]
    config = DraftConfig.from_dict(raw)
    assert {key: getattr(config, key) for key in want} == want


@pytest.mark.parametrize("name", REFUSED)
def test_published_variation_is_refused_by_name(name):
    raw, words = REFUSED[name]
    refused(raw, *words, kind=UnsupportedError)


# --- switches that are not built

UNBUILT = [
    ("mla", {"mla_use_output_gate": True}, ["mla_use_output_gate"]),
    ("mla", {"mla_use_qk_norm": True}, ["mla_use_qk_norm"]),
    ("mla", {"q_lora_rank": None}, ["q_lora_rank null"]),
    ("mla", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    ("mla", {"draft_vocab_size": 32}, ["32", "128"]),
    ("mla", {"markov_head_type": "gated"}, ["gated", "vanilla"]),
    ("mla", {"causal": [False, True]}, ["causal"]),
    ("mla", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ("mla", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50000.0}}, ["linear", "default", "yarn"]),
    ("gqa", {"attention_bias": True}, ["attention_bias"]),
    ("gqa", {"sliding_window": 2048, "use_sliding_window": None}, ["sliding_window 2048"]),
    ("gqa", {"mlp_bias": True}, ["mlp_bias"]),
    ("gqa", {"quantization_config": {"quant_method": "exl3", "bits": 2.0}}, ["exl3"]),
]


@pytest.mark.parametrize(("family", "changes", "words"), UNBUILT, ids=lambda value: str(value)[:40])
def test_unbuilt_switch_is_refused_by_name(family, changes, words):
    refused(tiny(family, **changes), *words, kind=UnsupportedError)


def test_switches_at_their_built_value_pass():
    mla = {"mla_use_output_gate": False, "mla_use_qk_norm": None, "causal": False, "hidden_act": "silu"}
    assert DraftConfig.from_dict(tiny(**mla, quantization_config=None, draft_vocab_size=None)).notes == ()
    gqa = {"sliding_window": 2048, "use_sliding_window": False, "attention_bias": False, "causal": [False, False]}
    assert DraftConfig.from_dict(tiny("gqa", **gqa)).notes == ()


# --- families


@pytest.mark.parametrize(
    ("identity", "words", "kind"),
    [
        ({"architectures": ["DFlashDraftModel"]}, ["DFlashDraftModel", "looks like a DFlash draft"], UnsupportedError),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, ["LlamaForCausalLM", "K3DSpark"], UnsupportedError),
        ({"architectures": None, "model_type": "qwen3"}, ["qwen3", "DSparkDraftModel"], UnsupportedError),
        ({"architectures": ["DSparkDraftModel"], "model_type": None}, ["same family"], DSparkError),
        ({"architectures": ["DSparkDraftModel"], "model_type": "k3_dspark"}, ["same family", "k3_dspark"], DSparkError),
        ({"architectures": ["K3DSparkModel"], "model_type": "qwen3"}, ["same family", "qwen3"], DSparkError),
        ({"architectures": ["K3DSparkModel", "DSparkDraftModel"]}, ["same family"], DSparkError),
        ({"architectures": "K3DSparkModel"}, ["list of names"], DSparkError),
    ],
    ids=str,
)
def test_family_that_cannot_be_told(identity, words, kind):
    refused(tiny(**identity), *words, kind=kind)


def test_family_by_either_key():
    assert DraftConfig.from_dict(tiny(drop=("architectures",))).family == "mla"
    assert DraftConfig.from_dict(tiny(drop=("model_type",))).model_type == "k3_dspark"


def test_no_dspark_heads_is_a_dflash_draft():
    drop = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    refused(tiny("gqa", drop=drop), "looks like a DFlash draft", "decoding_type DFlash")


# --- missing, mistyped, out of range


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_each_required_key_is_named_where_missing(family):
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size max_position_embeddings "
        "rms_norm_eps markov_rank markov_head_type enable_confidence_head confidence_head_with_markov block_size"
    ).split()
    names += ["q_lora_rank", "kv_lora_rank", "v_head_dim", "mask_token_id", "target_layer_ids"] if family == "mla" else []
    names += ["head_dim", "num_key_value_heads"] if family == "gqa" else []
    for name in names:
        refused(tiny(family, drop=(name,)), name)
    if family == "gqa":
        refused(tiny("gqa", dflash_config={"mask_token_id": 127}), "target_layer_ids")
        refused(tiny("gqa", dflash_config={"target_layer_ids": [0, 2]}), "mask_token_id")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, ["hidden_size", "came 0"]),
        ({"hidden_size": True}, ["hidden_size", "came True"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers", "came '2'"]),
        ({"num_attention_heads": 4.0}, ["num_attention_heads", "came 4.0"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps"]),
        ({"block_size": -1}, ["block_size", "came -1"]),
        ({"block_size": True}, ["block_size", "came True"]),
        ({"markov_rank": -8}, ["markov_rank", "came -8"]),
        ({"target_layer_ids": [], "num_target_layers": None}, ["target_layer_ids", "0..3"]),
        ({"target_layer_ids": 2}, ["target_layer_ids", "came 2"]),
        ({"target_layer_ids": [0, True]}, ["target_layer_ids", "True"]),
        ({"target_layer_ids": [0, 2.0]}, ["target_layer_ids", "2.0"]),
        ({"num_target_layers": 3}, ["num_target_layers", "must be 2", "came 3"]),
        ({"num_key_value_heads": 3}, ["num_heads 4", "num_kv_heads 3"]),
        ({"qk_rope_head_dim": 7}, ["even", "came 7"]),
        ({"enable_confidence_head": 1}, ["enable_confidence_head", "came 1"]),
        ({"markov_rank": 0}, ["confidence_head_with_markov", "markov_rank is 0"]),
        ({"causal": "no"}, ["causal", "'no'"]),
        ({"fc_norm": "yes"}, ["fc_norm", "'yes'"]),
        ({"aux_hidden_stream": "mixture"}, ["prefix", "attn_res", "mixture"]),
        ({"torch_dtype": "int8"}, ["dtype", "int8"]),
        ({"dtype": "float16"}, ["dtype", "float16", "bfloat16"]),
        ({"dspark_config": [1]}, ["dspark_config", "object"]),
    ],
    ids=str,
)
def test_bad_value_is_named(changes, words):
    refused(tiny(**changes), *words)


def test_num_kv_heads_is_free_for_mla_only():
    assert DraftConfig.from_dict(tiny(drop=("num_key_value_heads",))).num_kv_heads == 4


def test_heads_switched_off():
    off = DraftConfig.from_dict(
        tiny(drop=("markov_head_type", "confidence_head_with_markov"), markov_rank=0, enable_confidence_head=False)
    )
    assert (off.markov_rank, off.confidence_head, off.confidence_with_markov) == (0, False, False)


def test_direct_construction_is_validated():
    good = DraftConfig.from_dict(tiny()).model_dump()
    assert DraftConfig(**good) == DraftConfig.from_dict(tiny())
    for change in ({"target_layer_ids": (2, 0)}, {"kv_lora_rank": None}, {"mask_token_id": 128}, {"family": "mqa"}):
        with pytest.raises(ValueError):
            DraftConfig(**(good | change))


# --- places and aliases

NESTABLE = (
    "target_layer_ids mask_token_id block_size markov_rank markov_head_type enable_confidence_head num_target_layers "
    "confidence_head_with_markov"
).split()


@settings(max_examples=60, deadline=None)
@given(places=st.lists(st.sampled_from(["flat", "prefixed", "dspark_config", "dflash_config", "all"]), min_size=8, max_size=8))
def test_every_placement_resolves_to_the_same_config(places):
    raw = tiny()
    want = DraftConfig.from_dict(raw)
    for key, place in zip(NESTABLE, places, strict=True):
        value = raw.pop(key)
        if place in ("flat", "all"):
            raw[key] = value
        if place in ("prefixed", "all"):
            raw[f"dspark_{key}"] = value
        for nested in ("dspark_config", "dflash_config"):
            if place in (nested, "all"):
                raw.setdefault(nested, {})[key] = value
    assert DraftConfig.from_dict(raw) == want


@pytest.mark.parametrize(
    ("key", "alias"),
    [
        ("mask_token_id", "noise_token_id"),
        ("enable_confidence_head", "use_confidence_head"),
    ],
)
def test_alias_reads_and_conflicts(key, alias):
    raw = tiny()
    want, value = DraftConfig.from_dict(raw), raw[key]
    assert DraftConfig.from_dict(tiny(drop=(key,)) | {alias: value}) == want
    other = 5 if key == "mask_token_id" else False
    refused(raw | {alias: other}, repr(value), repr(other), alias)


def test_true_and_one_are_two_values():
    refused(tiny(dspark_config={"enable_confidence_head": 1}), "True", "1 at dspark_config.enable_confidence_head")


# --- layout, block size, overrides


@pytest.mark.parametrize("key", ["sample_from_anchor", "shift_label", "query_zero_predicts_next"])
@pytest.mark.parametrize("value", [True, False])
def test_layout_flags(key, value):
    config = DraftConfig.from_dict(tiny(dflash_config={key: value}))
    assert config.sample_from_anchor is value
    assert config.max_drafts == (4 if value else 3)
    assert any("fill-in" in note for note in config.notes) is not value


def test_bonus_anchor_is_the_inverse_flag():
    assert DraftConfig.from_dict(tiny(dspark_bonus_anchor=True)).sample_from_anchor is False
    assert DraftConfig.from_dict(tiny(dspark_bonus_anchor=False)).sample_from_anchor is True
    refused(tiny(dspark_bonus_anchor=True, sample_from_anchor=True), "sample_from_anchor", "dspark_bonus_anchor")


def test_overrides_are_said():
    raw = tiny(sample_from_anchor=False)
    config = DraftConfig.from_dict(raw, sample_from_anchor=True, aux_stream="attn_res", rope_theta=10000.0)
    assert (config.sample_from_anchor, config.aux_stream, config.rope.theta) == (True, "attn_res", 10000.0)
    assert config.notes == (
        "block layout overridden: the config says sample_from_anchor False, using sample_from_anchor=True",
        "aux_stream overridden: the draft's is prefix, using attn_res",
        "rope_theta overridden: config 50000, using 10000 (asked for by the caller)",
    )
    same = DraftConfig.from_dict(tiny(), sample_from_anchor=True, aux_stream="prefix", rope_theta=50000.0)
    assert same == DraftConfig.from_dict(tiny())
    refused(tiny(), "aux_hidden_stream", "layer", aux_stream="layer")
    refused(tiny(), "theta", rope_theta=-1.0)


def test_block_size_that_nobody_gives():
    raw = tiny(drop=("block_size",))
    refused(raw, "block_size", "max_draft_len")
    config = DraftConfig.from_dict(raw, require_block_size=False)
    assert config.block_size is None
    for use in (lambda: config.max_drafts, lambda: config.check_num_drafts(1)):
        with pytest.raises(DSparkError, match="block size is unknown"):
            use()
    assert DraftConfig.from_dict(raw | {"sample_from_anchor": False}, max_draft_len=3).block_size == 4
    for bad in (0, -1, True, 2.0):
        refused(raw, "max_draft_len", max_draft_len=bad)
    refused(tiny(block_size=1, sample_from_anchor=False), "fill-in", "block_size 1")


# --- RoPE

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def rope_of(family="mla", **changes):
    return DraftConfig.from_dict(tiny(family, drop=("rope_parameters", "rope_theta")) | changes).rope


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_older_and_newer_rope_spellings_agree(key):
    new = rope_of(rope_parameters={"rope_type": "yarn", "rope_theta": 5000, **YARN})
    assert new == rope_of(rope_theta=5000, rope_scaling={key: "yarn", **YARN})
    assert new == rope_of(rope_theta=5000.0, rope_parameters={"rope_theta": 5000}, rope_scaling={key: "yarn", **YARN})
    assert new == rope_of(rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 5000, **YARN}})
    assert (new.factor, new.original_max_position_embeddings, new.mscale) == (4.0, 64, None)
    full = rope_of(
        rope_theta=5000,
        rope_scaling={key: "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1, "mscale_all_dim": 0.5}
        | {"attention_factor": 1.5, "truncate": True},
    )
    assert (full.beta_fast, full.beta_slow, full.mscale, full.mscale_all_dim, full.attention_factor) == (16, 2, 1, 0.5, 1.5)


def test_null_rope_scaling_is_plain():
    assert rope_of(rope_theta=7.5, rope_scaling=None) == RopeConfig(rope_type="default", theta=7.5)


@pytest.mark.parametrize(
    ("changes", "words", "kind"),
    [
        ({"rope_theta": 50000, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, ["50000", "10000"], 0),
        (
            {"rope_theta": 5, "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", **YARN}},
            ["'default' at rope_parameters.rope_type", "'yarn' at rope_scaling.type"],
            0,
        ),
        ({"rope_theta": 5, "rope_scaling": {"type": "yarn", "rope_type": "default", **YARN}}, ["yarn", "default"], 0),
        ({"rope_theta": 5, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ["original_max_position_embeddings"], 0),
        ({"rope_theta": 5, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, ["factor"], 0),
        ({"rope_theta": 5, "rope_scaling": {"type": "yarn", **YARN, "factor": 0.5}}, ["factor", "0.5"], 0),
        ({"rope_theta": 5, "rope_scaling": YARN}, ["no rope_type"], 0),
        ({"rope_theta": 5, "rope_scaling": {"type": "default", "factor": 4.0}}, ["default", "factor 4"], 0),
        ({"rope_theta": 0}, ["theta"], 0),
        ({"rope_theta": True}, ["theta"], 0),
        ({"rope_theta": float("nan")}, ["theta"], 0),
        ({}, ["rope_theta is required"], 0),
        ({"rope_theta": 5, "rope_scaling": "yarn"}, ["rope_scaling must be an object"], 0),
        ({"rope_theta": 5, "rope_scaling": {"type": "yarn", **YARN, "truncate": False}}, ["truncate"], 1),
        ({"rope_theta": 5, "rope_scaling": {"type": "llama3", **YARN}}, ["llama3", "default", "yarn"], 1),
        ({"rope_theta": 5, "rope_scaling": {"type": "yarn", **YARN, "short_factor": [1]}}, ["short_factor"], 1),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_rope(changes, words, kind):
    raw = tiny(drop=("rope_parameters", "rope_theta")) | changes
    refused(raw, *words, kind=UnsupportedError if kind else DSparkError)


# --- targets


def test_check_target_lists_every_mismatch():
    config = DraftConfig.from_dict(tiny())
    config.check_target(hidden_size=64, vocab_size=128, num_layers=4)
    with pytest.raises(DSparkError, match="draft for another target") as caught:
        config.check_target(hidden_size=32, vocab_size=100, num_layers=2)
    for word in ("target_hidden_size 64", "lm_head takes 32", "vocab_size 128", "4 layers", "0..1"):
        assert word in str(caught.value)
    with pytest.raises(DSparkError, match="vocab_size") as caught:
        config.check_target(hidden_size=64, vocab_size=129, num_layers=4)
    assert "hidden" not in str(caught.value) and "layers" not in str(caught.value)


def test_check_target_without_a_declared_depth():
    config = DraftConfig.from_dict(tiny(drop=("target_num_hidden_layers",)))
    assert config.target_num_layers is None
    config.check_target(hidden_size=64, vocab_size=128, num_layers=3)
    with pytest.raises(DSparkError, match=r"valid ids are 0\.\.1"):
        config.check_target(hidden_size=64, vocab_size=128, num_layers=2)


# --- unknown keys


def test_unknown_keys_make_one_note():
    config = DraftConfig.from_dict(tiny(zeta=1, alpha={"x": 2}, dflash_config={"weird": 3}))
    assert config.notes == ("config keys that are not known and were not used: alpha, dflash_config.weird, zeta",)


def test_reading_does_not_change_the_input():
    raw = tiny("gqa")
    before = copy.deepcopy(raw)
    DraftConfig.from_dict(raw)
    assert raw == before


# --- paths


def test_paths_that_hold_no_config(tmp_path):
    def error(path):
        with pytest.raises(DSparkError) as caught:
            DraftConfig.from_pretrained(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        return str(caught.value)

    assert "does not exist" in error(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in error(tmp_path / "empty")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "is a file" in error(file)
    for text, word in (("{", "readable JSON"), ("[1]", "JSON object, came list"), ("", "readable JSON")):
        folder = tmp_path / f"bad{len(text)}"
        folder.mkdir()
        (folder / "config.json").write_text(text)
        assert word in error(folder)
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "config.json").write_bytes(b"\xff\xfe{}")
    assert "readable JSON" in error(binary)


@pytest.mark.parametrize(
    ("file", "value", "word"),
    [
        ("quantization_config.json", {"quant_method": "exl3", "bits": 2.0}, "exl3"),
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ("quantization_config.json", {"bits": 4}, "unnamed"),
    ],
)
def test_quantisation_file_beside_the_config_is_refused(tmp_path, file, value, word):
    folder = write_config(tmp_path / "d", tiny())
    assert DraftConfig.from_pretrained(folder).dtype == "bfloat16"
    (folder / file).write_text(json.dumps(value))
    with pytest.raises(UnsupportedError, match=word):
        DraftConfig.from_pretrained(folder)


def test_from_pretrained_passes_every_override(tmp_path):
    folder = write_config(tmp_path / "d", tiny(drop=("block_size",)))
    with pytest.raises(DSparkError, match="block_size"):
        DraftConfig.from_pretrained(folder)
    assert DraftConfig.from_pretrained(folder, require_block_size=False).block_size is None
    config = DraftConfig.from_pretrained(
        folder, max_draft_len=3, rope_theta=10000.0, aux_stream="attn_res", sample_from_anchor=False
    )
    assert (config.block_size, config.rope.theta, config.aux_stream, config.max_drafts) == (4, 10000.0, "attn_res", 3)


def test_dtype_default_is_said():
    config = DraftConfig.from_dict(tiny(drop=("torch_dtype",)))
    assert config.dtype == "bfloat16" and "dtype is not in the config: taken as bfloat16" in config.notes
    assert DraftConfig.from_dict(tiny(torch_dtype="torch.float32", dtype="float32")).dtype == "float32"


JUNK = [None, True, 0, -1, 2.5, float("nan"), 10**30, "", "x", [], [None], [{}], {}, {"a": 1}, [[0]], {"full_attention": 3}]


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_junk_in_any_key_is_a_one_line_error_or_harmless(family):
    """Whatever stands under any key, nothing but DSparkError comes out, on one line."""
    raw = tiny(family)
    extra = ("dspark_config", "rope_scaling", "causal", "layer_types", "quantization_config", "aux_stream", "fc_norm")
    outcomes = {"refused": 0, "read": 0}
    for key in (*raw, *extra, *(f"rope_parameters.{k}" for k in raw["rope_parameters"])):
        for junk in JUNK:
            outer, _, inner = key.partition(".")
            changed = raw | {outer: {**raw[outer], inner: junk} if inner else junk}
            for overrides in ({}, {"rope_theta": 7.0, "max_draft_len": 2, "sample_from_anchor": False}):
                try:
                    DraftConfig.from_dict(changed, **overrides)
                    outcomes["read"] += 1
                except DSparkError as error:
                    assert "\n" not in str(error)
                    outcomes["refused"] += 1
    assert min(outcomes.values()) > 100
    for raw in (None, [], "x", 3):
        refused(raw, "JSON object")
