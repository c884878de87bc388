"""VANILLA against a dense fp64 softmax, on pages whose dead parts are NaN."""

import pytest
import torch

from trtllm_dspark.attention import vanilla
from trtllm_dspark.errors import DSparkError

S, H, W, C, SCALE = 7, 3, 24, 16, 0.37


def make(lengths: list[int], page_size: int = 4, dtype: torch.dtype = torch.float32, slack: int = 2, seed: int = 0) -> dict:
    """Arguments of a call: shuffled pages, `slack` granted pages past each context, and NaN wherever no token lives."""
    generator = torch.Generator().manual_seed(seed)
    live = [-(-n // page_size) for n in lengths]
    granted = [n + slack for n in live]
    num_pages = sum(granted) + 3
    free = torch.randperm(num_pages, generator=generator).tolist()
    pages = torch.full((num_pages, page_size, W), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), max(granted)), -1, dtype=torch.int32)
    context = []
    for request, length in enumerate(lengths):
        ids = [free.pop() for _ in range(granted[request])]
        table[request, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        rows = torch.randn(length, W, generator=generator).to(dtype)
        context.append(rows)
        for t in range(length):
            pages[ids[t // page_size], t % page_size] = rows[t]
    return {
        "q": torch.randn(len(lengths), S, H, W, generator=generator).to(dtype),
        "block_latents": torch.randn(len(lengths), S, W, generator=generator).to(dtype),
        "pages": pages,
        "page_table": table,
        "context_len": torch.tensor(lengths, dtype=torch.int32),
        "context": context,
    }


def attend(case: dict, **changes: torch.Tensor) -> torch.Tensor:
    arguments = {k: v for k, v in case.items() if k != "context"} | changes
    return vanilla.block_attention(**arguments, scale=SCALE, value_width=C)


def dense(case: dict) -> torch.Tensor:
    """[B, S, H, C], fp64: softmax over the context and the whole block, all at once."""
    found = []
    for q, block, context in zip(case["q"].double(), case["block_latents"].double(), case["context"], strict=True):
        keys = torch.cat((context.double(), block))
        found.append((SCALE * torch.einsum("shw,tw->sht", q, keys)).softmax(-1) @ keys[:, :C])
    return torch.stack(found)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("lengths", [[0], [1], [64], [0, 5, 130, 64, 63]], ids=str)
def test_equals_dense_softmax(lengths: list[int], page_size: int) -> None:
    case = make(lengths, page_size)
    torch.testing.assert_close(attend(case).double(), dense(case), rtol=1e-5, atol=1e-5)


def test_fp64_queries_are_computed_in_fp64() -> None:
    case = make([130, 9], dtype=torch.float64)
    torch.testing.assert_close(attend(case), dense(case), rtol=1e-13, atol=1e-13)


def test_bf16_is_fp32_arithmetic_rounded_once() -> None:
    case = make([130, 9], dtype=torch.bfloat16)
    found = attend(case)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), dense(case), rtol=2**-8, atol=1e-5)


def test_control_a_context_one_token_short_is_noticed() -> None:
    case = make([64])
    short = attend(case, context_len=torch.tensor([63], dtype=torch.int32))
    assert float((short.double() - dense(case)).abs().max()) > 1e-3


def test_every_row_of_the_block_sees_every_other() -> None:
    case = make([9])
    base = attend(case)
    for changed in range(S):
        block = case["block_latents"].clone()
        block[0, changed] += 1.0
        moved = (attend(case, block_latents=block) - base).abs().amax(dim=(0, 2, 3))
        assert bool((moved > 1e-4).all()), (changed, moved)


def test_no_context_is_attention_within_the_block() -> None:
    case = make([0], slack=0)
    assert case["page_table"].shape == (1, 0)
    torch.testing.assert_close(attend(case).double(), dense(case), rtol=1e-5, atol=1e-5)


def test_nothing_past_the_context_is_read() -> None:
    case = make([0, 5, 64])
    for filler in (torch.nan, torch.inf, 1e30):
        pages = torch.where(case["pages"].isnan(), filler, case["pages"])
        assert torch.equal(attend(case, pages=pages), attend(case))
    assert bool(attend(case).isfinite().all())


@pytest.mark.parametrize("garbage", [-1, 10**6, 0])
def test_table_entries_past_the_context_are_never_looked_at(garbage: int) -> None:
    case = make([0, 5, 64])
    table = case["page_table"].clone()
    for request, length in enumerate((0, 5, 64)):
        table[request, -(-length // 4) :] = garbage
    assert torch.equal(attend(case, page_table=table), attend(case))


def test_control_a_wrong_live_entry_is_noticed() -> None:
    case = make([5, 8])
    table = case["page_table"].clone()
    table[0, 0] = table[1, 0]
    assert not torch.equal(attend(case, page_table=table)[0], attend(case)[0])
    assert torch.equal(attend(case, page_table=table)[1], attend(case)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_request_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    case = make([0, 5, 130, 64], dtype=dtype)
    together = attend(case)
    for b in range(4):
        alone = attend(case, **{k: case[k][b : b + 1] for k in ("q", "block_latents", "page_table", "context_len")})
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("group", [1, 4, 12, 64])
def test_groups_of_pages_fold_into_the_same_result(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([0, 5, 130])
    case["pages"] = case["pages"] * 4.0  # sharp scores: the running maximum changes from group to group
    case["context"] = [rows * 4.0 for rows in case["context"]]
    one = attend(case)
    monkeypatch.setattr(vanilla, "GROUP_TOKENS", group)
    torch.testing.assert_close(attend(case), one, rtol=1e-5, atol=4e-5)
    torch.testing.assert_close(attend(case).double(), dense(case), rtol=1e-5, atol=4e-5)


def test_large_scores_do_not_overflow() -> None:
    case = make([40])
    case["q"] = case["q"] * 1e4
    torch.testing.assert_close(attend(case).double(), dense(case), rtol=1e-4, atol=1e-4)


def test_strided_operands_give_the_same() -> None:
    case = make([5, 64])
    wide = {k: torch.full((*case[k].shape[:-1], 2 * W), torch.nan) for k in ("q", "block_latents", "pages")}
    strided = {}
    for key, value in wide.items():
        value[..., ::2] = case[key]
        strided[key] = value[..., ::2]
    table = torch.full((2, 2 * case["page_table"].shape[1]), 10**6, dtype=torch.int32)
    table[:, ::2] = case["page_table"]
    pool = torch.full((case["pages"].shape[0], 2, *case["pages"].shape[1:]), torch.nan)  # one layer of an interleaved pool
    pool[:, 1] = case["pages"]
    torch.testing.assert_close(
        attend(case, **strided, page_table=table[:, ::2]), attend(case), rtol=1e-6, atol=1e-6
    )  # a strided GEMM may sum in another order
    assert torch.equal(attend(case, pages=pool[:, 1]), attend(case))


@pytest.mark.parametrize("request_index", [0, 2])
def test_a_context_longer_than_its_table_is_an_error_with_both_numbers(request_index: int) -> None:
    case = make([5, 5, 5], slack=1)  # three pages of four
    lengths = [5, 5, 5]
    lengths[request_index] = 13
    with pytest.raises(DSparkError, match=rf"request {request_index} .*0 to 12 .*it has 13") as error:
        attend(case, context_len=torch.tensor(lengths, dtype=torch.int32))
    assert "3 pages of 4" in str(error.value)


def test_a_negative_length_is_an_error() -> None:
    case = make([5])
    with pytest.raises(DSparkError, match="it has -1"):
        attend(case, context_len=torch.tensor([-1], dtype=torch.int32))


@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_live_page_outside_the_pool_is_an_error(page: int) -> None:
    case = make([5, 8])
    table, last = case["page_table"].clone(), case["pages"].shape[0] - 1
    table[1, 1] = page
    with pytest.raises(DSparkError, match=rf"live pages of request 1 must lie in 0\.\.{last}.*{page}"):
        attend(case, page_table=table)


def test_operands_are_not_written() -> None:
    case = make([5, 64])
    before = {k: v.clone() for k, v in case.items() if k != "context"}
    attend(case)
    for key, value in before.items():
        assert torch.equal(case[key].nan_to_num(7.0), value.nan_to_num(7.0)), key
