"""The checks of a serving YAML: each finds its mistake, at its line, and is silent where there is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin.lint import lint_file
from trtllm_dspark.plugin.lint.schema import range_of, schema

ROOT = Path(__file__).parents[2]
DRAFT, TARGET = ROOT / "examples/tiny_pair/draft", ROOT / "examples/tiny_pair/target"
FIRST, SECOND, THIRD = (entry["first"] for entry in schema()["ranges"])
GOOD = f"""\
model: {TARGET}
max_batch_size: 8
max_num_tokens: 64
kv_cache_config:
  tokens_per_block: 64
  enable_block_reuse: false
speculative_config:
  decoding_type: DSpark
  speculative_model: {DRAFT}
  max_draft_len: 7
"""


@pytest.fixture
def lint(tmp_path):
    """Findings of a text, as "severity line key" each; `.full` are the findings themselves."""

    def run(text, version=None, name="server.yaml"):
        path = tmp_path / name
        path.write_text(text)
        run.report = lint_file(path, version)
        run.full = run.report.findings
        return [f"{finding.severity} {finding.line} {finding.key}" for finding in run.full]

    return run


def changed(old, new, text=GOOD):
    assert text.count(old) == 1, old
    return text.replace(old, new)


def test_a_right_file_has_nothing_to_say(lint):
    """The control of every test below: they change one thing in this file."""
    assert lint(GOOD) == []
    assert lint.report.roles == ("aggregated",)
    assert lint.report.draft is not None and lint.report.draft.family == "mla"


# The file


@pytest.mark.parametrize(
    "text, line, says",
    [
        ("", 1, "an empty file"),
        ("# nothing\n", 1, "an empty file"),
        ("- a\n- b\n", 1, "a list"),
        ("just words\n", 1, "a str"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "expected ',' or ']'"),
        ("a: &x [*x]\nb: : 1\n", 2, "mapping values are not allowed"),
        ("a: \x00\n", 1, "special characters are not allowed"),
        ("a: !!python/object:os.system 1\n", 1, "could not determine a constructor"),
        ("a: " + "[" * 500 + "]" * 500, 1, "recursion"),
    ],
)
def test_what_is_not_a_mapping_is_one_error(lint, text, line, says):
    """One line, no traceback, whatever the file holds."""
    (found,) = lint(text)
    assert found == f"error {line} "
    assert says in lint.full[0].message


def test_a_list_that_holds_itself_ends(lint):
    """An alias may lead back to its anchor; YAML allows it."""
    assert "error 1 pp_partition" not in lint("pp_partition: &x [*x]\n")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_what_cannot_be_read_is_an_error_of_the_user(tmp_path, content):
    """No such file, and bytes that are no text."""
    path = tmp_path / "file.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DSparkError, match="--config: a readable YAML file is required"):
        lint_file(path)


def test_a_key_given_twice(lint):
    """YAML takes the later one without a word."""
    assert lint(GOOD + "max_batch_size: 4\n") == ["warning 11 max_batch_size"]
    assert lint(changed("  tokens_per_block: 64\n", "  tokens_per_block: 64\n  tokens_per_block: 32\n")) == [
        "warning 6 tokens_per_block"
    ]


# Keys and words


@pytest.mark.parametrize(
    "old, new, finding, fix",
    [
        ("max_batch_size: 8", "max_batchsize: 8", "error 2 max_batchsize", "Did you mean max_batch_size?"),
        (
            "  tokens_per_block",
            "  token_per_block",
            "error 5 kv_cache_config.token_per_block",
            "Did you mean tokens_per_block?",
        ),
        ("max_batch_size: 8", "dtypo: 8", "error 2 dtypo", "Did you mean dtype?"),
        ("max_batch_size: 8", "enable_block_reuse: true", "error 2 enable_block_reuse", "It belongs in kv_cache_config."),
        ("max_batch_size: 8", "pineapple: 8", "error 2 pineapple", "Remove it."),
        ("max_batch_size: 8", "8: 8", "error 2 8", "Remove it."),
    ],
)
def test_c26_an_unknown_key_is_named_with_what_was_meant(lint, old, new, finding, fix):
    """Fails on a linter that lets an unknown key pass: TensorRT-LLM's blocks are strict and the server would not start."""
    assert finding in lint(changed(old, new))
    assert next(f for f in lint.full if f.severity == "error").fix == fix


