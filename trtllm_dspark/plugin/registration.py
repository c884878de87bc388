"""Two calls of public registries, made once a process and said in one line of the log.

Our builder for decoding_type DSpark, and the config class of `model_type: k3_dspark`. What else we do happens on the
instances of one model, when it is built (see `builder`). Either every required symbol is as we know it, or nothing is
registered.
"""

import importlib
import logging
import threading
from dataclasses import replace

from trtllm_dspark.plugin import config_route, decision, probing
from trtllm_dspark.plugin.hooks import INTERFACE, MODELING
from trtllm_dspark.plugin.outcome import HookVerdict, Outcome

log = logging.getLogger("trtllm_dspark.plugin")

_lock = threading.RLock()
_outcome: Outcome | None = None


def outcome() -> Outcome | None:
    """Of this process; None before `register()`."""
    return _outcome


def register() -> Outcome:
    """Make TensorRT-LLM construct our drafter in this process. Idempotent, thread-safe, never raises; logs one line."""
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = _register()
            log.log(logging.WARNING if _outcome.state == "refused" else logging.INFO, "%s", summary(_outcome))
        return _outcome


def probe() -> Outcome:
    """The same decision without applying anything, and whether the host's worker asks our drafter for what it has not.

    Imports tensorrt_llm, to learn whether it can be imported.
    """
    with _lock:
        found = decision.decide().outcome
        if found.state == "active":
            from trtllm_dspark.plugin.contract import verdict

            host = probing.locate()
            assert host is not None, "the host went away while it was looked at"
            found = replace(found, hooks=(*found.hooks, verdict(host)))
        return found


def summary(found: Outcome) -> str:
    """One line: state, host, reason, remedy."""
    host = f"tensorrt_llm {found.host_version}" if found.host_version else "no tensorrt_llm"
    return f"trtllm-dspark: {found.state} on {host}: {found.reason}" + (f" {found.remedy}" if found.remedy else "")


def _register() -> Outcome:
    try:
        decided = decision.decide()
    except Exception as error:  # this runs inside the host's start-up, which must go on
        reason = f"looking at the host failed: {type(error).__name__}: {error}."
        return Outcome("refused", reason, decision.DOCTOR, None, ())
    found = decided.outcome
    if not decided.apply:
        return found
    try:
        _apply()
    except Exception as error:
        reason = f"registering failed: {type(error).__name__}: {error}."
        hooks = tuple(_settle(v, "not applied", f"{v.symbol}: {reason} {decision.DOCTOR}") for v in found.hooks)
        return replace(found, state="refused", reason=reason, remedy=decision.DOCTOR, hooks=hooks)
    return replace(found, hooks=tuple(_settle(v, "applied", v.detail) for v in found.hooks))


def _settle(verdict: HookVerdict, word: str, detail: str) -> HookVerdict:
    return replace(verdict, verdict=word, detail=detail) if verdict.verdict == "would apply" else verdict


def _apply() -> None:
    from trtllm_dspark.plugin import builder

    modeling = importlib.import_module(f"{probing.PACKAGE}.{MODELING}")
    interface = importlib.import_module(f"{probing.PACKAGE}.{INTERFACE}")
    mode = interface.SpeculativeDecodingMode.DSPARK
    earlier = modeling.DRAFT_MODEL_BUILDER_MAPPING.get(mode)
    config_route.register()
    builder.remember(earlier)
    modeling.register_draft_model(mode)(builder.build_draft)
