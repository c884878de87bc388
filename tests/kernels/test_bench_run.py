"""A case of the bench and its contestants: who is timed, who is not, and what is said of those who are not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from bench_fabricated import ATTENTION, CPU, MISTAKES, SMALL, Answer, answer, make_up_times, of, swaps_two_heads

from cute_kernels.bench import timing
from cute_kernels.bench.cases import Inputs
from cute_kernels.bench.contestants import CONTESTANTS, Contestant
from cute_kernels.bench.run import ABSENT, FAILED, RIGHT, WRONG, run_case


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return make_up_times(monkeypatch)


def raises(case: Any, inputs: Inputs) -> torch.Tensor:
    raise RuntimeError("first line\nerror: no such instruction\nlast line")


def test_a_right_case_is_timed_with_all_who_are_right(measured: list[int]) -> None:
    result = run_case(ATTENTION, [of(answer), of(answer, "peer", ours=False)], 5, CPU, 50)
    assert result.passed and result.reason is None and measured == [2]
    assert [outcome.times_us for outcome in result.outcomes] == [(10.0, 11.0, 12.0, 13.0, 14.0), (20.0, 21.0, 22.0, 23.0, 24.0)]
    assert result.sets == 2


@pytest.mark.parametrize(("case", "wrong", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", None))
def test_a_case_that_we_get_wrong_has_no_speed(case: Any, wrong: Answer, said: str, measured: list[int]) -> None:
    result = run_case(case, [of(wrong), of(answer, "peer", ours=False)], 5, CPU, 50)
    assert not result.passed and measured == []
    assert result.outcomes[0].status == WRONG and "ours: wrong: " in str(result.reason) and said in str(result.reason)
    assert result.outcomes[1].status == RIGHT and result.outcomes[1].times_us == ()


def test_one_wrong_schedule_of_ours_is_enough(measured: list[int]) -> None:
    result = run_case(ATTENTION, [of(answer), of(swaps_two_heads, "ours, planned once")], 5, CPU, 50)
    assert result.reason is not None and result.reason.startswith("ours, planned once: wrong: ") and measured == []


def test_a_wrong_or_failing_peer_is_not_timed_and_the_others_are(measured: list[int]) -> None:
    peers = [of(swaps_two_heads, "wrong", ours=False), of(raises, "broken", ours=False), of(answer, "right", ours=False)]
    gone = Contestant("gone", peers[0].prepare, package="no_such_package_here")
    result = run_case(ATTENTION, [of(answer), *peers, gone], 5, CPU, 50)
    assert [o.status for o in result.outcomes] == [RIGHT, WRONG, FAILED, RIGHT, ABSENT]
    assert [bool(o.times_us) for o in result.outcomes] == [True, False, False, True, False]
    assert result.outcomes[2].reason == "error: no such instruction"
    assert result.outcomes[4].reason == "no_such_package_here is not installed"
    assert measured == [2] and result.reason is None and not result.passed


def test_a_peer_that_is_absent_is_no_fault(measured: list[int]) -> None:
    gone = Contestant("gone", of(answer).prepare, package="no_such_package_here")
    assert run_case(ATTENTION, [of(answer), gone], 5, CPU, 50).passed


def test_only_the_last_set_being_wrong_is_noticed(measured: list[int]) -> None:
    """A call that is bound to another set's tensors; fails when the first set alone is judged."""

    def prepare(case: Any, sets: list[Inputs]) -> list[Callable[[], torch.Tensor]]:
        return [partial(answer, case, {**sets[0], "out": inputs["out"]}) for inputs in sets]

    assert run_case(ATTENTION, [Contestant("ours", prepare, ours=True)], 5, CPU, 50).outcomes[0].status == WRONG


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)], ids=str)
def test_control_a_call_that_works_only_once_is_not_timed(device: torch.device, measured: list[int]) -> None:
    """A graph that captured no work would be the fastest of all: fails when results of an earlier run count."""
    done: dict[int, torch.Tensor] = {}

    def only_once(case: Any, inputs: Inputs) -> torch.Tensor:
        if id(inputs) not in done:
            done[id(inputs)] = answer(case, inputs)
        return done[id(inputs)]

    for case in SMALL.values():
        done.clear()
        (outcome,) = run_case(case, [of(only_once)], 3, device, 50).outcomes
        assert outcome.status == WRONG and "not written" in str(outcome.reason) and measured == []


def test_a_case_that_cannot_be_set_up_is_reported(measured: list[int]) -> None:
    result = run_case(replace(ATTENTION, page_size=0), [of(answer)], 5, CPU, 50)
    assert not result.passed and result.outcomes == () and "division" in str(result.reason)


def test_times_that_cannot_be_had_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "measure", raises)
    result = run_case(ATTENTION, [of(answer)], 5, CPU, 50)
    assert not result.passed and result.reason is not None and result.outcomes[0].status == RIGHT


def test_every_contestant_can_be_told_from_the_others() -> None:
    for kernel, entered in CONTESTANTS.items():
        names = [contestant.name for contestant in entered]
        assert len(set(names)) == len(names) and entered[0].name == "ours" and entered[0].ours, kernel
    fa3 = CONTESTANTS["block_attention"][-1]
    assert (fa3.name, fa3.package, fa3.capability) == ("flashinfer fa3", "flashinfer", (9, 0))


def test_ours_refuses_a_cpu_and_says_why(measured: list[int]) -> None:
    """The product's own contestants, where no kernel can run: reported, not raised."""
    for case in SMALL.values():
        ours = [contestant for contestant in CONTESTANTS[case.kernel] if contestant.ours]
        result = run_case(case, ours, 3, CPU, 50)
        assert [outcome.status for outcome in result.outcomes] == [FAILED] * len(ours)
        assert all("needs a CUDA device" in str(o.reason) or "not installed" in str(o.reason) for o in result.outcomes)
