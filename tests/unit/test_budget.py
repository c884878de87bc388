"""The budget: the published figures to the token, and for any sizes never a byte too much, never a page too few."""

import math
from decimal import Decimal
from fractions import Fraction

import published
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trtllm_dspark.budget import (
    DTYPES,
    GIB,
    MAX_BYTES,
    MAX_COUNT,
    MAX_TOKEN_BYTES,
    PUBLISHED,
    CacheCost,
    Deployment,
    Fit,
    bytes_of_gib,
    check_charge,
    draft_cost,
    draft_layout,
    dtype_of,
    fit,
    fit_host,
    wrong_charge,
)
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.pool import ContextPool, PoolLayout, bytes_per_token
from trtllm_dspark.errors import DSparkError

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
STATE = bytes_of_gib("state", 7.53)
# name -> (draft bytes a token, bytes a token of both pools, tokens, GiB of the draft pool): the measured DEP16 run. Each arm
# had its own total (the drafters' weights differ), so each is reproduced from the total that it implies.
MEASURED = {"inferact": (5_760, 33_408, 2_491_831, 13.37), "radixark": (20_480, 48_128, 1_779_275, 33.94)}
TARGET = CacheCost(27_648, STATE)
DEP16 = Deployment(tp_size=16, attention_dp=True)


def draft(name: str) -> DraftConfig:
    return DraftConfig.from_dict(published.CONFIGS[name][0], require_block_size=False)


