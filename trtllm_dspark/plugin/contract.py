"""What the installed host's worker asks of a drafter, read off its source, against what ours has.

Only methods that our worker leaves as they are count: what it replaces asks nothing any more.
"""

import ast

from trtllm_dspark.plugin.hooks import DFLASH, DSPARK, INTERFACE
from trtllm_dspark.plugin.outcome import HookVerdict
from trtllm_dspark.plugin.probing import HostSource

NAME = "drafter contract"
ARGUMENT = "draft_model"
CLASSES = (f"{INTERFACE}:SpecWorkerBase", f"{DFLASH}:DFlashWorker", f"{DSPARK}:DSparkWorker")


def asked(host: HostSource, replaced: frozenset[str]) -> dict[str, str]:
    """Attribute of a drafter -> the method that reads it, for all reads without a default, in methods not `replaced`."""
    found: dict[str, str] = {}
    for place in CLASSES:
        module, name = place.split(":")
        for node in ast.parse(host.module(module) or "").body:
            if not isinstance(node, ast.ClassDef) or node.name != name:
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name not in replaced:
                    for name in _reads(method):
                        found.setdefault(name, f"{node.name}.{method.name}")
    return found


def _reads(method: ast.FunctionDef) -> set[str]:
    """`draft_model.x` and `getattr(draft_model, "x")`; not what is asked with a default, or only once `hasattr` said yes."""
    reads: set[str] = set()
    guarded: set[str] = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == ARGUMENT:
            if isinstance(node.ctx, ast.Load):
                reads.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            subject, name = node.args[0], node.args[1]
            if isinstance(subject, ast.Name) and subject.id == ARGUMENT and isinstance(name, ast.Constant):
                if node.func.id == "getattr" and len(node.args) == 2:
                    reads.add(str(name.value))
                elif node.func.id in ("getattr", "hasattr"):
                    guarded.add(str(name.value))
    return reads - guarded


def replaced_methods() -> frozenset[str]:
    """Methods of the stock worker that ours does not call."""
    from trtllm_dspark.plugin.worker import HostedWorker

    extended = {"_forward_impl", "sample_and_accept_draft_tokens"}
    own = {name for name, value in vars(HostedWorker).items() if callable(value)}
    # what only replaced methods call
    return frozenset(own - extended) | {"_managed_ctx_pool", "_init_ctx_block_tables", "_store_context_kv_paged"}


def lacking(host: HostSource) -> dict[str, str]:
    """Of `asked`, what our drafter has not."""
    from trtllm_dspark.plugin.drafter import HostedMLADSpark

    has = set(dir(HostedMLADSpark)) | INSTANCE_ATTRIBUTES
    return {name: method for name, method in asked(host, replaced_methods()).items() if name not in has}


INSTANCE_ATTRIBUTES = frozenset(
    {"config", "logits_processor", "lm_head", "_runtime_position_ceiling", "embed_tokens", "backend"}
)
"""Set when a drafter is built, so that the class does not show them."""


def verdict(host: HostSource) -> HookVerdict:
    """For the doctor."""
    missing = lacking(host)
    place = CLASSES[1]
    if missing:
        what = ", ".join(f"{name} (read by {method})" for name, method in sorted(missing.items()))
        return HookVerdict(NAME, place, "changed", f"{place} reads of a drafter what ours has not: {what}. Report this.")
    return HookVerdict(NAME, place, "would apply", "all that the stock worker reads of a drafter is there.")
