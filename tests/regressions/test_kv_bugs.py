"""Public bugs of draft pools, pages, bounds and prefix reuse, each as the smallest case that shows it. Ids: see README.md."""

from collections.abc import Sequence

import published
import pytest
import small_drafts
import torch
from traffic import PAGE, World

from cute_kernels.reference.context_append import context_append
from trtllm_dspark.attention.policy import FAMILIES
from trtllm_dspark.budget import CacheCost, Deployment, check_charge, draft_cost, draft_layout, dtype_of, fit, fit_host
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.context.pages import NOT_WRITTEN, RequestPages, page_table, slot_vector
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.engine.requests import Request, SamplingParams
from trtllm_dspark.engine.scheduler import Scheduler
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter, Proposal

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def draft(name: str) -> DraftConfig:
    return DraftConfig.from_dict(published.CONFIGS[name][0], require_block_size=False)


def pool_bits(context: DraftContext) -> torch.Tensor:
    """[L, num_pages, P, W], a copy."""
    return torch.stack(context.pool.views).view(torch.int32).clone()


def feed(drafter: Drafter, request: str, features: torch.Tensor, first: int, end: int) -> None:
    assert drafter.context.grow(request, end)
    drafter.extend([Segment(request, first, end - first)], features[first:end])


def propose(drafter: Drafter, request: str, anchor: int) -> Proposal:
    return drafter.propose([request], torch.tensor([anchor]), 2, keep_logits=True)


# --- memory


def test_l11_the_draft_owns_each_tensor_once_and_no_head() -> None:
    """Fails where the draft also allocates a head that it borrows, or holds a tensor twice once it is loaded."""
    raw = published.tiny("mla")
    model = MLADSparkForCausalLM.empty(DraftConfig.from_dict(raw), dtype=torch.float32)
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    model.load_weights(small_drafts.weights(raw))
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == before, "loading allocated again"
    elements = sum(torch.Size(shape).numel() for shape in published.layout(raw).values())
    assert sum(value.numel() for value in (*model.parameters(), *model.buffers())) == elements
    assert not any("lm_head" in name for name in before) and "lm_head.weight" not in published.layout(raw)


@pytest.mark.parametrize("target_kv", [FP8, BF16, torch.float32], ids=str)
def test_k01_a_draft_token_is_charged_at_what_its_pool_costs(target_kv: torch.dtype) -> None:
    """Fails where the target's KV dtype reaches the draft's cost: 2,880 charged for a pool of 5,760."""
    at, bf16 = Deployment(16, True), draft("inferact")
    target = CacheCost(27_648 * target_kv.itemsize)
    found = fit(2**36, target, draft_cost(bf16, BF16, at))
    assert draft_cost(bf16, BF16, at).bytes_per_token == 5_760 == draft_layout(bf16, BF16, at).bytes_per_token
    small = DraftConfig.from_dict(published.tiny("mla"))
    pool = ContextPool.allocate(draft_layout(small, BF16, at), 3)
    assert pool.nbytes == draft_cost(small, BF16, at).at(3 * at.page_size)
    assert found.draft_bytes // 5_760 == found.tokens == (found.target_bytes // target.bytes_per_token)
    with pytest.raises(DSparkError, match=r"5,760 bytes \(bfloat16\); 2,880 were charged"):
        check_charge(2_880, draft_layout(bf16, BF16, at))


@pytest.mark.parametrize("tp_size", [1, 8, 16, 64])
def test_k02_attention_dp_is_not_divided_and_latents_never_are(tp_size: int) -> None:
    """Fails where heads are divided by the global width under attention-DP (16 times too little), or latents at all."""
    for dp in (True, False):
        assert draft_cost(draft("inferact"), BF16, Deployment(tp_size, dp)).bytes_per_token == 5_760
    assert draft_cost(draft("radixark"), BF16, Deployment(tp_size, True)).bytes_per_token == 20_480
    sharded = draft_cost(draft("radixark"), BF16, Deployment(tp_size, False)).bytes_per_token
    assert sharded == 20_480 // min(tp_size, 16)


