"""Public bugs of draft loaders, one test or more each, by bug id. Each docstring says on what the test would fail."""

import pytest
import torch
from published import layout, tiny, tiny_tensors, write_tiny

from trtllm_dspark.checkpoint import DraftCheckpoint
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError, UnsupportedError
from trtllm_dspark.tensor_names import canonical_name, tensor_table

TENSORS = [(family, name) for family in ("mla", "gqa") for name in layout(tiny(family))]


@pytest.mark.parametrize(("family", "gone"), TENSORS, ids=str)
def test_l01_one_missing_tensor_is_named(tmp_path, family, gone):
    """Fails where a module counts as loaded because another of its tensors is there (one half of gate and up, say)."""
    raw = tiny(family)
    config, tensors = DraftConfig.from_dict(raw), tiny_tensors(raw)
    DraftCheckpoint.open(write_tiny(tmp_path / "whole", raw, tensors)).check(config)
    del tensors[gone]
    part = DraftCheckpoint.open(write_tiny(tmp_path / "part", raw, tensors))
    with pytest.raises(DSparkError) as caught:
        part.check(config)
    assert f"missing {canonical_name(gone)} " in str(caught.value)
    assert len(part.problems(config)) == 1


def test_l01_only_what_the_target_shares_may_be_absent():
    """Fails where any tensor but the target's own embedding and head is optional."""
    optional = {
        family: {n for n, spec in tensor_table(DraftConfig.from_dict(tiny(family))).items() if not spec.required}
        for family in ("mla", "gqa")
    }
    assert optional == {"mla": {"lm_head.weight"}, "gqa": {"lm_head.weight", "embed_tokens.weight"}}


def test_l04_packed_tensor_under_a_bf16_name(tmp_path):
    """Fails where packed bytes are read as bf16, or where only the shape is complained of."""
    raw = tiny()
    tensors = tiny_tensors(raw)
    name = "layers.0.self_attn.o_proj.weight"
    tensors[name] = torch.zeros(64, 32, dtype=torch.uint8)
    tensors[f"{name}_scale"] = torch.ones(64, 4)
    checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tensors))
    problem, unknown = checkpoint.problems(DraftConfig.from_dict(raw))
    assert problem.startswith(f"{name} is U8 [64, 32], required BF16/F16/F32 [64, 64]")
    assert "packed or quantised draft under bf16 names" in problem
    assert f"{name}_scale" in unknown
    with pytest.raises(DSparkError, match=f"{name} must be BF16/F16/F32, came U8"):
        checkpoint.read(name)


def test_l04_packed_tensor_of_the_right_shape(tmp_path):
    """Fails where a check of shapes alone lets one byte an element pass."""
    raw = tiny()
    tensors = tiny_tensors(raw)
    tensors["final_norm.weight"] = torch.zeros(64, dtype=torch.uint8)
    (problem,) = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tensors)).problems(DraftConfig.from_dict(raw))
    assert "final_norm.weight is U8 [64]" in problem


def test_l06_reduced_vocabulary_is_refused_with_both_sizes():
    """Fails where one vocab_size serves target and draft although the draft's is smaller."""
    with pytest.raises(UnsupportedError, match=r"draft_vocab_size 32, vocab_size 128"):
        DraftConfig.from_dict(tiny(draft_vocab_size=32))
    assert DraftConfig.from_dict(tiny(draft_vocab_size=128)).vocab_size == 128


def test_l06_reduced_tables_and_maps_are_refused(tmp_path):
    """Fails where a reduced Markov output, the draft's small lm_head or its id map is dropped for the target's head."""
    raw = tiny()
    tensors = tiny_tensors(raw) | {
        "markov_head.markov_w2.weight": torch.zeros(32, 8, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(32, 64, dtype=torch.bfloat16),
        "d2t": torch.zeros(32, dtype=torch.int64),
    }
    found = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tensors)).problems(DraftConfig.from_dict(raw))
    assert found == [
        "markov_head.markov_w2.weight must be [128, 8], came [32, 8]",
        "lm_head.weight must be [128, 64], came [32, 64]",
        "unknown tensors that this draft's config has no place for: d2t",
    ]


HEAD = {"confidence_head.proj.weight", "confidence_head.proj.bias"}


@pytest.mark.parametrize("present", [set(), {"confidence_head.proj.weight"}, HEAD], ids=["absent", "no bias", "whole"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias declared", "no bias declared"])
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_l08_confidence_head(tmp_path, on, bias, present):
    """Fails where a head that is on is dropped or half loaded, or where one that is off stops the load or goes unsaid."""
    raw = tiny(enable_confidence_head=on, confidence_head_bias=bias)
    config = DraftConfig.from_dict(raw)
    tensors = {name: t for name, t in tiny_tensors(raw).items() if name not in HEAD - present}
    checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tensors))
    found, said = checkpoint.problems(config), checkpoint.notes(config)
    assert (config.confidence_head, config.confidence_bias) == (on, bias)
    if not on:
        ignored = ["confidence_head is in the checkpoint but switched off by the config: ignored"]
        assert (found, said) == ([], ignored if present else [])
        return
    wanted = HEAD if bias else {"confidence_head.proj.weight"}
    assert said == []
    assert len(found) == len(wanted ^ present)
    for name in wanted - present:
        assert any(text.startswith(f"missing {name} ") for text in found)
    for name in present - wanted:
        assert any("unknown" in text and name in text for text in found)
    if present == {"confidence_head.proj.weight"} and bias:
        assert "confidence_head_bias: false" in found[0]


def test_l08_head_width_follows_the_markov_switch(tmp_path):
    """Fails where the head's input is taken to hold the Markov feature whatever the config says."""
    raw = tiny(confidence_head_with_markov=False)
    config = DraftConfig.from_dict(raw)
    (problem,) = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw)).problems(config)
    assert problem == "confidence_head.proj.weight must be [1, 64], came [1, 72]"


def test_l10_unknown_tensors_are_listed(tmp_path):
    """Fails where an output gate that nobody reads is ignored, or where the error gives only a count."""
    raw = tiny()
    gates = {f"layers.{i}.self_attn.o_gate.weight": torch.zeros(4, 64, dtype=torch.bfloat16) for i in range(2)}
    checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tiny_tensors(raw) | gates))
    with pytest.raises(DSparkError, match="unknown tensors") as caught:
        checkpoint.check(DraftConfig.from_dict(raw))
    for name in gates:
        assert name in str(caught.value)


def test_l10_switches_and_unknown_keys():
    """Fails where the gate's switch passes, or where a harmless new key stops the load or goes unsaid."""
    with pytest.raises(UnsupportedError, match="mla_use_output_gate"):
        DraftConfig.from_dict(tiny(mla_use_output_gate=True))
    config = DraftConfig.from_dict(tiny(some_new_key=1, another="x"))
    assert config.notes == ("config keys that are not known and were not used: another, some_new_key",)
