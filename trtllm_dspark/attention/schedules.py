"""Which of a backend's schedules attends: the trusted one, or another that proved right and faster on this very device.

A schedule is one of several kernels for the same operation. One that was measured on a part is trusted there as a backend is:
after its self-check. One that nobody has run there earns its place in three steps, once for each shape in a process, before
any capture: it passes the self-check's attention in a process of its own, it is faster there than the trusted one, and it
passes the self-check here. Until it has, and wherever it does not, the trusted one attends and the log says why.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.attention.trial import Make
from trtllm_dspark.attention.trial_process import Outcome
from trtllm_dspark.config import DraftConfig

log = logging.getLogger(__name__)

Check = Callable[[str, Callable[[], Operations], DraftConfig, DraftShape, torch.device], str | None]
"""(name, operations, config, shape, device) -> why they may not be used, None where they may."""
Attempt = Callable[[Make, str, str, DraftConfig, DraftShape, torch.device], Outcome]
"""(make, schedule, trusted, config, shape, device) -> how its trial ended; see `trial_process.attempt`."""


@dataclass(frozen=True)
class Schedules:
    """What a backend has of them.

    Attributes:
        names: (config, device, shape) -> those that take a deployment which the backend has no reason against; the trusted
            one first. make: see `Make`.
    """

    names: Callable[[DraftConfig, torch.device, DraftShape], tuple[str, ...]]
    make: Make


@dataclass(frozen=True)
class PickedSchedule:
    """The one that attends. make: makes its operations. said: which it is and why not the others, where there are others."""

    make: Callable[[], Operations]
    said: str = ""


@lru_cache(maxsize=64)
def pick(
    backend: str,
    schedules: Schedules,
    config: DraftConfig,
    shape: DraftShape,
    device: torch.device,
    check: Check,
    attempt: Attempt,
) -> PickedSchedule:
    """The schedule that attends on this device; found, and said in one line, once for a shape in a process.

    Args:
        backend: its name; it has passed its check with the trusted schedule. device: with its index.
        check: the self-check of this process. attempt: the trial in another.
    """
    taken, *others = schedules.names(config, device, shape)
    make, said = partial(schedules.make, taken, config, shape), []
    for other in others:
        outcome = attempt(schedules.make, other, taken, config, shape, device)
        made, why = partial(schedules.make, other, config, shape), outcome.reason
        if why is None:
            why = check(f"{backend} {other}", made, config, shape, device)
        if why is None:
            times = outcome.microseconds
            said.append(f"{other}, not {taken}: takes {times[other]:.0f} us where {taken} takes {times[taken]:.0f}")
            taken, make = other, made
        else:
            said.append(f"{taken}, not {other}: {why}")
    if not others:
        return PickedSchedule(make)
    picked = PickedSchedule(make, f"attends by {'; '.join(said)}")
    log.info("%s on %s %s", backend, device, picked.said)
    return picked
