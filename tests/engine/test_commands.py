"""The commands as their users run them, on the tiny pair: what they print, what they write, and what they refuse."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import published
import pytest

from trtllm_dspark.cli import main

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "examples" / "tiny_pair"


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that bad input gets."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("trtllm-dspark: "), err
    assert "Traceback" not in out + err
    return lines[0]


def test_generate_compare_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--compare", "--max-new-tokens", "24", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    for label in ("accept_len", "accept_rate", "distinct 4-grams", "speed ratio"):
        assert label in out
    assert "identical to target-only  yes" in out
    assert "⟨" in out and "⟩" in out  # accepted drafts are marked where there is no colour


def test_generate_streams_the_same_text_with_and_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for extra in ([], ["--no-spec"]):
        assert main(["generate", "def add(a, b):\n", "--max-new-tokens", "20", *extra]) == 0
        texts.append(capsys.readouterr().out)
    drafted, plain = (text[text.index("def add") : text.index("new tokens")] for text in texts)
    assert drafted.replace("⟨", "").replace("⟩", "") == plain
    assert "⟨" in drafted and "⟨" not in plain
    assert "accept_len" not in texts[1]


def test_generate_says_no_where_the_text_differs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a verification that accepts one draft too many shows as NO, exit code 1, and no speed beside it."""
    import trtllm_dspark.engine.engine as engine

    right = engine.verify_greedy

    def generous(logits, drafts):  # type: ignore[no-untyped-def]
        verdict = right(logits, drafts)
        verdict.accepted = (verdict.accepted + 1).clamp(max=drafts.shape[1])
        return verdict

    monkeypatch.setattr(engine, "verify_greedy", generous)
    assert main(["generate", "--compare", "--max-new-tokens", "24", "--repeats", "1"]) == 1
    out = capsys.readouterr().out
    assert "identical to target-only  NO" in out and "speed ratio" not in out


def test_eval_writes_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert main(["eval", "--prompts", "4", "--max-new-tokens", "24", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["lossless"] is True and written["divergences"] == []
    assert 1 < written["accept_len"] <= 8 and 1 < written["accept_len_first16"] <= 8
    assert 0 < written["distinct_4grams"] <= 1
    assert written["prompts"] == 4 and written["new_tokens"] <= 96
    assert sum(written["histogram"]) == written["verifications"]
    accepted = sum(k * count for k, count in enumerate(written["histogram"]))
    assert written["accept_len"] == pytest.approx(1 + accepted / written["verifications"], abs=1e-5)
    assert written["new_tokens"] == written["verifications"] + accepted + written["prompts"]  # one each from prefill
    assert written["provenance"]["torch"] and written["speed_ratio"] > 0
    assert "accept_rate@7" in capsys.readouterr().out


def test_eval_on_own_prompts_without_a_baseline(tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('"import os\\n"\n"def f(x):"\n')
    argv = ["eval", "--prompts-file", str(prompts), "--no-baseline", "--max-new-tokens", "8", "--json", str(file)]
    assert main(argv) == 0
    written = json.loads(file.read_text())
    assert written["prompts"] == 2 and written["lossless"] is None and written["speed_ratio"] is None


def test_inspect_of_the_tiny_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(PAIR / "draft"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "mla" and report["tensors"] == 32 and report["problems"] == []
    assert report["bytes_per_token"] == 2 * 80 * 2
    assert report["shared"] == {"lm_head": "target's", "embed_tokens": "own"}


@pytest.mark.parametrize(("name", "tensors", "per_token"), [("inferact", 68, 5760), ("radixark", 62, 20480)])
def test_inspect_of_the_published_layouts(
    name: str, tensors: int, per_token: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published.write_published(tmp_path / name, name)
    for path in (folder, folder / "model.safetensors"):
        assert main(["inspect", str(path), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["tensors"], report["bytes_per_token"], report["problems"]) == (tensors, per_token, [])


def test_inspect_names_what_is_missing_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = published.tiny("mla")
    tensors = published.tiny_tensors(raw)
    del tensors["final_norm.weight"]
    assert main(["inspect", str(published.write_tiny(tmp_path / "draft", raw, tensors))]) == 2
    assert "problem: missing final_norm.weight" in capsys.readouterr().out


def test_inspect_of_a_head_that_is_not_used_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails where inspect calls a stored lm_head the draft's own: loading ignores it and takes the target's."""
    raw = published.tiny("mla")
    tensors = published.tiny_tensors(raw)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    assert main(["inspect", str(published.write_tiny(tmp_path / "draft", raw, tensors)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["shared"]["lm_head"] == "target's"
    assert any("lm_head.weight" in note and "ignored" in note for note in report["notes"])


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, not_json, other = tmp_path / "empty", tmp_path / "not_json", tmp_path / "other"
    empty.mkdir()
    shutil.copytree(PAIR / "draft", not_json)
    (not_json / "config.json").write_text("{model_type: k3")
    published.write_tiny(other, published.tiny("mla"))
    say = "generate", "x = 1", "--max-new-tokens", "4"
    assert "does not exist" in refused(capsys, *say, "--draft", str(tmp_path / "nowhere"))
    assert "config.json" in refused(capsys, *say, "--target", str(tmp_path / "nowhere"))
    assert "config.json" in refused(capsys, *say, "--draft", str(empty))
    assert "JSON" in refused(capsys, *say, "--draft", str(not_json))
    assert "another target" in refused(capsys, *say, "--draft", str(other))
    assert "K=9" in refused(capsys, *say, "--num-drafts", "9")
    assert "attention_backend" in refused(capsys, *say, "--attention-backend", "FA3")
    assert "needs a CUDA device" in refused(capsys, *say, "--attention-backend", "CUTEDSL")
    long = tmp_path / "long.txt"
    long.write_text("x = 1\n" * 400)
    line = refused(capsys, "generate", "--prompt-file", str(long), "--pool-tokens", "64", "--max-new-tokens", "4")
    assert "64" in line and "pool" in line
    line = refused(capsys, "generate", "--prompt-file", str(long), "--max-new-tokens", "2000")
    assert "2048" in line and "positions" in line
    assert "--no-spec" in refused(capsys, "generate", "--compare", "--no-spec")
    assert "no-such" in refused(capsys, "eval", "--json", str(tmp_path / "no-such" / "out.json"))
    assert "does not exist" in refused(capsys, "inspect", str(tmp_path / "nowhere"))
    assert ".safetensors" in refused(capsys, "inspect", str(empty))


def test_the_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert "same tokens as the target alone: True" in capsys.readouterr().out


def test_importing_the_package_is_light() -> None:
    """Lazy names: no torch, no transformers, under 0.2 s of its own."""
    code = (
        "import sys, time; start = time.perf_counter(); import trtllm_dspark; took = time.perf_counter() - start;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'heavy'; print(took)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.2


def test_every_public_name_can_be_imported() -> None:
    import trtllm_dspark

    assert all(getattr(trtllm_dspark, name) is not None for name in trtllm_dspark.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trtllm_dspark.nothing
