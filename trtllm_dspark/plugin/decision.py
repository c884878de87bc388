"""What this process may do to this host: the outcome, before anything is applied."""

import importlib
from dataclasses import dataclass, replace

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin import probing, settings
from trtllm_dspark.plugin.faults import Diagnosis, diagnose
from trtllm_dspark.plugin.hooks import HOOKS, MINIMUM, MODELING, NATIVE, Hook
from trtllm_dspark.plugin.outcome import HookVerdict, Outcome
from trtllm_dspark.plugin.probing import HostSource

INSTALL = "Install NVIDIA's tensorrt_llm in this environment; all but serving works without it."
REPAIR = "Repair the installation; `python -c 'import tensorrt_llm'` shows the same."
DOCTOR = "Run `trtllm-dspark doctor` and report what it prints."
UPGRADE = f"Upgrade tensorrt_llm to {MINIMUM} or later."
NEW_WITH_STANDALONE = (
    "draft-model registry",
    "draft-model table",
    "draft-model dispatch",
    "speculation mode",
    "standalone worker",
)
NATIVE_RUNS_ON = ("10.0", "10.3")  # what FlashInfer's MLA decode of the host's drafter is built for


@dataclass(frozen=True)
class Decision:
    """An outcome, and whether there is something to apply."""

    outcome: Outcome
    apply: bool = False


def decide() -> Decision:
    """For the host that is installed, the settings of this process and its GPU."""
    host = probing.locate()
    if host is None:
        return Decision(Outcome("absent", "tensorrt_llm is not installed.", INSTALL, None, ()))
    try:
        disabled, prefer = settings.read(settings.DISABLE) == "1", settings.read(settings.PREFER)
    except DSparkError as error:
        return Decision(Outcome("refused", str(error), "", host.version, ()))
    if disabled:
        reason, remedy = f"{settings.DISABLE.name} is 1.", f"Unset {settings.DISABLE.name}."
        return Decision(Outcome("disabled", reason, remedy, host.version, ()))
    verdicts = [_verdict(host, hook) for hook in HOOKS]
    broken = _import_failure(host)
    if broken is not None:
        reason = f"tensorrt_llm {host.version} is installed, its import fails: {broken}."
        hooks = _not_applied(verdicts, "the host cannot be imported")
        return Decision(Outcome("absent", reason, REPAIR, host.version, hooks))
    required = {hook.name for hook in HOOKS if hook.required}
    wanting = [v for v in verdicts if v.name in required and v.verdict in ("not found", "changed")]
    if wanting:
        return Decision(_refused(host, verdicts, wanting))
    diagnoses = diagnose(host)
    why_ours = _why_ours(host, diagnoses, prefer)
    if why_ours is None:
        return Decision(_native(host, verdicts, prefer))
    fixes = tuple(_fix_verdict(diagnosis) for diagnosis in diagnoses)
    reason = f"decoding_type DSpark with an MLA checkpoint constructs our drafter{why_ours}."
    return Decision(Outcome("active", reason, "", host.version, (*verdicts, *fixes)), apply=True)


def _import_failure(host: HostSource) -> str | None:
    """Why the host cannot be imported, None where it can."""
    names = [probing.PACKAGE] + [f"{probing.PACKAGE}.{MODELING}"] * (host.module(MODELING) is not None)
    try:
        for name in names:
            importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything
        return f"{type(error).__name__}: {error}"
    return None


def _verdict(host: HostSource, hook: Hook) -> HookVerdict:
    found = host.find_any(hook)
    if found is None:
        detail = f"{' or '.join(hook.places)} is not in tensorrt_llm {host.version}. {_remedy(hook)}"
        return HookVerdict(hook.name, hook.places[0], "not found", detail)
    missing = found.missing(hook.parameters)
    if missing:
        detail = f"{found.place} does not take {', '.join(missing)}. {_remedy(hook)}"
        return HookVerdict(hook.name, found.place, "changed", detail)
    if hook.host_has_it and found.place == hook.places[0]:
        return HookVerdict(hook.name, found.place, "not needed", f"{found.place}: the host does it itself.")
    instead = f"{hook.places[0]} is not there: " if hook.host_has_it else ""
    return HookVerdict(hook.name, found.place, "would apply", f"{instead}{hook.doing}.")


def _remedy(hook: Hook) -> str:
    if hook.name in NEW_WITH_STANDALONE:
        return UPGRADE
    return DOCTOR if hook.required else hook.without


def _fix_verdict(diagnosis: Diagnosis) -> HookVerdict:
    fix = diagnosis.fix
    if diagnosis.present:
        return HookVerdict(fix.name, fix.place, "would apply", f"{fix.fault}; ours {fix.doing}.")
    return HookVerdict(fix.name, fix.place, "not needed", f"{fix.place} no longer has the fault.")


def _refused(host: HostSource, verdicts: list[HookVerdict], wanting: list[HookVerdict]) -> Outcome:
    shown = [v.symbol for v in wanting[:3]]
    symbols = ", ".join(shown) + (f" and {len(wanting) - 3} more" if len(wanting) > 3 else "")
    too_old = any(v.name in NEW_WITH_STANDALONE and v.verdict == "not found" for v in wanting)
    if too_old:
        reason, remedy = f"it has no standalone DSpark drafter to replace ({symbols}); {MINIMUM} or later is required.", UPGRADE
    else:
        reason, remedy = f"these symbols are not as this version knows them: {symbols}; nothing was applied.", DOCTOR
    if host.has_native:
        reason += " Its own MLA drafter is left in place."
    return Outcome("refused", reason, remedy, host.version, _not_applied(verdicts, f"{wanting[0].symbol} is required too"))


def _native(host: HostSource, verdicts: list[HookVerdict], prefer: str) -> Outcome:
    why = f"{settings.PREFER.name} is native" if prefer == "native" else "it runs on this GPU and lacks no fix that we carry"
    reason = f"the host's own MLA drafter serves ({NATIVE}): {why}."
    remedy = f"Set {settings.PREFER.name}=extension for ours."
    return Outcome("native", reason, remedy, host.version, _not_applied(verdicts, why))


def _not_applied(verdicts: list[HookVerdict], why: str) -> tuple[HookVerdict, ...]:
    return tuple(
        replace(v, verdict="not applied", detail=f"{v.symbol} is there; not used: {why}.") if v.verdict == "would apply" else v
        for v in verdicts
    )


def _why_ours(host: HostSource, diagnoses: tuple[Diagnosis, ...], prefer: str) -> str | None:
    """How the reason goes on where ours serves ('' where the host has none of its own); None where the host's does."""
    if not host.has_native:
        return ""
    if prefer == "native":
        return None
    if prefer == "extension":
        return f"; the host's own is passed over: {settings.PREFER.name} is extension"
    gpu, lacking = _gpu(), [diagnosis.fix.name for diagnosis in diagnoses if diagnosis.present]
    reasons = []
    if gpu is not None and gpu not in NATIVE_RUNS_ON:
        reasons.append(f"it cannot run on this GPU (compute capability {gpu}; {' or '.join(NATIVE_RUNS_ON)} is required)")
    if lacking:
        reasons.append(f"it lacks {', '.join(lacking)}")
    return f"; the host's own is passed over: {' and '.join(reasons)}" if reasons else None


def _gpu() -> str | None:
    """Compute capability of this machine's first GPU, None without one.

    From the driver's management library, which the host depends on: asking CUDA would start it, in a process that may fork
    or choose its device yet.
    """
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        try:
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no library, no driver, no GPU: its own error classes
        return None
    return f"{major}.{minor}"