def test_k03_the_drafts_cost_comes_from_its_own_geometry() -> None:
    """Fails where the target's bytes are scaled by a ratio of layers: the draft's share must not move with the target."""
    cost = draft_cost(draft("inferact"), BF16, Deployment())
    for target in (CacheCost(1), CacheCost(2 * 4 * 128 * 32 * 2), CacheCost(27_648, 8_085_275_934)):
        found = fit(2**36, target, cost)
        assert found.draft_bytes == 5_760 * found.tokens
        assert target.bytes_per_token * 5 // 32 != 5_760  # control: the estimate by layers


def test_k04_the_two_pools_share_one_amount_of_memory() -> None:
    """Fails where target and draft each claim all of it, on the device or on the host."""
    target, cost, total = CacheCost(27_648, 10**9), CacheCost(5_760), 10**11
    for found in (fit(total, target, cost), fit_host(total, target, cost)):
        assert found.target_quota + found.draft_quota == total >= found.target_bytes + found.draft_bytes
    layout = PoolLayout(2, 8, PAGE, torch.float32)
    with pytest.raises(DSparkError, match="num_pages must be at least 1"):
        ContextPool.allocate(layout, 0)
    assert ContextPool.allocate(layout, 3).nbytes == 3 * layout.bytes_per_page  # a refusal left nothing behind


def test_k06_recurrent_state_is_constant_and_the_draft_adds_its_own_bytes_only() -> None:
    """Fails where layers without KV cost bytes a token, or where the draft's layers pad the target's groups."""
    latents, recurrent = 24, 69  # K3: layers with a cache, and layers with a state
    target = CacheCost(latents * 576 * 2, recurrent * 2**20)
    alone, beside = 10**10 - target.bytes_fixed, fit(10**10, target, CacheCost(5_760))
    assert beside.tokens == alone // (27_648 + 5_760)
    assert beside.draft_bytes + beside.target_bytes - target.bytes_fixed == beside.tokens * (27_648 + 5_760)
    padded = alone // (93 * 576 * 2 + 5_760)
    assert padded < beside.tokens / 2  # control: had every layer had a cache


def test_k07_the_context_scales_with_live_tokens_inside_the_pool(world: World) -> None:
    """Fails where context is reserved for the longest request times the batch, or anything grows past the pool."""
    drafter, text = world.drafter(8), world.texts[0]
    context, storage = drafter.context, drafter.context.pool.views[0].untyped_storage()
    assert storage.nbytes() == context.pool.nbytes == 8 * PAGE * context.pool.layout.bytes_per_token
    for request in range(64):  # a seat costs nothing: pages come with tokens
        context.admit(f"r{request}")
    assert context.allocator.num_free == 8
    for request in range(8):
        feed(drafter, f"r{request}", text.features, 0, 3)
        assert context.allocator.num_free == 7 - request
    assert not context.grow("r8", 1)
    with pytest.raises(DSparkError, match="0 of 8 are free"):
        context.admit("more", 1)
    assert drafter.context.pool.views[0].untyped_storage().data_ptr() == storage.data_ptr()
    assert storage.nbytes() == context.pool.nbytes


def test_k08_every_backend_of_the_family_keeps_its_context_in_the_managed_pool() -> None:
    """Fails where a backend has an arena of its own beside the pool that is charged, or a pool it does not use."""
    model = small_drafts.small_model()
    for name in FAMILIES["mla"].choices:
        model.backend = type(model.backend)(name, (), model.backend.operations)
        assert model._paged_ctx_cache and not model._uses_worker_attention_backend and model.dflash_attention_backend == name
    arena = torch.zeros(2, 2, 16, 1, model.config.latent_width)
    with pytest.raises(DSparkError, match="must be paged"):
        model.dflash_forward(torch.zeros(1, 4, 64), torch.zeros(1, 4).long(), torch.zeros(1), arena, None, torch.zeros(1))
    layout = PoolLayout.of(model.config, page_size=4, dtype=torch.float32)
    memory = torch.full((2, 5, 4, layout.width), torch.nan)
    context = DraftContext(ContextPool(layout, memory.unbind(0)))
    small_drafts.feed(Drafter(model, context, small_drafts.lm_head(model)), "r", small_drafts.taps(model, 4))
    assert int(memory.isfinite().all(-1).sum()) == 2 * 4, "rows went somewhere else than into the host's memory"