@pytest.mark.parametrize(
    "old, new, ok",
    [
        ("max_batch_size: 8", "max_batch_size: eight", False),
        ("max_batch_size: 8", "max_batch_size: 8.5", False),
        ("max_batch_size: 8", "max_batch_size: .inf", False),
        ("max_batch_size: 8", "max_batch_size: [8]", False),
        ("max_batch_size: 8", "max_batch_size: null", True),
        ("max_batch_size: 8", "max_batch_size: '8'", True),
        ("max_batch_size: 8", "enable_attention_dp: 'yes'", True),
        ("max_batch_size: 8", "enable_attention_dp: null", False),
        ("max_batch_size: 8", "enable_attention_dp: 2", False),
        ("max_batch_size: 8", "cuda_graph_config: null", True),
        ("max_batch_size: 8", "moe_config: CUTLASS", False),
        ("max_batch_size: 8", "dtype: 16", False),
        ("  enable_block_reuse: false", "  free_gpu_memory_fraction: half", False),
    ],
)
def test_values_of_the_wrong_kind(lint, old, new, ok):
    """As pydantic takes them: a string that spells a number is one, a null only where it is allowed."""
    errors = [found for found in lint(changed(old, new)) if found.startswith("error")]
    assert (errors == []) == ok, errors


def test_an_unknown_decoding_type_is_named(lint):
    """With the one that was meant; its block is then not checked further as somebody else's."""
    assert "error 8 speculative_config.decoding_type" in lint(changed("DSpark\n", "dspark\n"))
    assert lint.full[0].fix == "Did you mean DSpark?"
    assert "error 8 speculative_config.decoding_type" in lint(changed("DSpark\n", "Medusa\n"))
    assert "DFlash, DSpark, Draft_Target" in lint.full[0].message


def test_a_decoding_type_is_required(lint):
    """It decides which block it is at all."""
    assert "error 7 speculative_config.decoding_type" in lint(changed("  decoding_type: DSpark\n", ""))


def test_another_drafter_of_the_host_is_left_alone(lint):
    """Its keys are not recorded, so none of them is called unknown."""
    text = "speculative_config:\n  decoding_type: SA\n  max_matching_ngram_size: -1\n  max_draft_len: 2\n"
    assert lint(text) == ["note 2 speculative_config.decoding_type"]


def test_words_that_only_later_versions_know(lint):
    """AUTO and CUTEDSL came with the host's own MLA drafter."""
    text = GOOD + "  attention_backend: AUTO\n"
    assert lint(text) == ["warning 11 speculative_config.attention_backend"]
    assert lint(text, FIRST) == ["error 11 speculative_config.attention_backend"]
    assert lint(text, SECOND) == []
    assert lint(GOOD + "  attention_backend: VANILLA\n") == []
    assert lint(GOOD + "  attention_backend: FA4\n", THIRD) == ["error 11 speculative_config.attention_backend"]


def test_keys_that_only_later_versions_know(lint):
    """Unknown installed version: a warning with the version. A known one: right or refused."""
    text = GOOD + "  enable_confidence_scheduling: true\n"
    assert lint(text) == ["warning 11 speculative_config.enable_confidence_scheduling"]
    assert lint(text, SECOND) == ["error 11 speculative_config.enable_confidence_scheduling"]
    assert lint(text, THIRD) == []


@pytest.mark.parametrize(
    "version, first",
    [
        ("1.2.1", None),
        ("1.3.0rc25", None),
        ("1.3.0rc26", FIRST),
        ("1.3.0rc28.post1", FIRST),
        ("1.3.0rc29", SECOND),
        ("1.3.0", SECOND),
        ("1.4.0rc1", SECOND),
        ("1.4.0rc4", THIRD),
        ("1.4.0", THIRD),
        ("2.0", THIRD),
        ("unknown", None),
    ],
)
def test_versions_find_their_range(version, first):
    """A release comes after its candidates."""
    found = range_of(version)
    assert (found and found["first"]) == first


