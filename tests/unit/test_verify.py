"""Greedy verification: what is committed is the target's own argmax, whatever was drafted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.verify import verify_greedy

V = 6


def target(tokens: list[int]) -> torch.Tensor:
    """[1, K+1, V] logits whose argmax is `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), V).float()


@pytest.mark.parametrize(
    ("drafts", "accepted"),
    [
        ([3, 1, 4], 3),
        ([3, 1, 5], 2),
        ([3, 0, 4], 1),  # a right draft behind a wrong one does not count
        ([0, 1, 4], 0),
        ([-1, 1, 4], 0),
        ([3, -1, -1], 1),
        ([3, V, 4], 1),
        ([3, 10**9, 4], 1),
        ([-(2**62), 1, 4], 0),
    ],
    ids=str,
)
def test_a_prefix_of_agreeing_drafts_is_accepted(drafts: list[int], accepted: int) -> None:
    own = [3, 1, 4, 2]
    verdict = verify_greedy(target(own), torch.tensor([drafts]))
    assert verdict.accepted.tolist() == [accepted] and verdict.tokens.tolist() == [own]


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3.5, -0.5])
def test_drafts_that_are_no_token_at_all_are_never_accepted(garbage: float) -> None:
    verdict = verify_greedy(target([3, 1, 4, 2]), torch.full((1, 3), garbage))
    assert verdict.accepted.tolist() == [0] and verdict.tokens.tolist() == [[3, 1, 4, 2]]


def test_rows_are_judged_alone() -> None:
    logits = torch.cat((target([3, 1, 4, 2]), target([0, 0, 0, 0]), target([5, 4, 3, 2])))
    verdict = verify_greedy(logits, torch.tensor([[3, 1, 4], [1, 0, 0], [5, 0, 3]]))
    assert verdict.accepted.tolist() == [3, 0, 1]
    assert verdict.accepted.dtype == verdict.tokens.dtype == torch.int64


def test_no_drafts_commit_one_token() -> None:
    verdict = verify_greedy(target([3]), torch.empty(1, 0, dtype=torch.int64))
    assert verdict.accepted.tolist() == [0] and verdict.tokens.tolist() == [[3]]


def test_a_tie_is_the_smallest_id_as_without_speculation() -> None:
    assert verify_greedy(torch.zeros(1, 2, V), torch.tensor([[0]])).accepted.tolist() == [1]


@given(st.lists(st.integers(0, V - 1), min_size=4, max_size=4), st.lists(st.integers(-2, V + 2), min_size=3, max_size=3))
def test_accepted_drafts_are_the_committed_tokens(own: list[int], drafts: list[int]) -> None:
    verdict = verify_greedy(target(own), torch.tensor([drafts]))
    accepted = int(verdict.accepted)
    assert drafts[:accepted] == own[:accepted] == verdict.tokens[0, :accepted].tolist()
    assert accepted == 3 or drafts[accepted] != own[accepted]
    assert verdict.tokens[0].tolist() == own
