"""Draft, verify, commit: several requests at once, each target pass its own, all drafting in one batch.

    step:  plan -> one target pass for each planned request (a prompt chunk, or a verification)
           -> extend the context of all, one call -> propose for all that go on, one call

Straight after prefill a request already has drafts, so its first decode pass verifies real ones. Without a drafter the
same loop decodes one token a pass: the baseline that a speed is measured against.
"""

import logging
from collections.abc import Generator, Sequence
from itertools import takewhile

import torch

from trtllm_dspark.context.draft_context import Segment
from trtllm_dspark.engine.requests import Commit, Completion, Request, SamplingParams
from trtllm_dspark.engine.scheduler import OnPressure, Reuse, Scheduler
from trtllm_dspark.engine.target import HuggingFaceTarget, TargetOutput
from trtllm_dspark.engine.text import IncrementalText
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.propose import Drafter
from trtllm_dspark.stats import AcceptanceCounter
from trtllm_dspark.verify import verify_greedy

log = logging.getLogger(__name__)


class Engine:
    """Greedy decoding of a target, with or without a drafter.

    Args:
        target: the model that decides. drafter: the one that proposes; None decodes without speculation.
        num_drafts: K, drafts a step, 1 to the checkpoint's block. max_batch: requests decoded together.
        prefill_chunk: prompt tokens a step runs of one request; None is all. reuse, on_pressure: see `Scheduler`.
    Raises:
        DSparkError: more drafts than the block gives. UnsupportedError: a drafter beside a target that cannot take rows back.
    """

    def __init__(
        self,
        target: HuggingFaceTarget,
        drafter: Drafter | None = None,
        *,
        num_drafts: int = 0,
        max_batch: int = 8,
        prefill_chunk: int | None = None,
        reuse: Reuse = "off",
        on_pressure: OnPressure = "recompute",
    ) -> None:
        if drafter is not None:
            drafter.model.config.check_num_drafts(num_drafts)
            target.set_taps(drafter.model.config.target_layer_ids)
            target.check_can_take_back()
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if value is not None and value < 1:
                raise DSparkError(f"Engine: {name} must be at least 1, it is {value}. Give a positive number.")
        self.target, self.drafter, self.num_drafts, self.max_batch = target, drafter, num_drafts, max_batch
        self.acceptance = AcceptanceCounter(num_drafts)
        self.scheduler = Scheduler(
            target,
            None if drafter is None else drafter.context,
            max_batch=max_batch,
            rows_ahead=num_drafts + 1,
            prefill_chunk=prefill_chunk,
            reuse=reuse,
            on_pressure=on_pressure,
        )
        self._requests: dict[int, Request] = {}
        self._done: dict[int, Completion] = {}
        self._next_id = 0
        if drafter is not None and drafter.model.backend.operations.capturable and target.device.type == "cuda":
            drafter.capture(max_batch, num_drafts, target.max_positions or drafter.context.capacity)
        self._idle = False  # whether the last step could run no request

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
        tokenizer = self.target.tokenizer
        text = IncrementalText(tokenizer, params.stop) if tokenizer is not None else None
        request = Request(self._next_id, ids, params, stop_ids, text)
        self._next_id += 1
        self._requests[request.id] = request
        self.scheduler.waiting.append(request)
        return request.id

    def _check_size(self, prompt: int, params: SamplingParams) -> None:
        limit, needed = self.target.max_positions, prompt + params.max_new_tokens
        if limit is not None and needed > limit:
            raise DSparkError(
                f"Engine: prompt and new tokens must fit the target's positions of {limit} tokens, they need {needed} "
                f"({prompt} + {params.max_new_tokens}). Shorten the prompt or max_new_tokens."
            )
        if self.drafter is not None and prompt > self.drafter.context.capacity:
            raise DSparkError(
                f"Engine: a prompt must fit the draft pool of {self.drafter.context.capacity} tokens, it has {prompt}. "
                "Give the pool more tokens."
            )

    def pause(self, request: int) -> None:
        """Leave a request out of every step until `resume`.

        It keeps its place, its context, its cache and its drafts. Only memory pressure with "recompute" may take them; it
        is then computed again when it is resumed.
        """
        self._in_flight(request).paused = True

    def resume(self, request: int) -> None:
        """Let a paused request run again, at the positions it had."""
        self._in_flight(request).paused = False

    def preempt(self, request: int) -> None:
        """Take a running request's memory; it is computed again when it is next in line."""
        found = self._in_flight(request)
        if found in self.scheduler.running:
            self.scheduler.preempt(found)

    def _in_flight(self, request: int) -> Request:
        if request not in self._requests:
            raise DSparkError(f"Engine: a request in flight is required, {request} is not; in flight: {list(self._requests)}.")
        return self._requests[request]

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams = SamplingParams()) -> list[Completion]:
        """Decode prompts to their ends, together; completions in the prompts' order.

        Raises:
            DSparkError: see `add`; or paused requests hold what these need, so that none can run.
        """
        order = [self.add(prompt, params) for prompt in prompts]
        while not all(request in self._done for request in order):
            self._go_on()
        return [self._done.pop(request) for request in order]

    def stream(self, prompt: Sequence[int], params: SamplingParams = SamplingParams()) -> Generator[Commit, None, Completion]:
        """Decode one prompt, yielding what each target pass commits; the generator's value is the completion."""
        request = self.add(prompt, params)
        while request not in self._done:
            yield from (commit for commit in self._go_on() if commit.request == request)
        return self._done.pop(request)

    def _go_on(self) -> list[Commit]:
        """A step for a caller that waits for an end: where none can run, waiting would never end."""
        commits = self.step()
        if self._idle:
            paused = [request.id for request in self._requests.values() if request.paused]
            raise DSparkError(
                f"Engine: a request that can run is required, none can: requests {paused} are paused and keep their places "
                "and pages. Resume or preempt one."
            )
        return commits

    @property
    def in_flight(self) -> int:
        """Requests added and not finished."""
        return len(self._requests)

    def completion(self, request: int) -> Completion | None:
        """A finished request, handed over once; None while it is in flight."""
        return self._done.pop(request, None)

    def forget_prefixes(self) -> None:
        """Give back the pages and caches that are kept for reuse."""
        self.scheduler.prefixes.clear()

    # ---------------------------------------------------------------------------------------------------------- step
    def step(self) -> list[Commit]:
        """One target pass for every planned request. Returns what was committed."""
        segments: list[Segment] = []
        taps: list[torch.Tensor] = []
        commits: list[Commit] = []
        verified: list[Commit] = []
        planned = self.scheduler.plan()
        self._idle = not planned
        for request in planned:
            first, was_pending = request.computed, request.pending > 0
            commit, rows = self._prefill(request) if was_pending else self._verify(request)
            if commit is not None:
                commits.append(commit)
                if not was_pending:
                    verified.append(commit)
            if rows is not None:
                segments.append(Segment(request.id, first, rows.shape[0]))
                taps.append(rows)
        if verified and self.drafter is not None:
            accepted, submitted = zip(*((c.accepted, c.submitted) for c in verified), strict=True)
            self.acceptance.record(torch.tensor(accepted), torch.tensor(submitted))
        if self.drafter is not None and segments:
            self.drafter.extend(segments, torch.cat(taps))
        going_on = [request for request in planned if request.finish is None]
        for request in planned:
            if request.finish is not None:
                self.scheduler.retire(request)
                self._done[request.id] = self._requests.pop(request.id).completion()
        if self.drafter is not None:
            self._propose(self.drafter, [request for request in going_on if not request.pending])
        return commits

    def _prefill(self, request: Request) -> tuple[Commit | None, torch.Tensor | None]:
        rows = request.next_rows(self.scheduler.chunk)
        ids = torch.tensor(rows, device=self.target.device)
        output = self._run_target(ids, request, 1)
        request.computed += len(rows)
        commit = None
        if not request.pending and not request.tokens:
            commit = request.commit([int(output.logits[-1].argmax(-1))], submitted=0, prefill=True)
        return commit, output.taps

    def _verify(self, request: Request) -> tuple[Commit, torch.Tensor | None]:
        rows = torch.tensor(request.next_rows(1), device=self.target.device)
        output = self._run_target(rows, request, len(rows))
        verdict = verify_greedy(output.logits[None], rows[None, 1:])
        offered = verdict.tokens[0, : int(verdict.accepted[0]) + 1].tolist()
        commit = request.commit(offered, submitted=len(rows) - 1)
        kept = len(commit.tokens)
        self.target.take_back(request.cache, len(rows) - kept)
        request.computed += kept
        return commit, None if output.taps is None else output.taps[:kept]

    def _run_target(self, rows: torch.Tensor, request: Request, logit_rows: int) -> TargetOutput:
        if self.drafter is None:
            return self.target.forward(rows, request.cache, logit_rows)
        taps = self.drafter.model.config.target_layer_ids
        if self.target.target_layer_ids != taps:  # another engine on this target may tap other layers
            self.target.set_taps(taps)
        return self.target.forward(rows, request.cache, logit_rows, with_taps=True)

    def _propose(self, drafter: Drafter, requests: Sequence[Request]) -> None:
        drafting = [request for request in requests if self._can_draft(drafter, request)]
        if not drafting:
            return
        anchors = torch.tensor([request.anchor for request in drafting], device=self.target.device)
        proposal = drafter.propose([request.id for request in drafting], anchors, self.num_drafts)
        for request, drafts in zip(drafting, proposal.tokens.tolist(), strict=True):
            # an id that is no token cannot be run: it and those behind it are not submitted
            request.drafts = list(takewhile(lambda token: 0 <= token < self.target.vocab_size, drafts))

    def _can_draft(self, drafter: Drafter, request: Request) -> bool:
        config = drafter.model.config
        if request.computed + (config.block_size or self.num_drafts + 1) <= config.max_position_embeddings:
            return True
        request.drafts = []
        if not request.positions_end:
            request.positions_end = True
            log.warning(
                "request %d: at position %d its block would pass the draft's %d positions; it goes on without drafts",
                request.id,
                request.computed,
                config.max_position_embeddings,
            )
        return False
