"""A schedule's trial in a process of its own. These are real processes, on a CPU; each ends as its schedule is planted to.

The control of all: the schedule "right" passes, in the same way, within the same time.
"""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import planted_schedules
import published
import pytest
import torch

from trtllm_dspark.attention import cutedsl, trial, trial_process
from trtllm_dspark.attention.finding import Finding
from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.attention.trial import REQUEST, Request, Result, name_of
from trtllm_dspark.attention.trial_process import Outcome, attempt, environment
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.plugin import settings

CPU = torch.device("cpu")
CONFIG = DraftConfig.from_dict(published.tiny("mla"))
SHAPE = DraftShape.of(CONFIG, page_size=16)


def tried(schedule: str, trusted: str = "slow", **options: float) -> Outcome:
    return attempt(planted_schedules.operations, schedule, trusted, CONFIG, SHAPE, CPU, **options)


@pytest.fixture(scope="module")
def passing() -> tuple[Outcome, float]:
    """(how the trial of the right schedule ends, seconds that it took)."""
    start = time.perf_counter()
    return tried("right"), time.perf_counter() - start


def test_a_right_and_faster_schedule_passes(passing: tuple[Outcome, float]) -> None:
    outcome, _ = passing
    assert outcome.reason is None
    mine, theirs = outcome.microseconds["right"], outcome.microseconds["slow"]
    assert 0 < mine < theirs and theirs > 1e6 * planted_schedules.PAUSE


