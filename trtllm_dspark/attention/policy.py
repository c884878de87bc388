"""Which attention backend a drafter runs on. Resolved once, said once, with the reason for each one passed over.

| family | AUTO on CUDA               | AUTO on a CPU | may degrade                     |
|--------|----------------------------|---------------|---------------------------------|
| mla    | CUTEDSL, else TRTLLM       | VANILLA       | no: an error naming every reason |
| gqa    | TRTLLM, else VANILLA       | VANILLA       | yes, with one line               |

VANILLA is plain torch, there to be right. It runs on any device, but on a GPU the MLA family takes it only when asked by
name: an order of magnitude lost in silence is worse than a refusal.

A backend may have several schedules of its attention. The one that is trusted on a part decides whether the backend is fit;
another attends in its place only after a trial in a process of its own: see `schedules`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trtllm_dspark.attention import cutedsl, self_check, trial_process, vanilla
from trtllm_dspark.attention.operations import BlockAttention, DraftShape, Operations
from trtllm_dspark.attention.schedules import Attempt, Check, PickedSchedule, Schedules, pick
from trtllm_dspark.attention.self_check import NOISE, numbered
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.version import __version__

log = logging.getLogger(__name__)

Reason = Callable[[DraftConfig, torch.device, DraftShape], str | None]
"""Why a backend cannot run this draft, on this device, in this shape; None where it can. Launches nothing."""


@dataclass(frozen=True)
class Backend:
    """A backend as the policy sees it.

    Attributes:
        reason: see `Reason`. operations: makes its operations; None where this version has none.
        checked: whether it must pass its self-check before it is used.
        schedules: those of its attention, where it may have more than one; `operations` takes the trusted one.
    """

    name: str
    reason: Reason
    operations: Callable[[], Operations] | None
    checked: bool = True
    schedules: Schedules | None = None


@dataclass(frozen=True)
class FamilyPolicy:
    """choices: every name a user may give. on_cuda, on_cpu: AUTO's candidates in order."""

    choices: tuple[str, ...]
    on_cuda: tuple[str, ...]
    on_cpu: tuple[str, ...]


FAMILIES: Mapping[str, FamilyPolicy] = {
    "mla": FamilyPolicy(("CUTEDSL", "TRTLLM", "VANILLA"), on_cuda=("CUTEDSL", "TRTLLM"), on_cpu=("VANILLA",)),
    "gqa": FamilyPolicy(("TRTLLM", "VANILLA"), on_cuda=("TRTLLM", "VANILLA"), on_cpu=("VANILLA",)),
}


def _trtllm_reason(config: DraftConfig, device: torch.device, shape: DraftShape) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, this one is {device.type}"
    return f"trtllm-dspark {__version__} has no TRTLLM kernel"


Measure = Callable[[Operations, DraftConfig, DraftShape, torch.device], float]
"""(operations, config, shape, device) -> microseconds."""

BACKENDS: Mapping[str, Backend] = {
    "CUTEDSL": Backend(
        "CUTEDSL", cutedsl.reason, cutedsl.operations, schedules=Schedules(cutedsl.schedules, cutedsl.scheduled)
    ),
    "TRTLLM": Backend("TRTLLM", _trtllm_reason, None),
    "VANILLA": Backend("VANILLA", vanilla.reason, vanilla.operations, checked=False),
}


@dataclass(frozen=True)
class BackendChoice:
    """A resolved backend.

    Attributes:
        name: concrete, never AUTO. passed_over: (name, reason) of AUTO's other candidates.
        operations: what to call. schedule: which one attends and why not the others, where there are others.
    """

    name: str
    passed_over: tuple[tuple[str, str], ...]
    operations: Operations
    schedule: str = ""

    @property
    def block_attention(self) -> BlockAttention:
        """The one function that every backend has."""
        return self.operations.block_attention

    def __str__(self) -> str:
        over = "; ".join(f"{name}: {why}" for name, why in self.passed_over)
        schedule = f", which {self.schedule}" if self.schedule else ""
        return f"attention backend {self.name}{schedule}" + (f" (passed over: {over})" if over else "")