def refused(call, *words):
    with pytest.raises(DSparkError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith("budget") and "\n" not in message and message.endswith(".")
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


# --- the measured figures


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("state", [math.floor, math.ceil, round], ids=["down", "up", "nearest"])
def test_measured_capacity_to_the_token(name: str, state) -> None:
    slope, both, tokens, gib = MEASURED[name]
    cost = draft_cost(draft(name), BF16, DEP16)
    assert cost == CacheCost(slope) and TARGET.bytes_per_token + slope == both
    implied = state(7.53 * GIB) + tokens * both  # however the fraction of a byte of 7.53 GiB is rounded by hand
    found = fit(implied, TARGET, cost)
    assert found.tokens == tokens and found.draft_bytes == tokens * slope
    assert round(found.draft_bytes / GIB, 2) == gib
    assert found.target_bytes == STATE + tokens * 27_648 and found.unused_bytes in (0, 1)
    # Controls: a byte short of one token less, the other arm's draft, the fp8 charge, the state as nothing.
    assert fit(implied - 2, TARGET, cost).tokens == tokens - 1
    other = draft_cost(draft("radixark" if name == "inferact" else "inferact"), BF16, DEP16)
    assert fit(implied, TARGET, other).tokens != tokens
    assert fit(implied, TARGET, draft_cost(draft(name), FP8, DEP16)).tokens != tokens
    assert fit(implied, CacheCost(27_648), cost).tokens != tokens


@pytest.mark.parametrize("name", MEASURED)
def test_the_implied_total_in_gib_gives_the_same_tokens(name: str) -> None:
    slope, both, tokens, _ = MEASURED[name]
    exact = Fraction("7.53") + Fraction(tokens * both, GIB)
    for gib in (float(exact), Decimal(f"{float(exact):.10f}"), (STATE + tokens * both) / GIB, 7.53 + tokens * both / GIB):
        assert fit(bytes_of_gib("total", gib), TARGET, CacheCost(slope)).tokens == tokens
    assert fit(bytes_of_gib("total", float(exact) - 1e-7), TARGET, CacheCost(slope)).tokens == tokens - 1


def test_capacity_rises_by_forty_percent_between_the_two_measured_runs() -> None:
    mla, gqa = (fit(STATE + tokens * both, TARGET, CacheCost(slope)).tokens for slope, both, tokens, _ in MEASURED.values())
    assert f"{mla / gqa - 1:.1%}" == "40.0%" and f"{48_128 / 33_408 - 1:.1%}" == "44.1%"  # less, as the state is fixed


def test_published_geometry_is_that_of_the_published_configs() -> None:
    for family, name in (("mla", "inferact"), ("gqa", "radixark")):
        assert PUBLISHED[family].family == draft(name).family == family
        for dtype in DTYPES.values():
            for tp in (1, 3, 16, 64):
                for dp in (False, True):
                    at = Deployment(tp, dp)
                    assert draft_layout(PUBLISHED[family], dtype, at) == draft_layout(draft(name), dtype, at)


# --- what a draft token costs a rank


@pytest.mark.parametrize(
    ("tp", "dp", "gqa"),
    [(1, False, 20_480), (2, False, 10_240), (3, False, 7_680), (16, False, 1_280), (64, False, 1_280), (16, True, 20_480)],
)
def test_k02_heads_are_divided_by_the_attention_group_and_a_latent_never_is(tp: int, dp: bool, gqa: int) -> None:
    at = Deployment(tp, dp)
    assert draft_cost(draft("radixark"), BF16, at).bytes_per_token == gqa
    assert draft_cost(draft("inferact"), BF16, at).bytes_per_token == 5_760
    if not dp and tp > 1:  # the mistake: the cost of another grouping
        assert draft_cost(draft("radixark"), BF16, Deployment(tp, True)).bytes_per_token != gqa


def test_k01_an_fp8_target_leaves_the_draft_at_its_own_dtype() -> None:
    layout = draft_layout(draft("inferact"), BF16, DEP16)
    total = STATE + 1_000_000 * 33_408
    for slope in (27_648, 13_824):  # bf16 and fp8 KV of the target
        found = fit(total, CacheCost(slope, STATE), draft_cost(draft("inferact"), BF16, DEP16), whole_pages=True)
        assert found.draft_bytes == found.num_pages * layout.bytes_per_page == found.tokens * 5_760
    assert check_charge(5_760, layout) == 5_760
    refused(lambda: check_charge(2_880, layout), "5,760 bytes (bfloat16)", "2,880 were charged")
    refused(lambda: check_charge(11_520, layout), "11,520 were charged")
    assert check_charge(2_880, draft_layout(draft("inferact"), FP8, DEP16)) == 2_880


def test_k01_the_fp8_charge_promises_what_does_not_fit() -> None:
    total, cost = STATE + 2_491_831 * 33_408, CacheCost(5_760)
    wrong = wrong_charge(total, TARGET, cost, 2_880)
    assert wrong.promised.tokens == (total - STATE) // 30_528 > 2_491_831
    assert wrong.overcommit_bytes == STATE + wrong.promised.tokens * 33_408 - total > 7 * GIB
    assert wrong.draft_pool_tokens == wrong.promised.tokens // 2  # the server stops at half of what it was promised
    right = wrong_charge(total, TARGET, cost, 5_760)
    assert (right.overcommit_bytes, right.draft_pool_tokens, right.promised.tokens) == (0, 2_491_831, 2_491_831)
    high = wrong_charge(total, TARGET, cost, 11_520)
    assert high.overcommit_bytes == 0 and high.promised.tokens < 2_491_831


@pytest.mark.parametrize("dtype", [BF16, FP8, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_what_is_budgeted_is_what_is_allocated(family: str, dtype: torch.dtype) -> None:
    config = DraftConfig.from_dict(published.tiny(family))
    at = Deployment(page_size=8)
    found = fit(1_000_000, CacheCost(300, 5_000), draft_cost(config, dtype, at), page_size=8, whole_pages=True)
    pool = ContextPool.allocate(draft_layout(config, dtype, at), found.num_pages)
    assert pool.nbytes == found.draft_bytes
    half = fit(1_000_000, CacheCost(300, 5_000), CacheCost(bytes_per_token(config, dtype) // 2), page_size=8, whole_pages=True)
    assert pool.nbytes != half.draft_bytes


def test_tokens_over_all_ranks() -> None:
    assert (Deployment(16, True).num_token_sets, Deployment(16).num_token_sets) == (16, 1)
    assert (Deployment(4, ranks=16).num_token_sets, Deployment(4, True, 16).num_token_sets) == (4, 16)


# --- for any sizes

slopes = st.integers(1, 200_000)
fixed = st.integers(0, 20 * GIB)
costs = st.builds(CacheCost, slopes, fixed)
drafts = st.builds(
    lambda layers, width, dtype: CacheCost(PoolLayout(layers, width, 1, dtype).bytes_per_token),
    st.integers(1, 8),
    st.integers(1, 2_048),
    st.sampled_from(list(DTYPES.values())),
)
pages = st.sampled_from([1, 3, 16, 32, 64, 128])
totals = st.integers(1, 300 * GIB)
few = settings(max_examples=200, deadline=None)


def broken(found: Fit, draft: CacheCost) -> list[str]:
    """What is wrong with this fit, were the draft's pool to cost `draft`."""
    total, tokens, page = found.total_bytes, found.tokens, found.page_size
    wrong = []
    if found.target.at(tokens) + draft.at(tokens) > total:
        wrong.append("more than given")
    if found.target.at(tokens + page) + draft.at(tokens + page) <= total:
        wrong.append("one more page fits")
    return wrong


@few
@given(totals, costs, drafts, pages, st.booleans())
def test_never_more_than_given_and_never_a_page_less(total, target, draft, page, whole) -> None:
    assume(target.at(page) + draft.at(page) <= total)
    found = fit(total, target, draft, page_size=page, whole_pages=whole)
    assert broken(found, draft) == []
    assert found.unused_bytes == total - found.target_bytes - found.draft_bytes >= 0
    assert found.whole_pages.tokens == found.num_pages * page <= found.tokens
    if not whole:
        assert found.target.at(found.tokens + 1) + draft.at(found.tokens + 1) > total
    if draft.bytes_per_token > 1 and found.tokens > 2 * page * (
        1 + target.bytes_per_token
    ):  # control: half, or double, charged
        half = CacheCost(draft.bytes_per_token // 2)
        assert broken(fit(total, target, half, page_size=page), draft) == ["more than given"]
        assert "one more page fits" in broken(fit(total, target, CacheCost(2 * draft.bytes_per_token), page_size=page), draft)


@few
@given(totals, st.integers(0, GIB), costs, drafts, pages, st.integers(1, 5_000))
def test_monotone(total, more, target, draft, page, dearer) -> None:
    assume(target.at(page) + CacheCost(draft.bytes_per_token + dearer).at(page) <= total)
    tokens = fit(total, target, draft, page_size=page).tokens
    assert fit(total + more, target, draft, page_size=page).tokens >= tokens
    assert fit(total, target, CacheCost(draft.bytes_per_token + dearer), page_size=page).tokens <= tokens
    assert (
        fit(total + page * (target.bytes_per_token + draft.bytes_per_token), target, draft, page_size=page).tokens
        == tokens + page
    )


@few
@given(totals, costs, costs, pages)
def test_the_order_of_the_pools_does_not_matter(total, one, other, page) -> None:
    assume(one.at(page) + other.at(page) <= total)
    ab, ba = fit(total, one, other, page_size=page), fit(total, other, one, page_size=page)
    assert ab.tokens == ba.tokens and (ab.target_bytes, ab.draft_bytes) == (ba.draft_bytes, ba.target_bytes)


@few
@given(totals, costs, costs, pages)
def test_k04_the_two_quotas_are_the_total_and_hold_the_tokens(total, target, draft, page) -> None:
    assume(target.at(page) + draft.at(page) <= total)
    found = fit(total, target, draft, page_size=page)
    assert found.draft_quota + found.target_quota == total
    assert found.draft_quota >= found.draft_bytes and found.target_quota >= found.target_bytes
    by_quota = [
        (quota - cost.bytes_fixed) // cost.bytes_per_token
        for quota, cost in ((found.draft_quota, draft), (found.target_quota, target))
    ]
    assert by_quota[0] == found.tokens <= by_quota[1]
    if page * (target.bytes_per_token + draft.bytes_per_token) <= total:
        host = fit_host(total, target, draft, page_size=page)
        assert host.draft_quota + host.target_quota == total and host.tokens >= found.tokens
        assert host.draft_quota == total * draft.bytes_per_token // (target.bytes_per_token + draft.bytes_per_token)


@few
@given(totals, costs, costs, pages)
def test_a_budget_without_a_page_names_its_shortfall(total, target, draft, page) -> None:
    short = target.at(page) + draft.at(page) - total
    assume(short > 0)
    refused(lambda: fit(total, target, draft, page_size=page), f"Give the KV cache {short:,} bytes (", " GiB) more")
    assert fit(total + short, target, draft, page_size=page).num_pages == 1


# --- figures in GiB


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (7.53, 8_085_275_934),
        (Decimal("7.53"), 8_085_275_934),
        (0, 0),
        (1, GIB),
        (0.5, GIB // 2),
        (1 / GIB, 1),
        (0.9 / GIB, 1),
        (0.8 / GIB, 0),
        (85.05989423274994, 91_332_365_982),
        (2**20, MAX_BYTES),
    ],
)
def test_gib_to_whole_bytes(gib, expected: int) -> None:
    assert bytes_of_gib("total", gib) == expected


@few
@given(st.integers(0, 2**43))
def test_bytes_survive_a_float_of_gib(count: int) -> None:
    assert bytes_of_gib("total", count / GIB) == count == bytes_of_gib("total", float(repr(count / GIB)))
    assert bytes_of_gib("total", Decimal(f"{count / GIB:.10f}")) == count


# --- bad input


@pytest.mark.parametrize("gib", [-1, -1e-12, math.nan, math.inf, 2**20 + 1, Decimal("NaN"), Decimal("-Infinity")])
def test_bad_gib(gib) -> None:
    refused(lambda: bytes_of_gib("--total-gib", gib), "--total-gib must be 0 to 1,048,576 GiB", f"came {gib}")


@pytest.mark.parametrize("size", [0, -1, MAX_COUNT + 1, 1.5, True, "64"])
def test_bad_counts(size) -> None:
    refused(lambda: Deployment(tp_size=size), "tensor parallelism", "came")
    refused(lambda: Deployment(ranks=size), "ranks", "came")
    refused(lambda: Deployment(page_size=size), "page size", "came")
    refused(lambda: fit(GIB, CacheCost(1), CacheCost(1), page_size=size), "page size", "came")


@pytest.mark.parametrize("size", [-1, MAX_BYTES + 1, 0.5, True, None])
def test_bad_bytes(size) -> None:
    refused(lambda: CacheCost(size), "bytes a token", f"1 to {MAX_TOKEN_BYTES:,}")
    refused(lambda: CacheCost(1, size), "fixed bytes", "came")
    refused(lambda: fit(size, CacheCost(1), CacheCost(1)), "total bytes", "came")


def test_zero_is_bad_for_a_cost_and_a_total_but_not_for_fixed_bytes() -> None:
    refused(lambda: CacheCost(0), "bytes a token", "came 0")
    refused(lambda: fit(0, CacheCost(1), CacheCost(1)), "total bytes", "came 0")
    refused(lambda: fit_host(0, CacheCost(1), CacheCost(1)), "budget (host tier): total bytes", "came 0")
    assert CacheCost(1, 0).at(5) == 5


def test_ranks_are_whole_copies_of_the_model() -> None:
    refused(lambda: Deployment(8, ranks=12), "multiple of tensor parallelism 8", "came 12")
    refused(lambda: Deployment(8, ranks=4), "multiple of tensor parallelism 8", "came 4")


def test_unknown_dtype() -> None:
    assert dtype_of("bfloat16") == BF16
    for name in ("auto", "fp8", "int8", ""):
        refused(lambda name=name: dtype_of(name), "bfloat16, float16, float32, float8_e4m3fn", repr(name))


def test_host_tier_has_no_state() -> None:
    host = fit_host(200 * GIB, TARGET, CacheCost(5_760))
    assert host.tokens == 200 * GIB // 33_408 and host.draft_quota == 200 * GIB * 5_760 // 33_408
    assert host.tokens != fit(200 * GIB, TARGET, CacheCost(5_760)).tokens  # control: with the state
    refused(lambda: fit_host(1_000, TARGET, CacheCost(5_760)), "budget (host tier): ", "1,000 bytes")
