"""A case from its inputs to its times: everybody is judged, then those who are right are timed together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from cute_kernels.bench import timing
from cute_kernels.bench.cases import Case
from cute_kernels.bench.contestants import Contestant
from cute_kernels.bench.correctness import Verdict, Yardstick, judge, poison, yardstick
from cute_kernels.bench.sensors import Reading, Sensors
from cute_kernels.errors import one_line

RIGHT, WRONG, FAILED, ABSENT = "right", "wrong", "failed", "absent"


@dataclass(frozen=True)
class Outcome:
    """What became of a contestant on a case.

    Attributes:
        name, ours, note, planned: of the contestant. status: right, wrong, failed (it raised) or absent (it was not tried).
        reason: why not right. verdict: of the gate, the worse of two sets. times_us: of a call, a round each.
    """

    name: str
    ours: bool
    note: str
    status: str
    reason: str | None = None
    verdict: Verdict | None = None
    planned: str | None = None
    times_us: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class CaseResult:
    """A case and its outcomes.

    Attributes:
        sets: of inputs, calls of a graph. reason: why the case was not timed, None where it was. readings: of the device
            while it was.
    """

    case: Case
    sets: int
    outcomes: tuple[Outcome, ...] = ()
    reason: str | None = None
    readings: tuple[Reading, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all that was tried was right, and timed."""
        return self.reason is None and all(outcome.status in (RIGHT, ABSENT) for outcome in self.outcomes)


def run_case(
    case: Case,
    contestants: Sequence[Contestant],
    rounds: int,
    device: torch.device,
    l2_bytes: int,
    sensors: Sensors | None = None,
) -> CaseResult:
    """Never raises: what goes wrong is in the result.

    Args:
        rounds: replays of each contestant that are timed, at most. l2_bytes, sensors: of the device.
    """
    count = timing.num_sets(case.bytes, l2_bytes)
    outcomes: list[Outcome] = []
    readings: list[Reading | None] = []
    try:
        sets = case.sets(count, device)
        yardsticks = {index: yardstick(case, sets[index]) for index in (0, count - 1)}
        replays = {}
        for contestant in contestants:
            absent = contestant.absent(case, device)
            outcome = Outcome(contestant.name, contestant.ours, contestant.note, ABSENT, absent, planned=contestant.planned)
            if absent is None:
                try:
                    replay = timing.Replay(contestant.prepare(case, sets), device)
                    outcome = judged(outcome, replay, yardsticks)
                except Exception as error:
                    outcome = replace(outcome, status=FAILED, reason=one_line(error))
                else:
                    replays[contestant.name] = replay
            outcomes.append(outcome)
        unfit = [outcome for outcome in outcomes if outcome.ours and outcome.status != RIGHT]
        if unfit:
            return CaseResult(case, count, tuple(outcomes), f"{unfit[0].name}: {unfit[0].status}: {unfit[0].reason}")
        fit = [replays[outcome.name] for outcome in outcomes if outcome.status == RIGHT]
        look = None if sensors is None else lambda: readings.append(sensors.read())
        times = iter(timing.measure(fit, rounds, device, look))
        timed = [replace(o, times_us=tuple(next(times))) if o.status == RIGHT else o for o in outcomes]
        return CaseResult(case, count, tuple(timed), readings=tuple(filter(None, readings)))
    except Exception as error:
        return CaseResult(case, count, tuple(outcomes), one_line(error))


def judged(outcome: Outcome, replay: timing.Replay, yardsticks: Mapping[int, Yardstick]) -> Outcome:
    """With status, reason and verdict, from the results of the very graph that will be timed.

    Args:
        yardsticks: by the number of the set.
    """
    for result in replay.results:
        poison(result)
    replay.run()
    verdicts = [judge(held, replay.results[index]) for index, held in yardsticks.items()]
    worst = max(verdicts, key=lambda verdict: (verdict.complaint is not None, verdict.error or 0.0))
    return replace(outcome, status=RIGHT if worst.complaint is None else WRONG, reason=worst.complaint, verdict=worst)
