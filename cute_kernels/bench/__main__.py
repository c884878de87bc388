"""The command `python -m cute_kernels.bench`. Exit code 1: something that was tried was wrong or failed; 2: nothing was."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from cute_kernels.bench import machine, report, sensors, timing
from cute_kernels.bench.cases import Case
from cute_kernels.bench.contestants import CONTESTANTS
from cute_kernels.bench.run import CaseResult, run_case
from cute_kernels.bench.suites import SUITES, select
from cute_kernels.errors import KernelError, one_line

WHO = "cute_kernels.bench"
ROUNDS, QUICK_ROUNDS = 30, 7


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, report. Returns the exit code."""
    chosen = parser().parse_args(argv)
    try:
        cases = select(chosen.suite, chosen.only)
        if not cases:
            raise KernelError(f"{WHO}: a case that contains {chosen.only!r} is required, {chosen.suite} has none. Use --list.")
        if chosen.list:
            print("\n".join(map(line_of, cases)))
            return 0
        for option, path in (("--out", chosen.out), ("--md", chosen.md)):
            if path is not None and not path.absolute().parent.is_dir():
                raise KernelError(f"{WHO}: {option} needs a folder that exists, {path.parent} does not. Make it.")
        document = measured(chosen.suite, cases, QUICK_ROUNDS if chosen.quick else ROUNDS, cuda_device())
    except KernelError as error:
        print(error, file=sys.stderr)
        return 2
    tables, text = report.markdown(document), json.dumps(document, allow_nan=False)
    print(f"\n{tables}")
    if chosen.md is not None:
        chosen.md.write_text(tables)
    if chosen.out is not None:
        chosen.out.write_text(f"{text}\n")
    if chosen.json:
        print(text)
    return 0 if document["passed"] else 1


def parser() -> argparse.ArgumentParser:
    """Every option."""
    made = argparse.ArgumentParser(
        prog=f"python -m {WHO}", description="Time every kernel beside its peers, after a correctness gate."
    )
    made.add_argument("--suite", choices=list(SUITES), default="kernels", help="which cases (default kernels)")
    made.add_argument(
        "--only", default="", metavar="TEXT", help="cases whose kernel and shape, as --list has them, contain this"
    )
    made.add_argument("--quick", action="store_true", help=f"at most {QUICK_ROUNDS} timed replays of each instead of {ROUNDS}")
    made.add_argument("--list", action="store_true", help="print the cases; needs no GPU")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the JSON document here")
    made.add_argument("--md", type=Path, metavar="FILE", help="write the Markdown tables here")
    made.add_argument("--json", action="store_true", help="print the JSON document as the last line")
    return made


def cuda_device() -> torch.device:
    """The current CUDA device.

    Raises:
        KernelError: there is none.
    """
    if not torch.cuda.is_available():
        raise KernelError(f"{WHO}: a CUDA device is required, torch sees none. Use --list to see the cases.")
    return torch.device("cuda", torch.cuda.current_device())


def line_of(case: Case) -> str:
    """A case as --list prints it."""
    return f"{case.kernel} {case.label}: {case.bytes / 1e6:,.2f} MB, {case.flop / 1e9:,.2f} GFLOP"


def measured(suite: str, cases: Sequence[Case], rounds: int, device: torch.device) -> report.Document:
    """Ceilings, every case, ceilings again. Prints a line when a case is done."""
    facts = machine.facts(device)
    start = timing.ceilings(rounds, device, busy=lambda: facts.update(machine.clocks(device)))
    watched = sensors.Sensors.open(machine.smi_name(device)) if device.type == "cuda" else None
    results = []
    for case in cases:
        entered = [entry for entry in CONTESTANTS[case.kernel] if (case.kernel, entry.name) not in SUITES[suite].left_out]
        results.append(run_case(case, entered, rounds, device, facts["l2_bytes"], watched))
        print(progress(results[-1]), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    try:
        end = timing.ceilings(rounds, device)
    except Exception as error:  # after a fault of some case the device may be gone; what was measured before stands
        print(f"{WHO}: no ceilings at the end: {one_line(error)}", file=sys.stderr)
        end = None
    return report.document(suite, SUITES[suite], facts, start, end, rounds, results)


def progress(result: CaseResult) -> str:
    """What came out of a case, in a line."""
    case = result.case
    if result.reason is not None:
        return f"{case.kernel} {case.label}: not timed: {result.reason}"
    told = [
        f"{outcome.name} {f'{median(outcome.times_us):,.1f} us' if outcome.times_us else outcome.status}"
        for outcome in result.outcomes
    ]
    return f"{case.kernel} {case.label}: {', '.join(told)}"


if __name__ == "__main__":
    sys.exit(main())
