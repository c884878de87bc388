"""What was measured, as one JSON document, and that document as Markdown tables."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from cute_kernels.bench import sensors, targets
from cute_kernels.bench.cases import DTYPE
from cute_kernels.bench.run import ABSENT, RIGHT, CaseResult, Outcome
from cute_kernels.bench.suites import Suite
from cute_kernels.bench.timing import MIN_ROUNDS, TIMED_S, Ceilings

SCHEMA = 2
Document = dict[str, Any]


def floor_us(flop: int, moved: int, copy: float, matmul: float) -> float:
    """What the machine needs at least, in microseconds: the larger of FLOP and bytes at their ceilings, both a second."""
    return 1e6 * max(flop / matmul, moved / copy)


def document(
    suite: str,
    held: Suite,
    machine: dict[str, Any],
    start: Ceilings,
    end: Ceilings | None,
    rounds: int,
    results: Sequence[CaseResult],
) -> Document:
    """Everything that a result file holds; plain JSON values.

    Args:
        suite, held: its name and itself. machine: see `machine.facts` and `machine.clocks`. start, end: ceilings before and
            after the cases; end None where it could not be measured. The larger of all counts. rounds: timed replays of each
            contestant, at most.
    """
    both = [measured for measured in (start, end) if measured is not None]
    copy = max(max(measured.copy, measured.elementwise) for measured in both)
    matmul = max(measured.matmul for measured in both)
    cases = [_case(result, copy, matmul) for result in results]
    return {
        "schema": SCHEMA,
        "suite": suite,
        "dtype": str(DTYPE).removeprefix("torch."),
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
        "left_out": [f"{name} of {kernel}" for kernel, name in sorted(held.left_out)],
        "targets": targets.held(held.targets, cases),
        "cases": cases,
    }


def _case(result: CaseResult, copy: float, matmul: float) -> Document:
    case, ours = result.case, [outcome for outcome in result.outcomes if outcome.ours]
    floor = floor_us(case.flop, case.bytes, copy, matmul)
    medians = {outcome.name: statistics.median(outcome.times_us) for outcome in result.outcomes if outcome.times_us}
    beside = {outcome.name: _beside(outcome, result.outcomes, medians) for outcome in result.outcomes}
    listed = []
    for outcome in result.outcomes:
        entry = _outcome(outcome) | {"beside": beside[outcome.name]}
        median, other = medians.get(outcome.name), medians.get(beside[outcome.name] or "")
        if median is not None:
            theirs, ours_us = (other, median) if outcome.ours else (median, other)
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
        "shape": dict(vars(case)),
        "flop": case.flop,
        "bytes": case.bytes,
        "floor_us": figure(floor),
        "sets": result.sets,
        "rounds": max((len(outcome.times_us) for outcome in result.outcomes), default=0),
        "sensors": sensors.summary(result.readings),
        "numerics_passed": bool(ours) and all(outcome.status == RIGHT for outcome in ours),
        "passed": result.passed,
        "reason": result.reason,
        "best_peer": next((beside[outcome.name] for outcome in ours), None),
        "contestants": listed,
    }


def _beside(outcome: Outcome, others: Sequence[Outcome], medians: dict[str, float]) -> str | None:
    """Who it is held against: ours against the fastest peer, a peer against the first of ours.

    One that plans on the device in each call is held against those who do, and against those who have no such plan; so is
    one that plans once.
    """
    if outcome.name not in medians:
        return None
    opposed = [
        other.name
        for other in others
        if other.ours != outcome.ours
        and other.name in medians
        and (other.planned == outcome.planned or None in (other.planned, outcome.planned))
    ]
    if outcome.ours:
        return min(opposed, key=lambda name: medians[name], default=None)
    return next(iter(opposed), None)


def _outcome(outcome: Outcome) -> Document:
    verdict, times = outcome.verdict, outcome.times_us
    deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else list(times) * 9
    return {
        "name": outcome.name,
        "ours": outcome.ours,
        "note": outcome.note,
        "planned": outcome.planned,
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
    """The machine, the ceilings, the rounds, one table a kernel with every case that was tried, and what was asked."""
    kernels = dict.fromkeys(case["kernel"] for case in document["cases"])
    parts = [machine_line(document), ceiling_line(document), rounds_line(document)]
    for kernel in kernels:
        parts.append(f"## {kernel}\n\n{table([case for case in document['cases'] if case['kernel'] == kernel])}")
    if document["targets"]:
        parts.append(f"## Asked and found\n\n{targets.HOW_TO_READ}\n\n{targets.table(document['targets'])}")
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


def rounds_line(document: Document) -> str:
    """How often everybody was timed, and who was not."""
    fewer = [f"{case['label']} {case['rounds']}" for case in document["cases"] if 0 < case["rounds"] < document["rounds"]]
    said = [f"{document['rounds']} rounds a case, all contestants in turn in each."]
    if fewer:
        said.append(f"Fewer, but at least {MIN_ROUNDS}, where they would take more than {TIMED_S:g} s: {', '.join(fewer)}.")
    if document["left_out"]:
        said.append(f"Not timed in this suite: {', '.join(document['left_out'])}.")
    return " ".join(said)


def table(cases: Sequence[Document]) -> str:
    """The cases of one kernel, a row each, and what their readers must know below."""
    ours = {entry["name"]: entry["ours"] for case in cases for entry in case["contestants"]}  # a case may have failed early
    first, *more = [name for name, own in ours.items() if own] or ["ours"]
    peers = {name: _counterpart(name, cases) or first for name, own in ours.items() if not own}
    heads = ["case", "floor us", f"{first}: us (p10 to p90)", "of the floor", "GB/s", "TFLOP/s", "error (plain torch)"]
    heads += [f"{name}: us" for name in more] + [f"{name}: us (x {other})" for name, other in peers.items()]
    heads += ["best peer", "MHz, W"]
    lines = [f"| {' | '.join(heads)} |", f"|{'--|' * len(heads)}"]
    for case in cases:
        entries = {name: {} for name in (first, *ours)} | {entry["name"]: entry for entry in case["contestants"]}
        own = entries[first]
        spread = f" ({_number(own.get('p10_us'))} to {_number(own.get('p90_us'))})"
        cells = [case["label"], _number(case["floor_us"]), _time(own, spread), _percent(own.get("share_of_floor"))]
        cells += [_number(own.get("gb_per_s")), _number(own.get("tflop_per_s")), _errors(own)]
        cells += [_time(entries[name], _standing(entries[name], case["best_peer"])) for name in more]
        cells += [_time(entries[name], f" ({_ratio(entries[name].get('ratio'))})") for name in peers]
        cells.append(f"{case['best_peer']}, {_ratio(own['ratio'])}" if case["best_peer"] else "none")
        cells.append(_load(case["sensors"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in _below(cases))]).rstrip()


def _counterpart(name: str, cases: Sequence[Document]) -> str | None:
    """Who of ours a peer is held against."""
    found = (entry.get("beside") for case in cases for entry in case["contestants"] if entry["name"] == name)
    return next((other for other in found if other), None)


def _standing(entry: Document, best_peer: str | None) -> str:
    """Beside another peer than the first of ours: which, and the ratio."""
    other = entry.get("beside")
    return "" if other in (None, best_peer) else f" ({other}, {_ratio(entry['ratio'])})"


def _load(found: Document | None) -> str:
    """Medians of clock and power while a case was timed, and whether the clock was held back."""
    if found is None:
        return ""
    held_back = f", held back {found['held_back']:.0%}" if found["held_back"] else ""
    return f"{found['sm_clock_mhz']['median']:,.0f}, {found['power_w']['median']:,.0f}{held_back}"


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
