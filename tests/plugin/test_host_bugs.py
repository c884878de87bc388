"""Public bugs in how a host sets a drafter up and what is said of it, one test each, in the stand-in host.

A test's name begins with the bug's id, as in `tests/regressions/README.md`.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plugin.host.executor import StandIn
from plugin.hosted import DRAFT, SHORT, hosted

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin import builder, kv_charge, register
from trtllm_dspark.plugin.lint import lint_file
from trtllm_dspark.plugin.worker import HostedWorker


def folder_with(tmp_path: Path, **changes: object) -> Path:
    """The tiny draft with other keys in its config.json."""
    folder = tmp_path / "draft"
    shutil.copytree(DRAFT, folder)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return folder


def test_c02_more_drafts_than_the_block_are_refused_at_construction(host, pair) -> None:
    """Fails if max_draft_len 8 is built over a block of 7."""
    host("1.3.0rc28")
    register()
    with pytest.raises(DSparkError, match="at most 7, came K=8"):
        StandIn(pair.target, DRAFT, num_drafts=8)


@pytest.mark.parametrize("version", ["1.3.0rc28", "1.3.0rc29"])
def test_c11_one_decision_gives_model_and_worker(version, host, pair, tmp_path) -> None:
    """Fails if a draft in its own checkpoint, MLA or not, or one in the target's, gets the model or worker of another."""
    host(version)
    standalone = hosted(pair)
    assert type(standalone.model.draft_model).__name__ == "HostedMLADSpark"
    assert isinstance(standalone.model.spec_worker, HostedWorker)
    gqa = StandIn(pair.target, folder_with(tmp_path, kv_lora_rank=None))
    assert type(gqa.model.draft_model).__name__ == "GQADSparkForCausalLM"
    assert gqa.model.draft_model.dflash_attention_backend == gqa.spec_config.attention_backend
    assert type(gqa.model.spec_worker).__name__ == "DSparkWorker"
    embedded = SimpleNamespace(
        spec_config=SimpleNamespace(draft_is_embedded_in_target=True, attention_backend="VANILLA"), mapping=None
    )
    assert type(builder.build_draft(embedded, None, None, None)).__name__ == "DSv4DSparkForCausalLM"


def test_c12_who_is_ours_is_pinned_for_every_mode_and_kind(host) -> None:
    """Fails if the fp8 remedy reaches a mode, or a kind of draft, other than DSPARK with its own MLA checkpoint."""
    host("1.3.0rc28")
    from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode

    mla, gqa = (SimpleNamespace(pretrained_config=SimpleNamespace(kv_lora_rank=rank)) for rank in (512, None))
    ours = {
        (mode.name, kind, embedded)
        for mode in SpeculativeDecodingMode
        for kind, config in (("mla", mla), ("gqa", gqa), ("none", None))
        for embedded in (False, True)
        if kv_charge._is_ours(SimpleNamespace(spec_dec_mode=mode, draft_is_embedded_in_target=embedded), config)
    }
    assert ours == {("DSPARK", "mla", False)}


def test_c17_a_target_without_the_needed_parts_is_refused_by_name(host, pair, tmp_path) -> None:
    """Fails if a draft of another target, or a target without a standalone worker, ends in an error of Python's own."""
    host("1.3.0rc28")
    register()
    with pytest.raises(DSparkError, match="draft for another target"):
        StandIn(pair.target, folder_with(tmp_path, target_num_hidden_layers=9))
    drafter = StandIn(pair.target, DRAFT).model.draft_model
    target = torch.nn.Module()
    target.lm_head = None
    with pytest.raises(DSparkError, match="must have a standalone DSpark worker, Module has NoneType"):
        drafter.load_weights_from_target_model(target)


def test_c20_the_drafts_backend_is_resolved_apart_from_the_targets_words(host, pair, monkeypatch, caplog) -> None:
    """Fails if an older host's default VANILLA is taken by name, if the override is ignored, or if either goes unsaid."""
    host("1.3.0rc28")
    register()
    from trtllm_dspark.plugin import backend_choice

    asked = StandIn(pair.target, DRAFT)
    assert backend_choice.requested(asked.spec_config) == "AUTO" and "stands for AUTO" in caplog.text
    trtllm = StandIn.__new__(StandIn)
    with pytest.raises(DSparkError, match="TRTLLM was asked for"):
        trtllm.__init__(pair.target, DRAFT, extra={"attention_backend": "TRTLLM"})
    monkeypatch.setenv("TRTLLM_DSPARK_ATTENTION_BACKEND", "VANILLA")
    overridden = StandIn(pair.target, DRAFT, extra={"attention_backend": "TRTLLM"})  # the stock worker compares its own word
    drafter = overridden.model.draft_model
    assert drafter.backend.name == "VANILLA" and drafter.dflash_attention_backend == "TRTLLM"
    assert "from TRTLLM_DSPARK_ATTENTION_BACKEND" in caplog.text


