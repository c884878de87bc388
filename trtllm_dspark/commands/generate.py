"""`trtllm-dspark generate`: stream text with the accepted drafts marked, then say how it went."""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_dspark.commands.pair import Pair, encode, load_pair
from trtllm_dspark.engine.requests import Commit, Completion, SamplingParams
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.evaluation.lossless import compare_greedy
from trtllm_dspark.evaluation.measure import measure, run_interleaved
from trtllm_dspark.evaluation.stdlib_text import held_out_prompts
from trtllm_dspark.stats import distinct_ngrams

PROMPTS, SHOWN = 24, 10  # of the prompts that `eval` takes, one near their mean in accept_len and in repetition


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 where --compare finds another text than the target's own."""
    if arguments.compare and arguments.no_spec:
        raise DSparkError("generate: --compare runs with and without a drafter, --no-spec takes it away. Give one of them.")
    console = Console(highlight=False, soft_wrap=True)
    pair = load_pair(arguments, speculate=not arguments.no_spec)
    prompt = _prompt(arguments, pair)
    params = SamplingParams(arguments.max_new_tokens, stop=tuple(arguments.stop), ignore_eos=arguments.ignore_eos)
    for note in pair.notes:
        console.print(f"[dim]{note}[/dim]", markup=True)
    completion, seconds = _stream(console, pair, prompt, params)
    table = _summary(pair, completion, seconds)
    identical = True
    if arguments.compare:
        identical = _compare(table, pair, prompt, params, arguments.repeats)
    console.print(table)
    return 0 if identical else 1


def _prompt(arguments: argparse.Namespace, pair: Pair) -> list[int]:
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise DSparkError("generate: one prompt is required, PROMPT and --prompt-file both came. Give one of them.")
    if arguments.prompt_file is not None:
        path = Path(arguments.prompt_file)
        if not path.is_file():
            raise DSparkError(f"generate: --prompt-file must be a text file, {path} is none. Check the path.")
        return encode(pair, path.read_text())
    if arguments.prompt is not None:
        return encode(pair, arguments.prompt)
    if pair.target.tokenizer is None:
        raise DSparkError(f"generate: a tokenizer is required, {pair.target_path} has none. Add tokenizer.json to it.")
    return held_out_prompts(pair.target.tokenizer, PROMPTS, 128)[SHOWN]


def _stream(console: Console, pair: Pair, prompt: list[int], params: SamplingParams) -> tuple[Completion, float]:
    engine = pair.spec or pair.plain
    tokenizer = pair.target.tokenizer
    if tokenizer is not None:
        shown = tokenizer.decode(prompt[-64:])
        console.print(Text(("…" if len(prompt) > 64 else "") + shown, style="dim"), end="")
    start = time.perf_counter()
    stream = engine.stream(prompt, params)
    try:
        while True:
            commit = next(stream)
            console.print(_marked(commit, colour=console.is_terminal), end="")
            sys.stdout.flush()
    except StopIteration as end:
        seconds = time.perf_counter() - start
        console.print()
        return end.value, seconds


def _marked(commit: Commit, *, colour: bool) -> Text:
    """Accepted drafts in green on a terminal, between ⟨ and ⟩ elsewhere; the target's own tokens as they are."""
    drafted = "".join(commit.pieces[: commit.accepted])
    own = "".join(commit.pieces[commit.accepted :])
    if not colour:
        return Text((f"⟨{drafted}⟩" if drafted else "") + own)
    return Text.assemble((drafted, "green"), own)


def _summary(pair: Pair, completion: Completion, seconds: float) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    count = len(completion.tokens)
    table.add_row("new tokens", f"{count} ({completion.finish}), {count / seconds:.1f} a second")
    if pair.spec is not None:
        result = measure([completion], pair.num_drafts)
        acceptance = result.acceptance
        table.add_row("target passes", f"{acceptance.verifications} after the prompt's, {pair.num_drafts} drafts each")
        table.add_row("accept_len", f"{acceptance.accept_len:.2f}  (first 16 tokens: {result.accept_len_first16:.2f})")
        table.add_row("accept_rate", f"{acceptance.accept_rate:.1%}")
    table.add_row("distinct 4-grams", f"{distinct_ngrams(completion.tokens):.0%}")
    return table


def _compare(table: Table, pair: Pair, prompt: list[int], params: SamplingParams, repeats: int) -> bool:
    assert pair.spec is not None
    spec, plain = run_interleaved([pair.spec, pair.plain], [prompt], params, repeats=repeats)
    divergence = compare_greedy(pair.target, prompt, plain.completions[0].tokens, spec.completions[0].tokens)
    table.add_row("seconds, median of " + str(repeats), f"{spec.median:.3f} with the drafter, {plain.median:.3f} target only")
    identical = divergence is None or divergence.excused
    if identical:
        table.add_row("speed ratio", f"{plain.median / spec.median:.2f}x target only, same engine")
    said = "yes" if divergence is None else f"{'yes, up to a tie' if divergence.excused else 'NO'}: {divergence}"
    table.add_row("identical to target-only", said)
    return identical
