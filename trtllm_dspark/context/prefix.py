"""Contexts kept after their requests ended, so that a prompt that begins the same way need not be computed again.

A kept prefix covers whole tokens of one finished request. Its full pages are shared with whoever continues it; the last,
partly filled page is copied, so that no shared page is ever written. Least recently used prefixes go first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trtllm_dspark.context.draft_context import DraftContext


@dataclass
class KeptPrefix:
    """One finished request's context.

    Attributes:
        tokens: ids whose context is kept, from position 0. pages: of the draft, held; covering `start` .. len(tokens).
        start: first position that the pages carry; 0 unless the request had outgrown its pages.
        state: what the target needs to go on from here (its KV cache); never written, copied on use.
    """

    tokens: tuple[int, ...]
    pages: list[int]
    start: int
    state: Any
    used: int = field(default=0)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning of two token sequences."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class PrefixStore:
    """Kept prefixes of one draft context.

    Args:
        context: whose pages are kept. max_prefixes: at most this many; the least recently used goes first.
    """

    def __init__(self, context: DraftContext | None, max_prefixes: int = 16) -> None:
        self.context, self.max_prefixes = context, max_prefixes
        self._kept: list[KeptPrefix] = []
        self._clock = count(1)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, prefix: KeptPrefix) -> None:
        """Take over a finished request's context; one that it continues, and covers, is let go."""
        covered = [p for p in self._kept if prefix.start <= p.start and prefix.tokens[: len(p.tokens)] == p.tokens]
        for other in covered:
            self._drop(other)
        prefix.used = next(self._clock)
        self._kept.append(prefix)
        while len(self._kept) > self.max_prefixes:
            self.drop_oldest()

    def match(self, tokens: Sequence[int]) -> tuple[KeptPrefix, int] | None:
        """The kept prefix that shares most with `tokens`, and how many of its tokens; None where nothing is shared.

        The last of `tokens` is never matched: its logits are needed.
        """
        lengths = ((common_length(p.tokens, tokens[:-1]), p) for p in self._kept)
        usable = [(shared, p) for shared, p in lengths if shared > p.start]
        if not usable:
            return None
        shared, best = max(usable, key=lambda found: (found[0], found[1].used))
        best.used = next(self._clock)
        return best, shared

    def drop_oldest(self) -> bool:
        """Let the least recently used prefix go; False where none is kept."""
        if not self._kept:
            return False
        self._drop(min(self._kept, key=lambda p: p.used))
        return True

    def clear(self) -> None:
        """Let all go."""
        while self.drop_oldest():
            pass

    def _drop(self, prefix: KeptPrefix) -> None:
        self._kept.remove(prefix)
        if self.context is not None:
            self.context.allocator.give_back([page for page in prefix.pages if page >= 0])
