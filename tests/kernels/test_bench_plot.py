"""The plot of the bench: which points its lines have, what it says, and that what is drawn is what was measured."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_fabricated import H200, MACHINE

from cute_kernels.bench import plot, report
from cute_kernels.bench.cases import BlockAttentionCase, MarkovChainCase
from cute_kernels.bench.run import RIGHT, WRONG, CaseResult, Outcome
from cute_kernels.bench.suites import SUITES, SWEEP
from cute_kernels.errors import KernelError

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (extra: plot)")


def result(case: Any, flashmla_us: float | None = 40.0) -> CaseResult:
    """Ours in 20 us plus 1 a thousand tokens, FlashMLA as told or wrong, fa3 in 30."""
    right = flashmla_us is not None
    return CaseResult(
        case,
        2,
        (
            Outcome("ours", True, "", RIGHT, times_us=(20.0 + getattr(case, "context", 0) / 1024,)),
            Outcome("ours, planned once", True, "", RIGHT, times_us=(1.0,)),
            Outcome("flashmla", False, "", RIGHT if right else WRONG, times_us=(flashmla_us,) if right else ()),
            Outcome("flashinfer fa3", False, "", RIGHT, times_us=(30.0,)),
        ),
    )


def written(folder: Path, *results: CaseResult) -> Path:
    document = report.document("hopper", SUITES["hopper"], MACHINE, H200, H200, 30, results)
    path = folder / "result.json"
    path.write_text(json.dumps(document))
    return path


def test_the_lines_are_the_sweeps_medians_in_order(tmp_path: Path) -> None:
    others = (BlockAttentionCase(1, 1024, heads=8), BlockAttentionCase(1, 1024, page_size=32), MarkovChainCase(1))
    cases = [result(case) for case in (*reversed(SWEEP), *others)]
    found = plot.panels(plot.read(written(tmp_path, *cases)))
    assert list(found) == [1, 8]
    for batch, lines in found.items():
        assert list(lines) == ["ours", "flashmla", "flashinfer fa3", "floor"]
        assert lines["ours"] == [(1024 << step, 20.0 + (1 << step)) for step in range(8)]
        assert [us for _, us in lines["flashmla"]] == [40.0] * 8
        assert lines["floor"][0] == (1024, pytest.approx(1.455 * batch, rel=1e-3))


def test_a_peer_that_was_wrong_has_no_point_there(tmp_path: Path) -> None:
    """Fails when a speed is drawn that the gate refused."""
    cases = [result(case, None if case.context == 4096 else 40.0) for case in SWEEP if case.batch == 8]
    found = plot.panels(plot.read(written(tmp_path, *cases)))
    assert list(found) == [8]
    assert [context for context, _ in found[8]["flashmla"]] == [1024 << step for step in range(8) if step != 2]
    assert len(found[8]["ours"]) == 8


def test_the_title_names_device_day_dtype_and_shape(tmp_path: Path) -> None:
    document = plot.read(written(tmp_path, result(SWEEP[0])))
    first, _ = plot.title(document).splitlines()
    assert first == "block_attention, NVIDIA H200, 2026-11-29, bfloat16, pages of 64, H=64, S=8"


@needs_matplotlib
def test_the_picture_is_a_png_of_these_times(tmp_path: Path) -> None:
    """Control: other times of one peer make another picture, the same times the same."""
    drawn = []
    for name, flashmla_us in (("a.png", 40.0), ("b.png", 40.0), ("c.png", 55.0), ("d.png", None)):
        file = tmp_path / name
        assert plot.main([str(written(tmp_path, *(result(case, flashmla_us) for case in SWEEP))), str(file)]) == 0
        drawn.append(file.read_bytes())
    assert all(picture.startswith(b"\x89PNG\r\n") for picture in drawn)
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_without_matplotlib_it_names_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    picture = tmp_path / "a.png"
    assert plot.main([str(written(tmp_path, result(SWEEP[0]))), str(picture)]) == 2
    assert "Install it: pip install 'trtllm-dspark[plot]'." in capsys.readouterr().err and not picture.exists()


@pytest.mark.parametrize("name", ["a.pdf", "missing/a.png", "a"])
def test_control_the_path_must_be_a_png_in_a_folder_that_exists(name: str, tmp_path: Path) -> None:
    document = plot.read(written(tmp_path, result(SWEEP[0])))
    with pytest.raises(KernelError, match=r"a \.png in a folder that exists is required, came"):
        plot.draw(tmp_path / name, document)


def test_control_a_file_without_a_timed_sweep_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.png"
    untimed = CaseResult(SWEEP[0], 2, (), "out of memory")
    for results in ((), (untimed,), (result(BlockAttentionCase(64, 8192)),)):
        assert plot.main([str(written(tmp_path, *results)), str(picture)]) == 2
        assert "a timed case of the sweep is required, the file has none. Run --suite hopper." in capsys.readouterr().err
    assert not picture.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [("not json", "a result file of the bench is required"), ("[]", "has None"), ('{"schema": 1}', "of schema 2 is required")],
)
def test_control_another_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(KernelError, match=said):
        plot.read(path)
    with pytest.raises(KernelError, match="a result file of the bench is required"):
        plot.read(tmp_path / "none.json")
