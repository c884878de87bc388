"""Requests of the embedded engine: what was asked, what was committed, and the trace of how."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trtllm_dspark.engine.text import IncrementalText
from trtllm_dspark.errors import DSparkError

FinishReason = Literal["stop_token", "stop_string", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How a request decodes. Greedy.

    Attributes:
        max_new_tokens: at least 1. stop_token_ids: added to the target's own end-of-sequence ids.
        stop: strings that end the text; need a tokenizer. ignore_eos: do not stop at the target's own ids.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise DSparkError(
                f"SamplingParams: max_new_tokens must be at least 1, it is {self.max_new_tokens}. Ask for one or more."
            )


@dataclass(frozen=True)
class Commit:
    """Tokens that one target pass committed to one request.

    Attributes:
        request: its id. offset: new tokens before these. tokens: at least one; the first `accepted` were drafts.
        accepted, submitted: drafts. prefill: the pass was the prompt's, not a verification.
        pieces: what each token adds to the text ('' without a tokenizer, and while a character is cut).
        finish: set on the last commit.
    """

    request: int
    offset: int
    tokens: tuple[int, ...]
    accepted: int
    submitted: int
    prefill: bool
    pieces: tuple[str, ...]
    finish: FinishReason | None

    @property
    def text(self) -> str:
        """What these tokens add to the text."""
        return "".join(self.pieces)


@dataclass
class Completion:
    """A finished request.

    Attributes:
        request: its id. prompt: token ids. tokens: new token ids. text: '' without a tokenizer.
        finish: why it ended. commits: the trace, prefill first.
    """

    request: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish: FinishReason
    commits: tuple[Commit, ...]


@dataclass
class Request:
    """A request in flight. Its sequence is prompt + tokens; the newest token, `anchor`, is not run by the target yet.

    Attributes:
        cache: the target's, of the first `computed` tokens of the sequence. drafts: to verify next.
        paused: left out of every step; keeps its context. positions_end: said once that drafting ended there.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    text: IncrementalText | None
    cache: Any = None
    computed: int = 0
    paused: bool = False
    positions_end: bool = False
    tokens: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def pending(self) -> int:
        """Tokens that the target must run before it can verify: of the prompt, and of what was lost to preemption."""
        before_anchor = len(self.prompt) + len(self.tokens) - bool(self.tokens)
        return before_anchor - self.computed

    @property
    def remaining(self) -> int:
        return self.params.max_new_tokens - len(self.tokens)

    @property
    def finish(self) -> FinishReason | None:
        return self.commits[-1].finish if self.commits else None

    def next_rows(self, chunk: int) -> list[int]:
        """Token ids of the next target pass: up to `chunk` pending ones, else the anchor and its drafts.

        Drafts that could not be committed any more are not submitted.
        """
        if self.pending:
            return list(self.sequence[self.computed : self.computed + min(self.pending, chunk)])
        return [self.anchor, *self.drafts[: self.remaining - 1]]

    def commit(self, offered: Sequence[int], submitted: int, *, prefill: bool = False) -> Commit:
        """Take the target's tokens, up to a stop or the length.

        Args:
            offered: accepted drafts, then one token of the target's own. submitted: drafts that were verified.
        """
        offset, taken, pieces = len(self.tokens), [], []
        finish: FinishReason | None = None
        for token in offered:
            taken.append(token)
            pieces.append(self.text.push(token) if self.text else "")
            finish = self._finish(token, offset + len(taken))
            if finish:
                break
        if finish and self.text:
            pieces[-1] += self.text.flush()
        self.tokens += taken
        # a stop inside the drafts takes the place of the bonus token, so that 1 + accepted tokens are committed
        commit = Commit(self.id, offset, tuple(taken), len(taken) - 1, submitted, prefill, tuple(pieces), finish)
        self.commits.append(commit)
        return commit

    def _finish(self, token: int, count: int) -> FinishReason | None:
        if token in self.stop_ids:
            return "stop_token"
        if self.text and self.text.stopped:
            return "stop_string"
        return "length" if count >= self.params.max_new_tokens else None

    def completion(self) -> Completion:
        assert self.finish is not None, f"request {self.id} is still running"
        text = self.text.value if self.text else ""
        return Completion(self.id, self.prompt, tuple(self.tokens), text, self.finish, tuple(self.commits))
