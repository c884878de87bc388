"""A request past its pages drafts from its most recent context: kept positions only, at their absolute positions.

The yardstick is a dense fp64 softmax, and the un-absorbed backbone of `plain_mla`, over exactly the kept rows.
"""

import plain_mla
import published
import pytest
import small_drafts
import torch

from trtllm_dspark.attention import vanilla
from trtllm_dspark.attention.vanilla import block_attention
from trtllm_dspark.context.draft_context import Segment
from trtllm_dspark.context.pages import NOT_WRITTEN, RequestPages
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.propose import Drafter

S, H, W, C, PAGE, SCALE = 3, 2, 12, 8, 4, 0.41


def case(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One request: pages in a shuffled pool, NaN wherever no token lives."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-length // PAGE) + 2
    ids = torch.randperm(count + 3, generator=generator)[:count]
    rows = torch.randn(length, W, generator=generator)
    pages = torch.full((count + 3, PAGE, W), torch.nan)
    for position in range(length):
        pages[ids[position // PAGE], position % PAGE] = rows[position]
    return {
        "q": torch.randn(1, S, H, W, generator=generator),
        "block_latents": torch.randn(1, S, W, generator=generator),
        "pages": pages,
        "page_table": ids[None].int(),
        "rows": rows,
    }


def attend(given: dict[str, torch.Tensor], start: int | None, length: int, **changes: torch.Tensor) -> torch.Tensor:
    arguments = {k: v for k, v in given.items() if k != "rows"} | changes
    starts = None if start is None else torch.tensor([start], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    return block_attention(**arguments, context_len=lengths, context_start=starts, scale=SCALE, value_width=C)


def dense(given: dict[str, torch.Tensor], start: int, length: int) -> torch.Tensor:
    keys = torch.cat((given["rows"][start:length], given["block_latents"][0])).double()
    return ((SCALE * torch.einsum("shw,tw->sht", given["q"][0].double(), keys)).softmax(-1) @ keys[:, :C])[None]


# --- attention over start .. len-1


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 8, 12, 13])
def test_equals_dense_softmax_over_the_kept_positions(start: int) -> None:
    given = case(14)
    found = attend(given, start, 14).double()
    torch.testing.assert_close(found, dense(given, start, 14), rtol=1e-5, atol=1e-5)
    for other in (start + 1, start - 1):  # control: one position more or less is noticed
        if 0 <= other <= 14:
            assert float((found - dense(given, other, 14)).abs().max()) > 1e-4


@pytest.mark.parametrize("start", [14, 15, 100])
def test_a_start_at_or_past_the_end_is_no_context(start: int) -> None:
    given = case(14)
    torch.testing.assert_close(attend(given, start, 14).double(), dense(given, 14, 14), rtol=1e-5, atol=1e-5)
    assert torch.equal(attend(given, start, 14), attend(given, 0, 0))


def test_no_start_is_zero() -> None:
    given = case(14)
    assert torch.equal(attend(given, None, 14), attend(given, 0, 14))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize(("start", "length"), [(5, 14), (4, 12), (0, 9), (13, 14)])
def test_nothing_before_the_start_or_past_the_length_is_read(start: int, length: int, poison: float) -> None:
    given = case(14)
    pages, ids = given["pages"].clone(), given["page_table"][0].long()
    for position in [*range(start), *range(length, ids.shape[0] * PAGE)]:
        pages[ids[position // PAGE], position % PAGE] = poison
    found = attend(given, start, length, pages=pages)
    assert torch.equal(found, attend(given, start, length)) and bool(found.isfinite().all())


@pytest.mark.parametrize("garbage", [-1, 10**6])
def test_entries_of_pages_before_the_start_are_never_looked_at(garbage: int) -> None:
    given = case(14)
    table = given["page_table"].clone()
    table[0, :2] = garbage
    for start in (8, 9, 13):
        assert torch.equal(attend(given, start, 14, page_table=table), attend(given, start, 14))
    with pytest.raises(DSparkError, match="live pages of request 0"):  # control
        attend(given, 7, 14, page_table=table)


def test_a_negative_start_is_an_error() -> None:
    with pytest.raises(DSparkError, match="context_start of request 0 must be 0 or more, it is -1"):
        attend(case(14), -1, 14)


def test_groups_of_pages_begin_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(30)
    monkeypatch.setattr(vanilla, "GROUP_TOKENS", 8)
    for start in (0, 3, 9, 17, 29):
        torch.testing.assert_close(attend(given, start, 30).double(), dense(given, start, 30), rtol=1e-5, atol=1e-5)


# --- pages that are given up


def test_the_oldest_page_goes_first_and_the_last_one_stays() -> None:
    held = RequestPages(PAGE, [7, 8, 9], length=11, end=11)
    assert [held.give_up_oldest() for _ in range(3)] == [7, 8, None]
    assert held.ids == [NOT_WRITTEN, NOT_WRITTEN, 9] and held.held == [9] and held.bound == 12
    assert (held.start, held.end, held.length) == (8, 11, 11)


def test_a_page_given_up_before_its_rows_came_leaves_a_gap() -> None:
    held = RequestPages(PAGE, [7, 8], length=2, end=2)
    held.give_up_oldest()
    assert held.start >= held.end and held.writable_from == 4
    held.advance(3)
    assert held.start >= held.end and held.suppressed == 1
    held.advance(6)
    assert (held.start, held.end, held.suppressed) == (4, 6, 2)


def test_what_was_lost_and_given_up_is_not_readable_again() -> None:
    held = RequestPages(PAGE, [7], length=0)
    held.advance(9)
    assert (held.end, held.suppressed) == (4, 5)
    held.grant([8])
    held.give_up_oldest()
    assert held.start >= held.end
    held.advance(10)
    assert (held.start, held.end) == (9, 10) and held.slots(9, 1) == [8 * PAGE + 1]


def drafter_of(pages: int) -> Drafter:
    return small_drafts.small_drafter(small_drafts.small_model(), page_size=PAGE, num_pages=pages)


def grow_and_feed(drafter: Drafter, request: str, features: torch.Tensor, done: int, count: int) -> None:
    assert drafter.context.slide(request, done + count)
    drafter.extend([Segment(request, done, count)], features[done : done + count])


def test_a_request_longer_than_the_pool_drafts_from_its_newest_rows_like_the_oracle() -> None:
    """30 tokens through three pages: what is kept is dense fp64 attention over positions start .. 29, where they were."""
    drafter = drafter_of(3)
    features = small_drafts.taps(drafter.model, 30)
    drafter.context.admit("r")
    for done in range(0, 30, 3):
        grow_and_feed(drafter, "r", features, done, 3)
    held, ids = drafter.context.requests["r"], torch.tensor([7, 127, 127, 127])
    assert (held.start, held.end, held.suppressed) == (20, 30, 0) and len(held.held) == 3
    found = drafter.propose(["r"], ids[:1], 4).hidden[0].double()
    raw = published.tiny("mla")
    tensors = small_drafts.weights(raw)
    expected = plain_mla.hidden_states(raw, tensors, features[20:], ids, 30)
    assert float((found - expected).abs().max()) < 1e-4
    for wrong in (
        plain_mla.hidden_states(raw, tensors, features[19:], ids, 30),  # one row more
        plain_mla.hidden_states(raw, tensors, features[21:], ids, 30),  # one row less
        plain_mla.hidden_states(raw, tensors, features[:10], ids, 30),  # the oldest rows
    ):
        assert float((found - wrong).abs().max()) > 1e-3


def test_control_positions_counted_from_the_kept_start_are_noticed() -> None:
    """The same rows at positions 0 .. 9 with the block at 30: another distance, other hidden states."""
    drafter, moved = drafter_of(3), drafter_of(12)
    features = small_drafts.taps(drafter.model, 30)
    for one in (drafter, moved):
        one.context.admit("r")
    for done in range(0, 30, 3):
        grow_and_feed(drafter, "r", features, done, 3)
    moved.context.grow("r", 10)
    moved.extend([Segment("r", 0, 10)], features[20:])
    moved.context.skip_to("r", 30)
    anchor = torch.tensor([7])
    assert float((drafter.propose(["r"], anchor, 4).hidden - moved.propose(["r"], anchor, 4).hidden).abs().max()) > 1e-3


def test_sliding_takes_no_page_of_another_request() -> None:
    drafter = drafter_of(5)
    features = small_drafts.taps(drafter.model, 40, seed=1)
    small_drafts.feed(drafter, "other", features[:7])
    before = small_drafts.rows_of(drafter, "other").clone()
    ids = list(drafter.context.requests["other"].ids)
    drafter.context.admit("r")
    for done in range(0, 40, 4):
        grow_and_feed(drafter, "r", features, done, 4)
    assert drafter.context.requests["other"].ids == ids and torch.equal(small_drafts.rows_of(drafter, "other"), before)
    assert drafter.context.requests["r"].start == 28


def test_a_slide_that_cannot_succeed_gives_nothing_up() -> None:
    drafter = drafter_of(5)
    context = drafter.context
    small_drafts.feed(drafter, "other", small_drafts.taps(drafter.model, 8))
    small_drafts.feed(drafter, "r", small_drafts.taps(drafter.model, 12))
    ids = list(context.requests["r"].ids)
    assert not context.slide("r", 24)  # three pages more: two of its own would come free
    assert context.requests["r"].ids == ids and context.requests["r"].start == 0
    assert context.slide("r", 20) and context.requests["r"].start == 8
    drafter.extend([Segment("r", 12, 8)], small_drafts.taps(drafter.model, 8))
    assert context.requests["r"].suppressed == 0


def test_a_shared_page_is_given_up_but_not_counted_on() -> None:
    drafter = drafter_of(4)
    context = drafter.context
    small_drafts.feed(drafter, "first", small_drafts.taps(drafter.model, 12))
    kept = context.detach("first").ids
    before = torch.stack(context.pool.views)[:, kept].clone()
    context.admit_behind("r", kept, 0, 12)
    assert context.grow("r", 16) and context.allocator.num_free == 0
    assert not context.slide("r", 20)  # its other pages are the kept prefix's too
    assert context.requests["r"].held == [*kept, 3]
    context.allocator.give_back(kept[:1])
    assert context.slide("r", 20) and context.requests["r"].ids == [NOT_WRITTEN, kept[1], kept[2], 3, kept[0]]
    assert torch.equal(torch.stack(context.pool.views)[:, kept], before)
    context.release("r")
    context.allocator.give_back(kept[1:])
    assert context.allocator.num_free == 4


def test_a_lone_page_is_kept_and_what_follows_it_is_lost() -> None:
    drafter = drafter_of(1)
    features = small_drafts.taps(drafter.model, 9)
    small_drafts.feed(drafter, "r", features[:3])
    assert not drafter.context.slide("r", 9)
    drafter.extend([Segment("r", 3, 6)], features[3:])
    view = drafter.context.view(["r"])
    assert (view.context_start.tolist(), view.context_len.tolist()) == ([0], [4])
    assert drafter.context.requests["r"].suppressed == 5 and drafter.context.length("r") == 9
    assert bool(drafter.propose(["r"], torch.tensor([7]), 4).hidden.isfinite().all())
