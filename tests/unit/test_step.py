"""The buffers that a captured step reads: what a smaller batch leaves in them. No graph here; that needs a GPU."""

import small_drafts
import torch

from trtllm_dspark.context.draft_context import ContextView
from trtllm_dspark.context.pages import NOT_WRITTEN
from trtllm_dspark.step import CapturedStep, StepBuffers


def step() -> CapturedStep:
    """Buffers for 4 requests, 6 pages and 3 context rows, filled by an earlier batch; the control flow only, no graph."""
    made = CapturedStep.__new__(CapturedStep)
    made.buffers, made.pages = StepBuffers.allocate(small_drafts.small_model(), 4, 6, rows=3), ()
    made.buffers.context_len.fill_(9)
    made.buffers.slots.fill_(5)
    made.buffers.page_table.fill_(8)
    return made


def view(batch: int, pages: int) -> ContextView:
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    return ContextView((), table, torch.arange(batch, dtype=torch.int32), torch.arange(batch, dtype=torch.int32) + 3)


def test_a_smaller_batch_leaves_no_request_and_no_write_of_the_last() -> None:
    """Fails where a row behind the batch keeps a context, or a slot of an earlier step is written once more."""
    made, given = step(), view(2, 3)
    made.load(torch.tensor([7, 8]), torch.tensor([3, 4]), given)
    found = made.buffers
    assert found.anchors[:2].tolist() == [7, 8] and found.positions[:2].tolist() == [3, 4]
    assert torch.equal(found.page_table[:2, :3], given.page_table) and found.context_start[:2].tolist() == [0, 1]
    assert found.context_len.tolist() == [3, 4, 0, 0] and found.slots.tolist() == [NOT_WRITTEN] * 3


def test_what_fits_and_what_does_not() -> None:
    """Fails where a batch, a table or a pool that was not captured is taken."""
    made = step()
    assert made.takes(4, view(4, 6)) and made.takes(1, view(1, 0))
    assert not made.takes(5, view(5, 6)) and not made.takes(2, view(2, 7))
    fits = view(2, 3)
    elsewhere = ContextView([torch.zeros(1)], fits.page_table, fits.context_start, fits.context_len)
    assert made.takes(2, fits) and not made.takes(2, elsewhere)
