"""Which schedule attends: when another is tried, when it is taken, and what is said. No GPU; one trial is a real process."""

import logging
from collections.abc import Iterator
from functools import partial

import launches
import planted_schedules
import published
import pytest
import torch
from planted_schedules import PLANTED

from cute_kernels import support
from cute_kernels.block_attention.config import BlockAttentionConfig
from trtllm_dspark.attention import cutedsl, policy, schedules, self_check, trial_process
from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.attention.policy import Backend, BackendChoice, resolve_backend
from trtllm_dspark.attention.schedules import Schedules
from trtllm_dspark.attention.trial_process import Outcome
from trtllm_dspark.config import DraftConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = DraftConfig.from_dict(published.tiny("mla"))
SHAPE = DraftShape.of(CONFIG, page_size=16)
FASTER = Outcome(None, {"right": 41.0, "slow": 60.0})


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    schedules.pick.cache_clear()
    yield
    schedules.pick.cache_clear()


class Bench:
    """A backend with the schedules "slow", trusted, and others; what was tried and what was checked, in order."""

    def __init__(self, *others: str, outcomes: dict[str, Outcome] | None = None, wrong_here: tuple[str, ...] = ()) -> None:
        self.outcomes, self.wrong_here = outcomes or {}, wrong_here
        self.tried: list[tuple[str, str]] = []
        self.checked: list[str] = []

        def names(*arguments: object) -> tuple[str, ...]:
            return ("slow", *others)

        trusted = partial(planted_schedules.operations, "slow", CONFIG, SHAPE)
        available = Backend("CUTEDSL", lambda *a: None, trusted, schedules=Schedules(names, planted_schedules.operations))
        self.table = {
            "CUTEDSL": available,
            "TRTLLM": Backend("TRTLLM", lambda *a: "none here", None),
        }

    def check(self, name: str, *arguments: object) -> str | None:
        self.checked.append(name)
        return "failed its self-check: here" if name in self.wrong_here else None

    def attempt(self, make: object, schedule: str, trusted: str, *arguments: object) -> Outcome:
        assert make is planted_schedules.operations and arguments[-1] == CUDA
        self.tried.append((schedule, trusted))
        return self.outcomes[schedule]

    def resolve(self, requested: str = "AUTO", shape: DraftShape = SHAPE) -> BackendChoice:
        return resolve_backend(
            CONFIG, CUDA, requested, shape=shape, backends=self.table, check=self.check, attempt=self.attempt
        )


