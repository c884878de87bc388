"""Our worker in the place of the host's stock one, once the model is built.

The host itself swaps a worker this way for a target of its own (`_own_spec_branch` of its experimental Kimi-K3 model).
"""

from functools import cache
from typing import Any

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin.worker import WHO, HostedWorker


@cache
def hosted(stock: type, fixes: frozenset[str]) -> type:
    """Our worker class over the installed stock class, with these of `faults.FIXES`."""
    members = {"__module__": __name__, "__doc__": HostedWorker.__doc__, "fixes": fixes}
    return type("HostedDSparkWorker", (HostedWorker, stock), members)


def _owner(target: Any, drafter: Any) -> Any:
    """The module that has both: the target itself, or the language model inside a wrapper with a vision encoder."""
    owners = (module for module in target.modules() if module._modules.get("draft_model") is drafter)
    return next(owners, target)


def replace_worker(target: Any, drafter: Any, fixes: frozenset[str]) -> Any:
    """Put our worker in the place of the target's stock one; its entry in the epilogue too.

    Args:
        target: the host's SpecDecOneEngineForCausalLM, built, or a wrapper around it. drafter: ours.
        fixes: needed on this host.
    Returns:
        our worker, or the stock one where nothing needs fixing.
    Raises:
        DSparkError: the target has no worker of the standalone kind.
    """
    target = _owner(target, drafter)
    stock: Any = getattr(target, "spec_worker", None)
    if isinstance(stock, HostedWorker) or (stock is not None and not fixes):
        return stock
    if not any(base.__name__ == "DFlashWorker" for base in type(stock).__mro__):
        raise DSparkError(
            f"{WHO}: the target must have a standalone DSpark worker, {type(target).__name__} has {type(stock).__name__}. "
            "Run `trtllm-dspark doctor` and report what it prints."
        )
    kind: type = type(stock)
    ours: Any = object.__new__(hosted(kind, fixes))
    ours.__dict__.update(stock.__dict__)  # what it was built with, whatever a version's constructor takes
    ours.take_drafter(drafter)
    target.spec_worker = ours
    for index, module in enumerate(target.epilogue):
        if module is stock:
            target.epilogue[index] = ours
    return ours
