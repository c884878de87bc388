"""Greedy output with speculation against without: the same tokens, or a tie that the target's own arithmetic cannot settle.

A verification runs several rows at once, decoding without speculation runs one. The sums are the same, their order is not,
so two tokens whose logits differ by less than that rounding may come out either way. The rounding is measured on the
target itself, at the very position; a difference it does not explain is a fault.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_dspark.engine.target import HuggingFaceTarget

ROWS = (1, 8)  # rows of the passes that a position is computed in, beside the full one
NOISE_FACTOR = 2  # either logit may be off by the noise, in opposite directions


@dataclass(frozen=True)
class Divergence:
    """The first new token that differs.

    Attributes:
        offset: new tokens before it. expected, got: without and with speculation; None where that side had ended.
        gap: between the target's two largest logits there, from a fresh pass over the whole text; nan where a side had ended.
        noise: largest change of the two tokens' logits between passes of different shapes; nan likewise.
        excused: the two tokens are the target's top two there, and gap <= 2 * noise.
    """

    offset: int
    expected: int | None
    got: int | None
    gap: float
    noise: float
    excused: bool

    def __str__(self) -> str:
        verdict = "a tie within the target's noise" if self.excused else "a fault"
        return (
            f"new token {self.offset}: {self.expected} without speculation, {self.got} with it; top-two gap {self.gap:.3g}, "
            f"noise {self.noise:.3g}: {verdict}"
        )


def compare_greedy(
    target: HuggingFaceTarget, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> Divergence | None:
    """Compare one completion, token for token. The target runs only where they differ.

    Args:
        target: that decoded both. prompt: token ids. expected: new tokens without speculation. got: with it.
    Returns:
        None where they are equal; else the first difference. One side ending early is a difference, never excused.
    """
    shared = min(len(expected), len(got))
    offset = next((i for i in range(shared) if expected[i] != got[i]), shared)
    if offset == len(expected) == len(got):
        return None
    if offset == shared:
        left, right = (tokens[offset] if offset < len(tokens) else None for tokens in (expected, got))
        return Divergence(offset, left, right, gap=math.nan, noise=math.nan, excused=False)

    contenders = [expected[offset], got[offset]]
    text = [*prompt, *expected[:offset]]
    fresh = _last_logits(target, text, len(text))
    top = fresh.topk(2)
    gap = float(top.values[0] - top.values[1])
    passes = [fresh, *(_last_logits(target, text, rows) for rows in ROWS if rows < len(text))]
    of_two = torch.stack([logits[contenders] for logits in passes])
    noise = float((of_two.amax(0) - of_two.amin(0)).max())
    excused = set(top.indices.tolist()) == set(contenders) and gap <= NOISE_FACTOR * noise
    return Divergence(offset, expected[offset], got[offset], gap=gap, noise=noise, excused=excused)


def _last_logits(target: HuggingFaceTarget, text: Sequence[int], rows: int) -> torch.Tensor:
    """[V], fp64: logits after `text`, its last `rows` tokens in one pass behind a cache of the others."""
    ids, cache = torch.tensor(text, device=target.device), target.new_cache()
    if rows < len(text):
        target.forward(ids[:-rows], cache, 1)
    return target.forward(ids[-rows:], cache, 1).logits[-1].double()
