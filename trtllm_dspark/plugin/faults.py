"""What the stock DSpark worker gets wrong with an MLA draft, each with the test that says whether this host still does.

A fault is read off the host's source: the names that a method uses. Where the source has changed beyond recognition, the
fault counts as present: ours does the same job without it. A host without any of these keeps its own worker.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trtllm_dspark.plugin.hooks import DFLASH
from trtllm_dspark.plugin.probing import HostSource

Names = frozenset[str]


@dataclass(frozen=True)
class Fix:
    """One fault and what we do instead.

    Attributes:
        name: ours. place: the method that has it. present: from the names that this method uses (None: no such method).
        fault: what goes wrong. doing: what our worker does.
    """

    name: str
    place: str
    present: Callable[[Names | None], bool]
    fault: str
    doing: str


PAGE_BOUND = "page bound"
KEPT_WHILE_ABSENT = "context kept while absent"
BATCHED_PREFILL = "one append at prefill"
ABSOLUTE_POSITIONS = "absolute positions"
SHARED_PREFIX = "shared prefix untouched"
NO_LOOK_AHEAD = "no rejected rows in the pool"
FIRST_DRAFTS = "drafts after prefill"
DEVICE_ACCEPTANCE = "acceptance in graphs"

FIXES = (
    Fix(
        PAGE_BOUND,
        f"{DFLASH}:DFlashWorker._refresh_ctx_block_tables",
        lambda names: names is None or not names & {"kv_cache_map", "capacity", "get_batch_cache_indices"},
        "the pages of a request are counted by the sign of its table entries, and the C++ manager writes 0 where there is "
        "none: writes past the grant reach page 0, which is another request's",
        "takes the bound from what the manager granted the request, and writes nothing past it",
    ),
    Fix(
        KEPT_WHILE_ABSENT,
        f"{DFLASH}:DFlashSpecMetadata.prepare",
        lambda names: names is None or {"_req_to_slot", "pop"} <= names,
        "a request that is left out of one batch loses its draft context",
        "keeps a request's context for as long as the manager keeps its pages",
    ),
    Fix(
        BATCHED_PREFILL,
        f"{DFLASH}:DFlashWorker._store_prefill_context",
        lambda names: names is None or bool(names & {"item", "tolist"}),
        "the prompts of a step are stored one by one, with lengths and positions read back from the device",
        "stores all prompt tokens of a step in one append, without a host sync",
    ),
    Fix(
        ABSOLUTE_POSITIONS,
        f"{DFLASH}:DFlashWorker.prepare_1st_drafter_inputs",
        lambda names: names is None or "position_ids" not in names,
        "positions are counted from where the worker first saw a request: 0 for a long prompt that came from elsewhere",
        "takes positions from the target's own",
    ),
    Fix(
        SHARED_PREFIX,
        f"{DFLASH}:DFlashWorker._assign_slot",
        lambda names: names is None or "_ctx_len" in names,
        "a request that lost its count is written again from position 0, over pages that others share with it",
        "never writes below the first position that the target computed for the request",
    ),
    Fix(
        NO_LOOK_AHEAD,
        f"{DFLASH}:DFlashWorker.prepare_1st_drafter_inputs",
        lambda names: names is None or bool(names & {"mul_", "clamp_"}),
        "rows of rejected drafts are written as zeros, at the last page's end over a valid row",
        "writes accepted rows only; the block's own latents are passed beside the pool",
    ),
    Fix(
        FIRST_DRAFTS,
        f"{DFLASH}:DFlashWorker._forward_impl",
        lambda names: names is None or "write_context_onehot_draft_probs" in names,
        "a request's first verification is spent on placeholder drafts",
        "drafts straight after the prompt, so that the first verification has real drafts",
    ),
    Fix(
        DEVICE_ACCEPTANCE,
        f"{DFLASH}:DFlashWorker._forward_impl",
        lambda names: names is None or "on_accept" in names or "_accept_stats" not in names,
        "accepted drafts are not counted in CUDA graphs, where a server spends its time",
        "counts on the device, in graphs too",
    ),
)


@dataclass(frozen=True)
class Diagnosis:
    """A fix on this host. present: whether it is needed."""

    fix: Fix
    present: bool


def diagnose(host: HostSource) -> tuple[Diagnosis, ...]:
    """Every fault, present or not, in the table's order."""
    found = []
    for fix in FIXES:
        symbol = host.find(fix.place)
        found.append(Diagnosis(fix, fix.present(symbol.names if symbol else None)))
    return tuple(found)
