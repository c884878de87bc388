"""Tokens to text, as they come: a character is given out once its bytes are complete."""

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "�"  # what a tokenizer puts for bytes that are not a character yet
LOOK_BACK = 16  # tokens decoded again, so that a joint between tokens reads as in the whole text


class IncrementalText:
    """The text of one request.

    Args:
        tokenizer: with `decode`. Special tokens are left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._read = 0  # tokens whose text is in `value`
        self.value = ""
        self._given = 0  # characters of `value` given out

    def push(self, token: int) -> str:
        """Add a token; returns the text that became complete, '' while a character is cut."""
        self._tokens.append(token)
        self._absorb(final=False)
        return self._give()

    def flush(self) -> str:
        """The rest, with a replacement sign where the last character never completed."""
        self._absorb(final=True)
        return self._give()

    def cut_at(self, stops: Sequence[str]) -> bool:
        """Whether a stop string has appeared; the text then ends before it."""
        found = [at for at in (self.value.find(stop) for stop in stops if stop) if at >= 0]
        if not found:
            return False
        self.value = self.value[: min(found)]
        self._read = len(self._tokens)
        return True

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _absorb(self, *, final: bool) -> None:
        start = max(self._read - LOOK_BACK, 0)
        before = self._decode(self._tokens[start : self._read])
        after = self._decode(self._tokens[start:])
        if final or not after.endswith(INCOMPLETE):
            self.value += after[len(before) :]
            self._read = len(self._tokens)

    def _give(self) -> str:
        new = self.value[self._given :]
        self._given = max(self._given, len(self.value))
        return new
