"""Which pages a request holds, how many tokens they may carry, and where each token of it goes.

A bound is a number of tokens and comes from what was granted to the request. It is never read off the sign of a table
entry: a manager may fill unused entries with 0, and 0 is a valid page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trtllm_dspark.errors import DSparkError

NOT_WRITTEN = -1


@dataclass
class RequestPages:
    """The pages granted to one request, in token order, and which of its positions can be read.

    Attributes:
        page_size: P. ids: page of each run of P positions; NOT_WRITTEN where the page was given up for newer tokens, or
            was never granted and all its positions have passed.
        length: the position of the next token: all earlier ones are written, suppressed or skipped.
        start, end: positions start .. end-1 are written and can be read. end < length where writes were suppressed.
        suppressed: tokens without a page, which were not written.
    """

    page_size: int
    ids: list[int] = field(default_factory=list)
    length: int = 0
    start: int = 0
    end: int = 0
    suppressed: int = 0

    @property
    def bound(self) -> int:
        """Positions from 0 that the granted pages may carry, those given up included."""
        return len(self.ids) * self.page_size

    @property
    def held(self) -> list[int]:
        """The page ids that are still this request's."""
        return [page for page in self.ids if page != NOT_WRITTEN]

    @property
    def writable_from(self) -> int:
        """The first position that may be written: none before it comes again, and no page before it was given up."""
        gone = max((index for index, page in enumerate(self.ids) if page == NOT_WRITTEN), default=-1)
        return max(self.length, (gone + 1) * self.page_size)

    @property
    def passed(self) -> int:
        """Pages behind the granted ones whose positions all lie before `length`: they are never needed."""
        return max(self.length // self.page_size - len(self.ids), 0)

    def missing(self, tokens: int) -> int:
        """How many more pages the positions to come, up to tokens-1, take."""
        return max(-(-tokens // self.page_size) - len(self.ids) - self.passed, 0)

    def grant(self, ids: Sequence[int]) -> None:
        """Take these pages, for the positions that follow the granted ones and are still to come."""
        if ids:
            self.ids += [NOT_WRITTEN] * self.passed + list(ids)

    def slots(self, first: int, count: int) -> list[int]:
        """Where positions first .. first+count-1 lie; see `slot_vector`."""
        table = page_table([self])
        bound, zero = torch.tensor([self.bound]), torch.tensor([0])
        positions = torch.arange(first, first + count)
        return slot_vector(table, bound, zero, torch.zeros_like(positions), positions, self.page_size).tolist()

    def advance(self, end: int) -> None:
        """Tokens from `length` up to position `end` have been written, or suppressed where there is no page for them.

        Behind a gap (suppressed or skipped positions) the context begins anew: what is read is one unbroken run.
        """
        first, last = self.writable_from, min(end, self.bound)
        if last > first:
            if self.end < first:
                self.start = first
            self.end = last
        self.suppressed += end - self.length - max(last - first, 0)
        self.length = end

    def skip_to(self, position: int) -> None:
        """Positions up to `position` never come: the context begins there, at its absolute position."""
        if position < self.length:
            raise DSparkError(
                f"RequestPages: a skip must go forward from position {self.length}, it goes to {position}. "
                "Positions are absolute and never repeat."
            )
        self.length = position

    def give_up_oldest(self) -> int | None:
        """The page of the oldest readable positions, no longer this request's; None where only one page is held."""
        held = [index for index, page in enumerate(self.ids) if page != NOT_WRITTEN]
        if len(held) < 2:
            return None
        index, page = held[0], self.ids[held[0]]
        self.ids[index] = NOT_WRITTEN
        self.start = max(self.start, (index + 1) * self.page_size)
        self.end = max(self.end, min(self.start, self.length))
        return page


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1. A page may have several holders; it is free when the last gives it back."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_ids(self) -> tuple[int, ...]:
        return tuple(self._free)

    def holders(self, page: int) -> int:
        """How many hold this page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages; all of them or an error."""
        if count > len(self._free):
            raise DSparkError(
                f"PageAllocator: {count} pages are required, {len(self._free)} of {self.num_pages} are free. "
                "Release a request or give the pool more memory."
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, ids: Sequence[int]) -> None:
        """One more holder for each of these pages, which must be held."""
        for page in ids:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def give_back(self, ids: Sequence[int]) -> None:
        """One holder less for each of these pages."""
        for page in ids:
            assert self._holders[page] > 0, f"page {page} is given back more often than it was taken"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


def page_table(
    requests: Sequence[RequestPages], device: torch.device | str = "cpu", *, filler: int = NOT_WRITTEN
) -> torch.Tensor:
    """[B, max_pages] int32. Entries that name no page hold `filler` (hosts fill -1 or 0) and are never read."""
    width = max((len(r.ids) for r in requests), default=0)
    rows = [[filler if page == NOT_WRITTEN else page for page in r.ids] + [filler] * (width - len(r.ids)) for r in requests]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(requests), width)


def readable_ranges(requests: Sequence[RequestPages], device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """context_start and context_len, [B] int32 each: positions start .. len-1 of a request can be read."""
    pairs = torch.tensor([(r.start, r.end) for r in requests], dtype=torch.int32, device=device).view(-1, 2)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def slot_vector(
    table: torch.Tensor, bound: torch.Tensor, first: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slot of each context token of a step, of all requests at once: tensor arithmetic of fixed shape, no host sync.

    slot[t] = table[rows[t], positions[t] // P] * P + positions[t] % P

    Args:
        table: [B, max_pages], int32, any filler. bound: [B], int, tokens that the grant of each request may carry.
        first: [B], int, the first position of each request that may be written: below it pages may be shared.
        rows: [T], int64, the request of each token. positions: [T], int64, absolute. page_size: P.
    Returns:
        [T], int64: page * P + offset; NOT_WRITTEN for a position outside first .. bound-1.
    """
    inside = (positions >= first[rows]) & (positions < bound[rows]) & (positions < table.shape[1] * page_size)
    if not table.shape[1]:
        return torch.full_like(positions, NOT_WRITTEN)
    page_index = torch.where(inside, positions // page_size, 0)
    slots = table[rows, page_index].long() * page_size + positions % page_size
    return torch.where(inside, slots, NOT_WRITTEN).clamp(min=NOT_WRITTEN)
