"""Which request has which row of the worker's device state, from its first batch to the end of its grant.

A request may be left out of a batch: paused, preempted, or in the other micro-batch. Its row stays.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.plugin.manager import Grant

log = logging.getLogger("trtllm_dspark.plugin")


@dataclass
class Entry:
    """Attributes: slot: row of the state. owner: see `Grant`. seen: the step it was last part of."""

    slot: int
    owner: Any
    seen: int


@dataclass(frozen=True)
class StepRows:
    """One batch, in its order.

    Attributes:
        slots: rows of the state; that of padding is the last row. bounds: tokens granted, 0 for padding.
        begun: slots whose request is new here.
    """

    slots: list[int]
    bounds: list[int]
    begun: list[int]


class RequestLedger:
    """Rows for requests.

    Args:
        num_slots: rows for requests; one more is for padding. grant: what the manager gave a request.
    """

    def __init__(self, num_slots: int, grant: Callable[[int], Grant | None]) -> None:
        self.num_slots, self.grant = num_slots, grant
        self.padding = num_slots
        self.entries: dict[int, Entry] = {}
        self.evicted = 0  # contexts given up because there were more requests in flight than rows
        self._free = list(range(num_slots - 1, -1, -1))
        self._step = 0

    def step(self, requests: Sequence[int]) -> StepRows:
        """The rows of a batch; rows of requests that have ended are given back first."""
        self._step += 1
        grants = {request: self.grant(request) for request in {*self.entries, *requests}}
        for ended in [request for request in self.entries if grants[request] is None]:
            self._free.append(self.entries.pop(ended).slot)
        for request in self.entries.keys() & set(requests):
            self.entries[request].seen = self._step  # all of them before the first row is looked for: none is taken from these
        slots, bounds, begun = [], [], []
        for request in requests:
            grant = grants[request]
            if grant is None:
                slots.append(self.padding)
                bounds.append(0)
                continue
            entry = self.entries.get(request)
            if entry is None or (entry.owner is not grant.owner and entry.owner != grant.owner):
                entry = Entry(entry.slot if entry else self._take(), grant.owner, self._step)
                self.entries[request] = entry
                begun.append(entry.slot)
            slots.append(entry.slot)
            bounds.append(grant.tokens)
        return StepRows(slots, bounds, begun)

    def _take(self) -> int:
        if not self._free:  # the longest absent one: when it comes back, its context begins anew
            oldest = min(self.entries, key=lambda request: self.entries[request].seen)
            assert self.entries[oldest].seen < self._step, f"a batch of more than {self.num_slots} requests"
            self._free.append(self.entries.pop(oldest).slot)
            if not self.evicted:
                log.warning(
                    "more than %d requests in flight: the longest absent lose their draft context and draft worse when they "
                    "come back. Raise max_batch_size, or admit fewer. Said once.",
                    self.num_slots,
                )
            self.evicted += 1
        return self._free.pop()