def test_the_record_is_whole():
    """Every range names its sources, every later key and every word belongs to a recorded block."""
    record = schema()
    assert [entry["first"] for entry in record["ranges"]] == [FIRST, SECOND, THIRD]
    assert all(entry["sources"] for entry in record["ranges"])
    for block, later in record["since"].items():
        for first, keys in later.items():
            assert first in (SECOND, THIRD) and set(keys) <= set(record["blocks"][block])
    for dotted, table in record["words"].items():
        block, _, key = dotted.rpartition(".")
        assert key in record["blocks"][block] and FIRST in table


# Settings against each other


def test_c13_a_draft_step_has_to_fit_the_token_budget(lint):
    """Fails on a linter that does not check max_num_tokens >= max_batch_size x (K + 1); 63 of 64 is one row too few."""
    assert lint(changed("max_num_tokens: 64", "max_num_tokens: 63")) == ["error 3 max_num_tokens"]
    assert "8 x (max_draft_len 7 + 1) = 64 is required, 63 came" in lint.full[0].message
    assert "max_batch_size to 7" in lint.full[0].fix
    assert lint(changed("max_num_tokens: 64", "max_num_tokens: '63'")) == ["error 3 max_num_tokens"]  # pydantic reads it


@pytest.mark.parametrize(
    "pages, found",
    [
        (16, ["note 5 kv_cache_config.tokens_per_block"]),
        (32, []),
        (48, ["error 5 kv_cache_config.tokens_per_block"]),
        (64, []),
        (128, ["note 5 kv_cache_config.tokens_per_block"]),
        (256, ["error 5 kv_cache_config.tokens_per_block"]),
        (0, ["error 5 kv_cache_config.tokens_per_block"]),
    ],
)
def test_page_sizes(lint, pages, found):
    """Kernels exist for four of them, the host's for two."""
    assert lint(changed("tokens_per_block: 64", f"tokens_per_block: {pages}")) == found


def test_what_is_not_set_is_said(lint):
    """Both have defaults that depend on the target."""
    assert lint(changed("kv_cache_config:\n  tokens_per_block: 64\n  enable_block_reuse: false\n", "")) == [
        "note 1 kv_cache_config.tokens_per_block",
        "note 1 kv_cache_config.enable_block_reuse",
    ]


def test_fp8_kv_and_block_reuse(lint):
    """What each costs, and what to look at."""
    assert lint(changed("  tokens_per_block: 64", "  dtype: fp8\n  tokens_per_block: 64")) == ["note 5 kv_cache_config.dtype"]
    assert "5,760 bytes a token" in lint.full[0].message
    assert lint(changed("enable_block_reuse: false", "enable_block_reuse: true")) == [
        "warning 6 kv_cache_config.enable_block_reuse"
    ]
    assert "2.21 instead of 2.87" in lint.full[0].message


def test_parallelism(lint):
    """An MLA draft has no context parallelism, Kimi-K3 no pipeline."""
    assert lint(GOOD + "context_parallel_size: 2\npipeline_parallel_size: 2\n") == [
        "error 11 context_parallel_size",
        "warning 12 pipeline_parallel_size",
    ]


# Roles


TRANSCEIVER = "cache_transceiver_config:\n  backend: NIXL\n  transceiver_runtime: PYTHON\n"


def test_the_drafter_is_on_the_generation_server_alone(lint):
    """The role is in the file's name; a name that says nothing is taken as the generation server, and that is said."""
    on_ctx = "disable_overlap_scheduler: true\n" + GOOD + TRANSCEIVER
    assert lint(on_ctx, name="k3_ctx_x16.yaml") == ["error 8 speculative_config"]
    assert lint.report.roles == ("context",)
    assert lint(on_ctx, name="k3_gen_x16.yaml") == ["note 8 speculative_config"]
    assert lint(on_ctx, name="k3.yaml") == ["note 8 speculative_config", "note 8 speculative_config"]
    assert lint.report.roles == ("worker",)
    assert lint("disable_overlap_scheduler: true\n" + TRANSCEIVER, name="ctx.yaml") == []


