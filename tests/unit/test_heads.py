"""The Markov chain and the confidence head. Tables of small integers: sums are exact, so tokens are compared exactly."""

import pytest
import torch

from trtllm_dspark.model.heads import ConfidenceHead, MarkovHead, greedy_chain

V, R, B, K = 40, 6, 3, 5


def head(seed: int = 0, dtype: torch.dtype = torch.float32) -> MarkovHead:
    generator, made = torch.Generator().manual_seed(seed), MarkovHead(V, R)
    for table in (made.markov_w1, made.markov_w2):
        table.weight.data = torch.randint(-3, 4, (V, R), generator=generator).to(dtype)
    return made.requires_grad_(False)


def base(seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-8, 9, (B, K, V), generator=torch.Generator().manual_seed(seed)).to(dtype)


def chain_by_hand(made: MarkovHead | None, logits: torch.Tensor, anchors: list[int]) -> list[list[int]]:
    """One number at a time, in Python."""
    found = []
    for rows, anchor in zip(logits.tolist(), anchors, strict=True):
        tokens, previous = [], anchor
        for row in rows:
            scores = list(row)
            if made is not None and 0 <= previous < V:
                code = made.markov_w1.weight[previous].tolist()
                for v, w in enumerate(made.markov_w2.weight.tolist()):
                    scores[v] += sum(x * y for x, y in zip(code, w, strict=True))
            previous = scores.index(max(scores))
            tokens.append(previous)
        found.append(tokens)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_chain_equals_the_one_by_hand(dtype: torch.dtype) -> None:
    made, logits, anchors = head(dtype=dtype), base(dtype=dtype), [0, 7, 39]
    chain = greedy_chain(made, logits, torch.tensor(anchors), keep_logits=True)
    assert chain.tokens.tolist() == chain_by_hand(made, logits, anchors)
    assert chain.tokens.dtype == torch.int64 and chain.logits.dtype == torch.float32
    assert torch.equal(chain.logits.argmax(-1), chain.tokens)


def test_control_the_chain_depends_on_anchor_head_and_previous_token() -> None:
    made, logits = head(), base()
    right = greedy_chain(made, logits, torch.tensor([0, 7, 39])).tokens
    assert not torch.equal(greedy_chain(made, logits, torch.tensor([1, 8, 38])).tokens, right)
    assert not torch.equal(greedy_chain(None, logits, torch.tensor([0, 7, 39])).tokens, right)
    parallel = (logits + made(torch.tensor([[0], [7], [39]]))).argmax(-1)  # every row biased by the anchor
    assert not torch.equal(parallel, right)


def test_without_a_head_the_chain_is_the_argmax() -> None:
    chain = greedy_chain(None, base(), torch.tensor([0, 7, 39]), keep_logits=True)
    assert torch.equal(chain.tokens, base().argmax(-1)) and chain.codes is None
    assert torch.equal(chain.logits, base())
    assert greedy_chain(None, base(), torch.tensor([0, 7, 39])).logits is None
    half = greedy_chain(None, base(dtype=torch.bfloat16), torch.tensor([0, 7, 39]), keep_logits=True)
    assert half.logits.dtype == torch.float32


def test_codes_are_those_of_the_token_before() -> None:
    made, anchors = head(), torch.tensor([0, 7, 39])
    chain = greedy_chain(made, base(), anchors)
    before = torch.cat((anchors[:, None], chain.tokens[:, :-1]), 1)
    assert torch.equal(chain.codes, made.markov_w1.weight[before])


def test_a_tie_goes_to_the_smallest_id() -> None:
    logits = torch.zeros(1, 2, V)
    logits[0, :, [5, 11, 30]] = 4.0
    assert greedy_chain(None, logits, torch.tensor([0])).tokens.tolist() == [[5, 5]]
    made = head()
    made.markov_w1.weight.zero_()
    assert greedy_chain(made, logits, torch.tensor([0])).tokens.tolist() == [[5, 5]]


@pytest.mark.parametrize("previous", [-1, V, V + 1000, -(2**31)])
def test_an_unknown_previous_id_gives_no_bias(previous: int) -> None:
    made = head()
    assert not bool(made(torch.tensor([previous])).any())
    assert bool(made(torch.tensor([3])).any())  # control: a known one does
    chain = greedy_chain(made, base(), torch.tensor([previous, 7, 39]))
    assert chain.tokens.tolist() == chain_by_hand(made, base(), [previous, 7, 39])


