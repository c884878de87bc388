"""Every YAML in configs/: complete, recorded keys only, right numbers, and nothing that `doctor` finds fault with."""

import re
from pathlib import Path

import pytest
import yaml

from trtllm_dspark.cli import main
from trtllm_dspark.plugin.lint import lint_file
from trtllm_dspark.plugin.lint.schema import schema

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SERVERS = [path for path in CONFIGS if "proxy" not in path.stem]
PURPOSES = ("tep", "dep", "ctx", "gen", "low_latency", "throughput", "acceptance")


def name(path):
    return path.stem


def load(path):
    return yaml.safe_load(path.read_text())


def test_there_is_one_for_every_purpose():
    """Aggregated and disaggregated on 8 and 16 GPUs, the proxy, and the three special ones."""
    found = {path.stem for path in CONFIGS}
    for purpose in PURPOSES[:4]:
        assert {f"kimi_k3_dspark_{purpose}_gb300x{gpus}" for gpus in (8, 16)} <= found
    assert {f"kimi_k3_dspark_{purpose}_gb300x16" for purpose in PURPOSES[4:]} | {"kimi_k3_dspark_proxy"} <= found


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_doctor_passes_it(path, capsys):
    """Exit code 0 without tensorrt_llm, and not one error or warning."""
    assert main(["doctor", "--config", str(path)]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out


@pytest.mark.parametrize("version", [entry["first"] for entry in schema()["ranges"]])
@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_every_recorded_version_takes_it(path, version):
    """Held against one range at a time, as on a machine with that TensorRT-LLM."""
    findings = lint_file(path, version).findings
    assert [finding for finding in findings if finding.severity != "note"] == []


@pytest.mark.parametrize("path", SERVERS, ids=name)
def test_its_name_is_what_it_says(path):
    """The number of GPUs, attention parallelism and the drafter follow from the name."""
    match = re.fullmatch(r"kimi_k3_dspark_([a-z_]+)_gb300x(\d+)", path.stem)
    assert match, path.stem
    purpose, gpus, config = match[1], int(match[2]), load(path)
    assert config["tensor_parallel_size"] == config["moe_expert_parallel_size"] == gpus
    assert config["pipeline_parallel_size"] == 1
    if purpose in ("tep", "low_latency"):
        assert config["enable_attention_dp"] is False
    if purpose in ("dep", "throughput", "acceptance"):
        assert config["enable_attention_dp"] is True
    assert ("speculative_config" in config) == (purpose != "ctx")
    assert ("cache_transceiver_config" in config) == (purpose in ("ctx", "gen"))
    assert path.name in path.read_text(), "the command in its head names another file"


@pytest.mark.parametrize("path", SERVERS, ids=name)
def test_its_numbers_hold(path):
    """A prompt fits where prompts are computed, every step fits, and every batch has a CUDA graph."""
    config = load(path)
    assert config["kv_cache_config"]["tokens_per_block"] == 64
    assert config["kv_cache_config"]["enable_block_reuse"] is False
    if "speculative_config" in config:
        assert config["speculative_config"]["max_draft_len"] == 7
        assert config["max_num_tokens"] >= config["max_batch_size"] * 8
    if "gen" not in path.stem.split("_"):
        assert config["max_num_tokens"] >= 8192
    graphs = config["cuda_graph_config"]
    if graphs is not None:
        assert graphs.get("max_batch_size", max(graphs.get("batch_sizes", [0]))) == config["max_batch_size"]


@pytest.mark.parametrize("gpus", (8, 16))
def test_both_sides_of_a_transfer_agree(gpus):
    """Kimi-K3's recurrent state is handed over rank by rank, through buffers of one size."""
    ctx, gen = (load(ROOT / f"configs/kimi_k3_dspark_{role}_gb300x{gpus}.yaml") for role in ("ctx", "gen"))
    for key in ("tensor_parallel_size", "moe_expert_parallel_size", "enable_attention_dp", "cache_transceiver_config"):
        assert ctx[key] == gen[key], key
    assert ctx["cache_transceiver_config"]["max_tokens_in_buffer"] >= ctx["max_seq_len"]
    payload = 433 + 27 * ctx["max_seq_len"] / 1024  # MiB: state, and KB a token
    assert ctx["cache_transceiver_config"]["kv_cache_bounce_size_mb"] >= payload
    assert gen["max_seq_len"] >= ctx["max_seq_len"] + 1024


def test_the_guide_uses_these_files():
    """examples/serve.md names every file of configs/ that a server or the proxy is started with, and no other."""
    guide = (ROOT / "examples/serve.md").read_text()
    named = set(re.findall(r"configs/([a-z0-9_]+\.yaml)", guide))
    assert named <= {path.name for path in CONFIGS}
    assert {path.name for path in CONFIGS} <= named
