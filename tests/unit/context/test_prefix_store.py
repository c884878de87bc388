"""Kept prefixes: the longest usable one is found, the least recently used goes first, and pages go back once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.context.draft_context import DraftContext
from trtllm_dspark.context.pages import NOT_WRITTEN
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.context.prefix import KeptPrefix, PrefixStore, common_length

PAGE = 4


def context(num_pages: int = 12) -> DraftContext:
    return DraftContext(ContextPool.allocate(PoolLayout(1, 6, PAGE, torch.float32), num_pages))


def keep(store: PrefixStore, text: str, start: int = 0) -> KeptPrefix:
    """Keep the context of a finished request; a letter is a token."""
    pages = store.context.allocator.take(-(-len(text) // PAGE)) if store.context is not None else []
    given_up = start // PAGE
    if store.context is not None:
        store.context.allocator.give_back(pages[:given_up])
    prefix = KeptPrefix(tokens(text), [NOT_WRITTEN] * given_up + pages[given_up:], start, object())
    store.keep(prefix)
    return prefix


def tokens(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def match(store: PrefixStore, text: str) -> tuple[str, int] | None:
    found = store.match(tokens(text))
    return found and ("".join(map(chr, found[0].tokens)), found[1])


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [("", "", 0), ("abc", "", 0), ("abc", "abd", 2), ("abc", "abcd", 3), ("abc", "abc", 3), ("xbc", "abc", 0)],
)
def test_common_length(a: str, b: str, length: int) -> None:
    assert common_length(a, b) == common_length(b, a) == length


# --- matching


def test_the_longest_match_is_found() -> None:
    store = PrefixStore(context())
    for text in ("abcx", "abcdefy", "zzz"):
        keep(store, text)
    assert match(store, "abcdefgh") == ("abcdefy", 6)
    assert match(store, "abcq") == ("abcdefy", 3) or match(store, "abcq") == ("abcx", 3)
    assert match(store, "zq") == ("zzz", 1)
    assert match(store, "q") is None and match(store, "qabc") is None


def test_the_last_token_is_never_matched() -> None:
    store = PrefixStore(context())
    keep(store, "abcd")
    assert match(store, "abcd") == ("abcd", 3)
    assert match(store, "abcde") == ("abcd", 4)
    assert match(store, "ab") == ("abcd", 1)
    assert match(store, "a") is None and match(store, "") is None


def test_a_prefix_without_its_beginning_serves_only_past_its_start() -> None:
    store = PrefixStore(context())
    keep(store, "abcdefghijkl", start=8)
    assert match(store, "abcdefghijxx") == ("abcdefghijkl", 10)
    assert match(store, "abcdefghi") is None  # eight of them would be matched, none of which can be read
    assert match(store, "abcdefghij") == ("abcdefghijkl", 9)


def test_a_longer_match_that_cannot_be_read_does_not_hide_a_shorter_one() -> None:
    store = PrefixStore(context())
    keep(store, "abcdxxxx")
    keep(store, "abcdefghijkl", start=8)
    assert match(store, "abcdefz") == ("abcdxxxx", 4)


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=6), st.text("ab", max_size=7))
def test_matches_are_those_of_a_search_through_all(kept: list[str], text: str) -> None:
    store = PrefixStore(context(64))
    for one in kept:
        keep(store, one)
    lengths = [common_length(one, text[:-1]) for one in kept]
    best = max(lengths, default=0)
    found = match(store, text)
    assert (found is None) == (best == 0)
    if found is not None:
        assert found[1] == best and found[0][:best] == text[:best] and found[0] in kept


# --- keeping and dropping


def test_a_continuation_takes_the_place_of_what_it_continues() -> None:
    ctx = context()
    store = PrefixStore(ctx)
    for text in ("abcd", "abcde", "abx"):
        keep(store, text)
    assert len(store) == 2 and ctx.allocator.num_free == 12 - 3
    keep(store, "abcde")
    assert len(store) == 2 and ctx.allocator.num_free == 12 - 3


def test_a_continuation_that_lost_its_beginning_leaves_the_older_one() -> None:
    store = PrefixStore(context())
    keep(store, "abcdef")
    keep(store, "abcdefghij", start=8)
    assert len(store) == 2 and match(store, "abcz") == ("abcdef", 3)
    keep(store, "abcdefghijk", start=8)
    assert len(store) == 2


def test_the_least_recently_used_goes_first() -> None:
    store = PrefixStore(context(), max_prefixes=3)
    for text in ("aa", "bb", "cc"):
        keep(store, text)
    assert match(store, "aax") == ("aa", 2)
    keep(store, "dd")
    assert match(store, "bbx") is None and match(store, "aax") and match(store, "ccx") and len(store) == 3
    assert store.drop_oldest() and match(store, "ddx") is None  # aa and cc were matched since
    assert store.drop_oldest() and match(store, "aax") is None
    assert store.drop_oldest() and not store.drop_oldest() and len(store) == 0


def test_an_equal_match_prefers_the_most_recent() -> None:
    store = PrefixStore(context())
    for text in ("abx", "aby"):
        keep(store, text)
    assert match(store, "abz") == ("aby", 2)
    assert match(store, "abxq") == ("abx", 3)
    assert match(store, "abz") == ("abx", 2)


def test_pages_go_back_when_a_prefix_goes_and_only_then() -> None:
    ctx = context()
    store = PrefixStore(ctx)
    prefix = keep(store, "abcdefghi")
    assert ctx.allocator.num_free == 9
    ctx.admit_behind("r", prefix.pages, 0, 9)
    store.clear()
    held = ctx.requests["r"].ids
    assert [ctx.allocator.holders(page) for page in held] == [1, 1, 1] and ctx.allocator.num_free == 9
    assert held[:2] == prefix.pages[:2]
    ctx.release("r")
    store.clear()
    assert ctx.allocator.num_free == 12


def test_pages_that_were_given_up_are_not_given_back_again() -> None:
    ctx = context()
    store = PrefixStore(ctx)
    keep(store, "abcdefghijkl", start=8)
    assert ctx.allocator.num_free == 11
    store.clear()
    assert ctx.allocator.num_free == 12


def test_a_store_of_none_keeps_nothing() -> None:
    ctx = context()
    store = PrefixStore(ctx, max_prefixes=0)
    keep(store, "abcd")
    assert len(store) == 0 and ctx.allocator.num_free == 12


def test_states_that_cannot_be_compared_are_never_compared() -> None:
    store = PrefixStore(None)
    for text in ("ab", "ac", "ab"):
        store.keep(KeptPrefix(tokens(text), [], 0, torch.ones(2)))
    assert len(store) == 2
    store.clear()
    assert len(store) == 0


def test_without_a_draft_context_there_are_no_pages() -> None:
    store = PrefixStore(None, max_prefixes=2)
    for text in ("aa", "bb", "cc"):
        keep(store, text)
    assert len(store) == 2 and match(store, "ccx") == ("cc", 2)
    assert store.drop_oldest() and match(store, "ccx") == ("cc", 2)
