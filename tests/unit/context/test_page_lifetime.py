"""Pages from grant to return: all or nothing, shared by count, given back once, never written while shared."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.context.pages import NOT_WRITTEN, PageAllocator, RequestPages
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.errors import DSparkError

LAYERS, W, PAGE = 2, 6, 4


def context(num_pages: int = 6) -> DraftContext:
    return DraftContext(ContextPool.allocate(PoolLayout(LAYERS, W, PAGE, torch.float32), num_pages))


def write(ctx: DraftContext, request: str, count: int, value: float = 1.0) -> None:
    """The next `count` rows of a request. Row p differs from every other: its first element is value, its last p."""
    first = ctx.length(request)
    z = torch.full((count, LAYERS, W), value)
    z[..., -1] = torch.arange(first, first + count)[:, None]
    no_turn = {"cos": torch.ones(count, 1), "sin": torch.zeros(count, 1)}
    ctx.append([Segment(request, first, count)], z, norm_weight=torch.ones(LAYERS, 4), **no_turn, eps=1e-5)


def pool_bits(ctx: DraftContext) -> torch.Tensor:
    return torch.stack(ctx.pool.views).view(torch.int32)


def rows(ctx: DraftContext, request: str) -> torch.Tensor:
    """[L, end - start, W]: what can be read of a request."""
    held = ctx.requests[request]
    slots = torch.tensor(held.slots(held.start, held.end - held.start), dtype=torch.int64)
    return torch.stack([view.flatten(0, 1)[slots] for view in ctx.pool.views])


# --- growth


def test_growth_is_all_or_nothing() -> None:
    ctx = context()
    ctx.admit("a", 8)
    ctx.admit("b", 4)
    before = list(ctx.requests["a"].ids)
    assert not ctx.grow("a", 8 + 4 * PAGE)  # four more, three are free
    assert ctx.requests["a"].ids == before and ctx.allocator.num_free == 3
    assert ctx.grow("a", 8 + 3 * PAGE) and ctx.allocator.num_free == 0
    assert ctx.requests["a"].ids[:2] == before and ctx.requests["a"].bound == 20


def test_growth_to_less_than_is_held_is_no_change() -> None:
    ctx = context()
    ctx.admit("a", 9)
    for tokens in (0, 5, 12):
        assert ctx.grow("a", tokens) and len(ctx.requests["a"].ids) == 3
    assert ctx.grow("a", 13) and len(ctx.requests["a"].ids) == 4


def test_a_request_grows_while_it_runs_and_keeps_what_it_wrote() -> None:
    ctx = context()
    ctx.admit("a")
    ctx.admit("b", 4)
    for done in range(0, 18, 3):
        kept = rows(ctx, "a")
        assert ctx.grow("a", done + 3)
        write(ctx, "a", 3)
        assert torch.equal(rows(ctx, "a")[:, :done], kept) and ctx.length("a") == done + 3
    assert ctx.requests["a"].suppressed == 0 and rows(ctx, "a")[0, :, -1].tolist() == list(range(18))


def test_after_lost_writes_only_pages_for_rows_to_come_are_asked_for() -> None:
    ctx = context()
    ctx.admit("a", 4)
    ctx.admit("b", 20)
    write(ctx, "a", 15)  # 11 of them find no page
    assert ctx.requests["a"].suppressed == 11 and ctx.view(["a"]).context_len.tolist() == [4]
    ctx.release("b")
    assert ctx.grow("a", 17) and ctx.allocator.num_free == 3  # pages of positions 12..15 and 16..19; none for 4..11
    write(ctx, "a", 2)
    view, held = ctx.view(["a"]), ctx.requests["a"]
    assert (view.context_start.tolist(), view.context_len.tolist()) == ([15], [17])
    assert rows(ctx, "a")[0, :, -1].tolist() == [15, 16] and held.ids[1:3] == [NOT_WRITTEN] * 2
    ctx.release("a")
    assert ctx.allocator.num_free == 6


def test_a_skipped_prefix_takes_no_pages() -> None:
    ctx = context()
    ctx.admit("a")
    ctx.skip_to("a", 17)
    assert ctx.grow("a", 20) and ctx.allocator.num_free == 5
    write(ctx, "a", 3)
    assert rows(ctx, "a")[0, :, -1].tolist() == [17, 18, 19] and ctx.requests["a"].suppressed == 0


def test_admission_for_more_than_there_is_takes_nothing() -> None:
    ctx = context()
    with pytest.raises(DSparkError, match="7 pages are required, 6 of 6 are free"):
        ctx.admit("a", 25)
    assert "a" not in ctx.requests and ctx.allocator.num_free == 6


# --- lost writes, gaps


def test_lost_writes_are_counted_and_touch_nothing() -> None:
    ctx = context(4)
    ctx.admit("a", 4)
    ctx.admit("b", 12)
    write(ctx, "b", 12, 2.0)
    write(ctx, "a", 3)
    others = pool_bits(ctx).clone()
    write(ctx, "a", 6, 3.0)
    changed = (pool_bits(ctx) != others).any(-1).any(0)
    assert changed.nonzero().tolist() == [[0, 3]]  # the one row that still had a slot
    held = ctx.requests["a"]
    assert (held.length, held.end, held.suppressed) == (9, 4, 5)
    write(ctx, "a", 1)
    assert (held.length, held.suppressed, ctx.length("a")) == (10, 6, 10)


def test_a_context_behind_a_gap_begins_anew() -> None:
    ctx = context()
    ctx.admit("a", 4)
    write(ctx, "a", 6)
    assert ctx.grow("a", 12)
    write(ctx, "a", 3)
    view = ctx.view(["a"])
    assert (view.context_start.tolist(), view.context_len.tolist()) == ([6], [9])
    write(ctx, "a", 1)
    assert rows(ctx, "a")[0, :, -1].tolist() == [6, 7, 8, 9]
    ctx.skip_to("a", 11)
    assert ctx.view(["a"]).context_len.tolist() == [10]  # until something is written, the older run is what it has
    write(ctx, "a", 1)
    assert rows(ctx, "a")[0, :, -1].tolist() == [11]


def test_a_skip_keeps_absolute_positions_and_never_goes_back() -> None:
    ctx = context()
    ctx.admit("a", 12)
    ctx.skip_to("a", 5)
    assert ctx.length("a") == 5 and ctx.view(["a"]).context_len.tolist() == [0]
    with pytest.raises(DSparkError, match="must be at position 5, it came at 0"):
        ctx.append([Segment("a", 0, 1)], torch.zeros(1, LAYERS, W), torch.ones(LAYERS, 4), *torch.ones(2, 1, 1), 1e-5)
    write(ctx, "a", 2)
    with pytest.raises(DSparkError, match="forward from position 7, it goes to 6"):
        ctx.skip_to("a", 6)
    ctx.skip_to("a", 7)
    assert ctx.length("a") == 7 and rows(ctx, "a")[0, :, -1].tolist() == [5, 6]


@given(st.lists(st.tuples(st.sampled_from(["grow", "write", "skip", "slide"]), st.integers(0, 9)), max_size=14))
def test_what_can_be_read_is_one_run_of_rows_that_were_written(steps: list[tuple[str, int]]) -> None:
    ctx = context(3)
    ctx.admit("a")
    written: set[int] = set()
    for step, count in steps:
        held, first = ctx.requests["a"], ctx.length("a")
        if step in ("grow", "slide"):
            getattr(ctx, step)("a", first + count)
        elif step == "skip":
            ctx.skip_to("a", first + count)
        else:
            fits = {p for p in range(first, min(first + count, held.bound)) if held.ids[p // PAGE] != NOT_WRITTEN}
            lost = held.suppressed
            write(ctx, "a", count)
            written |= fits
            assert held.suppressed - lost == count - len(fits)
        written = {p for p in written if held.ids[p // PAGE] != NOT_WRITTEN}
        run = set(range(held.start, held.end))
        assert run <= written and (not written or max(written) in run) and held.start - 1 not in written
        assert rows(ctx, "a")[0, :, -1].tolist() == sorted(run)
        assert ctx.allocator.num_free == 3 - len(held.held)


# --- shared pages


def test_a_page_is_free_when_its_last_holder_gives_it_back() -> None:
    allocator = PageAllocator(3)
    pages = allocator.take(2)
    allocator.share(pages)
    allocator.share(pages[:1])
    assert [allocator.holders(page) for page in pages] == [3, 2]
    allocator.give_back(pages)
    allocator.give_back(pages)
    assert [allocator.holders(page) for page in pages] == [1, 0] and allocator.num_free == 2
    assert pages[0] not in allocator.free_ids and pages[1] in allocator.free_ids
    allocator.give_back(pages[:1])
    assert sorted(allocator.free_ids) == [0, 1, 2]


def test_a_free_page_is_neither_shared_nor_given_back() -> None:
    allocator = PageAllocator(3)
    page = allocator.take(1)
    free = allocator.free_ids[0]
    with pytest.raises(AssertionError, match=f"page {free} is free and cannot be shared"):
        allocator.share([free])
    with pytest.raises(AssertionError, match=f"page {free} is given back more often than it was taken"):
        allocator.give_back([free])
    allocator.give_back(page)
    with pytest.raises(AssertionError, match="more often than it was taken"):
        allocator.give_back(page)
    assert allocator.num_free == 3


def prefix(ctx: DraftContext, tokens: int, value: float = 1.0) -> list[int]:
    """Pages of a finished request of so many tokens, held by the caller."""
    ctx.admit("first", tokens)
    write(ctx, "first", tokens, value)
    return ctx.detach("first").ids


def test_a_continuation_shares_full_pages_and_owns_a_copy_of_the_last() -> None:
    ctx = context(8)
    pages = prefix(ctx, 10)
    ctx.admit_behind("b", pages, 0, 10)
    ids = ctx.requests["b"].ids
    assert ids[:2] == pages[:2] and ids[2] not in pages
    assert [ctx.allocator.holders(page) for page in (*pages, ids[2])] == [2, 2, 1, 1]
    assert all(torch.equal(view[ids[2]], view[pages[2]]) or bool(view[ids[2], 2:].isnan().all()) for view in ctx.pool.views)
    assert rows(ctx, "b")[0, :, -1].tolist() == list(range(10)) and ctx.length("b") == 10


def test_the_writer_of_a_continuation_never_changes_what_is_kept() -> None:
    ctx = context(10)
    pages = prefix(ctx, 10)
    kept = pool_bits(ctx)[:, pages].clone()
    for name, value in (("b", 2.0), ("c", 3.0)):
        ctx.admit_behind(name, pages, 0, 10)
        assert ctx.grow(name, 15)
        write(ctx, name, 5, value)
    assert torch.equal(pool_bits(ctx)[:, pages], kept)
    found = {name: rows(ctx, name) for name in "bc"}
    assert torch.equal(found["b"][:, :10], found["c"][:, :10])
    assert not torch.equal(found["b"][:, 10:], found["c"][:, 10:])  # control: each has its own rows
    ctx.release("b")
    ctx.admit("d", 8)
    write(ctx, "d", 8, 9.0)
    assert torch.equal(rows(ctx, "c"), found["c"]) and torch.equal(pool_bits(ctx)[:, pages], kept)
    for name in "cd":
        ctx.release(name)
    assert ctx.allocator.num_free == 7
    ctx.allocator.give_back(pages)
    assert ctx.allocator.num_free == 10


@pytest.mark.parametrize(("tokens", "own"), [(8, 0), (9, 1), (4, 0), (3, 1)])
def test_a_continuation_may_begin_anywhere_in_a_prefix(tokens: int, own: int) -> None:
    ctx = context()
    pages = prefix(ctx, 10)
    free = ctx.allocator.num_free
    ctx.admit_behind("b", pages, 0, tokens)
    assert free - ctx.allocator.num_free == own and ctx.length("b") == tokens
    assert rows(ctx, "b")[0, :, -1].tolist() == list(range(tokens))


def test_a_prefix_without_its_beginning_is_read_from_its_start() -> None:
    ctx = context(3)
    ctx.admit("first", 8)
    write(ctx, "first", 8)
    ctx.admit("x", 4)
    assert ctx.slide("first", 10)
    write(ctx, "first", 2)
    held = ctx.detach("first")
    ctx.release("x")
    ctx.admit_behind("b", held.ids, held.start, 10)
    view = ctx.view(["b"])
    assert (view.context_start.tolist(), view.context_len.tolist()) == ([4], [10])
    assert ctx.requests["b"].ids[0] == NOT_WRITTEN and rows(ctx, "b")[0, :, -1].tolist() == list(range(4, 10))
    ctx.release("b")
    ctx.allocator.give_back([page for page in held.ids if page != NOT_WRITTEN])
    assert ctx.allocator.num_free == 3


def test_a_continuation_without_a_page_for_its_copy_takes_nothing() -> None:
    ctx = context(3)
    pages = prefix(ctx, 10)
    with pytest.raises(DSparkError, match="1 pages are required, 0 of 3 are free"):
        ctx.admit_behind("b", pages, 0, 10)
    assert "b" not in ctx.requests and [ctx.allocator.holders(page) for page in pages] == [1, 1, 1]


# --- ends


def test_release_happens_once_and_only_to_its_own_pages() -> None:
    ctx = context()
    ctx.admit("a", 8)
    ctx.release("a")
    ctx.admit("b", 8)
    write(ctx, "b", 8)
    kept = rows(ctx, "b")
    ctx.release("a")
    assert ctx.allocator.num_free == 4 and torch.equal(rows(ctx, "b"), kept)


def test_detached_pages_stay_held_and_the_request_is_gone() -> None:
    ctx = context()
    ctx.admit("a", 8)
    held = ctx.detach("a")
    ctx.release("a")
    assert ctx.allocator.num_free == 4 and "a" not in ctx.requests
    with pytest.raises(DSparkError, match="'a' must be admitted first"):
        ctx.detach("a")
    ctx.admit("a", 4)  # the name is free
    assert not set(ctx.requests["a"].ids) & set(held.ids)


# --- bad input


def test_bad_sizes_name_the_request_and_leave_the_others() -> None:
    ctx = context()
    ctx.admit("b", 8)
    write(ctx, "b", 5)
    kept, free = rows(ctx, "b"), ctx.allocator.free_ids
    pages = ctx.requests["b"].ids
    for words, call in {
        r"tokens of request 'a' must be 0 or more, came -1": lambda: ctx.admit("a", -1),
        r"100 pages are required, 4 of 6": lambda: ctx.admit("a", 400),
        r"rows of request 'b' must be 0 or more, came -2": lambda: ctx.append(
            [Segment("b", 5, -2)], torch.zeros(0, LAYERS, W), torch.ones(LAYERS, 4), *torch.ones(2, 0, 1), 1e-5
        ),
        r"2 pages carry 0 to 8 tokens; request 'a' was to continue 9": lambda: ctx.admit_behind("a", pages, 0, 9),
        r"request 'a' was to continue 3 of them, readable from 4": lambda: ctx.admit_behind("a", pages, 4, 3),
        r"request 'a' was to continue 3 of them, readable from -1": lambda: ctx.admit_behind("a", pages, -1, 3),
        r"'b' is already admitted": lambda: ctx.admit_behind("b", pages, 0, 4),
    }.items():
        with pytest.raises(DSparkError, match=words):
            call()
    assert ctx.allocator.free_ids == free and list(ctx.requests) == ["b"]
    assert torch.equal(rows(ctx, "b"), kept) and ctx.length("b") == 5


def test_a_grant_behind_a_gap_is_no_shorter_than_the_rows_need() -> None:
    held = RequestPages(PAGE, [5], length=13)
    assert held.missing(13) == 1 and held.missing(12) == 0 and held.missing(20) == 2
    held.grant([3, 8])
    assert held.ids == [5, NOT_WRITTEN, NOT_WRITTEN, 3, 8] and held.bound == 20 and held.missing(20) == 0
    held.grant([])
    assert len(held.ids) == 5