def test_a_slower_one_does_not() -> None:
    """Fails where being right is enough. Control: the same two, the other way round, in `passing`."""
    outcome = tried("slow", "right")
    mine, theirs = outcome.microseconds["slow"], outcome.microseconds["right"]
    assert outcome.reason == f"takes {mine:.0f} us where right takes {theirs:.0f}" and mine > theirs


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("crashes", "was killed by SIGSEGV: checking crashes"),
        ("crashes later", "was killed by SIGABRT: timing slow and crashes later"),
        ("leaves", "ended with exit code 3: checking leaves"),
        ("raises", "ended with exit code 1: RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("babbles", "ended without a result: \ufffd[31mlast words[0m"),
    ],
)
def test_a_process_that_does_not_come_back_is_a_reason(schedule: str, reason: str, passing: tuple[Outcome, float]) -> None:
    """Fails where such an end passes, raises here, or takes this process along."""
    assert tried(schedule) == Outcome(reason, {})
    assert passing[0].reason is None


def test_a_wrong_result_is_a_reason_with_its_error_and_is_not_timed(
    passing: tuple[Outcome, float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger=trial_process.__name__):
        outcome = tried("wrong")
    assert "checking wrong" in caplog.text and "timing" not in caplog.text  # what the process said, for who looks
    assert outcome.reason is not None and outcome.microseconds == {}
    assert outcome.reason.startswith("block_attention is off by 1.0e+00, allowed is ")
    assert passing[0].reason is None


def test_one_that_hangs_is_killed_with_all_that_it_started(
    passing: tuple[Outcome, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where a kernel without end holds up the server, or a process or a zombie of it stays."""
    monkeypatch.setenv(planted_schedules.GRANDCHILD, str(tmp_path / "pid"))
    before, timeout = _children(), 2 * passing[1] + 2
    start = time.perf_counter()
    outcome = tried("hangs", timeout=timeout)
    took = time.perf_counter() - start
    assert outcome == Outcome(f"did not end within {timeout:g} s: checking hangs", {})
    assert timeout <= took < timeout + trial_process.REAP_S
    assert _children() == before
    deadline = time.perf_counter() + 5  # the system's first process takes what a killed one leaves
    grandchild = int((tmp_path / "pid").read_text())
    while _state(grandchild) not in (None, "Z") and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert _state(grandchild) in (None, "Z")
    assert passing[0].reason is None


def _children() -> set[int]:
    """Of this process, zombies too."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def _state(pid: int) -> str | None:
    """R, S, Z and so on; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_one_that_cannot_be_killed_at_once_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the wait for a killed process has no end, as one held in the driver has none. The zombie goes in the end."""
    monkeypatch.setattr(trial_process, "REAP_S", 0.05)
    monkeypatch.setattr(trial_process.os, "killpg", lambda group, number: None)  # the kill does not take
    before = _children()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"], start_new_session=True)
    start = time.perf_counter()
    trial_process._end(process)
    assert time.perf_counter() - start < 1 and _children() - before == {process.pid}
    while _children() != before and time.perf_counter() - start < 10:
        time.sleep(0.05)
    assert _children() == before


def test_an_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where Ctrl-C during a trial leaves its process, which is in a session of its own, on the device."""

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.undo()
        assert _children() - before == {process.pid}
        raise KeyboardInterrupt

    before = _children()
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial_process._run(["sleep", "1000"], dict(os.environ), tmp_path / "output", 1000)
    assert _children() == before


@pytest.mark.parametrize("executable", ["/nonexistent/python", "", None])
def test_a_process_that_cannot_be_started_is_a_reason(executable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    outcome = tried("right")
    assert str(outcome.reason).startswith("could not be tried: ") and outcome.microseconds == {}


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError(12, "Cannot allocate memory")], ids=str)
def test_no_memory_for_a_process_is_a_reason(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where it ends the server's start. Control: without the error the same call passes (`passing`)."""

    def refuse(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert tried("right") == Outcome(f"could not be tried: {type(error).__name__}: {error}", {})


def test_a_makers_name_that_means_nothing_there_is_a_reason() -> None:
    """A partial, a lambda or a nested function cannot be found by another process."""
    outcome = attempt(partial(planted_schedules.operations), "right", "slow", CONFIG, SHAPE, CPU)  # type: ignore[arg-type]
    assert str(outcome.reason).startswith("could not be tried: AttributeError")
    outcome = attempt(lambda *arguments: planted_schedules.operations(*arguments), "right", "slow", CONFIG, SHAPE, CPU)
    assert str(outcome.reason).startswith("ended with exit code 1: AttributeError")


# --- what the process is given


RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "MPI_LOCALRANKID", "I_MPI_HYDRA_HOST_FILE")


def test_it_is_no_rank_and_no_host_of_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the process would join the server's MPI job, load tensorrt_llm, or fault as a client of an MPS server."""
    for name in (*RANKS, "PYTHONINSPECT", "CUTE_KERNELS_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(settings.DISABLE.name, raising=False)
    found = environment(tmp_path)
    assert found[settings.DISABLE.name] == "1" and found["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path)
    assert not {*RANKS, "PYTHONINSPECT"} & set(found)
    assert found["CUTE_KERNELS_CACHE_DIR"] == "1" and found["PATH"] == os.environ["PATH"]  # control: the rest is as it was
    assert set(RANKS) < set(os.environ) and settings.DISABLE.name not in os.environ  # and here nothing has changed


WITHOUT_GUARD = """
import sys
sys.path[:0] = {path!r}
import planted_schedules, published, torch
from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.attention.trial_process import attempt
from trtllm_dspark.config import DraftConfig
config = DraftConfig.from_dict(published.tiny("mla"))
print("started")
print(attempt(planted_schedules.operations, "right", "slow", config, DraftShape.of(config), torch.device("cpu")).reason)
"""


def test_it_starts_from_any_script_and_finds_what_that_one_finds(tmp_path: Path) -> None:
    """Fails where a script without a `__main__` guard is run again, or modules are sought where this process has not.

    Both packages are on the path of the one that asks because it put them there.
    """
    root, tests = Path(trial.__file__).parents[2], Path(planted_schedules.__file__).parent
    (tmp_path / "program.py").write_text(WITHOUT_GUARD.format(path=[str(root), str(tests)]))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.stdout == "started\nNone\n", done.stderr


def test_an_orphan_ends_by_itself(passing: tuple[Outcome, float], tmp_path: Path) -> None:
    """Fails where a trial outlives a server that was killed: it would hold its memory of the device for ever."""
    seconds = math.ceil(2 * passing[1]) + 2
    request = Request(name_of(planted_schedules.operations), "hangs", "slow", CONFIG, SHAPE, "cpu", None, seconds)
    (tmp_path / REQUEST).write_text(request.to_json())
    command = [sys.executable, "-m", trial.__name__, str(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGALRM and done.stderr == "checking hangs\n"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_request_arrives_as_it_was_sent(dtype: torch.dtype) -> None:
    for raw in (published.INFERACT, published.tiny("mla"), published.tiny("gqa")):
        config = DraftConfig.from_dict(raw, require_block_size=False)
        shape = DraftShape.of(config, dtype=dtype, page_size=32)
        request = Request(name_of(cutedsl.scheduled), "sm100", "portable", config, shape, "cuda:3", "GPU-1", 130)
        assert Request.from_json(request.to_json()) == request
    assert request.make == "trtllm_dspark.attention.cutedsl:scheduled" and "<" not in request.make
    assert Request.from_json(request.to_json().replace('"page_size": 32', '"page_size": 64')) != request  # control


def test_a_result_arrives_as_it_was_sent() -> None:
    for error in (0.5, float("inf")):
        result = Result(Finding("block_attention", error, 1.0), {"sm100": 41.5, "portable": 60.0})
        assert Result.from_json(result.to_json()) == result
    lost = Result.from_json(Result(Finding("block_attention", float("nan"), 1.0), {}).to_json())
    assert not lost.finding.passed
    for text in ("", "null", "[]", "{}", '{"finding": {}, "microseconds": {}}', json.dumps({"finding": 1, "microseconds": []})):
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            Result.from_json(text)


def test_another_device_under_the_same_index_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where CUDA_VISIBLE_DEVICES was changed after this process had opened its device, and another one is tried."""
    request = Request(name_of(planted_schedules.operations), "right", "slow", CONFIG, SHAPE, "cpu", "GPU-1", 130)
    with pytest.raises(ValueError, match="trial: cpu must be GPU-1, here it is None"):
        trial.try_schedule(request)
    monkeypatch.setattr(trial, "identity_of", lambda device: "GPU-1")
    monkeypatch.setattr(trial.self_check, "measure_block_attention", planted_schedules.on_the_hosts_clock)
    assert trial.try_schedule(request).finding.passed  # control


def test_the_two_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where one is timed after the other: a clock that falls meanwhile decides then. The medians are compared."""
    seen: list[str] = []
    names = {attend: name for name, attend in planted_schedules.PLANTED.items()}
    times = iter([9.0, 1.0, 8.0, 2.0, 70.0, 60.0])

    def measured(operations: object, *rest: object) -> float:
        seen.append(names[operations.block_attention])  # type: ignore[attr-defined]
        return next(times)

    monkeypatch.setattr(trial.self_check, "measure_block_attention", measured)
    request = Request(name_of(planted_schedules.operations), "right", "slow", CONFIG, SHAPE, "cpu", None, 130)
    assert trial.try_schedule(request).microseconds == {"slow": 9.0, "right": 2.0}
    assert seen == ["slow", "right"] * trial.TURNS
