"""Tokens to text, as they come: a character is given out once its bytes are complete, and no part of a stop string is."""

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "�"  # what a tokenizer puts for bytes that are not a character yet
LOOK_BACK = 16  # tokens decoded again, so that a joint between tokens reads as in the whole text


class IncrementalText:
    """The text of one request.

    Args:
        tokenizer: with `decode`. Special tokens are left out. stops: strings that end the text before them.

    Attributes:
        value: the text so far. stopped: whether a stop string has appeared; `value` then ends before it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        self._read = 0  # tokens whose text is in `value`
        self._given = 0  # characters of `value` given out
        self.value = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the text that became certain: whole characters, no beginning of a stop string."""
        self._tokens.append(token)
        self._absorb(final=False)
        return self._give(len(self.value) if self.stopped else len(self.value) - self._held())

    def flush(self) -> str:
        """The rest, with a replacement sign where the last character never completed."""
        if not self.stopped:
            self._absorb(final=True)
        return self._give(len(self.value))

    def _absorb(self, *, final: bool) -> None:
        start = max(self._read - LOOK_BACK, 0)
        before = self._decode(self._tokens[start : self._read])
        after = self._decode(self._tokens[start:])
        if not final and after.endswith(INCOMPLETE):
            return
        searched = len(self.value)
        self.value += after[len(before) :]
        self._read = len(self._tokens)
        found = [self.value.find(stop, max(searched - len(stop) + 1, 0)) for stop in self._stops]
        if any(at >= 0 for at in found):
            self.stopped = True
            self.value = self.value[: min(at for at in found if at >= 0)]

    def _held(self) -> int:
        """Characters at the end that may yet turn out to begin a stop string."""
        lengths = (n for stop in self._stops for n in range(len(stop) - 1, 0, -1) if self.value.endswith(stop[:n]))
        return max(lengths, default=0)

    def _give(self, end: int) -> str:
        new = self.value[self._given : end]
        self._given = max(self._given, end)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