def resolve_backend(
    config: DraftConfig,
    device: torch.device,
    requested: str = "AUTO",
    *,
    shape: DraftShape | None = None,
    owner: str = "drafter",
    backends: Mapping[str, Backend] = BACKENDS,
    check: Check = self_check.checked_reason,
    measure: Measure = self_check.measure_block_attention,
    attempt: Attempt = trial_process.attempt,
) -> BackendChoice:
    """Pick the attention backend of a drafter.

    A candidate must have no reason against it and pass its self-check on this device. Where several do, AUTO measures them
    at this shape and takes the fastest; on a tie (within NOISE), the first. Where one has another schedule than the one that
    is trusted here, the first call for a shape waits for its trial: seconds, or `trial_process.TIMEOUT_S` where it hangs.

    Args:
        config: of the draft. device: where it will run. requested: AUTO, or one of the family's choices.
        shape: of the deployment; None is the checkpoint's own on one rank, in pages of 64.
        owner: who the errors speak for. backends: every known backend by name.
        check, measure: how a candidate is checked and timed. attempt: how a schedule is tried that is not trusted.
    Raises:
        DSparkError: an unknown name (lists the choices), an explicit one that is unavailable or fails its self-check (its
            reason), or AUTO with no candidate left (every reason).
    """
    policy = FAMILIES[config.family]
    where = _device_name(device)
    shape = shape or DraftShape.of(config)
    usable: dict[str, PickedSchedule] = {}

    def against(name: str) -> str | None:
        backend = backends[name]
        why = backend.reason(config, device, shape)
        if why is not None:
            return why
        assert backend.operations is not None, f"{name} gave no reason and has no operations"
        why = check(name, backend.operations, config, shape, device) if backend.checked else None
        if why is None and backend.schedules is not None:
            usable[name] = pick(name, backend.schedules, config, shape, numbered(device), check, attempt)
        elif why is None:
            usable[name] = PickedSchedule(backend.operations)
        return why

    def choice(name: str, passed: Sequence[tuple[str, str]] = ()) -> BackendChoice:
        return BackendChoice(name, tuple(passed), usable[name].make(), usable[name].said)

    if requested != "AUTO":
        if requested not in policy.choices:
            raise DSparkError(
                f"{owner}: attention_backend must be AUTO or one of {', '.join(policy.choices)} for the {config.family} "
                f"family, it is {requested!r}. Choose one of these."
            )
        why = against(requested)
        if why is not None:
            raise DSparkError(
                f"{owner}: attention_backend {requested} was asked for and must be available on {where}; {why}. "
                "Choose AUTO or another backend."
            )
        return choice(requested)
    candidates = policy.on_cuda if device.type == "cuda" else policy.on_cpu
    passed: list[tuple[str, str]] = []
    fit: list[str] = []
    for name in candidates:
        why = against(name)
        if why is not None:
            passed.append((name, why))
        elif backends[name].checked or not fit:  # plain torch stands in where nothing else runs; it is not raced
            fit.append(name)
    if not fit:
        reasons = "; ".join(f"{name}: {why}" for name, why in passed)
        raise DSparkError(
            f"{owner}: a usable attention backend is required on {where} and the {config.family} family does not degrade; "
            f"{reasons}. Ask for VANILLA by name to run it in plain torch, slowly."
        )
    if len(fit) > 1:
        times = {name: measure(usable[name].make(), config, shape, device) for name in fit}
        best = min(times.values())
        fit.sort(key=lambda name: times[name] > NOISE * best)  # stable: of those that tie, the first
        passed += [(name, f"takes {times[name]:.0f} us where {fit[0]} takes {times[fit[0]]:.0f}") for name in fit[1:]]
    chosen = choice(fit[0], passed)
    log.info("%s on %s: %s", owner, where, chosen)
    return chosen


def _device_name(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device.type} (sm_{major}{minor})"