def test_a_disaggregated_kimi_k3_needs_its_transceiver(lint):
    """Over anything but NIXL in Python its recurrent state does not move; a context server does not overlap."""
    text = "cache_transceiver_config:\n  backend: UCX\n  transceiver_runtime: auto\n"
    assert lint(text, name="ctx.yaml") == [
        "warning 1 disable_overlap_scheduler",
        "warning 2 cache_transceiver_config.backend",
        "warning 3 cache_transceiver_config.transceiver_runtime",
    ]


PROXY = """\
hostname: localhost
port: 8000
backend: pytorch
context_servers:
  num_instances: 1
  urls: ["a:8001"]
generation_servers:
  num_instances: 1
  urls: ["b:8002"]
"""


def test_a_proxy(lint):
    """It has keys of its own; a section of addresses configures no server."""
    assert lint(PROXY) == []
    assert lint.report.roles == ("proxy",)
    assert lint(PROXY + "hostnam: b\n") == ["error 10 hostnam"]
    assert lint(PROXY + "schedule_style: gen_first\n") == ["error 10 schedule_style"]


def test_a_proxy_that_configures_the_servers_too(lint):
    """As for `disaggregated_mpi_worker`: a key at the top reaches both sections, the drafter must not."""
    block = "speculative_config:\n  decoding_type: DSpark\n  speculative_model: /models/d\n  max_draft_len: 7\n"
    inside = PROXY + "  " + block.replace("\n", "\n  ").rstrip() + "\n"
    found = lint(inside)
    assert not [line for line in found if line.startswith("error")], found
    assert lint.report.roles == ("generation",)
    found = lint(PROXY + block)
    assert [line for line in found if line.startswith("error")] == ["error 10 speculative_config"]
    assert lint.report.roles == ("context", "generation")
    assert "error 4 kv_cache_config" not in lint(PROXY + "kv_cache_config:\n  tokens_per_block: 64\n")


# Against the checkpoint


@pytest.mark.parametrize("drafts, says", [(8, "must be at most 7"), (3, "to equal the checkpoint's block_size 7, 3 came")])
def test_c02_the_draft_length_is_the_blocks(lint, drafts, says):
    """Fails on a linter that does not look into the checkpoint: the host wants exactly its block_size."""
    text = changed("max_draft_len: 7", f"max_draft_len: {drafts}", changed("max_num_tokens: 64", "max_num_tokens: 99"))
    assert lint(text) == ["error 10 speculative_config.max_draft_len"]
    assert says in lint.full[0].message


@pytest.mark.parametrize("value", ("0", "-1", "null", "'-1'", "0.0"))
def test_a_draft_length_is_required(lint, value):
    """DSpark has no default."""
    assert lint(changed("max_draft_len: 7", f"max_draft_len: {value}")) == ["error 10 speculative_config.max_draft_len"]


