"""Loading a draft for a target: what is said about the two, what the options change, and drafts of another target refused."""

import pytest
import torch
from engine_pair import FOLDER
from engine_targets import random_prompts, random_target, write_random_draft

from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.loading import DraftOptions, load_drafter
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.errors import DSparkError, UnsupportedError


@pytest.fixture(scope="module")
def target():
    return random_target("llama")


def refused(error, path, target, options=DraftOptions(), words=()):
    with pytest.raises(error) as caught:
        load_drafter(path, target, options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


def test_the_tiny_pair_loads_with_its_notes(pair):
    pair.target.set_taps(())  # whoever shares the target may have set others
    loaded = load_drafter(FOLDER / "draft", pair.target)
    config, notes = loaded.drafter.model.config, loaded.notes
    assert loaded.num_drafts == config.max_drafts == pair.block
    assert "attention backend VANILLA" in notes
    taps = ", ".join(map(str, config.target_layer_ids))
    assert f"taps: residual stream after layers {taps} of {pair.target.num_layers}, counted from 0" in notes
    assert any(note.startswith("draft embedding: ") for note in notes)
    assert all("\n" not in note for note in notes)
    assert pair.target.target_layer_ids == config.target_layer_ids
    assert loaded.drafter.model.context_proj.weight.dtype == pair.target.dtype == torch.float32


def test_options_reach_the_draft(pair):
    loaded = load_drafter(
        FOLDER / "draft",
        pair.target,
        DraftOptions(num_drafts=2, page_size=32, pool_tokens=100, dtype=torch.bfloat16, rope_theta=12345.0),
    )
    pool = loaded.drafter.context.pool
    assert (loaded.num_drafts, pool.layout.page_size, pool.num_pages) == (2, 32, 4)
    assert pool.layout.dtype == loaded.drafter.model.context_proj.weight.dtype == torch.bfloat16
    assert any(note.startswith("rope_theta overridden") and "12345" in note for note in loaded.notes)


def test_a_bf16_draft_beside_an_fp32_target_keeps_the_output(pair):
    """The target's head reads the draft's hidden states: their dtypes met there, and it failed."""
    loaded = load_drafter(FOLDER / "draft", pair.target, DraftOptions(dtype=torch.bfloat16, pool_tokens=1024))
    engine = Engine(pair.target, loaded.drafter, num_drafts=pair.block)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    got = engine.generate(pair.prompts[:3], params)
    assert [c.tokens for c in got] == [pair.alone(prompt, params).tokens for prompt in pair.prompts[:3]]
    assert engine.acceptance.summary().accept_len > 1.5


def test_a_different_embedding_is_said_and_no_error(tmp_path, target):
    loaded = load_drafter(write_random_draft(tmp_path), target)
    note = next(note for note in loaded.notes if note.startswith("draft embedding: "))
    assert note.startswith("draft embedding: 0 of ") and note.endswith("mask row different")
    params = SamplingParams(max_new_tokens=4)
    assert len(Engine(target, loaded.drafter, num_drafts=2).generate(random_prompts(1, 5), params)[0].tokens) == 4


def test_a_draft_of_another_target_names_every_mismatch(tmp_path, pair):
    """Hidden 64 and 128 tokens against the tiny pair's target, and a depth of 4."""
    path, target = write_random_draft(tmp_path), pair.target
    words = (
        "a draft for another target",
        f"target_hidden_size 64, the target's hidden size {target.hidden_size}",
        f"hidden_size 64, the target's lm_head takes {target.hidden_size}",
        f"vocab_size 128, the target's {target.vocab_size}",
        f"a target of 4 layers, the target has {target.num_layers}",
        "Use this target's own draft.",
    )
    refused(DSparkError, path, target, words=words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 130, "draft_vocab_size": 130}, ("vocab_size 130, the target's 128",)),
        ({"target_num_hidden_layers": 5}, ("a target of 5 layers, the target has 4",)),
        (
            {"target_num_hidden_layers": None, "target_layer_ids": [0, 4]},
            ("target_layer_ids [0, 4], valid ids are 0..3",),
        ),
    ],
)
def test_one_mismatch_is_named_alone(tmp_path, target, changes, words):
    path = write_random_draft(tmp_path, **changes)
    refused(DSparkError, path, target, words=("for another target", *words))
    with pytest.raises(DSparkError) as caught:
        load_drafter(path, target)
    assert ";" not in str(caught.value)


def test_the_attn_res_stream_is_refused_until_overridden(tmp_path, target):
    path = write_random_draft(tmp_path, aux_hidden_stream="attn_res")
    refused(UnsupportedError, path, target, words=("aux_stream prefix", "trained on attn_res", "Pass aux_stream='prefix'"))
    loaded = load_drafter(path, target, DraftOptions(aux_stream="prefix"))
    assert any("aux_stream overridden" in note for note in loaded.notes)


@pytest.mark.parametrize("sizes", [{"pool_tokens": 0}, {"page_size": 0}, {"pool_tokens": -5}])
def test_a_pool_of_nothing_is_refused(tmp_path, target, sizes):
    words = ("load_drafter: pool_tokens and page_size must be at least 1", "Give positive sizes.")
    refused(DSparkError, write_random_draft(tmp_path), target, DraftOptions(**sizes), words)


def test_a_refused_draft_leaves_the_targets_taps(tmp_path, pair):
    before = pair.target.target_layer_ids
    refused(DSparkError, write_random_draft(tmp_path), pair.target)
    assert pair.target.target_layer_ids == before


def test_a_plain_head_is_given_as_its_weight_and_any_other_as_it_is():
    """Fails where a bias or a cast of the target's head is lost in a draft step."""
    target = random_target("llama")
    head = target.model.get_output_embeddings()
    assert target.output_head(torch.float32).data_ptr() == head.weight.data_ptr()
    assert target.output_head(torch.bfloat16) == target.lm_head
    hook = head.register_forward_pre_hook(lambda module, inputs: None)
    assert target.output_head(torch.float32) == target.lm_head  # what a hook does must not be lost
    hook.remove()
    assert target.output_head(torch.float32) != target.lm_head
    target.model.set_output_embeddings(torch.nn.Linear(head.in_features, head.out_features))
    assert target.output_head(torch.float32) == target.lm_head
