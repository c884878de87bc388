"""`trtllm-dspark eval --multi-turn`: acceptance with prefix reuse off, on, and with the draft's part of it missing."""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trtllm_dspark.commands.pair import Pair
from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.engine.scheduler import Reuse
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.evaluation.lossless import compare_greedy
from trtllm_dspark.evaluation.measure import figure
from trtllm_dspark.evaluation.multi_turn import TurnsResult, conversations, run_turns
from trtllm_dspark.provenance import provenance

FIRST, THEN, ANSWER = 96, 32, 32  # tokens of the first turn, of each later one, and of an answer
NAMES = {"off": "off", "joint": "on", "target_only": "on, not the draft's: fault"}


def run(arguments: argparse.Namespace, pair: Pair, console: Console) -> int:
    """Returns the exit code: 1 where a text differs from the target's own."""
    assert pair.spec is not None and pair.spec.drafter is not None
    if pair.target.tokenizer is None:
        raise DSparkError(f"eval: a tokenizer is required, {pair.target_path} has none. Add tokenizer.json to it.")
    talks = conversations(pair.target.tokenizer, arguments.prompts, arguments.turns, first=FIRST, then=THEN)
    params = SamplingParams(ANSWER, ignore_eos=arguments.ignore_eos)
    modes = get_args(Reuse)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("conversations", total=len(talks) * arguments.turns * (len(modes) + 1))

        def hold(engine: Engine) -> TurnsResult:
            result = run_turns(engine, talks, params, batch=arguments.batch, progress=lambda n: progress.advance(task, n))
            engine.forget_prefixes()
            return result

        alone = hold(pair.plain)
        results = {
            mode: hold(
                Engine(
                    pair.target,
                    pair.spec.drafter,
                    num_drafts=pair.num_drafts,
                    max_batch=arguments.batch,
                    reuse=mode,
                )
            )
            for mode in modes
        }
    document = {mode: _figures(pair, alone, result) for mode, result in results.items()}
    report: dict[str, Any] = {
        "conversations": len(talks),
        "turns": len(talks) * arguments.turns,
        "batch": arguments.batch,
        "num_drafts": pair.num_drafts,
        "reuse": document,
        "lossless": all(figures["lossless"] for figures in document.values()),
        "provenance": provenance(),
    }
    table = Table("reuse", "accept_len", "verifications", "reused", "same text", box=None)
    for mode, figures in document.items():
        table.add_row(
            NAMES[mode],
            f"{results[mode].accept_len:.3f} ± {results[mode].stderr:.3f}",
            str(figures["verifications"]),
            str(figures["reused_tokens"]),
            "yes" if figures["lossless"] else "NO",
        )
    console.print(f"{len(talks)} conversations of {arguments.turns} turns")
    console.print(table)
    console.print("[dim]reused: prompt tokens not computed again; same text: as the target by itself[/dim]")
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["lossless"] else 1


def _figures(pair: Pair, alone: TurnsResult, result: TurnsResult) -> dict[str, Any]:
    """Behind a tie that fell the other way the histories differ: those turns cannot be compared, and are not counted."""
    both = zip(alone.completions, result.completions, strict=True)
    compared = [(expected, got) for expected, got in both if expected.prompt == got.prompt]
    divergences = [
        divergence
        for expected, got in compared
        if (divergence := compare_greedy(pair.target, expected.prompt, expected.tokens, got.tokens)) is not None
    ]
    return {
        "accept_len": figure(result.accept_len),
        "stderr": figure(result.stderr),
        "verifications": result.verifications,
        "reused_tokens": result.reused_tokens,
        "lossless": all(divergence.excused for divergence in divergences),
        "compared_turns": len(compared),
        "divergences": [str(divergence) for divergence in divergences],
    }
