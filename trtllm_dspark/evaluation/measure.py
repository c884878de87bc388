"""Acceptance and speed of a drafter over prompts, from the traces of finished requests.

Every figure is a fact of the traces: a verification commits 1 + accepted tokens. `accept_len_first16` pools the
verifications whose anchor lies among the first 16 new tokens, where a small target does not loop yet.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.requests import Commit, Completion, SamplingParams
from trtllm_dspark.stats import Acceptance, AcceptanceCounter, distinct_ngrams

NEAR_PROMPT = 16


@dataclass(frozen=True)
class Measurement:
    """Figures of a set of completions.

    Attributes:
        prompts: how many. new_tokens: committed in all. acceptance: pooled over verifications.
        accept_len_stderr: of the mean, over prompts. accept_len_first16: see above.
        distinct_4grams: mean share over the completions.
    """

    prompts: int
    new_tokens: int
    acceptance: Acceptance
    accept_len_stderr: float
    accept_len_first16: float
    distinct_4grams: float


def measure(completions: Sequence[Completion], num_drafts: int) -> Measurement:
    """Figures of finished requests, drafted with up to num_drafts tokens a step."""
    traces = [_verifications(completion) for completion in completions]
    near = [commit for trace in traces for commit in trace if commit.offset - 1 < NEAR_PROMPT]
    lengths = [_accept(trace, num_drafts).accept_len for trace in traces if trace]
    spread = statistics.stdev(lengths) / math.sqrt(len(lengths)) if len(lengths) > 1 else float("nan")
    shares = [distinct_ngrams(completion.tokens) for completion in completions if len(completion.tokens) >= 4]
    return Measurement(
        prompts=len(completions),
        new_tokens=sum(len(completion.tokens) for completion in completions),
        acceptance=_accept([commit for trace in traces for commit in trace], num_drafts),
        accept_len_stderr=spread,
        accept_len_first16=_accept(near, num_drafts).accept_len,
        distinct_4grams=statistics.fmean(shares) if shares else float("nan"),
    )


def _verifications(completion: Completion) -> list[Commit]:
    return [commit for commit in completion.commits if not commit.prefill]


def _accept(commits: Sequence[Commit], num_drafts: int) -> Acceptance:
    counter = AcceptanceCounter(num_drafts)
    counter.record(torch.tensor([c.accepted for c in commits]), torch.tensor([c.submitted for c in commits]))
    return counter.summary()


def figure(value: float) -> float | None:
    """A figure as a result file holds it: six decimals, None for nan and infinity, which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None


@dataclass(frozen=True)
class TimedRuns:
    """Completions of the first run, and the seconds of each."""

    completions: list[Completion]
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run_interleaved(
    engines: Sequence[Engine],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    repeats: int = 1,
    progress: Callable[[int], None] = lambda prompts: None,
) -> list[TimedRuns]:
    """Decode the prompts on each engine in turn, prompt batch by prompt batch, so that all see the same machine.

    Args:
        engines: e.g. with a drafter and without. prompts: token ids. params: of every request.
        repeats: whole passes; the tokens of every pass must be the same. progress: told how many prompts a batch held.
    """
    runs = [TimedRuns([], []) for _ in engines]
    for repeat in range(repeats):
        elapsed = [0.0] * len(engines)
        tokens: list[list[Completion]] = [[] for _ in engines]
        size = min(engine.max_batch for engine in engines)
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            for index, engine in enumerate(engines):
                start = time.perf_counter()
                tokens[index] += engine.generate(batch, params)
                elapsed[index] += time.perf_counter() - start
            progress(len(batch))
        for run, completions, seconds in zip(runs, tokens, elapsed, strict=True):
            run.seconds.append(seconds)
            if repeat == 0:
                run.completions.extend(completions)
    return runs
