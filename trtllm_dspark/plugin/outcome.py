"""What `register()` found and did: one record of the process, one verdict a hook."""

from dataclasses import dataclass

STATES = ("active", "native", "refused", "disabled", "absent")
VERDICTS = ("applied", "would apply", "not needed", "not found", "changed", "not applied")


@dataclass(frozen=True)
class HookVerdict:
    """One hook of `trtllm_dspark.plugin.hooks.HOOKS` on the installed host.

    Attributes:
        name: of the hook.
        symbol: "module:attribute" under which it was found, or where it should have been.
        verdict: one of VERDICTS. not needed: the host already does this. not found, changed: the symbol is missing, or
            lacks a parameter that we rely on. not applied: it is there, another hook's verdict or a setting forbids it.
        detail: one sentence; names the symbol and the remedy where it is not applied.
    """

    name: str
    symbol: str
    verdict: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """The decision of this process.

    Attributes:
        state: active: `decoding_type: DSpark` with an MLA checkpoint constructs our drafter. native: the host's own class
            serves it, by the setting TRTLLM_DSPARK_PREFER. refused: this host cannot take the drafter. disabled: by
            TRTLLM_DSPARK_DISABLE. absent: tensorrt_llm is not installed, or its import fails; reason says which.
        reason, remedy: one sentence each; remedy is empty where there is nothing to do.
        host_version: of tensorrt_llm; None where it is absent.
        hooks: one verdict for each hook that was looked at, in the table's order.
    """

    state: str
    reason: str
    remedy: str
    host_version: str | None
    hooks: tuple[HookVerdict, ...]
