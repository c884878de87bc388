"""What fits: how many tokens of KV a rank holds once the target's pool and the draft's come out of one amount of memory.

Both pools cost `bytes_fixed + tokens * bytes_per_token` on one rank, and hold the same tokens, so

    tokens = (total - fixed_target - fixed_draft) // (slope_target + slope_draft)

All arithmetic is in whole bytes. What the draft costs a token comes from `trtllm_dspark.context.pool` alone, which also
allocates it; nothing of the target (its KV dtype, layers, heads) can reach that figure. Every amount is of one rank unless
its name says otherwise. GiB is 2**30 bytes.

Source: the split is TensorRT-LLM's `CacheCost(slope, intercept)` rule (`_torch/pyexecutor/_util.py`, pull request 19040).
"""

import math
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

import torch

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.pool import PoolLayout
from trtllm_dspark.errors import DSparkError

WHO = "budget"
GIB = 2**30
MAX_BYTES = 2**50  # of one rank: 1 PiB
MAX_TOKEN_BYTES = 2**30
MAX_COUNT = 2**20  # ranks, tokens a page
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn")}

# The two published Kimi-K3 drafts, as far as a token's bytes depend on them. mla: Inferact/Kimi-K3-DSpark, config.json at
# cf6b8244620e (SHA-256 5a3c2f4f...). gqa: RadixArk/Kimi-K3-DSpark, config.json (SHA-256 6aed2089...).
PUBLISHED = {
    "mla": DraftConfig.model_construct(family="mla", num_layers=5, num_kv_heads=64, kv_lora_rank=512, qk_rope_head_dim=64),
    "gqa": DraftConfig.model_construct(family="gqa", num_layers=5, num_kv_heads=16, head_dim=64),
}


@dataclass(frozen=True)
class CacheCost:
    """What one pool costs a rank. bytes_per_token: at least 1. bytes_fixed: whatever its tokens, e.g. recurrent state."""

    bytes_per_token: int
    bytes_fixed: int = 0

    def __post_init__(self) -> None:
        _whole("bytes a token", self.bytes_per_token, 1, MAX_TOKEN_BYTES)
        _whole("fixed bytes", self.bytes_fixed, 0, MAX_BYTES)

    def at(self, tokens: int) -> int:
        """Bytes of a pool that holds so many tokens."""
        return self.bytes_fixed + tokens * self.bytes_per_token


@dataclass(frozen=True)
class Deployment:
    """How a model lies on its ranks.

    Attributes:
        tp_size: ranks that share one copy of the model. attention_dp: each of them has its own requests, attention unsharded.
        ranks: all of them, a multiple of tp_size; None is tp_size. page_size: tokens a page (`tokens_per_block`).
    """

    tp_size: int = 1
    attention_dp: bool = False
    ranks: int | None = None
    page_size: int = 64

    def __post_init__(self) -> None:
        _whole("tensor parallelism", self.tp_size, 1, MAX_COUNT)
        _whole("page size", self.page_size, 1, MAX_COUNT)
        _whole("ranks", self.num_ranks, 1, MAX_COUNT)
        if self.num_ranks % self.tp_size:
            raise DSparkError(
                f"{WHO}: ranks must be a multiple of tensor parallelism {self.tp_size}, came {self.num_ranks}. "
                "Give the ranks of whole copies of the model."
            )

    @property
    def num_ranks(self) -> int:
        return self.tp_size if self.ranks is None else self.ranks

    @property
    def num_token_sets(self) -> int:
        """Ranks that hold different tokens: all under attention-DP; without, the tp_size ranks of a copy hold the same."""
        return self.num_ranks if self.attention_dp else self.num_ranks // self.tp_size


@dataclass(frozen=True)
class Fit:
    """Two pools of the same number of tokens in `total_bytes` of one rank. Made by `fit`."""

    tokens: int
    total_bytes: int
    target: CacheCost
    draft: CacheCost
    page_size: int

    @property
    def target_bytes(self) -> int:
        """Of the target's pool, its fixed bytes included."""
        return self.target.at(self.tokens)

    @property
    def draft_bytes(self) -> int:
        return self.draft.at(self.tokens)

    @property
    def unused_bytes(self) -> int:
        """What is left of the total; never negative."""
        return self.total_bytes - self.target_bytes - self.draft_bytes

    @property
    def num_pages(self) -> int:
        """Whole pages in each pool."""
        return self.tokens // self.page_size

    @property
    def whole_pages(self) -> "Fit":
        """The same, its tokens rounded down to whole pages: the most pages that fit."""
        return replace(self, tokens=self.num_pages * self.page_size)

    @property
    def draft_quota(self) -> int:
        """The draft's share when the total is handed out to the last byte: fixed bytes, then by slope, rounded down."""
        free = self.total_bytes - self.target.bytes_fixed - self.draft.bytes_fixed
        slopes = self.target.bytes_per_token + self.draft.bytes_per_token
        return self.draft.bytes_fixed + free * self.draft.bytes_per_token // slopes

    @property
    def target_quota(self) -> int:
        """The rest of the total."""
        return self.total_bytes - self.draft_quota


@dataclass(frozen=True)
class WrongCharge:
    """What a budget promises that charges a draft token at other than its pool's cost, and what becomes of the promise.

    Attributes:
        promised: the fit at the charged bytes. real: what the draft's pool costs.
    """

    promised: Fit
    real: CacheCost

    @property
    def overcommit_bytes(self) -> int:
        """Bytes past the total if both pools are allocated for the promised tokens; 0 where the charge was too high."""
        return max(0, self.real.at(self.promised.tokens) - self.promised.draft_bytes - self.promised.unused_bytes)

    @property
    def draft_pool_tokens(self) -> int:
        """Tokens that the draft's pool really holds if it is given the bytes it was charged: where the server stops."""
        return (self.promised.draft_bytes - self.real.bytes_fixed) // self.real.bytes_per_token


