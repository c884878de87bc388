"""`trtllm-dspark eval`: acceptance over many prompts, with the text's correctness beside it."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trtllm_dspark.commands import multi_turn
from trtllm_dspark.commands.pair import Pair, encode, load_pair
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.evaluation.lossless import Divergence, compare_greedy
from trtllm_dspark.evaluation.measure import Measurement, TimedRuns, figure, measure, run_interleaved
from trtllm_dspark.evaluation.stdlib_text import held_out_prompts
from trtllm_dspark.provenance import provenance

BAR = 40


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 where a text differs from the target's own."""
    console = Console(highlight=False)
    if arguments.json is not None and not Path(arguments.json).resolve().parent.is_dir():
        raise DSparkError(f"eval: --json needs a folder that exists, {arguments.json} is in none. Make the folder first.")
    pair = load_pair(arguments, max_batch=arguments.batch)
    assert pair.spec is not None
    for note in pair.notes:
        console.print(f"[dim]{note}[/dim]")
    if arguments.multi_turn:
        return multi_turn.run(arguments, pair, console)
    prompts = _prompts(arguments, pair)
    params = SamplingParams(arguments.max_new_tokens, ignore_eos=arguments.ignore_eos)
    engines = [pair.spec] if arguments.no_baseline else [pair.spec, pair.plain]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=len(prompts) * arguments.repeats)
        runs = run_interleaved(
            engines, prompts, params, repeats=arguments.repeats, progress=lambda done: progress.advance(task, done)
        )
    result = measure(runs[0].completions, pair.num_drafts)
    divergences = None if arguments.no_baseline else _divergences(pair, prompts, runs)
    document = _document(arguments, pair, prompts, result, runs, divergences)
    _show(console, pair, result, document)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(document, indent=2) + "\n")
        console.print(f"[dim]written: {arguments.json}[/dim]")
    return 0 if document["lossless"] in (True, None) else 1


def _prompts(arguments: argparse.Namespace, pair: Pair) -> list[list[int]]:
    if arguments.prompts_file is None:
        if pair.target.tokenizer is None:
            raise DSparkError(f"eval: a tokenizer is required, {pair.target_path} has none. Add tokenizer.json to it.")
        return held_out_prompts(pair.target.tokenizer, arguments.prompts, arguments.prompt_tokens)
    path = Path(arguments.prompts_file)
    if not path.is_file():
        raise DSparkError(f"eval: --prompts-file must be a file with one JSON string a line, {path} is none. Check the path.")
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            text = json.loads(line)
        except json.JSONDecodeError as error:
            raise DSparkError(f"eval: line {number} of {path} must be a JSON string, it is not: {error.msg}.") from error
        if not isinstance(text, str) or not text:
            raise DSparkError(f"eval: line {number} of {path} must be a JSON string with text, it is {text!r}.")
        prompts.append(encode(pair, text))
    if not prompts:
        raise DSparkError(f"eval: --prompts-file must hold a prompt, {path} is empty. Write one JSON string a line.")
    return prompts[: arguments.prompts]


def _divergences(pair: Pair, prompts: list[list[int]], runs: list[TimedRuns]) -> list[tuple[int, Divergence]]:
    found = []
    for index, prompt in enumerate(prompts):
        divergence = compare_greedy(pair.target, prompt, runs[1].completions[index].tokens, runs[0].completions[index].tokens)
        if divergence is not None:
            found.append((index, divergence))
    return found


def _document(
    arguments: argparse.Namespace,
    pair: Pair,
    prompts: list[list[int]],
    result: Measurement,
    runs: list[TimedRuns],
    divergences: list[tuple[int, Divergence]] | None,
) -> dict[str, Any]:
    acceptance = result.acceptance
    lossless = None if divergences is None else all(divergence.excused for _, divergence in divergences)
    seconds = {"spec": [round(s, 4) for s in runs[0].seconds]}
    if divergences is not None:
        seconds["target_only"] = [round(s, 4) for s in runs[1].seconds]
    return {
        "accept_len": figure(acceptance.accept_len),
        "accept_len_stderr": figure(result.accept_len_stderr),
        "accept_len_first16": figure(result.accept_len_first16),
        "accept_rate": figure(acceptance.accept_rate),
        "accept_rate_at": [figure(rate) for rate in acceptance.accept_rate_at],
        "histogram": list(acceptance.histogram),
        "distinct_4grams": figure(result.distinct_4grams),
        "lossless": lossless,
        "divergences": None if divergences is None else [f"prompt {i}: {d}" for i, d in divergences],
        "speed_ratio": figure(runs[1].median / runs[0].median) if lossless else None,
        "seconds": seconds,
        "num_drafts": pair.num_drafts,
        "prompts": result.prompts,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": result.new_tokens,
        "verifications": acceptance.verifications,
        "batch": arguments.batch,
        "target": pair.target_path.name,
        "draft": pair.draft_path.name if pair.draft_path else None,
        "notes": list(pair.notes),
        "provenance": provenance(),
    }


def _show(console: Console, pair: Pair, result: Measurement, document: dict[str, Any]) -> None:
    acceptance = result.acceptance
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("accept_len", f"{acceptance.accept_len:.2f} ± {result.accept_len_stderr:.2f} over {result.prompts} prompts")
    table.add_row("  first 16 new tokens", f"{result.accept_len_first16:.2f}")
    table.add_row("accept_rate", f"{acceptance.accept_rate:.1%} of {acceptance.submitted} drafts")
    table.add_row("distinct 4-grams", f"{result.distinct_4grams:.0%}")
    lossless = {True: "yes", False: "NO", None: "not checked"}[document["lossless"]]
    table.add_row("identical to target-only", lossless)
    if document["speed_ratio"] is not None:
        table.add_row("speed ratio", f"{document['speed_ratio']:.2f}x target only, same engine, batch {document['batch']}")
    console.print(table)
    for line in document["divergences"] or ():
        console.print(f"  {line}")
    for k, rate in enumerate(acceptance.accept_rate_at, 1):
        if math.isfinite(rate):
            console.print(f"  accept_rate@{k}  {'█' * round(rate * BAR):<{BAR}} {rate:.2f}")