@pytest.mark.parametrize("requested", ["AUTO", "CUTEDSL"])
def test_one_that_passes_there_and_here_and_is_faster_attends(requested: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("right", outcomes={"right": FASTER})
    with caplog.at_level(logging.INFO, logger=schedules.__name__):
        choice = bench.resolve(requested)
    assert choice.name == "CUTEDSL" and choice.block_attention is PLANTED["right"]
    assert bench.tried == [("right", "slow")] and bench.checked == ["CUTEDSL", "CUTEDSL right"]
    said = "attends by right, not slow: takes 41 us where slow takes 60"
    assert [record.getMessage() for record in caplog.records] == [f"CUTEDSL on cuda:0 {said}"]
    assert str(choice).startswith(f"attention backend CUTEDSL, which {said}")


@pytest.mark.parametrize(
    "reason",
    [
        "did not end within 120 s",
        "was killed by SIGSEGV: last words",
        "block_attention is off",
        "takes 60 us where slow takes 41",
    ],
)
def test_one_that_does_not_pass_there_is_never_run_here(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fails where a schedule that hangs or faults is given to this process. Control: the test before this one."""
    bench = Bench("right", outcomes={"right": Outcome(reason, {})})
    with caplog.at_level(logging.INFO, logger=schedules.__name__):
        choice = bench.resolve()
    assert choice.block_attention is PLANTED["slow"] and bench.checked == ["CUTEDSL"]
    assert [r.getMessage() for r in caplog.records] == [f"CUTEDSL on cuda:0 attends by slow, not right: {reason}"]
    assert reason in str(choice)


def test_one_that_fails_here_does_not_attend() -> None:
    """Fails where what another process found stands for this one. Control: the same without the finding here."""
    bench = Bench("right", outcomes={"right": FASTER}, wrong_here=("CUTEDSL right",))
    choice = bench.resolve()
    assert choice.block_attention is PLANTED["slow"]
    assert choice.schedule == "attends by slow, not right: failed its self-check: here"
    assert Bench("right", outcomes={"right": FASTER}).resolve().block_attention is PLANTED["right"]


def test_nothing_is_tried_where_there_is_one_schedule_or_the_trusted_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Fails where a part that is measured pays for a trial, or a backend that is out does. Control: one with two schedules."""
    alone = Bench()
    with caplog.at_level(logging.INFO, logger=schedules.__name__):
        choice = alone.resolve()
    assert choice.block_attention is PLANTED["slow"] and choice.schedule == "" and ", which" not in str(choice)
    out = Bench("right", outcomes={"right": FASTER}, wrong_here=("CUTEDSL",))
    with pytest.raises(ValueError, match="CUTEDSL: failed its self-check: here"):
        out.resolve()
    assert alone.tried == out.tried == [] and not caplog.records
    control = Bench("right", outcomes={"right": FASTER})
    control.resolve()
    assert control.tried


def test_of_several_each_is_raced_against_the_best_so_far() -> None:
    times = {"crashes": 50.0, "right": 41.0}
    outcomes = {
        "wrong": Outcome("block_attention is off", {}),
        "crashes": Outcome(None, {"crashes": 50.0, "slow": 60.0}),
        "right": Outcome(None, times),
    }
    bench = Bench("wrong", "crashes", "right", outcomes=outcomes)
    choice = bench.resolve()
    assert bench.tried == [("wrong", "slow"), ("crashes", "slow"), ("right", "crashes")]
    assert choice.block_attention is PLANTED["right"]
    assert choice.schedule == (
        "attends by slow, not wrong: block_attention is off; crashes, not slow: takes 50 us where slow takes 60; "
        "right, not crashes: takes 41 us where crashes takes 50"
    )


def test_a_schedule_is_tried_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where each model of a process waits for a trial, or a verdict is kept for a shape that it was not made for."""
    bench = Bench("right", outcomes={"right": Outcome("did not end within 120 s", {})})
    made = {bench.resolve().schedule for _ in range(3)}
    assert len(made) == 1 and len(bench.tried) == 1
    other = DraftShape.of(CONFIG, page_size=32)
    assert bench.resolve(shape=other).schedule in made and len(bench.tried) == 2


def test_the_picked_schedule_is_what_a_race_of_backends_times() -> None:
    """Fails where the backends are raced by their trusted schedules and another then attends."""
    bench, timed = Bench("right", outcomes={"right": FASTER}), []
    bench.table["TRTLLM"] = Backend("TRTLLM", lambda *a: None, lambda: Operations(PLANTED["wrong"]))

    def measure(operations: Operations, *rest: object) -> float:
        timed.append(operations.block_attention)
        return 1.0

    resolve_backend(CONFIG, CUDA, shape=SHAPE, backends=bench.table, check=bench.check, attempt=bench.attempt, measure=measure)
    assert timed == [PLANTED["right"], PLANTED["wrong"]]


def test_the_whole_way_with_a_real_trial(caplog: pytest.LogCaptureFixture) -> None:
    """A trial's process on a CPU, the real self-check here. Control: a wrong schedule behind the right one is not taken."""

    def on_cpu(name: str, make, config, shape, device):  # type: ignore[no-untyped-def]
        return self_check.checked_reason(name, make, config, shape, CPU)

    def attempt(*arguments):  # type: ignore[no-untyped-def]
        return trial_process.attempt(*arguments[:-1], CPU)

    table = Bench("right", "wrong").table
    with caplog.at_level(logging.INFO, logger=schedules.__name__):
        choice = resolve_backend(CONFIG, CUDA, shape=SHAPE, backends=table, check=on_cpu, attempt=attempt)
    assert choice.block_attention is PLANTED["right"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("CUTEDSL on cuda:0 attends by right, not slow: takes ")
    assert "; right, not wrong: block_attention is off by 1.0e+00, allowed is " in line


# --- how it reaches the kernels


K3 = DraftConfig.from_dict(published.INFERACT, max_draft_len=7)
K3_SHAPE = DraftShape.of(K3)


@pytest.mark.parametrize(
    ("arch", "page_size", "names"),
    [
        ("sm_90a", 64, ("sm90",)),
        ("sm_90a", 16, ("portable",)),
        ("sm_100a", 64, ("portable", "sm100")),
        ("sm_100a", 16, ("portable",)),
        ("sm_120a", 64, ("portable",)),
    ],
)
def test_cutedsl_has_the_schedules_of_its_device(
    arch: str, page_size: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "arch_name", lambda device: arch)
    backend = policy.BACKENDS["CUTEDSL"]
    assert backend.schedules is not None
    assert backend.schedules.names(K3, CUDA, DraftShape.of(K3, page_size=page_size)) == names


def planned_by(operations: Operations, page_size: int) -> str:
    """The schedule for which a plan of a step over such pages is made."""
    case = launches.attention_case(K3, DraftShape.of(K3, page_size=page_size), [5])
    shared = ("context_len", "context_start", "value_width", "pages", "page_table")
    plan = operations.plan(**{name: case[name] for name in shared}, block_rows=7, heads=96)
    return str(plan.schedule)  # type: ignore[attr-defined]


def test_the_chosen_schedule_attends_over_its_pages_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a schedule is used for pages that it was not tried on, or not for those it was. Control: none chosen."""
    launches.watch(monkeypatch)  # an sm_90a, by its word
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    scheduled = cutedsl.scheduled("portable", K3, K3_SHAPE)
    assert planned_by(scheduled, K3_SHAPE.page_size) == "portable" and planned_by(scheduled, 32) == "sm90"
    pages = BlockAttentionConfig(512, 64, 32, "bfloat16")
    assert planned_by(cutedsl.operations({pages: "portable"}), 32) == "portable"
    assert planned_by(cutedsl.operations(), K3_SHAPE.page_size) == "sm90"
