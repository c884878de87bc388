"""`trtllm-dspark doctor`: exit codes, what it prints, and that it changes nothing."""

import json
import re
import sys
from pathlib import Path

import pytest

from trtllm_dspark.attention import policy
from trtllm_dspark.cli import main
from trtllm_dspark.commands import doctor
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.plugin import HookVerdict, Outcome, autoload, outcome, register
from trtllm_dspark.plugin.hooks import HOOKS

ROOT = Path(__file__).parents[2]
BROKEN = Path(__file__).parent / "broken"
MISTAKES = {  # file -> lines of its errors
    "unknown_keys.yaml": {
        2: "max_batch_size",
        3: "kv_cache_config",
        5: "tokens_per_block",
        10: "'seven'",
        11: "num_speculative",
    },
    "draft_length.yaml": {2: "576 is required, 256 came", 9: "must be at most 7, came K=8"},
    "not_a_mapping.yaml": {2: "a mapping of keys is required, a list came"},
    "unknown_decoding_type.yaml": {6: "Did you mean DSpark?"},
    "drafter_on_ctx.yaml": {9: "the drafter belongs on the generation servers alone"},
    "taps_and_pages.yaml": {
        1: "a draft for another target",
        2: "1 is required by an MLA draft",
        4: "16, 32, 64, 128 is required, 48 came",
        10: "the checkpoint says [1, 3, 5], [1, 2, 3] came",
    },
}
WITHOUT_HOST = pytest.mark.skipif(doctor.probing.locate() is not None, reason="trtllm: tensorrt_llm is installed")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """The settings of whoever runs the tests are not theirs to depend on."""
    for setting in doctor.settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)


@pytest.fixture
def outcome_is(monkeypatch):
    """Makes the plugin's probe return this."""

    def put(state, **changes):
        verdict = HookVerdict(HOOKS[0].name, HOOKS[0].places[0], "would apply", "register our builder.")
        fields = {"reason": "because.", "remedy": "do this.", "host_version": "1.3.0rc27", "hooks": (verdict,)} | changes
        monkeypatch.setattr(doctor, "probe", lambda: Outcome(state, **fields))

    return put


def words(capsys):
    """What was printed, its line breaks taken out: tables fold at the width of the terminal."""
    return " ".join(capsys.readouterr().out.split())


# A serving YAML


@pytest.mark.parametrize("name", MISTAKES)
def test_broken_files_exit_2_with_the_line(name, monkeypatch, capsys):
    """Each mistake is named at its line, and no other line is called an error."""
    monkeypatch.chdir(ROOT)  # the checkpoints in them are relative, as for trtllm-serve
    path = f"tests/plugin/broken/{name}"
    assert main(["doctor", "--config", path]) == 2
    printed = capsys.readouterr().out
    errors = {int(line): text for line, text in re.findall(rf"^{re.escape(path)}:(\d+): error: (.*)$", printed, re.MULTILINE)}
    assert errors.keys() == MISTAKES[name].keys(), printed
    for line, words in MISTAKES[name].items():
        assert words in errors[line], errors[line]


def test_there_are_six_of_them():
    """Every file of broken/ is in the table above."""
    assert {path.name for path in BROKEN.glob("*.yaml")} == set(MISTAKES) and len(MISTAKES) == 6


