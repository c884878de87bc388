"""Who runs in the next step, and on which pages: admission, prefix reuse, and what gives way when memory is short.

A request keeps its context from admission to its end, whether a step includes it or not. When the draft pool is short of
pages, kept prefixes go first. Then, as `on_pressure` says:

    recompute   the youngest request is put back in the queue without its context, which is computed again later
    keep        the request that wants pages is left out of the step and keeps what it has, unless it is the oldest
    slide       the request gives up its own oldest context

Whoever can take no more from others slides; it drafts from its most recent context, at its absolute positions.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from trtllm_dspark.context.draft_context import DraftContext
from trtllm_dspark.context.pages import NOT_WRITTEN
from trtllm_dspark.context.prefix import KeptPrefix, PrefixStore
from trtllm_dspark.engine.requests import Request
from trtllm_dspark.engine.target import HuggingFaceTarget

Reuse = Literal["off", "joint", "target_only"]
OnPressure = Literal["recompute", "keep", "slide"]


@dataclass
class SchedulerCounts:
    """What happened so far. reused_tokens: of prompts, not computed again. left_out: requests times steps."""

    preempted: int = 0
    slid: int = 0
    left_out: int = 0
    reused_tokens: int = 0


class Scheduler:
    """Requests of one engine.

    Args:
        target: gives caches. context: of the drafter; None decodes without one.
        max_batch: requests decoded together. rows_ahead: target rows of one verification, K + 1.
        prefill_chunk: prompt tokens a step runs of one request; None is all.
        reuse: "joint" continues from kept target caches and draft pages, "target_only" from the target's alone (the draft
            then lacks the prefix: the fault that joint reuse avoids), "off" from nothing.
        on_pressure: see above. max_prefixes: kept at most.
    """

    def __init__(
        self,
        target: HuggingFaceTarget,
        context: DraftContext | None,
        *,
        max_batch: int,
        rows_ahead: int,
        prefill_chunk: int | None = None,
        reuse: Reuse = "off",
        on_pressure: OnPressure = "recompute",
        max_prefixes: int = 16,
    ) -> None:
        self.target, self.context = target, context
        self.max_batch, self.rows_ahead, self.reuse, self.on_pressure = max_batch, rows_ahead, reuse, on_pressure
        largest = max(context.capacity // 2, 1) if context is not None else 2**31
        self.chunk = min(prefill_chunk or largest, largest)
        self.prefixes = PrefixStore(context if reuse == "joint" else None, max_prefixes)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.counts = SchedulerCounts()

    def plan(self) -> list[Request]:
        """The requests of the next step, oldest first, each with the pages that its rows need."""
        self._admit()
        planned = []
        for request in list(self.running):
            if request in self.running and not request.paused and self._make_room(request):
                planned.append(request)
        return [request for request in planned if request in self.running]

    # ------------------------------------------------------------------------------------------------------ admission
    def _admit(self) -> None:
        for request in [r for r in self.waiting if not r.paused]:
            if len(self.running) >= self.max_batch or not self._fits(request):
                return
            self.waiting.remove(request)
            self._begin(request)
            self.running.append(request)
            if self.context is not None:  # now, or the next one in line would count on the same free pages
                self.context.grow(request.id, request.computed + request.pending + self.rows_ahead)

    def _fits(self, request: Request) -> bool:
        if self.context is None:
            return True
        while self._pages_to_begin(request, self.context.page_size) > self.context.allocator.num_free:
            if not self._drop_prefix():
                return not self.running
        return True

    def _pages_to_begin(self, request: Request, page_size: int) -> int:
        """Pages for all that must be run before it decodes, less those it would share. A match is dropped last."""
        found = self.prefixes.match(request.sequence) if self.reuse == "joint" else None
        shared = found[1] // page_size if found else 0
        return -(-(request.pending + self.rows_ahead) // page_size) - shared

    def _begin(self, request: Request) -> None:
        found = self.prefixes.match(request.sequence) if self.reuse != "off" else None
        if found is None:
            request.cache, request.computed = self.target.new_cache(), 0
            if self.context is not None:
                self.context.admit(request.id)
            return
        kept, shared = found
        request.cache = self.target.copy_cache(kept.state, len(kept.tokens) - shared)
        request.computed = shared
        self.counts.reused_tokens += shared
        if self.context is not None and self.reuse == "joint":
            self.context.admit_behind(request.id, kept.pages, kept.start, shared)
        elif self.context is not None:
            self.context.admit(request.id)
            self.context.skip_to(request.id, shared)

    # ------------------------------------------------------------------------------------------------------- pressure
    def _make_room(self, request: Request) -> bool:
        if self.context is None:
            return True
        tokens = request.computed + len(request.next_rows(self.chunk))
        while not self.context.grow(request.id, tokens):
            if self._drop_prefix():
                continue
            if self.on_pressure == "recompute" and (victim := self._youngest_after(request)) is not None:
                self.preempt(victim)
                continue
            if self.on_pressure == "keep" and request is not next(r for r in self.running if not r.paused):
                self.counts.left_out += 1
                return False
            self.counts.slid += 1
            self.context.slide(request.id, tokens)  # what finds no page even so is not written, and counted
            return True
        return True

    def _drop_prefix(self) -> bool:
        """Let the least recently used prefix go for its pages; False where none is kept, or none has pages."""
        return self.prefixes.context is not None and self.prefixes.drop_oldest()

    def _youngest_after(self, request: Request) -> Request | None:
        younger = self.running[self.running.index(request) + 1 :]
        return younger[-1] if younger else None

    # ---------------------------------------------------------------------------------------------------------- events
    def preempt(self, request: Request) -> None:
        """Put a running request back in the queue, first in line, without its context and its cache."""
        self.running.remove(request)
        if self.context is not None:
            self.context.release(request.id)
        request.cache, request.computed, request.drafts = None, 0, []
        self.waiting.appendleft(request)
        self.counts.preempted += 1

    def retire(self, request: Request) -> None:
        """A finished request leaves; its context is kept for reuse or given back."""
        self.running.remove(request)
        tokens = request.sequence[: request.computed]
        if self.reuse == "joint" and self.context is not None:
            held = self.context.detach(request.id)
            pages = -(-len(tokens) // self.context.page_size) if held.end == len(tokens) else 0  # 0: some was not written
            self.context.allocator.give_back([page for page in held.ids[pages:] if page != NOT_WRITTEN])
            if pages:
                self.prefixes.keep(KeptPrefix(tokens, held.ids[:pages], held.start, request.cache))
        else:
            if self.context is not None:
                self.context.release(request.id)
            if self.reuse != "off":
                self.prefixes.keep(KeptPrefix(tokens, [], 0, request.cache))
        request.cache = None
