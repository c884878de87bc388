"""Page bookkeeping: bounds are tokens that were granted, page 0 is a page, and no page has two owners."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.context.pages import NOT_WRITTEN, PageAllocator, RequestPages, page_table, readable_ranges
from trtllm_dspark.errors import DSparkError


def test_slots_are_page_times_size_plus_offset() -> None:
    held = RequestPages(4, [7, 0, 3])
    assert held.bound == 12
    assert held.slots(0, 12) == [28, 29, 30, 31, 0, 1, 2, 3, 12, 13, 14, 15]
    assert held.slots(3, 2) == [31, 0]
    assert held.slots(5, 0) == []


def test_positions_at_and_past_the_bound_have_no_slot() -> None:
    held = RequestPages(4, [7, 0])
    assert held.slots(6, 4) == [2, 3, NOT_WRITTEN, NOT_WRITTEN]
    assert held.slots(8, 1) == [NOT_WRITTEN]
    assert held.slots(100, 3) == [NOT_WRITTEN] * 3
    assert RequestPages(4).slots(0, 2) == [NOT_WRITTEN] * 2


@given(st.lists(st.integers(0, 50), max_size=6, unique=True), st.integers(1, 8), st.integers(0, 60), st.integers(0, 20))
def test_slots_stay_within_the_requests_own_pages(ids: list[int], size: int, first: int, count: int) -> None:
    slots = RequestPages(size, ids).slots(first, count)
    written = [slot for slot in slots if slot != NOT_WRITTEN]
    assert len(slots) == count
    assert len(written) == max(0, min(first + count, len(ids) * size) - first)
    assert {slot // size for slot in written} <= set(ids) and len(set(written)) == len(written)
    assert slots == written + [NOT_WRITTEN] * (count - len(written))


def test_the_table_names_page_zero_like_any_other_and_pads_with_minus_one() -> None:
    held = [RequestPages(4, [0]), RequestPages(4, []), RequestPages(4, [5, 0, 2])]
    table = page_table(held)
    assert table.dtype == torch.int32
    assert table.tolist() == [[0, -1, -1], [-1, -1, -1], [5, 0, 2]]


def test_tables_of_nothing_have_a_shape() -> None:
    assert page_table([]).shape == (0, 0) and page_table([RequestPages(4)]).shape == (1, 0)
    assert [part.shape for part in readable_ranges([])] == [(0,), (0,)]


def test_what_is_readable_ends_at_the_bound() -> None:
    held = [RequestPages(4, [0]), RequestPages(4, [1]), RequestPages(4)]
    for request, end in zip(held, (3, 9, 2), strict=True):
        request.advance(end)
    start, length = readable_ranges(held)
    assert length.dtype == start.dtype == torch.int32
    assert length.tolist() == [3, 4, 0] and start.tolist() == [0, 0, 0]
    assert [request.suppressed for request in held] == [0, 5, 2]


def test_every_page_is_handed_out_once_page_zero_too() -> None:
    allocator = PageAllocator(5)
    assert sorted(allocator.take(2) + allocator.take(3)) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0


def test_too_many_pages_are_an_error_that_takes_none() -> None:
    allocator = PageAllocator(5)
    allocator.take(2)
    with pytest.raises(DSparkError, match="4 pages are required, 3 of 5 are free"):
        allocator.take(4)
    assert allocator.num_free == 3 and len(allocator.take(3)) == 3


@given(st.lists(st.integers(0, 4), max_size=30))
def test_pages_in_use_never_have_two_owners(wanted: list[int]) -> None:
    allocator, held = PageAllocator(8), []
    for count in wanted:
        if count <= allocator.num_free:
            held.append(allocator.take(count))
        elif held:
            allocator.give_back(held.pop(0))
        used = [page for ids in held for page in ids]
        assert len(set(used)) == len(used) and len(used) + allocator.num_free == 8
        assert set(used) <= set(range(8))
