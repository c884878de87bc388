"""What a suite asks of ours, beside what was found. From the cases of a document, so that the file and its tables agree."""

from collections.abc import Sequence
from typing import Any

from cute_kernels.bench.suites import BEST_PEER, FLOOR, Target

HOW_TO_READ = "The time of the best peer, of the floor, or of the same contestant on another case, over ours."


def held(targets: Sequence[Target], cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each target whose case was tried: what was asked and, by each of ours, what was found.

    Args:
        cases: of a document, see `report.document`.
    Returns:
        Each with kernel, label, at_least, beside (in words) and found: by the name of ours the time of `beside` over its own
        and the name of the peer, or None for both where there is no such time.
    """
    by_name = {(case["kernel"], case["label"]): case for case in cases}
    asked = []
    for target in targets:
        case = by_name.get((target.case.kernel, target.case.label))
        if case is None:
            continue
        beside = target.beside if isinstance(target.beside, str) else target.beside.label
        other = None if isinstance(target.beside, str) else by_name.get((target.beside.kernel, target.beside.label))
        found = {entry["name"]: _found(entry, target, other) for entry in case["contestants"] if entry["ours"]}
        asked.append(
            {
                "kernel": case["kernel"],
                "label": case["label"],
                "at_least": round(target.at_least, 4),
                "beside": beside,
                "found": found,
            }
        )
    return asked


def _found(entry: dict[str, Any], target: Target, other: dict[str, Any] | None) -> dict[str, Any]:
    if target.beside == BEST_PEER:
        return {"ratio": entry.get("ratio"), "peer": entry.get("beside")}
    if target.beside == FLOOR:
        return {"ratio": entry.get("share_of_floor"), "peer": None}
    theirs = next((e["median_us"] for e in (other or {"contestants": ()})["contestants"] if e["name"] == entry["name"]), None)
    own = entry["median_us"]
    return {"ratio": round(theirs / own, 4) if theirs and own else None, "peer": None}


def table(asked: Sequence[dict[str, Any]]) -> str:
    """A row for each target: what is asked, and by each of ours the ratio and by how much it is met or missed."""
    names = list(dict.fromkeys(name for target in asked for name in target["found"]))
    heads = ["case", "asked", *names]
    lines = [f"| {' | '.join(heads)} |", f"|{'--|' * len(heads)}"]
    for target in asked:
        cells = [f"{target['kernel']} {target['label']}", f"{target['at_least']:.3g}x {target['beside']}"]
        cells += [_verdict(target["found"].get(name), target["at_least"]) for name in names]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(found: dict[str, Any] | None, at_least: float) -> str:
    if found is None:
        return ""
    if found["ratio"] is None:
        return "nothing to hold it against"
    beyond = found["ratio"] / at_least - 1
    peer = f" {found['peer']}" if found["peer"] else ""
    return f"{found['ratio']:.3f}x{peer}: {'met' if beyond >= 0 else 'missed'} by {abs(beyond):.1%}"
