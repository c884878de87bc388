"""`python -m cute_kernels.bench.plot RESULT.json OUT.png`: microseconds of block_attention against the context, log-log.

One panel for each batch of the hopper suite's sweep: ours, the peers that count there, and the floor of that run.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from cute_kernels.bench.report import SCHEMA
from cute_kernels.bench.suites import SWEEP
from cute_kernels.errors import KernelError

WHO = "cute_kernels.bench.plot"
FLOOR = "floor"
STYLES: dict[str, dict[str, Any]] = {  # in the order of the legend
    "ours": {"color": "#0072b2", "marker": "o", "linewidth": 2.0},
    "flashmla": {"color": "#d55e00", "marker": "s", "linewidth": 1.2},
    "flashinfer fa3": {"color": "#009e73", "marker": "^", "linewidth": 1.2},
    FLOOR: {"color": "#666666", "linestyle": "--", "linewidth": 1.2},
}
Line = list[tuple[int, float]]
"""(context in tokens, microseconds a call), by context."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, read, draw. Returns the exit code: 2 where nothing was drawn."""
    made = argparse.ArgumentParser(prog=f"python -m {WHO}", description="Draw block_attention against the context.")
    made.add_argument("result", type=Path, metavar="RESULT.json", help="what `python -m cute_kernels.bench --out` wrote")
    made.add_argument("picture", type=Path, metavar="OUT.png")
    chosen = made.parse_args(argv)
    try:
        draw(chosen.picture, read(chosen.result))
    except (KernelError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def read(path: Path) -> dict[str, Any]:
    """A document of the bench.

    Raises:
        KernelError: the file cannot be read, or holds something else.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise KernelError(f"{WHO}: a result file of the bench is required, {path} is none: {error}.") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise KernelError(f"{WHO}: a result file of schema {SCHEMA} is required, {path} has {schema}. Run the bench again.")
    return document


def panels(document: dict[str, Any]) -> dict[int, dict[str, Line]]:
    """By batch the lines by name. A contestant has a point only where it was right and timed.

    Raises:
        KernelError: nothing of the sweep was timed.
    """
    swept = {case.label: case for case in SWEEP}
    found: dict[int, dict[str, Line]] = {}
    for entry in document["cases"]:
        case = swept.get(entry["label"]) if entry["kernel"] == "block_attention" else None
        times = {contestant["name"]: contestant["median_us"] for contestant in entry["contestants"]}
        if case is None or not times.get("ours"):
            continue
        lines = found.setdefault(case.batch, {name: [] for name in STYLES})
        for name, line in lines.items():
            us = entry["floor_us"] if name == FLOOR else times.get(name)
            if us:
                line.append((case.context, us))
    if not found:
        raise KernelError(f"{WHO}: a timed case of the sweep is required, the file has none. Run --suite hopper.")
    return {batch: {name: sorted(line) for name, line in found[batch].items() if line} for batch in sorted(found)}


def title(document: dict[str, Any]) -> str:
    """Kernel, device, day, dtype and shape; and what is in the clock."""
    machine, case = document["machine"], SWEEP[0]
    return (
        f"block_attention, {machine['device']}, {machine['date'][:10]}, {document['dtype']}, pages of {case.page_size}, "
        f"H={case.heads}, S={case.rows}\nattention, combine, and the plan where it is made on the device"
    )


def draw(path: Path, document: dict[str, Any]) -> None:
    """Write the picture.

    Raises:
        KernelError: the path is no PNG in a folder that exists, or there is nothing to draw.
        ImportError: matplotlib is not installed.
    """
    if path.suffix.lower() != ".png" or not path.absolute().parent.is_dir():
        raise KernelError(f"{WHO}: a .png in a folder that exists is required, came {path}. Give such a path.")
    found = panels(document)
    try:
        figure_module = import_module("matplotlib.figure")
    except ImportError:
        raise ImportError(f"{WHO}: matplotlib is required. Install it: pip install 'trtllm-dspark[plot]'.") from None
    figure = figure_module.Figure(figsize=(5 * len(found), 4.6), layout="constrained")
    every = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (batch, lines) in zip(every, found.items(), strict=True):
        for name, line in lines.items():
            axes.loglog(*zip(*line, strict=True), label=name, markersize=4.5, **STYLES[name])
        contexts = sorted({context for line in lines.values() for context, _ in line})
        axes.set_xticks(contexts, [f"{context // 1024}k" for context in contexts], minor=False)
        axes.minorticks_off()
        axes.set_title(f"B = {batch}", fontsize=10)
        axes.set_xlabel("context, tokens")
        axes.grid(True, which="major", linewidth=0.4, alpha=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].set_ylabel("us a call")
    every[0].legend(frameon=False, fontsize=9)
    figure.suptitle(title(document), fontsize=10)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