@pytest.mark.parametrize("target_kv", ["auto", "fp8", "bf16", "nvfp4"])
def test_k19_the_drafts_views_have_their_own_dtype(target_kv: str) -> None:
    """Fails where one dtype is given to both models, 'auto' reaches the draft, or a refusal leaves something behind."""
    with pytest.raises(DSparkError, match=f"came {target_kv!r}"):
        dtype_of(target_kv)  # no dtype of a draft's pool, and none is guessed
    config = DraftConfig.from_dict(published.tiny("mla"))
    layout = draft_layout(config, dtype_of("bfloat16"), Deployment(page_size=4))
    typed = ContextPool.allocate(layout, 3)
    for view in typed.views:
        assert view.dtype == BF16 and tuple(view.shape) == (3, 4, 40) and view[0].is_contiguous()
    arena = torch.zeros(2, 3, 4, 80, dtype=FP8)  # the same bytes, read as the target's
    with pytest.raises(DSparkError, match=r"must be \[3, 4, 40\] of torch.bfloat16, it is \[3, 4, 80\] of torch.float8_e4m3fn"):
        ContextPool(layout, arena.unbind(0))
    with pytest.raises(DSparkError, match=r"of torch.bfloat16, it is .* of torch.float8_e4m3fn"):
        ContextPool(layout, arena[..., :40].unbind(0))  # the right shape, half the bytes
    again = ContextPool(layout, arena.view(BF16).unbind(0))
    assert again.views[0].dtype == BF16 and again.nbytes == arena.numel()


# --- pages and bounds


def test_k09_no_table_means_no_draft_and_page_zero_is_untouched(world: World) -> None:
    """Fails where a request without a table reads or writes through zeros, that is page 0."""
    drafter, text = world.drafter(6), world.texts[0]
    drafter.context.admit("owner of page 0", 4)
    assert drafter.context.requests["owner of page 0"].ids == [0]
    drafter.extend([Segment("owner of page 0", 0, 4)], text.features[:4])
    before = pool_bits(drafter.context)
    for call in (
        lambda: propose(drafter, "unknown", 3),
        lambda: drafter.extend([Segment("unknown", 0, 2)], text.features[:2]),
    ):
        with pytest.raises(DSparkError, match="'unknown' must be admitted first"):
            call()
    drafter.context.admit("empty")
    found = propose(drafter, "empty", text.tokens[0])
    assert torch.equal(found.hidden, world.alone(text, 0, 0, 0).hidden)
    drafter.extend([Segment("empty", 0, 2)], text.features[:2])
    assert drafter.context.requests["empty"].suppressed == 2
    assert torch.equal(pool_bits(drafter.context), before)
    zeros, at = torch.zeros(1, 6, dtype=torch.int32), torch.arange(4)
    stale = slot_vector(zeros, torch.tensor([0]), torch.tensor([0]), torch.zeros_like(at), at, PAGE)
    assert stale.tolist() == [NOT_WRITTEN] * 4
    read_zeros = slot_vector(zeros, torch.tensor([24]), torch.tensor([0]), torch.zeros_like(at), at, PAGE)
    assert read_zeros.tolist() == [0, 1, 2, 3]  # control: what a bound of the table's width would do


