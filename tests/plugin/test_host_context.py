"""The readable range of a request's context, as tensor arithmetic, against sets of positions."""

import random
from types import SimpleNamespace

import pytest
import torch

from trtllm_dspark.plugin.host_context import NEW, HostContext


def context(joint: bool = False) -> HostContext:
    bare = HostContext.__new__(HostContext)
    bare.pages = SimpleNamespace(joint_reuse=joint)
    return bare


def advanced(state: tuple[int, int], first: int, count: int, bound: int, joint: bool = False) -> tuple[int, int]:
    last = min(first + count, bound)
    out = context(joint)._advanced(torch.tensor([state]), torch.tensor([first]), torch.tensor([last]))
    return tuple(out[0].tolist())


def run_of(valid: set[int]) -> set[int]:
    """The unbroken run that ends at the last valid position; what lies before it is forgotten."""
    run, at = set(), max(valid, default=-1)
    while at in valid:
        run.add(at)
        at -= 1
    return run


def trace(seed: int) -> None:
    """Appends, rows taken back, gaps, short grants that grow later, a fresh start."""
    pick = random.Random(seed)
    state, valid, length, bound = (NEW, NEW), set(), pick.randrange(40), 48
    for _ in range(30):
        what = pick.random()
        first = length
        if what < 0.15:
            first = length + pick.randrange(1, 9)  # speculation was off for a while
        elif what < 0.3:
            first = max(length - pick.randrange(1, 9), 0)  # rows were taken back
        if what > 0.9:
            bound += 16
        count = pick.randrange(0, 9)
        valid = run_of({p for p in valid if p < first} | {p for p in range(first, first + count) if p < bound})
        state = advanced(state, first, count, bound)
        assert set(range(*state)) == valid, (seed, state, sorted(valid))
        length = first + count


def test_random_traces() -> None:
    for seed in range(100):
        trace(seed)


def test_the_check_catches_a_range_that_spans_a_gap(monkeypatch) -> None:
    """The control: without the rule for gaps, unwritten positions would be read."""

    def spans(self, state, first, last):
        start = torch.where(state[:, 0] == NEW, first, torch.minimum(state[:, 0], first))
        return torch.stack((start, torch.maximum(last, first)), 1)

    monkeypatch.setattr(HostContext, "_advanced", spans)
    with pytest.raises(AssertionError):
        for seed in range(10):
            trace(seed)


def test_a_joint_prefix_is_readable_from_its_first_token() -> None:
    assert advanced((NEW, NEW), 32, 8, 64, joint=True) == (0, 40)
    assert advanced((NEW, NEW), 32, 8, 64) == (32, 40)


def test_nothing_written_leaves_what_there_is() -> None:
    assert advanced((0, 48), 48, 8, 48) == (0, 48)
    assert advanced((0, 48), 60, 8, 48) == (0, 48)
    assert advanced((0, 48), 60, 8, 80) == (60, 68)
