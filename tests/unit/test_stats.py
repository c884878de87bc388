"""Acceptance figures from exact counts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.stats import AcceptanceCounter, distinct_ngrams


def counted(rows: list[tuple[int, int]], num_drafts: int = 3) -> AcceptanceCounter:
    counter = AcceptanceCounter(num_drafts)
    accepted, submitted = zip(*rows, strict=True) if rows else ((), ())
    counter.record(torch.tensor(accepted, dtype=torch.int64), torch.tensor(submitted, dtype=torch.int64))
    return counter


def test_figures_by_hand() -> None:
    found = counted([(3, 3), (0, 3), (1, 3), (1, 2), (0, 0)]).summary()
    assert (found.verifications, found.submitted, found.accepted) == (5, 11, 5)
    assert found.histogram == (2, 2, 0, 1)
    assert found.accept_len == 2.0  # 1 + 5/5: the bonus token counts
    assert found.accept_rate == 5 / 11
    assert found.accept_rate_at == (3 / 4, 1 / 4, 1 / 3)


def test_padding_rows_count_nothing() -> None:
    real = [(3, 3), (0, 2)]
    padded = counted([(0, -1), *real, (3, -1), (2, -1), (10**6, -1), (-5, -1)]).summary()
    assert padded == counted(real).summary()
    assert counted([(0, 0)]).summary().verifications == 1  # control: a real row without drafts does count


def test_calls_add_up() -> None:
    rows = [(3, 3), (0, 3), (1, 2), (0, -1)]
    one = counted(rows)
    several = AcceptanceCounter(3)
    for accepted, submitted in rows:
        several.record(torch.tensor([accepted]), torch.tensor([submitted]))
    assert one.summary() == several.summary()
    assert one.summary() == one.summary()  # reading changes nothing


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    counter = AcceptanceCounter(3)
    counter.record(torch.tensor([2, 0], dtype=dtype), torch.tensor([3, 1], dtype=dtype))
    assert counter.summary().histogram == (1, 0, 1, 0)


def test_nothing_is_nan_and_never_a_division_by_zero() -> None:
    empty = counted([]).summary()
    assert empty.verifications == 0 and math.isnan(empty.accept_len) and math.isnan(empty.accept_rate)
    assert all(math.isnan(rate) for rate in empty.accept_rate_at)
    undrafted = counted([(0, 0), (0, 0)]).summary()
    assert undrafted.accept_len == 1.0 and math.isnan(undrafted.accept_rate)
    short = counted([(1, 1)]).summary()
    assert short.accept_rate_at[0] == 1.0 and math.isnan(short.accept_rate_at[1])
    assert AcceptanceCounter(0).summary().accept_rate_at == ()


@given(st.lists(st.integers(0, 4).flatmap(lambda s: st.tuples(st.integers(0, s), st.just(s))), max_size=30))
def test_figures_equal_a_plain_count(rows: list[tuple[int, int]]) -> None:
    found = counted(rows, num_drafts=4).summary()
    assert found.verifications == len(rows) == sum(found.histogram)
    assert found.accepted == sum(a for a, _ in rows) and found.submitted == sum(s for _, s in rows)
    for k in range(1, 5):
        offered = [a >= k for a, s in rows if s >= k]
        rate = found.accept_rate_at[k - 1]
        assert rate == sum(offered) / len(offered) if offered else math.isnan(rate)


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [
        ([1, 2, 3, 4, 5], 4, 1.0),
        ([1, 1, 1, 1, 1, 1], 4, 1 / 3),
        ([1, 2, 1, 2, 1, 2, 1, 2], 4, 2 / 5),
        ([1, 2, 1, 2], 1, 0.5),
        ([1, 2, 3, 4], 4, 1.0),
    ],
)
def test_distinct_ngrams(tokens: list[int], n: int, share: float) -> None:
    assert distinct_ngrams(tokens, n) == share


@pytest.mark.parametrize("tokens", [[], [1, 2, 3]])
def test_a_text_shorter_than_an_ngram_has_no_share(tokens: list[int]) -> None:
    assert math.isnan(distinct_ngrams(tokens))