@pytest.mark.parametrize("filler", [-1, 0])
@pytest.mark.parametrize("length", range(10))
def test_k10_no_byte_outside_a_requests_pages_changes(length: int, filler: int) -> None:
    """Fails where only reads are bounded: a block of rows at any length, through a table padded with -1 or with 0."""
    held, block = RequestPages(PAGE, [7, 8]), 4
    table = page_table([held, RequestPages(PAGE, [1, 2, 3, 4])], filler=filler)
    views = [torch.full((9, PAGE, 12), -777.0) for _ in range(2)]
    at, first = torch.arange(length, length + block), torch.tensor([length, 0])
    slots = slot_vector(table, torch.tensor([held.bound, 16]), first, torch.zeros_like(at), at, PAGE)
    angles = {"cos": torch.ones(block, 2), "sin": torch.zeros(block, 2)}
    context_append(torch.randn(block, 2, 12), torch.ones(2, 8), **angles, slots=slots, pools=views, eps=1e-5)
    changed = (torch.stack(views) != -777.0).any(-1).any(0)
    assert changed[7:].flatten().nonzero().flatten().tolist() == list(range(length, min(length + block, 8)))
    assert not changed[:7].any()
    clamped = table[0].clamp(min=0).long()[at // PAGE] * PAGE + at % PAGE  # control: the write that was reported
    assert bool((clamped < 4).any()) == (length + block > 8)


@pytest.mark.parametrize("offset", [0, 3])
def test_k20_zero_is_a_page_and_padded_rows_are_not_requests(world: World, offset: int) -> None:
    """Fails where page 0 means none, or rows of padding get addresses before their mask applies."""
    drafter, text = world.drafter(6), world.texts[1]
    drafter.context.admit("zero")
    feed(drafter, "zero", text.features, 0, 3)
    assert drafter.context.requests["zero"].ids == [0]
    found = propose(drafter, "zero", text.tokens[3])
    assert torch.equal(found.hidden, world.alone(text, 0, 3, 3).hidden)
    model, before = world.model, pool_bits(drafter.context)
    view = drafter.context.view(["zero"])
    table = torch.full((3, 2), 10**6, dtype=torch.int32)  # rows of padding: counts of zero, addresses of nothing
    table[0, :1], lengths = view.page_table[0], torch.tensor([3, 0, 0], dtype=torch.int32)
    q = torch.randn(3, 2, 2, 12, generator=torch.Generator().manual_seed(0))
    attend = model.backend.block_attention
    given = {"pages": view.pages[0], "scale": 0.3, "value_width": 8}
    padded = attend(q, q[:, :, 0], page_table=table, context_len=lengths, **given)
    alone = attend(q[:1], q[:1, :, 0], page_table=table[:1, :1], context_len=lengths[:1], **given)
    assert torch.equal(padded[:1], alone) and bool(padded.isfinite().all())
    z = torch.full((4, 2, 12), torch.nan)
    angles = model.rope.angles(torch.arange(4))
    slots = torch.full((4,), NOT_WRITTEN)
    context_append(z, model.latent_norm, *angles, slots, view.pages, 1e-5)
    assert torch.equal(pool_bits(drafter.context), before)
    slots[offset], z[offset] = 5, 1.0  # control: one real row among the padding
    context_append(z, model.latent_norm, *angles, slots, view.pages, 1e-5)
    assert (pool_bits(drafter.context) != before).any(-1).any(0).nonzero().tolist() == [[1, 1]]


# --- reuse and preemption


class Caches:
    """A mock, for control flow only: a target's cache is the number of its rows."""

    def new_cache(self) -> int:
        return 0

    def copy_cache(self, state: int, rows_less: int) -> int:
        return state - rows_less


def scheduled(scheduler: Scheduler, name: int, prompt: Sequence[int]) -> Request:
    request = Request(name, tuple(prompt), SamplingParams(max_new_tokens=4), frozenset(), None)
    scheduler.waiting.append(request)
    assert scheduler.plan() == [request]
    return request


def compute(scheduler: Scheduler, drafter: Drafter | None, request: Request, features: torch.Tensor) -> None:
    """What a prefill does: run what is pending, then leave with one new token."""
    first, request.computed = request.computed, len(request.prompt)
    if drafter is not None:
        assert drafter.context.grow(request.id, request.computed)
        drafter.extend([Segment(request.id, first, request.computed - first)], features[first : request.computed])
    request.cache = request.computed


def two_turns(world: World, reuse: str, shared: int = 8, prompt: int = 12) -> tuple[Scheduler, Drafter, Request]:
    """One request of 12 tokens has ended, a second one that shares 8 of them is admitted and computed."""
    drafter, text = world.drafter(12), world.texts[0]
    scheduler = Scheduler(Caches(), drafter.context, max_batch=4, rows_ahead=3, reuse=reuse)  # type: ignore[arg-type]
    other = [(token + 1) % 31 for token in text.tokens]
    first = scheduled(scheduler, 0, (*text.tokens[:shared], *other[shared:prompt]))
    compute(scheduler, drafter, first, torch.cat((text.features[:shared], world.texts[1].features[shared:])))
    scheduler.retire(first)
    second = scheduled(scheduler, 1, text.tokens[:prompt])
    reused = second.computed
    compute(scheduler, drafter, second, text.features)
    assert reused == (0 if reuse == "off" else shared)
    return scheduler, drafter, second


@pytest.mark.parametrize("reuse", ["off", "joint", "target_only"])
def test_k12_restored_tokens_are_read_only_where_the_draft_has_them(world: World, reuse: str) -> None:
    """Fails where a draft attends to positions that never passed through the target: the pool there is NaN."""
    _, drafter, request = two_turns(world, reuse)
    found = propose(drafter, request.id, world.texts[0].tokens[12])
    missing = 8 if reuse == "target_only" else 0
    expected = world.alone(world.texts[0], missing, 12, 12)
    assert bool(found.hidden.isfinite().all()) and torch.equal(found.hidden, expected.hidden)
    assert torch.equal(found.logits, expected.logits)
    if missing:  # control: all of the target's length
        drafter.context.requests[request.id].start = 0
        with pytest.raises(DSparkError, match="live pages of request 0"):
            propose(drafter, request.id, world.texts[0].tokens[12])


def test_k13_target_and_draft_reuse_the_same_tokens_and_a_miss_is_computed_again(world: World) -> None:
    """Fails where the target's hit moves on without the draft's, or leaves the draft without pages."""
    drafter, text = world.drafter(12), world.texts[0]
    scheduler = Scheduler(Caches(), drafter.context, max_batch=4, rows_ahead=3, reuse="joint")
    expected = world.alone(text, 0, 12, 12).hidden
    for turn, reused in enumerate((0, 11, 0, 11)):
        if turn == 2:
            scheduler.prefixes.clear()  # the draft's copy is gone: the target's goes with it
        request = scheduled(scheduler, turn, text.tokens[:12])
        assert request.computed == drafter.context.length(turn) == reused
        assert request.cache == reused and drafter.context.requests[turn].bound >= 12
        compute(scheduler, drafter, request, text.features)
        assert torch.equal(propose(drafter, turn, text.tokens[12]).hidden, expected)
        scheduler.retire(request)
    assert scheduler.counts.reused_tokens == 22


def test_k14_a_drafter_does_not_lower_the_targets_reuse(world: World) -> None:
    """Fails where the draft's context vetoes prefix hits, in silence."""
    reused = []
    for drafter in (None, world.drafter(24)):
        context = None if drafter is None else drafter.context
        scheduler = Scheduler(Caches(), context, max_batch=4, rows_ahead=3, reuse="joint")
        for name, text in enumerate([*world.texts, *world.texts]):
            request = scheduled(scheduler, name, text.tokens[: 8 + name])
            compute(scheduler, drafter, request, text.features)
            scheduler.retire(request)
        reused.append(scheduler.counts.reused_tokens)
    assert reused[0] == reused[1] > 60


@pytest.mark.parametrize("how", ["recompute", "keep"])
def test_k16_a_resumed_request_drafts_from_valid_rows_only(world: World, how: str) -> None:
    """Fails where a preempted request comes back to pages that another has overwritten."""
    drafter, text, other = world.drafter(4), world.texts[0], world.texts[1]
    context = drafter.context
    context.admit("r")
    feed(drafter, "r", text.features, 0, 9)
    before, pages = propose(drafter, "r", text.tokens[9]), list(context.requests["r"].ids)
    if how == "recompute":
        context.release("r")
    context.admit("other")
    taken = 16 if how == "recompute" else 4
    feed(drafter, "other", other.features, 0, taken)
    assert bool(set(context.requests["other"].ids) & set(pages)) == (how == "recompute")
    if how == "recompute":
        context.release("other")
        context.admit("r")
        assert context.length("r") == 0 and context.view(["r"]).context_len.tolist() == [0]
        feed(drafter, "r", text.features, 0, 9)
    after = propose(drafter, "r", text.tokens[9])
    assert torch.equal(after.hidden, before.hidden) and torch.equal(after.tokens, before.tokens)
