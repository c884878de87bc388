"""An engine that checks itself at every step: whose pages are whose, where is written, at which positions, who gets on.

Free pages hold NaN at every step, so that a read of one shows in what is proposed.
"""

from collections import Counter

import torch

from trtllm_dspark.engine.engine import Engine


class WatchedEngine(Engine):
    """Fails at the step that breaks a promise.

    Attributes:
        steps: so far. most_running: requests at once.
        proposals: drafts of each request, step by step; None keeps none, for a long run.
    """

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.steps, self.most_running, self.proposals = 0, 0, {}
        if self.drafter is not None:
            self._watch_writes()
            self._watch_reads()

    def step(self):
        before = {r.id: (r.computed, len(r.tokens)) for r in self.scheduler.running}
        running = list(self.scheduler.running)
        commits = super().step()
        self.steps += 1
        self.most_running = max(self.most_running, len(self.scheduler.running))
        oldest = next((r for r in running if not r.paused), None)
        if oldest is not None:
            now = oldest.computed, len(oldest.tokens)
            assert now > before[oldest.id], f"request {oldest.id} is the oldest and stands still"
        check_positions(self)
        if self.drafter is not None:
            check_pages(self)
            poison_free_pages(self.drafter.context)
        return commits

    def run_to_end(self):
        """Step until nothing waits or runs. Returns completions by request."""
        while self._requests:
            self.step()
        return dict(self._done)

    def _propose(self, drafter, requests):
        super()._propose(drafter, requests)
        for request in requests if self.proposals is not None else ():
            self.proposals.setdefault(request.id, []).append(tuple(request.drafts))

    def _watch_writes(self):
        extend, context = self.drafter.extend, self.drafter.context

        def watched(segments, taps):
            before = bits(context)
            extend(segments, taps)
            changed = (bits(context) != before).any(-1).any(0).nonzero().flatten().tolist()
            allowed = set()
            for segment in segments:
                slots = context.requests[segment.request].slots(segment.first, segment.count)
                assert all(context.allocator.holders(slot // context.page_size) == 1 for slot in slots if slot >= 0), segment
                allowed.update(slots)
            assert set(changed) <= allowed, f"rows {sorted(set(changed) - allowed)} were written and are none of {segments}"

        self.drafter.extend = watched

    def _watch_reads(self):
        propose = self.drafter.propose

        def watched(requests, anchors, num_drafts):
            proposal = propose(requests, anchors, num_drafts)
            assert bool(proposal.hidden.isfinite().all()), f"a NaN was read for one of {requests}"
            return proposal

        self.drafter.propose = watched


def bits(context):
    """[L, rows, W], int32: a copy of an fp32 pool, where NaN equals itself."""
    return torch.stack([view.flatten(0, 1) for view in context.pool.views]).view(torch.int32)


def poison_free_pages(context):
    for view in context.pool.views:
        view[list(context.allocator.free_ids)] = torch.nan


def check_positions(engine):
    """A request's cache, its context and its count of computed tokens agree, in or out of the step."""
    for request in engine.scheduler.running:
        assert request.cache.get_seq_length() == request.computed, f"request {request.id}: cache and computed differ"
        if engine.drafter is not None:
            held = engine.drafter.context.requests[request.id]
            assert held.length == request.computed, f"request {request.id}: context at {held.length}, not {request.computed}"
            assert 0 <= held.start <= held.end <= held.length and held.end <= held.bound
    for request in engine.scheduler.waiting:
        assert request.cache is None and request.computed == 0 and not request.drafts
        assert engine.drafter is None or request.id not in engine.drafter.context.requests


def check_pages(engine):
    """Every page is free or held as often as it is named; a page with several holders lies behind all of them."""
    context = engine.drafter.context
    owners = Counter(page for held in context.requests.values() for page in held.held)
    if engine.scheduler.prefixes.context is not None:
        owners.update(page for kept in engine.scheduler.prefixes._kept for page in kept.pages if page >= 0)
    for page in range(context.allocator.num_pages):
        assert context.allocator.holders(page) == owners[page], f"page {page}"
    free = context.allocator.free_ids
    assert len(set(free)) == len(free) and not set(free) & set(owners)
    assert len(free) + len(owners) == context.allocator.num_pages
    for request, held in context.requests.items():
        assert len(set(held.held)) == len(held.held), f"request {request!r} holds a page twice"
        shared = [index for index, page in enumerate(held.ids) if page >= 0 and owners[page] > 1]
        behind = all((index + 1) * held.page_size <= held.length for index in shared)
        assert behind, f"request {request!r} may write a shared page"


def check_all_given_back(engine):
    """Nothing of any request is left behind."""
    assert not engine._requests and not engine.scheduler.running and not engine.scheduler.waiting
    context = engine.drafter.context
    assert not context.requests
    if not len(engine.scheduler.prefixes):
        assert context.allocator.num_free == context.allocator.num_pages
