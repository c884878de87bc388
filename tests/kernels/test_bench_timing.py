"""What the times of the bench rest on: sets beyond the L2, a steady clock, and the machine that is named beside them."""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
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
    assert timing.warm_up(device.run, device) == 4
    assert device.rounds == 1 + 4 * 5  # 10 ms a round, 50 ms a block


def test_the_warm_up_ends_anyway() -> None:
    device = SlowingClock(1.0 + i % 2 for i in range(10**6))
    timing.warm_up(device.run, device)
    assert 1.0 <= device.now < 1.3


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
    monkeypatch.setattr(machine, "_smi_name", lambda device: "GPU-0")
    assert tuple(machine.clocks(CPU).values()) == expected
