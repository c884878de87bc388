"""What the times of the bench rest on: sets beyond the L2, a steady clock, and the machine that is named beside them."""

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fabricated import CPU, L2

from cute_kernels.bench import machine, timing


@pytest.mark.parametrize(
    ("moved", "sets"), [(10**9, 2), (60_000_000, 2), (50_000_000, 2), (49_000_000, 3), (10_000_000, 10), (1_000, 64)]
)
def test_the_sets_exceed_twice_l2_or_are_as_many_as_a_graph_takes(moved: int, sets: int) -> None:
    assert timing.num_sets(moved, L2) == sets
    assert sets * moved >= 2 * L2 or sets == timing.MAX_SETS


class SlowingClock:
    """A device whose calls get slower until its clock has settled; time stands still but for them."""

    def __init__(self, factors: Iterator[float]) -> None:
        self.now, self.factors, self.rounds = 0.0, factors, 0

    def __call__(self) -> float:
        return self.now

    def run(self, rounds: int) -> list[list[float]]:
        call_us = 1000.0 * next(self.factors)
        self.now += 1e-6 * rounds * 10 * call_us
        self.rounds += rounds
        return [[call_us] * rounds, [2 * call_us] * rounds]


def test_the_warm_up_ends_when_the_clock_is_steady() -> None:
    device = SlowingClock(iter([1.0, 1.0, 1.2, 1.3, 1.305]))
    round_s = timing.warm_up(device.run, device)
    assert device.rounds == 1 + 4 * 5  # 10 ms a round, 50 ms a block
    assert round_s == pytest.approx(0.01305)


def test_the_warm_up_ends_anyway() -> None:
    device = SlowingClock(1.0 + i % 2 for i in range(10**6))
    timing.warm_up(device.run, device)
    assert 1.0 <= device.now < 1.3


@pytest.mark.parametrize(
    ("round_s", "rounds"),
    [(0.001, 30), (0.033, 30), (0.05, 20), (0.2, timing.MIN_ROUNDS), (9.0, timing.MIN_ROUNDS)],
)
def test_long_rounds_are_fewer_but_never_too_few(round_s: float, rounds: int) -> None:
    assert timing.affordable(30, round_s) == rounds
    assert timing.affordable(7, round_s) == 7


class Queue:
    """A device with a clock of its own: what it is given takes time there, and the host asks so often before it is done."""

    def __init__(self, questions: int = 0) -> None:
        self.now_us, self.questions, self.order = 0.0, questions, ""

    def takes(self, name: str, us: float) -> Callable[[], None]:
        def work() -> None:
            self.now_us += us
            self.order += name

        return work

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def record(self) -> None:
        self.at_us = self.queue.now_us

    def elapsed_time(self, end: "Event") -> float:
        return (end.at_us - self.at_us) / 1e3

    def query(self) -> bool:
        self.queue.questions -= 1
        return self.queue.questions < 0


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue(questions=3)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "LOOK_S", 0.0)
    return made


class Calls:
    """Stands for a Replay."""

    def __init__(self, run: Callable[[], None], calls: int) -> None:
        self.run, self.results = run, [None] * calls


def test_all_contestants_take_turns_and_cooling_is_not_in_the_clock(queue: Queue) -> None:
    """Fails when one contestant runs all its rounds before the next, when the same one always begins, or when the clock
    covers what fills L2.
    """
    replays: Any = [Calls(queue.takes("a", 10.0), 1), Calls(queue.takes("b", 40.0), 2)]
    times = timing.interleave(replays, 3, queue.takes(".", 1000.0))
    assert queue.order == ".a.b.b.a.a.b" and queue.questions == 3  # nobody looks, nobody asks
    assert times == [pytest.approx([10.0] * 3), pytest.approx([20.0] * 3)]


def test_the_device_is_looked_at_until_it_is_done(queue: Queue) -> None:
    """Fails when the device is looked at before it works, or only afterwards, when it idles."""
    looks: list[str] = []
    replays: Any = [Calls(queue.takes("a", 10.0), 1)]
    timing.interleave(replays, 2, queue.takes(".", 1.0), lambda: looks.append(queue.order))
    assert looks == [".a.a"] * 3


def test_the_commit_and_whether_the_tree_differs(tmp_path: Path) -> None:
    assert machine.commit(tmp_path) == {"commit": None, "dirty": None}
    git = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    git(["git", "init"])
    (tmp_path / "file").write_text("1")
    git(["git", "add", "file"])
    git(["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "commit", "-m", "one"])
    clean = machine.commit(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert machine.commit(tmp_path) == {**clean, "dirty": True}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("580.65.06, 1755, 1980, 700.00", ("580.65.06", 1755.0, 1980.0, 700.0)),
        ("580.65.06, 1755, 1980, [N/A]", ("580.65.06", 1755.0, 1980.0, None)),
        (None, (None, None, None, None)),
    ],
)
def test_clocks_are_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch, said: str | None, expected: tuple[Any, ...]) -> None:
    monkeypatch.setattr(machine, "_run", lambda *command: said)
    monkeypatch.setattr(machine, "smi_name", lambda device: "GPU-0")
    assert tuple(machine.clocks(CPU).values()) == expected
