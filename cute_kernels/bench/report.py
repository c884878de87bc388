"""What was measured, as one JSON document, and that document as Markdown tables."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from cute_kernels.bench.run import ABSENT, RIGHT, CaseResult, Outcome
from cute_kernels.bench.timing import Ceilings

SCHEMA = 1
Document = dict[str, Any]


def floor_us(flop: int, moved: int, copy: float, matmul: float) -> float:
    """What the machine needs at least, in microseconds: the larger of FLOP and bytes at their ceilings, both a second."""
    return 1e6 * max(flop / matmul, moved / copy)


def document(
    suite: str, machine: dict[str, Any], start: Ceilings, end: Ceilings | None, rounds: int, results: Sequence[CaseResult]
) -> Document:
    """Everything that a result file holds; plain JSON values.

    Args:
        machine: see `machine.facts` and `machine.clocks`. start, end: ceilings before and after the cases; end None where it
            could not be measured. The larger of all counts. rounds: timed replays of each contestant.
    """
    both = [measured for measured in (start, end) if measured is not None]
    copy = max(max(measured.copy, measured.elementwise) for measured in both)
    matmul = max(measured.matmul for measured in both)
    return {
        "schema": SCHEMA,
        "suite": suite,
        "machine": machine,
        "ceilings": {
            "copy_gb_per_s": figure(copy / 1e9),
            "matmul_tflop_per_s": figure(matmul / 1e12),
            "measured": {
                when: None
                if measured is None
                else {
                    "copy_gb_per_s": figure(measured.copy / 1e9),
                    "elementwise_gb_per_s": figure(measured.elementwise / 1e9),
                    "matmul_tflop_per_s": figure(measured.matmul / 1e12),
                }
                for when, measured in (("start", start), ("end", end))
            },
        },
        "rounds": rounds,
        "passed": all(result.passed for result in results),
        "cases": [_case(result, copy, matmul) for result in results],
    }


def _case(result: CaseResult, copy: float, matmul: float) -> Document:
    case, ours = result.case, [outcome for outcome in result.outcomes if outcome.ours]
    floor = floor_us(case.flop, case.bytes, copy, matmul)
    medians = {outcome.name: statistics.median(outcome.times_us) for outcome in result.outcomes if outcome.times_us}
    peers = {outcome.name: medians[outcome.name] for outcome in result.outcomes if outcome.name in medians and not outcome.ours}
    best = min(peers, key=lambda name: peers[name], default=None)
    own = next((medians[outcome.name] for outcome in ours if outcome.name in medians), None)
    listed = []
    for outcome in result.outcomes:
        entry = _outcome(outcome)
        median = medians.get(outcome.name)
        if median is not None:
            theirs, ours_us = (peers.get(best or ""), median) if outcome.ours else (median, own)
            entry |= {
                "gb_per_s": figure(case.bytes / median / 1e3),
                "tflop_per_s": figure(case.flop / median / 1e6),
                "share_of_copy": figure(1e6 * case.bytes / median / copy),
                "share_of_matmul": figure(1e6 * case.flop / median / matmul),
                "share_of_floor": figure(floor / median),
                "ratio": figure(theirs / ours_us) if theirs and ours_us else None,
            }
        listed.append(entry)
    return {
        "kernel": case.kernel,
        "label": case.label,
        "flop": case.flop,
        "bytes": case.bytes,
        "floor_us": figure(floor),
        "sets": result.sets,
        "numerics_passed": bool(ours) and all(outcome.status == RIGHT for outcome in ours),
        "passed": result.passed,
        "reason": result.reason,
        "best_peer": best,
        "contestants": listed,
    }


def _outcome(outcome: Outcome) -> Document:
    verdict, times = outcome.verdict, outcome.times_us
    deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else list(times) * 9
    return {
        "name": outcome.name,
        "ours": outcome.ours,
        "note": outcome.note,
        "status": outcome.status,
        "reason": outcome.reason,
        "numerics_passed": None if verdict is None else verdict.complaint is None,
        "checked": None if verdict is None else verdict.checked,
        "error": None if verdict is None or verdict.error is None else figure(verdict.error),
        "error_allowed": None if verdict is None else figure(verdict.allowed),
        "error_of_plain_torch": None if verdict is None else figure(verdict.baseline),
        "median_us": figure(statistics.median(times)) if times else None,
        "p10_us": figure(deciles[0]) if times else None,
        "p90_us": figure(deciles[-1]) if times else None,
    }


def figure(value: float) -> float | None:
    """As a result file holds it: six significant digits, None for nan and infinity, which JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def markdown(document: Document) -> str:
    """The machine, the ceilings, and one table a kernel; every case that was tried is in it."""
    kernels = dict.fromkeys(case["kernel"] for case in document["cases"])
    parts = [machine_line(document), ceiling_line(document)]
    for kernel in kernels:
        parts.append(f"## {kernel}\n\n{table([case for case in document['cases'] if case['kernel'] == kernel])}")
    return "\n\n".join(parts) + "\n"


