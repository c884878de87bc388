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
    """The pages granted to one request, in token order.

    Attributes:
        ids: page ids. page_size: P. length: tokens written so far, a prefix of the positions.
        suppressed: writes past the bound that were not done.
    """

    page_size: int
    ids: list[int] = field(default_factory=list)
    length: int = 0
    suppressed: int = 0

    @property
    def bound(self) -> int:
        """Tokens that the granted pages may carry."""
        return len(self.ids) * self.page_size

    def slots(self, first: int, count: int) -> list[int]:
        """Slots of positions first .. first+count-1: page * P + offset, NOT_WRITTEN at and past the bound."""
        found = [
            self.ids[p // self.page_size] * self.page_size + p % self.page_size
            for p in range(first, first + count)
            if p < self.bound
        ]
        return found + [NOT_WRITTEN] * (count - len(found))

    def advance(self, end: int) -> None:
        """Tokens up to position `end` have been written, or suppressed from the bound on."""
        self.suppressed += max(end - max(self.length, self.bound), 0)
        self.length = end


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1, each to one request at a time."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; all of them or an error."""
        if count > len(self._free):
            raise DSparkError(
                f"PageAllocator: {count} pages are required, {len(self._free)} of {self.num_pages} are free. "
                "Release a request or give the pool more memory."
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, ids: Sequence[int]) -> None:
        self._free.extend(ids)


def page_table(requests: Sequence[RequestPages], device: torch.device | str = "cpu") -> torch.Tensor:
    """[B, max_pages] int32; entries past a request's pages are NOT_WRITTEN and are never read."""
    width = max((len(r.ids) for r in requests), default=0)
    rows = [r.ids + [NOT_WRITTEN] * (width - len(r.ids)) for r in requests]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(requests), width)


def readable_lengths(requests: Sequence[RequestPages], device: torch.device | str = "cpu") -> torch.Tensor:
    """[B] int32, tokens: min(context length, bound)."""
    return torch.tensor([min(r.length, r.bound) for r in requests], dtype=torch.int32, device=device)