@WITHOUT_HOST
def test_a_right_file_on_a_machine_without_the_host(capsys):
    """The host's absence is a note, not a failure."""
    assert main(["doctor", "--config", str(ROOT / "configs/kimi_k3_dspark_gen_gb300x16.yaml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 0 and report["outcome"] is None and report["host"]["version"] is None
    assert "not installed here: held against every recorded range" in report["config"]["host"]
    assert report["config"]["roles"] == ["generation"]
    assert {finding["severity"] for finding in report["config"]["findings"]} == {"note"}


def test_no_such_file_is_one_line(capsys):
    """Like every other command's user error."""
    assert main(["doctor", "--config", "/nowhere.yaml"]) == 2
    assert capsys.readouterr().err.startswith("trtllm-dspark: --config: a readable YAML file is required")


def test_a_host_too_old_for_the_file(monkeypatch, capsys):
    """The file is right; the installed version has no standalone DSpark. The control: the same file on one that has."""
    path = str(ROOT / "configs/kimi_k3_dspark_tep_gb300x8.yaml")
    for version, code in (("1.2.1", 3), ("1.3.0rc27", 0)):
        monkeypatch.setattr(doctor.probing, "locate", lambda version=version: _host(version))
        assert main(["doctor", "--config", path]) == code
    assert "TensorRT-LLM 1.2.1 is older than 1.3.0rc26 and has no standalone DSpark" in words(capsys)


def _host(version):
    class Host:
        root = Path("/site-packages/tensorrt_llm")

    Host.version = version
    return Host()


# The host


@WITHOUT_HOST
def test_json_without_tensorrt_llm(capsys):
    """Outcome and remedy, exit code 3."""
    assert main(["doctor", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 3
    assert report["outcome"]["state"] == "absent" and report["outcome"]["hooks"] == []
    assert "not installed" in report["outcome"]["reason"] and report["outcome"]["remedy"]
    assert report["settings"].keys() == {setting.name for setting in doctor.settings.SETTINGS}


@pytest.mark.parametrize("state, code", [("active", 0), ("native", 0), ("disabled", 0), ("refused", 3), ("absent", 3)])
def test_exit_codes(outcome_is, state, code, capsys):
    """3 where no TensorRT-LLM takes the drafter; who turned it off, or prefers the host's, is answered with 0."""
    outcome_is(state)
    assert main(["doctor"]) == code
    printed = words(capsys)
    assert state in printed and "because." in printed and "do this." in printed
    assert doctor.OUTCOMES[state] in printed


def test_it_prints_every_hook_with_its_verdict(outcome_is, capsys):
    """And the upstream files that the table was recorded from."""
    hooks = tuple(HookVerdict(hook.name, hook.places[0], "changed", f"detail of {hook.name}") for hook in HOOKS)
    outcome_is("refused", hooks=hooks)
    main(["doctor"])
    printed = words(capsys)
    for hook in HOOKS:
        assert hook.name in printed and hook.places[0] in printed and f"detail of {hook.name}" in printed
        assert hook.reference in printed


def test_a_serving_machine_without_a_backend_exits_2(outcome_is, monkeypatch, capsys):
    """AUTO refuses: the server would fail at construction. The control: the same machine, with one."""
    outcome_is("active")
    assert main(["doctor"]) == 0
    refusing = policy.FamilyPolicy(("VANILLA",), on_cuda=(), on_cpu=())
    monkeypatch.setattr(policy, "FAMILIES", {**policy.FAMILIES, "mla": refusing})
    assert main(["doctor"]) == 2
    assert "a usable attention backend is required" in words(capsys)
    outcome_is("native")  # the host's own drafter has its own kernels
    assert main(["doctor"]) == 0


def test_a_backend_asked_for_by_the_environment(outcome_is, monkeypatch, capsys):
    """Available or not, with its reason."""
    outcome_is("active")
    monkeypatch.setenv("TRTLLM_DSPARK_ATTENTION_BACKEND", "VANILLA")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"]["backend"] == "VANILLA"
    monkeypatch.setenv("TRTLLM_DSPARK_ATTENTION_BACKEND", "FA4")
    assert main(["doctor", "--json"]) == 2
    assert "it is 'FA4'" in json.loads(capsys.readouterr().out)["attention"]["reason"]


def test_the_drafts_own_shape_decides_where_it_is_at_hand():
    """Otherwise that of the published Kimi-K3 draft."""
    assert doctor.examine()["attention"]["draft"] == "a draft of Kimi-K3's published shape"
    config = doctor.KIMI_K3
    assert (config.latent_width, config.num_layers, config.num_heads, config.max_drafts) == (576, 5, 64, 7)
    assert isinstance(config, DraftConfig) and config.family == "mla"


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    "version, state, code",
    [
        ("1.2.1", "refused", 3),
        ("1.3.0rc25", "refused", 3),
        ("1.3.0rc26", "active", 0),
        ("1.3.0rc28", "active", 0),
        ("1.3.0rc29", "active", 0),
    ],
)
def test_on_the_stand_in_host(version, state, code, packages, monkeypatch, capsys):
    """The whole way, from the source of a generated `tensorrt_llm`; afterwards nothing is registered in it."""
    monkeypatch.syspath_prepend(packages(version))
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert (report["outcome"]["state"], report["host"]["version"]) == (state, version)
    assert report["host"]["place"] == str(packages(version) / "tensorrt_llm")
    verdicts = {hook["verdict"] for hook in report["outcome"]["hooks"]}
    assert "applied" not in verdicts and ("would apply" in verdicts) == (state == "active")
    assert outcome() is None
    if state == "active":
        modeling = sys.modules["tensorrt_llm._torch.models.modeling_utils"]
        assert not any(is_ours(builder) for builder in modeling.DRAFT_MODEL_BUILDER_MAPPING.values())
        register()  # the control: what looking must not do
        assert any(is_ours(builder) for builder in modeling.DRAFT_MODEL_BUILDER_MAPPING.values())


def is_ours(builder):
    return builder.__module__.startswith("trtllm_dspark")


# The start-up hook


def test_looking_does_not_register(outcome_is, monkeypatch):
    """The probe imports the host; a watching hook would register in it. Afterwards the hook watches again."""
    outcome_is("active")
    seen = []
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(doctor, "probe", lambda probe=doctor.probe: seen.append(autoload.installed()) or probe())
    assert "not installed" in doctor.examine()["autoload"]["says"]
    autoload.install()
    report = doctor.examine()
    assert seen == [None, None]
    assert report["autoload"]["watching"] and "every Python of this environment" in report["autoload"]["says"]
    assert autoload.installed() is not None


def test_a_hook_that_did_not_run(outcome_is, monkeypatch, tmp_path):
    """The file is there: turned off by the variable, or Python was started without `site`."""
    outcome_is("active")
    (tmp_path / "trtllm_dspark.pth").write_text("")
    monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not hasattr(finder, "watches")])
    found = doctor.examine()["autoload"]
    assert found["pth"] == str(tmp_path / "trtllm_dspark.pth") and "was not run" in found["says"]
    monkeypatch.setenv("TRTLLM_DSPARK_DISABLE", "1")
    assert "off by TRTLLM_DSPARK_DISABLE" in doctor.examine()["autoload"]["says"]