def machine_line(document: Document) -> str:
    """Device, clocks, versions, commit and date, in one paragraph."""
    machine = document["machine"]
    major, minor = machine["capability"].split(".")
    known = [
        f"{machine['device']} (sm_{major}{minor}, {machine['multiprocessors']} SMs)",
        _if(machine["sm_clock_mhz"], "SM clock {:,.0f} MHz under the matmul"),
        _if(machine["sm_clock_max_mhz"], "{:,.0f} at most"),
        _if(machine["power_limit_w"], "{:,.0f} W"),
        _if(machine["driver"], "driver {}"),
        _if(machine["cuda"], "CUDA {}"),
        *(f"{package} {version}" for package, version in machine["versions"].items() if version),
        _if(machine["commit"], "commit {:.12}" + (" with changes" if machine["dirty"] else "")),
        machine["date"],
    ]
    return ", ".join(item for item in known if item) + "."


def ceiling_line(document: Document) -> str:
    """Both ceilings, as they were measured at the start and at the end."""
    found = document["ceilings"]
    runs = "; ".join(
        f"at the {when} copy_ {m['copy_gb_per_s']:,.0f}, an elementwise kernel {m['elementwise_gb_per_s']:,.0f} GB/s, "
        f"matmul {m['matmul_tflop_per_s']:,.0f} TFLOP/s"
        for when, m in found["measured"].items()
        if m is not None
    )
    return (
        f"Ceilings of this run: {found['copy_gb_per_s']:,.0f} GB/s read and written, {found['matmul_tflop_per_s']:,.0f} "
        f"TFLOP/s of an 8192^3 product in bf16 ({runs})."
    )


def table(cases: Sequence[Document]) -> str:
    """The cases of one kernel, a row each, and what their readers must know below."""
    ours = {entry["name"]: entry["ours"] for case in cases for entry in case["contestants"]}  # a case may have failed early
    first, *more = [name for name, own in ours.items() if own] or ["ours"]
    peers = [name for name, own in ours.items() if not own]
    heads = ["case", "floor us", f"{first}: us (p10 to p90)", "of the floor", "GB/s", "TFLOP/s", "error (plain torch)"]
    heads += [f"{name}: us" for name in more] + [f"{name}: us (x {first})" for name in peers] + ["best peer"]
    lines = [f"| {' | '.join(heads)} |", f"|{'--|' * len(heads)}"]
    for case in cases:
        entries = {name: {} for name in (first, *ours)} | {entry["name"]: entry for entry in case["contestants"]}
        own = entries[first]
        spread = f" ({_number(own.get('p10_us'))} to {_number(own.get('p90_us'))})"
        cells = [case["label"], _number(case["floor_us"]), _time(own, spread), _percent(own.get("share_of_floor"))]
        cells += [_number(own.get("gb_per_s")), _number(own.get("tflop_per_s")), _errors(own)]
        cells += [_time(entries[name]) for name in more]
        cells += [_time(entries[name], f" ({_ratio(entries[name].get('ratio'))})") for name in peers]
        cells.append(f"{case['best_peer']}, {_ratio(own['ratio'])}" if case["best_peer"] else "none")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in _below(cases))]).rstrip()


def _below(cases: Sequence[Document]) -> list[str]:
    """Lines under a table: notes, each once, and every reason."""
    named: dict[str, dict[str, None]] = {}  # note -> names
    reasons = [f"{case['label']}: not timed: {case['reason']}" for case in cases if case["reason"]]
    for case in cases:
        for entry in case["contestants"]:
            told = f"absent: {entry['reason']}." if entry["status"] == ABSENT else entry["note"]
            if told:
                named.setdefault(told, {})[entry["name"]] = None
            if entry["status"] not in (RIGHT, ABSENT) and entry["reason"] not in (case["reason"] or ""):
                reasons.append(f"{case['label']}, {entry['name']}: {entry['status']}: {entry['reason']}")
    return [f"{', '.join(names)}: {told}" for told, names in named.items()] + reasons


def _time(entry: Document, more: str = "") -> str:
    """A contestant's cell: its median, or why there is none."""
    if entry.get("median_us") is None:
        status = entry.get("status", "not tried")
        return "right, not timed" if status == RIGHT else status
    return f"{_number(entry['median_us'])}{more}"


def _errors(entry: Document) -> str:
    if entry.get("error") is None:
        return ""
    if entry["error"] == entry["error_allowed"] == 0:
        return "exact"
    return f"{entry['error']:.1e} ({entry['error_of_plain_torch']:.1e})"


def _number(value: float | None) -> str:
    """Three significant digits or all before the point; nothing for None and 0."""
    return "" if not value else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _if(value: Any, text: str) -> str:
    return "" if value is None else text.format(value)
