"""The context of several requests in one pool: admit, append, view, release."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from cute_kernels.reference.context_append import context_append
from trtllm_dspark.context.pages import PageAllocator, RequestPages, page_table, readable_lengths
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
        pages: L views [num_pages, P, W]. page_table: [B, max_pages], int32. context_len: [B], int32, tokens.
    """

    pages: Sequence[torch.Tensor]
    page_table: torch.Tensor
    context_len: torch.Tensor


class DraftContext:
    """Owns the pages of every admitted request. A request keeps its context from `admit` to `release`.

    Args:
        pool: where latents live.
    """

    def __init__(self, pool: ContextPool) -> None:
        self.pool = pool
        self.allocator = PageAllocator(pool.num_pages)
        self.requests: dict[Hashable, RequestPages] = {}

    @property
    def page_size(self) -> int:
        return self.pool.layout.page_size

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool may carry."""
        return self.pool.num_pages * self.page_size

    def can_admit(self, tokens: int) -> bool:
        """Whether pages for `tokens` tokens are free."""
        return -(-tokens // self.page_size) <= self.allocator.num_free

    def admit(self, request: Hashable, tokens: int) -> None:
        """Grant a new request pages for `tokens` tokens; all of them or an error."""
        if request in self.requests:
            raise DSparkError(f"DraftContext: request {request!r} is already admitted. Release it first.")
        ids = self.allocator.take(-(-tokens // self.page_size))
        self.requests[request] = RequestPages(self.page_size, ids)

    def release(self, request: Hashable) -> None:
        """Give a request's pages back. Releasing an unknown request is no error: it happens once."""
        held = self.requests.pop(request, None)
        if held is not None:
            self.allocator.give_back(held.ids)

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
        assert z.shape[0] == sum(s.count for s in segments), f"{z.shape[0]} rows for segments {segments}"
        ends: dict[Hashable, int] = {}
        slots: list[int] = []
        for segment in segments:
            held = self._held(segment.request)
            end = ends.get(segment.request, held.length)
            if segment.first != end:
                raise DSparkError(
                    f"DraftContext: the next context token of request {segment.request!r} must be at position {end}, "
                    f"it came at {segment.first}. Append every position once, in order."
                )
            slots += held.slots(segment.first, segment.count)
            ends[segment.request] = end + segment.count
        on_device = torch.tensor(slots, dtype=torch.int64, device=z.device)
        context_append(z, norm_weight, cos, sin, on_device, self.pool.views, eps)
        for request, end in ends.items():  # counted only once it is written
            self.requests[request].advance(end)

    def view(self, requests: Sequence[Hashable], device: torch.device | str = "cpu") -> ContextView:
        """Page table and readable lengths of a batch, in its order."""
        held = [self._held(request) for request in requests]
        return ContextView(self.pool.views, page_table(held, device), readable_lengths(held, device))

    def length(self, request: Hashable) -> int:
        """Tokens of context, whether written or suppressed: the position of the next one."""
        return self._held(request).length

    def _held(self, request: Hashable) -> RequestPages:
        if request not in self.requests:
            raise DSparkError(f"DraftContext: request {request!r} must be admitted first; known: {list(self.requests)}.")
        return self.requests[request]