def test_an_unknown_previous_id_gives_no_bias_where_row_0_is_not_finite() -> None:
    made = head()
    made.markov_w1.weight[0] = torch.nan  # the row that stands in while looking up
    assert made(torch.tensor([-1])).tolist() == [[0.0] * V]


def test_the_bias_is_accumulated_in_fp32() -> None:
    made = MarkovHead(1, 4).requires_grad_(False)
    made.markov_w1.weight.data = torch.tensor([[256.0, 1.0, 1.0, 1.0]]).bfloat16()
    made.markov_w2.weight.data = torch.ones(1, 4).bfloat16()
    found = made(torch.tensor([0]))
    assert found.dtype == torch.float32 and found.tolist() == [[259.0]]  # bf16 would stay at 256 or round to 260
    logits = torch.tensor([[[1.0]]]).bfloat16()
    assert greedy_chain(made, logits, torch.tensor([0]), keep_logits=True).logits.tolist() == [[[260.0]]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_chain_over_a_sharded_vocabulary_equals_the_whole(ranks: int) -> None:
    """Every rank keeps its columns; the argmax seam joins them, step by step."""
    made, logits, anchors = head(), base(), torch.tensor([0, 7, 39])
    whole = greedy_chain(made, logits, anchors, keep_logits=True)
    share = V // ranks
    previous = anchors
    for k in range(K):  # one step at a time: each rank's local winner, then the winner of winners
        winners = []
        for rank in range(ranks):
            columns = slice(rank * share, (rank + 1) * share)
            part = greedy_chain(
                made,
                logits[:, k : k + 1, columns],
                previous,
                argmax=lambda local, start=columns.start: local.argmax(-1) + start,
                vocab=columns,
                keep_logits=True,
            )
            assert torch.equal(part.logits[:, 0], whole.logits[:, k, columns])
            winners.append(part.tokens[:, 0])
        candidates = torch.stack(winners, 1)
        best = whole.logits[:, k].gather(1, candidates).argmax(1, keepdim=True)
        previous = candidates.gather(1, best)[:, 0]
        assert torch.equal(previous, whole.tokens[:, k])


def test_the_argmax_seam_decides_what_follows() -> None:
    made, anchors = head(), torch.tensor([0, 7, 39])
    forced = greedy_chain(made, base(), anchors, argmax=lambda logits: torch.full((B,), 4, dtype=torch.int32))
    assert forced.tokens.tolist() == [[4] * K] * B and forced.tokens.dtype == torch.int64
    assert torch.equal(forced.codes[:, 1:], made.markov_w1.weight[4].expand(B, K - 1, R))


def test_nan_logits_still_give_ids_of_the_vocabulary() -> None:
    tokens = greedy_chain(head(), torch.full((B, K, V), torch.nan), torch.tensor([0, 7, 39])).tokens
    assert bool(((tokens >= 0) & (tokens < V)).all())


def confidence(code: int, bias: bool, dtype: torch.dtype = torch.float32) -> ConfidenceHead:
    made, generator = ConfidenceHead(8, code, bias), torch.Generator().manual_seed(3)
    made.weight.data = torch.randn(1, 8 + code, generator=generator).to(dtype)
    if bias:
        made.bias.data = torch.tensor([0.75]).to(dtype)
    return made.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("code", [0, R])
def test_confidence_is_a_dot_product_in_fp32(code: int, bias: bool, dtype: torch.dtype) -> None:
    made, generator = confidence(code, bias, dtype), torch.Generator().manual_seed(4)
    hidden = torch.randn(B, K, 8, generator=generator).to(dtype)
    codes = torch.randn(B, K, R, generator=generator).to(dtype)
    features = torch.cat((hidden, codes), -1)[..., : 8 + code].double()
    expected = (features * made.weight[0].double()).sum(-1) + (0.75 if bias else 0.0)
    found = made(hidden, codes)
    assert found.shape == (B, K) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    if code:  # control: without the codes it is another number
        assert float((made(hidden, torch.zeros_like(codes)) - found).abs().max()) > 0.1


def test_a_confidence_head_over_codes_refuses_to_go_without() -> None:
    with pytest.raises(AssertionError, match="was given none"):
        confidence(R, True)(torch.zeros(1, 8), None)