def rewritten(folder, **config):
    """A copy of the tiny draft's config alone, changed."""
    folder.mkdir()
    values = json.loads((DRAFT / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    (folder / "model.safetensors").symlink_to(DRAFT / "model.safetensors")
    return folder


def test_c04_no_block_size_in_the_checkpoint(lint, tmp_path):
    """Fails on a linter that guesses one: max_draft_len is then the block, and that is said."""
    folder = rewritten(tmp_path / "draft", block_size=None)
    assert lint(changed(str(DRAFT), str(folder))) == ["note 10 speculative_config.max_draft_len"]


def test_c10_taps_past_the_targets_depth(lint, tmp_path):
    """Fails on a linter that does not read the target's config: the tap is found in minutes of loading, or never."""
    target = tmp_path / "target"
    target.mkdir()
    config = json.loads((TARGET / "config.json").read_text()) | {"num_hidden_layers": 4}
    (target / "config.json").write_text(json.dumps({"text_config": config}))
    folder = rewritten(tmp_path / "draft", target_num_hidden_layers=None)
    assert lint(changed(str(TARGET), str(target), changed(str(DRAFT), str(folder)))) == ["error 1 model"]
    assert "target_layer_ids [0, 2, 4], valid ids are 0..3" in lint.full[0].message


def test_facts_of_the_checkpoint_that_the_file_repeats(lint):
    """Right ones are fine, wrong ones are not, and without the checkpoint they are better left out."""
    assert lint(GOOD + "  target_layer_ids: [0, 2, 4]\n  mask_token_id: 3\n") == []
    assert lint(GOOD + "  target_layer_ids: [0, 2, 5]\n  mask_token_id: 4\n") == [
        "error 11 speculative_config.target_layer_ids",
        "error 12 speculative_config.mask_token_id",
    ]
    text = changed(str(DRAFT), "/models/draft") + "  mask_token_id: 3\n"
    assert "warning 11 speculative_config.mask_token_id" in lint(text)


def test_c19_an_mla_draft_under_another_decoding_type(lint):
    """Fails on a linter that takes decoding_type at its word: the draft dies in the wrong loader, after minutes."""
    assert "error 8 speculative_config.decoding_type" in lint(changed("DSpark\n", "DFlash\n"))
    assert "DSpark is required" in next(f for f in lint.full if f.severity == "error").message


def test_a_broken_checkpoint(lint, tmp_path):
    """No config, no tensors, a tensor missing: found before the server loads anything."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert lint(changed(str(DRAFT), str(empty))) == ["error 9 speculative_config.speculative_model"]
    assert "has no config.json" in lint.full[0].message
    folder = rewritten(tmp_path / "draft", num_hidden_layers=3)
    assert lint(changed(str(DRAFT), str(folder))) == ["error 9 speculative_config.speculative_model"]
    assert "the checkpoint is not whole: " in lint.full[0].message
    assert lint(changed(str(DRAFT), str(folder / "config.json"))) == ["error 9 speculative_config.speculative_model"]


@pytest.mark.parametrize(
    "path, severity, says",
    [
        ("Inferact/Kimi-K3-DSpark", "warning", "taken as a Hugging Face id, which appears only at run time"),
        ("/models/Kimi-K3-DSpark", "note", "is not on this machine"),
        ("./not/here", "note", "is not on this machine"),
    ],
)
def test_a_checkpoint_that_appears_only_at_run_time(lint, path, severity, says):
    """Not an error; what was not checked, and what the plugin checks at start-up, is said."""
    assert lint(changed(str(DRAFT), path)) == [f"{severity} 9 speculative_config.speculative_model"]
    assert says in lint.full[0].message
    assert "At start-up the plugin checks" in lint.full[0].message


def test_no_draft_at_all(lint):
    """An embedded draft is the host's; Kimi-K3 has none."""
    assert lint(changed(f"  speculative_model: {DRAFT}\n", "")) == ["warning 7 speculative_config"]
    assert lint("max_batch_size: 1\n") == ["note 1 speculative_config"]


def test_the_older_name_of_the_drafts_path(lint):
    """`speculative_model_dir` is the same key."""
    assert lint(changed("  speculative_model:", "  speculative_model_dir:")) == []
    assert lint.report.draft is not None


def test_it_imports_no_tensorrt_llm(tmp_path):
    """A host whose import fails, and is slow, changes nothing: only its version is read."""
    host = tmp_path / "tensorrt_llm"
    host.mkdir()
    (host / "__init__.py").write_text("raise SystemExit('imported')\n")
    (host / "version.py").write_text('__version__ = "1.4.0rc1"\n')
    (tmp_path / "server.yaml").write_text(GOOD + "  attention_backend: AUTO\n")
    code = "import sys; from trtllm_dspark.cli import main; code = main(['doctor', '--config', 'server.yaml'])\n"
    code += "assert not [name for name in sys.modules if name.startswith('tensorrt_llm')]; sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1.3.0rc29 to 1.4.0rc3; 1.4.0rc1 is installed, and was not imported" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_values_and_lines_agree_with_yaml(path):
    """The linter's own reading of a file is PyYAML's."""
    from trtllm_dspark.plugin.lint.document import read_document

    document = read_document(path)
    assert document.value == yaml.safe_load(path.read_text())
    lines = path.read_text().splitlines()
    for place, line in document.lines.items():
        if place and not place[-1].isdigit():  # not an item of a list
            assert lines[line - 1].lstrip().startswith(f"{place[-1]}:"), (place, line)
