"""The command of the bench: what it prints and writes, its exit codes, and what it imports.

All on a CPU, except the last test, which runs the command on a GPU.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fabricated import ATTENTION, CPU, H200, MACHINE, ROPE, SMALL, Answer, answer, make_up_times, of, swaps_two_heads

from cute_kernels.bench import __main__ as command
from cute_kernels.bench import machine, timing
from cute_kernels.bench.cases import (
    BlockAttentionCase,
    Case,
    ContextAppendCase,
    FewRowLinearCase,
    MarkovChainCase,
    QueryRopeCase,
)
from cute_kernels.bench.contestants import CONTESTANTS
from cute_kernels.bench.suites import SUITES, Suite
from cute_kernels.bench.timing import Ceilings
from cute_kernels.few_row_linear.config import SILU_MUL


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return make_up_times(monkeypatch)


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch, measured: list[int]) -> None:
    """The command with small cases, the twins as ours, made-up times and a machine that says it is an H200."""
    monkeypatch.setitem(SUITES, "kernels", Suite(tuple(SMALL.values()), left_out=frozenset({("query_rope", "torch")})))
    monkeypatch.setattr(command, "cuda_device", lambda: CPU)
    monkeypatch.setattr(machine, "facts", lambda device: dict(MACHINE))
    monkeypatch.setattr(machine, "clocks", lambda device: {})
    monkeypatch.setattr(timing, "ceilings", lambda rounds, device, busy=None: (busy and busy()) or H200)
    enter(monkeypatch, answer)


def enter(monkeypatch: pytest.MonkeyPatch, ours: Answer) -> None:
    for kernel, entered in list(CONTESTANTS.items()):
        plain = [contestant for contestant in entered if contestant.name == "torch"]
        monkeypatch.setitem(CONTESTANTS, kernel, (of(ours), *plain))


@pytest.mark.usefixtures("without_a_gpu")
def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tables = tmp_path / "a.json", tmp_path / "a.md"
    assert command.main(["--quick", "--json", "--out", str(out), "--md", str(tables)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert json.loads(out.read_text()) == document and tables.read_text() in printed
    assert [case["kernel"] for case in document["cases"]] == list(SMALL) and document["passed"] is True
    assert document["rounds"] == command.QUICK_ROUNDS
    assert f"block_attention {ATTENTION.label}: ours 13.0 us, torch 23.0 us" in printed.splitlines()
    assert f"query_rope {ROPE.label}: ours 13.0 us" in printed.splitlines()  # the suite leaves torch out
    assert document["left_out"] == ["torch of query_rope"] and "Not timed in this suite: torch of query_rope." in printed


@pytest.mark.usefixtures("without_a_gpu")
def test_exit_code_1_where_something_was_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    enter(monkeypatch, swaps_two_heads)
    assert command.main(["--json", "--only", "query_rope"]) == 1
    printed = capsys.readouterr().out
    (case,) = json.loads(printed.splitlines()[-1])["cases"]
    assert case["numerics_passed"] is False and case["contestants"][0]["status"] == "wrong"
    assert f"query_rope {ROPE.label}: not timed: ours: wrong: error" in printed
    assert command.main(["--only", "markov_chain"]) == 1  # it has no heads: raises


@pytest.mark.usefixtures("without_a_gpu")
def test_a_device_that_is_gone_at_the_end_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([H200])

    def ceilings(rounds: int, device: torch.device, busy: Any = None) -> Ceilings:
        for measured in found:
            return measured
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(timing, "ceilings", ceilings)
    assert command.main(["--json", "--only", "query_rope"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["ceilings"]["measured"]["end"] is None
    assert "no ceilings at the end: CUDA error" in printed.err


def test_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SUITES["kernels"].cases)
    assert lines[0] == "block_attention B=1 context=1024 H=64 S=8: 2.30 MB, 1.15 GFLOP"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "no such case"], "a case that contains 'no such case' is required, kernels has none. Use --list."),
        (["--out", "no/such/folder/a.json"], "--out needs a folder that exists, no/such/folder does not. Make it."),
        (["--md", "no/such/folder/a.md"], "--md needs a folder that exists, no/such/folder does not. Make it."),
    ],
)
def test_exit_code_2_where_nothing_was_tried(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"cute_kernels.bench: {said}\n"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    said = "cute_kernels.bench: a CUDA device is required, torch sees none. Use --list to see the cases.\n"
    assert capsys.readouterr().err == said


def test_the_module_runs_and_imports_neither_drafter_nor_peers() -> None:
    probe = (
        "import runpy, sys; sys.argv = ['bench', '--list']\n"
        "try: runpy.run_module('cute_kernels.bench', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, sorted({'trtllm_dspark', 'flashinfer', 'cutlass', 'tensorrt_llm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stderr


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[Case] = [BlockAttentionCase(2, 130, heads=8), ContextAppendCase(40), QueryRopeCase(2)]
    cases.append(MarkovChainCase(3, vocabulary=4099))
    if torch.cuda.get_device_capability() == (9, 0):  # no other part has these
        cases += [FewRowLinearCase("unabsorb", 128, 512, groups=8), FewRowLinearCase("gate_up", 512, 1024, form=SILU_MUL)]
    monkeypatch.setitem(SUITES, "kernels", Suite(tuple(cases)))
    for kernel, entered in list(CONTESTANTS.items()):  # FlashInfer may have to be compiled for minutes
        monkeypatch.setitem(CONTESTANTS, kernel, tuple(contestant for contestant in entered if contestant.package is None))
    tables = tmp_path / "a.md"
    code = command.main(["--quick", "--json", "--md", str(tables)])
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    problems = [case["reason"] for case in document["cases"] if case["reason"]]
    problems += [entry["reason"] for case in document["cases"] for entry in case["contestants"] if entry["reason"]]
    assert (code, problems, document["passed"]) == (0, [], True)
    assert document["ceilings"]["copy_gb_per_s"] > 50 and document["ceilings"]["matmul_tflop_per_s"] > 5
    for case in document["cases"]:
        for entry in case["contestants"]:
            assert 0.5 < entry["p10_us"] <= entry["median_us"] <= entry["p90_us"] < 5000, (case["label"], entry)
            assert entry["share_of_floor"] < 1.05
    assert tables.read_text() in printed