def test_c20_where_auto_can_be_asked_for_vanilla_means_vanilla(host, pair, monkeypatch) -> None:
    """Fails if a newer host's VANILLA, which a user wrote, is turned into AUTO."""
    host("1.3.0rc29")
    register()
    from trtllm_dspark.plugin import backend_choice

    made = StandIn(pair.target, DRAFT, extra={"attention_backend": "VANILLA"})
    assert backend_choice.requested(made.spec_config) == "VANILLA"
    assert backend_choice.requested(StandIn(pair.target, DRAFT).spec_config) == "AUTO"


@pytest.mark.parametrize("version", ["1.3.0rc28", "1.3.0rc29"])
def test_c21_worker_and_draft_report_one_resolved_name(version, host, pair) -> None:
    """Fails if the host's worker goes by AUTO, or by another name than the draft that it holds."""
    host(version)
    register()
    stand_in = StandIn(pair.target, DRAFT)
    drafter, stock = stand_in.model.draft_model, stand_in.model.spec_worker
    assert stock._dflash_attention_backend == drafter.dflash_attention_backend == drafter.backend.name == "VANILLA"
    drafter.asked_backend = "TRTLLM"
    with pytest.raises(ValueError, match="backends differ"):  # control: the host does compare
        stock.set_draft_model(drafter)


@pytest.mark.parametrize("role", ["ctx", "gen"])
def test_s01_a_file_says_what_a_transferred_request_lacks(role, tmp_path) -> None:
    """Fails if a drafter on the context servers passes, or one on the generation servers with nothing said of the prompt."""
    file = tmp_path / f"{role}.yaml"
    transceiver = "cache_transceiver_config: {backend: NIXL, transceiver_runtime: PYTHON}\n"
    drafter = f"speculative_config: {{decoding_type: DSpark, speculative_model: {DRAFT}, max_draft_len: 7}}\n"
    file.write_text("disable_overlap_scheduler: true\n" + transceiver + drafter)
    found = {(one.severity, one.message) for one in lint_file(file).findings if one.key == "speculative_config"}
    says = {"ctx": ("error", "belongs on the generation servers alone"), "gen": ("note", "context is not transferred")}[role]
    assert any(severity == says[0] and says[1] in message for severity, message in found), found


def test_s03_the_storage_in_use_is_said_once(host, pair, caplog) -> None:
    """Fails if a log does not prove that the managed pool, and no arena, holds the context."""
    host("1.3.0rc28")
    hosted(pair).generate(pair.prompts[:2], SHORT)
    lines = [record.message for record in caplog.records if "DSpark draft context" in record.message]
    assert len(lines) == 1 and "draft KV manager's pool" in lines[0] and "640 bytes a token" in lines[0]


def test_s04_one_line_has_every_setting_that_two_deployments_may_differ_in(host, pair, caplog) -> None:
    """Fails if a setting that changes acceptance or speed cannot be read off the log by a program."""
    host("1.3.0rc28")
    hosted(pair)
    (line,) = (r.message for r in caplog.records if r.message.startswith("DSpark draft: "))
    said = dict(word.split("=", 1) for word in line.removeprefix("DSpark draft: ").split())
    assert said["layout"] == "anchor-first" and said["taps"] == "0,2,4" and said["bytes_per_token"] == "640"
    names = "draft layout block max_draft_len taps rope markov_rank aux_stream backend dtype bytes_per_token tp fixes"
    assert list(said) == names.split()


def test_x02_acceptance_is_logged_when_asked_for(host, pair, monkeypatch, caplog) -> None:
    """Fails if a drafter that proposes nothing cannot be told from one that does."""
    host("1.3.0rc28")
    monkeypatch.setenv("TRTLLM_DSPARK_STATS_EVERY", "2")
    hosted(pair).generate(pair.prompts[:2], SHORT)
    lines = [record.message for record in caplog.records if record.message.startswith("accept_len")]
    assert lines and "verifications" in lines[-1]


def test_x02_a_bad_number_of_steps_is_said_when_the_worker_is_made(host, pair, monkeypatch) -> None:
    """Fails if a setting that cannot be read turns the report off in silence."""
    host("1.3.0rc28")
    monkeypatch.setenv("TRTLLM_DSPARK_STATS_EVERY", "often")
    with pytest.raises(DSparkError, match="TRTLLM_DSPARK_STATS_EVERY: a whole number of 0 or more is required, 'often' came"):
        hosted(pair)
