"""trtllm-dspark: the MLA-backboned DSpark drafter for Kimi-K3, beside TensorRT-LLM or alone on one machine.

Importing this changes nothing in the process and loads nothing: a public name is imported when it is first used.
"""

from importlib import import_module
from typing import Any

from trtllm_dspark.version import __version__

_PUBLIC = {
    "DSparkError": "errors",
    "UnsupportedError": "errors",
    "DraftConfig": "config",
    "DraftCheckpoint": "checkpoint",
    "MLADSparkForCausalLM": "model.mla",
    "TensorParallel": "model.parallel",
    "ContextPool": "context.pool",
    "PoolLayout": "context.pool",
    "DraftContext": "context.draft_context",
    "Drafter": "propose",
    "verify_greedy": "verify",
    "AcceptanceCounter": "stats",
    "HuggingFaceTarget": "engine.target",
    "Engine": "engine.engine",
    "SamplingParams": "engine.requests",
    "DraftOptions": "engine.loading",
    "load_drafter": "engine.loading",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