def fit(total_bytes: int, target: CacheCost, draft: CacheCost, *, page_size: int = 64, whole_pages: bool = False) -> Fit:
    """The most tokens for which both pools fit in `total_bytes` of one rank; never a byte more than that.

    Args:
        total_bytes: for both pools together. page_size: tokens a page. whole_pages: round the tokens down to whole pages.
    Raises:
        DSparkError: a size out of range, or a total that does not hold the fixed bytes and one page; it names the shortfall.
    """
    _whole("total bytes", total_bytes, 1, MAX_BYTES)
    _whole("page size", page_size, 1, MAX_COUNT)
    slope, fixed = target.bytes_per_token + draft.bytes_per_token, target.bytes_fixed + draft.bytes_fixed
    needed = fixed + page_size * slope
    if total_bytes < needed:
        raise DSparkError(
            f"{WHO}: a rank must have {in_bytes(needed)}, {fixed:,} fixed and a page of {page_size:,} tokens at {slope:,}; "
            f"came {in_bytes(total_bytes)}. Give the KV cache {in_bytes(needed - total_bytes)} more."
        )
    found = Fit((total_bytes - fixed) // slope, total_bytes, target, draft, page_size)
    return found.whole_pages if whole_pages else found


def fit_host(total_bytes: int, target: CacheCost, draft: CacheCost, *, page_size: int = 64) -> Fit:
    """The same for a host (or disk) tier, which holds pages and no state: split by slope only.

    Raises:
        DSparkError: as `fit`.
    """
    try:
        return fit(total_bytes, replace(target, bytes_fixed=0), replace(draft, bytes_fixed=0), page_size=page_size)
    except DSparkError as error:
        raise DSparkError(str(error).replace(WHO, f"{WHO} (host tier)", 1)) from None


def draft_layout(config: DraftConfig, dtype: torch.dtype, deployment: Deployment) -> PoolLayout:
    """The draft's pool on one rank.

    An MLA latent is whole on every rank. GQA heads are divided by tensor parallelism, the fullest rank counting, and past
    their number each rank holds one; under attention-DP every rank holds all.

    Args:
        dtype: of the draft's own pool, whatever the target's KV cache has.
    """
    if config.family == "gqa" and not deployment.attention_dp:
        config = config.model_copy(update={"num_kv_heads": -(-config.num_kv_heads // deployment.tp_size)})
    return PoolLayout.of(config, page_size=deployment.page_size, dtype=dtype)


def draft_cost(config: DraftConfig, dtype: torch.dtype, deployment: Deployment) -> CacheCost:
    """What the draft's pool costs one rank: that of `draft_layout`, nothing fixed."""
    return CacheCost(draft_layout(config, dtype, deployment).bytes_per_token)


def check_charge(charged: int, layout: PoolLayout) -> int:
    """`charged` itself, where a budget charges a draft token, in bytes, at exactly what its pool costs.

    Raises:
        DSparkError: another figure, e.g. 2,880 for a bf16 pool of 5,760, the charge of a target's fp8 KV cache.
    """
    if charged != layout.bytes_per_token:
        raise DSparkError(
            f"{WHO}: a draft token must be charged at what its pool costs, {layout.bytes_per_token:,} bytes "
            f"({dtype_name(layout.dtype)}); {charged:,} were charged. Charge the dtype that the pool is allocated at, not the "
            "target's KV dtype."
        )
    return charged


def wrong_charge(total_bytes: int, target: CacheCost, draft: CacheCost, charged: int, *, page_size: int = 64) -> WrongCharge:
    """What charging `charged` bytes for a draft token of `draft` would promise. Raises as `fit`."""
    promised = fit(total_bytes, target, replace(draft, bytes_per_token=charged), page_size=page_size)
    return WrongCharge(promised, draft)


def bytes_of_gib(name: str, gib: float | Decimal) -> int:
    """Whole bytes of a figure in GiB: rounded down, so that what is budgeted is not more than what was given.

    A figure less than an eighth of a byte under a whole one is taken as that one: ten typed decimals say no more (7.53 GiB is
    8,085,275,934.72 bytes, so 8,085,275,934). `name` is for the error.

    Raises:
        DSparkError: not a number, negative, or more than 1 PiB.
    """
    try:
        exact = Fraction(gib) * GIB
    except (ValueError, OverflowError):
        exact = Fraction(-1)
    if not 0 <= exact <= MAX_BYTES:
        raise DSparkError(f"{WHO}: {name} must be 0 to {MAX_BYTES // GIB:,} GiB, came {gib}. Give GiB of one rank.")
    return math.floor(exact + Fraction(1, 8))


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a pool by its torch name. Raises `DSparkError` that lists them."""
    found = DTYPES.get(name)
    if found is None:
        raise DSparkError(f"{WHO}: the draft's dtype must be one of {', '.join(DTYPES)}, came {name!r}. Give one of them.")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_bytes(count: int) -> str:
    """`14,352,946,560 bytes (13.37 GiB)`."""
    return f"{count:,} bytes ({count / GIB:,.{'2f' if count >= GIB / 100 else '3g'}} GiB)"


def _whole(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        came = f"{value:,}" if type(value) is int else repr(value)
        raise DSparkError(f"{WHO}: {name} must be a whole number from {least} to {most:,}, came {came}. Give such a number.")
