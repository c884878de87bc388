"""The context of several requests in one pool: admit, grow, append, view, release."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from cute_kernels.reference.context_append import context_append
from trtllm_dspark.attention.operations import ContextAppend
from trtllm_dspark.context.pages import (
    PageAllocator,
    RequestPages,
    page_table,
    readable_ranges,
    slot_vector,
)
from trtllm_dspark.context.pool import ContextPool
from trtllm_dspark.errors import DSparkError


@dataclass(frozen=True)
class Segment:
    """`count` consecutive tokens of a request, the first at absolute position `first`."""

    request: Hashable
    first: int
    count: int


@dataclass(frozen=True)
class ContextView:
    """What block attention needs of a batch.

    Attributes:
        pages: L views [num_pages, P, W]. page_table: [B, max_pages], int32.
        context_start, context_len: [B], int32: positions start .. len-1 are read.
    """

    pages: Sequence[torch.Tensor]
    page_table: torch.Tensor
    context_start: torch.Tensor
    context_len: torch.Tensor


class DraftContext:
    """Owns the pages of every admitted request. A request keeps its context from `admit` to `release`, in or out of a batch.

    Args:
        pool: where latents live. write: finishes latents and writes them into their slots; plain torch by default.
    """

    def __init__(self, pool: ContextPool, write: ContextAppend = context_append) -> None:
        self.pool, self.write = pool, write
        self.allocator = PageAllocator(pool.num_pages)
        self.requests: dict[Hashable, RequestPages] = {}

    @property
    def page_size(self) -> int:
        return self.pool.layout.page_size

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool may carry."""
        return self.pool.num_pages * self.page_size

    # --------------------------------------------------------------------------------------------------- lifetime
    def admit(self, request: Hashable, tokens: int = 0) -> None:
        """Begin a request with pages for `tokens` tokens; all of them or an error."""
        self._check_new(request)
        self._check_count(request, "tokens", tokens)
        ids = self.allocator.take(-(-tokens // self.page_size))
        self.requests[request] = RequestPages(self.page_size, ids)

    def admit_behind(self, request: Hashable, pages: Sequence[int], start: int, tokens: int) -> None:
        """Begin a request whose first `tokens` tokens are in these pages, of which positions from `start` are readable.

        Full pages are shared; a partly filled last one is copied into a page of the request's own.
        """
        self._check_new(request)
        carried = len(pages) * self.page_size
        if not 0 <= start <= tokens <= carried:
            raise DSparkError(
                f"DraftContext: {len(pages)} pages carry 0 to {carried} tokens; request {request!r} was to continue {tokens} "
                f"of them, readable from {start}. Pass the pages of the whole prefix."
            )
        full, rest = divmod(tokens, self.page_size)
        shared = list(pages[:full])
        own = self.allocator.take(1 if rest else 0)
        self.allocator.share([page for page in shared if page >= 0])
        if rest:
            for view in self.pool.views:
                view[own[0]] = view[pages[full]]
        self.requests[request] = RequestPages(self.page_size, shared + own, length=tokens, start=start, end=tokens)

    def _check_new(self, request: Hashable) -> None:
        if request in self.requests:
            raise DSparkError(f"DraftContext: request {request!r} is already admitted. Release it first.")

    def _check_count(self, request: Hashable, name: str, count: int) -> None:
        if count < 0:
            raise DSparkError(f"DraftContext: {name} of request {request!r} must be 0 or more, came {count}. Count them again.")

    def grow(self, request: Hashable, tokens: int) -> bool:
        """Grant pages so that positions up to tokens-1 may be written. False: too few are free, nothing changed."""
        held = self._held(request)
        wanted = held.missing(tokens)
        if wanted > self.allocator.num_free:
            return False
        held.grant(self.allocator.take(wanted))
        return True

    def slide(self, request: Hashable, tokens: int) -> bool:
        """`grow`, giving up the request's oldest pages for its newest tokens. False: not even then, nothing changed."""
        held = self._held(request)
        own = sum(self.allocator.holders(page) == 1 for page in held.held[:-1])  # a shared page is not free when given back
        if held.missing(tokens) > self.allocator.num_free + own:
            return False
        while not self.grow(request, tokens):
            page = held.give_up_oldest()
            assert page is not None, f"request {request!r} ran out of pages to give up: {held}"
            self.allocator.give_back([page])
        return True

    def release(self, request: Hashable) -> None:
        """Give a request's pages back. Releasing an unknown request is no error: it happens once."""
        held = self.requests.pop(request, None)
        if held is not None:
            self.allocator.give_back(held.held)

    def detach(self, request: Hashable) -> RequestPages:
        """End a request and hand its pages over to the caller, who gives them back to the allocator."""
        held = self._held(request)
        del self.requests[request]
        return held

    # ------------------------------------------------------------------------------------------------------ tokens
    def skip_to(self, request: Hashable, position: int) -> None:
        """Positions up to `position` of a request never come; see `RequestPages.skip_to`."""
        self._held(request).skip_to(position)

    def append(
        self,
        segments: Sequence[Segment],
        z: torch.Tensor,
        norm_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
    ) -> None:
        """Write the context tokens of a step, of all requests, in one call.

        Args:
            segments: whose tokens the rows of z are, in order; each begins where its request's context ends.
            z: [T, L, W], neither normalised nor rotated. norm_weight: [L, c].
            cos, sin: [T, r/2], of the tokens' absolute positions. eps: of the RMSNorm.
        Raises:
            DSparkError: a segment that leaves a gap or overwrites: positions are absolute and contiguous.
        """
        ends: dict[Hashable, int] = {}
        for segment in segments:
            self._check_count(segment.request, "rows", segment.count)
            end = ends.get(segment.request, self._held(segment.request).length)
            if segment.first != end:
                raise DSparkError(
                    f"DraftContext: the next context token of request {segment.request!r} must be at position {end}, "
                    f"it came at {segment.first}. Append every position once, in order."
                )
            ends[segment.request] = end + segment.count
        assert z.shape[0] == sum(s.count for s in segments), f"{z.shape[0]} rows for segments {segments}"
        self.write(z, norm_weight, cos, sin, self._slots(segments, list(ends), z.device), self.pool.views, eps)
        for request, end in ends.items():  # counted only once it is written
            self.requests[request].advance(end)

    def _slots(self, segments: Sequence[Segment], order: list[Hashable], device: torch.device) -> torch.Tensor:
        held = [self._held(request) for request in order]
        row_of = {request: row for row, request in enumerate(order)}
        counts = torch.tensor([s.count for s in segments], dtype=torch.int64, device=device)
        begins = torch.tensor([s.first for s in segments], dtype=torch.int64, device=device)
        rows = torch.tensor([row_of[s.request] for s in segments], dtype=torch.int64, device=device)
        total = sum(s.count for s in segments)
        which = torch.repeat_interleave(torch.arange(len(segments), device=device), counts, output_size=total)
        offsets = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[which]
        return slot_vector(
            page_table(held, device),
            torch.tensor([h.bound for h in held], dtype=torch.int64, device=device),
            torch.tensor([h.writable_from for h in held], dtype=torch.int64, device=device),
            rows[which],
            begins[which] + offsets,
            self.page_size,
        )

    def view(self, requests: Sequence[Hashable], device: torch.device | str = "cpu") -> ContextView:
        """Page table and readable ranges of a batch, in its order."""
        held = [self._held(request) for request in requests]
        start, length = readable_ranges(held, device)
        return ContextView(self.pool.views, page_table(held, device), start, length)

    def length(self, request: Hashable) -> int:
        """Tokens of context, written or not: the position of the next one."""
        return self._held(request).length

    def _held(self, request: Hashable) -> RequestPages:
        if request not in self.requests:
            raise DSparkError(f"DraftContext: request {request!r} must be admitted first; known: {list(self.requests)}.")
        return self.requests[request]
