"""The draft context of one worker on the host's pages: which positions each request can read, and writing new ones.

Everything a captured graph touches is a tensor of fixed shape and address. The host's side of a step (grants, rows) is
copied in before the step by `begin_step`; lengths and positions never leave the device.

State, a row a request: positions start .. end-1 are written and readable. A step appends `count` tokens from the absolute
position `first`, of which those below the grant are written:

    begins anew at `first`        the request is new here, or first < start
    is cut back to `first`        start <= first < end: rows that were taken back
    begins anew where it writes   end < first: positions without a page came between; what is read is one unbroken run
"""

import torch

from trtllm_dspark.context.pages import slot_vector
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.plugin.ledger import RequestLedger
from trtllm_dspark.plugin.manager import DraftPages
from trtllm_dspark.step import context_rows

NEW = -1  # in `start`: the request has not been part of a step
SLOTS_PER_REQUEST = 4  # rows of state for each place in a batch: absent requests keep theirs


class HostContext:
    """Contexts of all requests of a worker.

    Args:
        drafter: whose context. pages: of the host's manager. max_requests: of one batch. device: of the state.
    """

    def __init__(self, drafter: MLADSparkForCausalLM, pages: DraftPages, max_requests: int, device: torch.device) -> None:
        self.drafter, self.pages, self.max_requests = drafter, pages, max_requests
        self.ledger = RequestLedger(SLOTS_PER_REQUEST * max_requests, pages.grant)
        rows = self.ledger.num_slots + 1
        with torch.inference_mode(False):  # steps run in it, their preparation may not: both write these
            self.state = torch.full((rows, 2), NEW, dtype=torch.int64, device=device)  # start, end
            self._rows = torch.zeros(2, max_requests, dtype=torch.int64, device=device)  # slot and bound of each batch row
            self._rows[0] = self.ledger.padding
        self._table: torch.Tensor | None = None

    # ------------------------------------------------------------------------------------------------- before a step
    def begin_step(self, requests: list[int]) -> None:
        """Look the batch's grants up and copy them in. Runs on the host before every step, never inside a capture."""
        rows = self.ledger.step(requests)
        if not requests:
            return
        device = self._rows.device
        self._rows[:, : len(requests)].copy_(_to(device, [rows.slots, rows.bounds]), non_blocking=True)
        if rows.begun:
            self.state.index_fill_(0, _to(device, rows.begun), NEW)

    # ------------------------------------------------------------------------------------------------- inside a step
    def refresh_table(self, offsets: torch.Tensor, rows: int) -> None:
        """Decode this step's block table; see `DraftPages.table`."""
        self._table = self.pages.table(offsets, rows)

    def append(
        self,
        taps: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        batch: slice,
        first: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        """Write the context tokens of several requests in one call.

        Args:
            taps: [T, n_taps * D_target]. positions: [T], absolute. rows: [T], the batch row of each.
            batch: the batch rows that these are of. first, count: [B] over `batch`, int64: the request's first position
                here, and how many tokens from there are kept; later ones are not written.
        """
        assert self._table is not None, "refresh_table comes before append"
        drafter = self.drafter
        z, weight, cos, sin, eps = context_rows(drafter, taps, positions)
        slots, bound = self._rows[:, batch]
        last = torch.minimum(first + count, bound)
        limits = torch.stack((last, first))
        reach = limits.new_zeros(2, self._rows.shape[1]).index_copy_(1, _span(batch, limits.device), limits)
        where = slot_vector(self._table, reach[0], reach[1], rows, positions, self.pages.pool.layout.page_size)
        drafter.backend.operations.context_append(z, weight, cos, sin, where, self.pages.pool.views, eps)
        self.state.index_copy_(0, slots, self._advanced(self.state[slots], first, last))

    def _advanced(self, state: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """[B, 2] after a step that wrote positions first .. last-1, or nothing where last <= first."""
        start, end = state.unbind(1)
        new = start == NEW
        origin = torch.zeros_like(first) if self.pages.joint_reuse else first  # a joint prefix has its draft pages
        anew = new | (first < start)
        start = torch.where(new, origin, torch.where(anew, first, start))
        end = torch.where(anew, first, torch.minimum(end, first))
        wrote = last > first
        start = torch.where(wrote & (end < first), first, start)
        return torch.stack((start, torch.where(wrote, last, end)), 1)

    def readable(self, batch: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Page table [B, max_blocks] and context_start, context_len [B], int32, of these batch rows."""
        assert self._table is not None, "refresh_table comes before readable"
        slots, bound = self._rows[:, batch]
        start, end = self.state[slots].unbind(1)
        return self._table[batch], start.clamp(min=0).int(), torch.minimum(end, bound).clamp(min=0).int()


def _span(batch: slice, device: torch.device) -> torch.Tensor:
    return torch.arange(batch.start, batch.stop, device=device)


def _to(device: torch.device, values: list) -> torch.Tensor:
    """Small integers for the device; the copy from pinned memory does not wait for it."""
    host = torch.tensor(values, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
