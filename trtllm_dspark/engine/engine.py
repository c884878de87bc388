"""Draft, verify, commit: several requests at once, each target pass its own, all drafting in one batch.

    step:  verify every running request -> admit waiting ones and prefill them -> extend the context of all, one call
           -> propose for all that go on, one call

Straight after prefill a request already has drafts, so its first decode pass verifies real ones. Without a drafter the
same loop decodes one token a pass: the baseline that a speed is measured against.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import takewhile

import torch

from trtllm_dspark.context.draft_context import Segment
from trtllm_dspark.engine.requests import Commit, Completion, Request, SamplingParams
from trtllm_dspark.engine.target import HuggingFaceTarget
from trtllm_dspark.engine.text import IncrementalText
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.propose import Drafter
from trtllm_dspark.stats import AcceptanceCounter
from trtllm_dspark.verify import verify_greedy


class Engine:
    """Greedy decoding of a target, with or without a drafter.

    Args:
        target: the model that decides. drafter: the one that proposes; None decodes without speculation.
        num_drafts: K, drafts a step, 1 to the checkpoint's block. max_batch: requests decoded together.
    Raises:
        DSparkError: more drafts than the block gives. UnsupportedError: a drafter beside a target that cannot take rows back.
    """

    def __init__(
        self, target: HuggingFaceTarget, drafter: Drafter | None = None, *, num_drafts: int = 0, max_batch: int = 8
    ) -> None:
        if drafter is not None:
            drafter.model.config.check_num_drafts(num_drafts)
            if target.target_layer_ids != drafter.model.config.target_layer_ids:
                target.set_taps(drafter.model.config.target_layer_ids)
            target.check_can_take_back()
        if max_batch < 1:
            raise DSparkError(f"Engine: max_batch must be at least 1, it is {max_batch}. Decode one or more at once.")
        self.target, self.drafter, self.num_drafts, self.max_batch = target, drafter, num_drafts, max_batch
        self.acceptance = AcceptanceCounter(num_drafts)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._done: dict[int, Completion] = {}
        self._next_id = 0

    # ------------------------------------------------------------------------------------------------------ requests
    def add(self, prompt: Sequence[int], params: SamplingParams = SamplingParams()) -> int:
        """Queue a request.

        Args:
            prompt: token ids, at least one, each in the target's vocabulary. params: how it decodes.
        Returns:
            its id, counted from 0.
        Raises:
            DSparkError: a prompt that is empty, holds an unknown id, or cannot fit the target or the pool; the engine
                goes on as before.
        """
        ids = tuple(int(token) for token in prompt)
        bad = [token for token in ids if not 0 <= token < self.target.vocab_size]
        if not ids or bad:
            came = f"token {bad[0]} came" if bad else "none came"
            raise DSparkError(
                f"Engine: a prompt must be one or more token ids in 0..{self.target.vocab_size - 1}, {came}. "
                "Encode the prompt with the target's tokenizer."
            )
        self._check_size(len(ids), params)
        if params.stop and self.target.tokenizer is None:
            raise DSparkError("Engine: stop strings need a tokenizer, the target has none. Use stop_token_ids.")
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.target.stop_token_ids)
        text = IncrementalText(self.target.tokenizer, params.stop) if self.target.tokenizer is not None else None
        request = Request(self._next_id, ids, params, self.target.new_cache(), stop_ids, text)
        self._next_id += 1
        self._waiting.append(request)
        return request.id

    def _check_size(self, prompt: int, params: SamplingParams) -> None:
        needed, limits = prompt + params.max_new_tokens, []
        if self.target.max_positions is not None:
            limits.append((self.target.max_positions, "the target's positions", "Shorten the prompt or max_new_tokens."))
        if self.drafter is not None:
            limits.append((self.drafter.context.capacity, "the draft pool", "Give the pool more tokens."))
        for limit, what, remedy in limits:
            if needed > limit:
                raise DSparkError(
                    f"Engine: prompt and new tokens must fit {what} of {limit} tokens, they need {needed} "
                    f"({prompt} + {params.max_new_tokens}). {remedy}"
                )

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams = SamplingParams()) -> list[Completion]:
        """Decode prompts to their ends, together; completions in the prompts' order."""
        order = [self.add(prompt, params) for prompt in prompts]
        while not all(request in self._done for request in order):
            self.step()
        return [self._done.pop(request) for request in order]

    def stream(self, prompt: Sequence[int], params: SamplingParams = SamplingParams()) -> Generator[Commit, None, Completion]:
        """Decode one prompt, yielding what each target pass commits; the generator's value is the completion."""
        request = self.add(prompt, params)
        while request not in self._done:
            yield from (commit for commit in self.step() if commit.request == request)
        return self._done.pop(request)

    # ---------------------------------------------------------------------------------------------------------- step
    def step(self) -> list[Commit]:
        """One target pass for every running request, and a first one for those admitted. Returns what was committed."""
        segments: list[Segment] = []
        taps: list[torch.Tensor] = []
        commits: list[Commit] = []

        def ran(request: Request, commit: Commit, first: int, rows: torch.Tensor | None) -> None:
            commits.append(commit)
            if rows is not None and commit.finish is None:
                segments.append(Segment(request.id, first, rows.shape[0]))
                taps.append(rows)

        verified, going_on = [], []
        for request in self._running:
            first = request.anchor_position
            commit, rows = self._verify(request)
            verified.append(commit)
            ran(request, commit, first, rows)
        for request in self._admit():
            commit, rows = self._prefill(request)
            self._running.append(request)
            ran(request, commit, 0, rows)
        for request in self._running:
            if request.finish is None:
                going_on.append(request)
            else:
                self._retire(request)
        self._running = going_on
        if verified and self.drafter is not None:
            self.acceptance.record(torch.tensor([c.accepted for c in verified]), torch.tensor([c.submitted for c in verified]))
        if self.drafter is not None and going_on:
            self.drafter.extend(segments, torch.cat(taps))
            self._propose(self.drafter, going_on)
        return commits

    def _admit(self) -> Iterator[Request]:
        while self._waiting and len(self._running) < self.max_batch:
            request = self._waiting[0]
            tokens = len(request.prompt) + request.params.max_new_tokens
            if self.drafter is not None:
                if not self.drafter.context.can_admit(tokens):
                    return
                self.drafter.context.admit(request.id, tokens)
            yield self._waiting.popleft()

    def _prefill(self, request: Request) -> tuple[Commit, torch.Tensor | None]:
        ids = torch.tensor(request.prompt, device=self.target.device)
        output = self.target.forward(ids, request.cache, 1, with_taps=self.drafter is not None)
        first = int(output.logits[-1].argmax(-1))
        return request.commit([first], submitted=0, prefill=True), output.taps

    def _verify(self, request: Request) -> tuple[Commit, torch.Tensor | None]:
        rows = request.rows(self.target.device)
        output = self.target.forward(rows, request.cache, len(rows), with_taps=self.drafter is not None)
        verdict = verify_greedy(output.logits[None], rows[None, 1:])
        accepted = int(verdict.accepted[0])
        self.target.take_back(request.cache, len(rows) - 1 - accepted)
        commit = request.commit(verdict.tokens[0, : accepted + 1].tolist(), submitted=len(rows) - 1)
        return commit, None if output.taps is None else output.taps[: accepted + 1]

    def _propose(self, drafter: Drafter, requests: Sequence[Request]) -> None:
        anchors = torch.tensor([request.anchor for request in requests], device=self.target.device)
        proposal = drafter.propose([request.id for request in requests], anchors, self.num_drafts)
        for request, drafts in zip(requests, proposal.tokens.tolist(), strict=True):
            # an id that is no token cannot be run: it and those behind it are not submitted
            request.drafts = list(takewhile(lambda token: 0 <= token < self.target.vocab_size, drafts))

    def _retire(self, request: Request) -> None:
        if self.drafter is not None:
            self.drafter.context.release(request.id)
        request.cache = None
        self._done[request.id] = request.completion()
