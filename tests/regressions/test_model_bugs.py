"""Public bugs of drafters and their context, each as the smallest case that shows it. Ids: see README.md."""

import plain_mla
import published
import pytest
import small_drafts
import torch

from cute_kernels.reference.context_append import context_append, finish_latents
from cute_kernels.reference.rotation import rotate_adjacent, rotate_half_split
from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.rope import RotaryEmbedding
from trtllm_dspark.propose import Drafter

RAW = published.tiny("mla")


def pool_bytes(drafter: Drafter) -> torch.Tensor:
    return torch.stack([view.contiguous().view(torch.uint8) for view in drafter.context.pool.views]).clone()


def test_c22_positions_past_the_drafts_own_ceiling() -> None:
    """Fails where a RoPE table is as long as the draft's max_position_embeddings, or memory grows with it."""
    hidden, sizes = [], []
    for ceiling in (32, 1 << 20):
        drafter = small_drafts.small_drafter(small_drafts.small_model(max_position_embeddings=ceiling), num_pages=20)
        small_drafts.feed(drafter, "long", small_drafts.taps(drafter.model, 64))
        hidden.append(drafter.propose(["long"], torch.tensor([3]), 4).hidden)
        state = [*drafter.model.parameters(), *drafter.model.buffers(), drafter.model.rope.inv_freq]
        sizes.append(sum(tensor.nbytes for tensor in state))
    assert torch.equal(*hidden) and bool(hidden[0].isfinite().all()) and sizes[0] == sizes[1]


def test_c22_angles_past_a_million_equal_fp64() -> None:
    """Fails where angles are looked up, clamped or kept in less than fp32."""
    rope = small_drafts.small_model(max_position_embeddings=32).rope
    positions = torch.tensor([31, 32, 39, 1 << 20, (1 << 20) + 7])
    exact = positions.double().unsqueeze(-1) * rope.inv_freq.double()
    cos, sin = rope.angles(positions)
    limit = 1e-6 + positions.unsqueeze(-1) * rope.inv_freq * 2.0**-23
    assert bool(((cos - exact.cos()).abs() <= limit).all()) and bool(((sin - exact.sin()).abs() <= limit).all())
    assert not torch.equal(cos[0], cos[1])  # control: a clamp to the ceiling would make them equal


def test_c25_pages_hold_adjacent_pairs() -> None:
    """Fails where keys are rotated half-split, in whole or on one side only."""
    model = small_drafts.small_model(qk_rope_head_dim=8)
    drafter, features = small_drafts.small_drafter(model), small_drafts.taps(model, 6)
    small_drafts.feed(drafter, "r", features)
    c, z = model.config.kv_lora_rank, model.context_latents(model.project_context(features))
    lanes = z[5, 0, c:]
    expected = plain_mla.turn(lanes.double(), 5, RAW["rope_parameters"])
    found = small_drafts.rows_of(drafter, "r")[0, 5, c:].double()
    assert float((found - expected).abs().max()) < 1e-5
    cos, sin = model.rope.angles(torch.tensor(5))
    assert float((rotate_half_split(lanes, cos, sin) - expected).abs().max()) > 0.1  # control


def test_c25_one_convention_on_both_sides_of_a_score() -> None:
    """Fails where a score depends on more than the distance, as it does once the two conventions are mixed."""
    rope = small_drafts.small_model().rope
    q, k = torch.randn(2, 200, 8, generator=torch.Generator().manual_seed(0))

    def scores(rotate_key, at: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
        (cos_q, cos_k), (sin_q, sin_k) = (t.unbind(0) for t in rope.angles(torch.tensor([at + 5, at])))
        return (rotate_adjacent(q, cos_q, sin_q) * rotate_key(k, cos_k, sin_k)).sum(-1)

    assert torch.allclose(scores(rotate_adjacent, 0), scores(rotate_adjacent, 40), atol=1e-4)
    mixed = torch.corrcoef(torch.stack((scores(rotate_half_split, 40), scores(rotate_adjacent, 40))))[0, 1]
    assert not torch.allclose(scores(rotate_half_split, 0), scores(rotate_half_split, 40), atol=1e-1) and mixed < 0.9


def test_l10_weights_passed_by_the_host_are_all_claimed() -> None:
    """Fails where a tensor that nothing claims, an output gate say, is dropped in silence when a host passes the weights."""
    gate = "layers.0.self_attn.g_proj.weight"
    with pytest.raises(DSparkError, match=gate):
        small_drafts.small_model(tensors=small_drafts.weights(RAW) | {gate: torch.zeros(64, 64)})


@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e30])
def test_n06_padding_rows_change_nothing(poison: float) -> None:
    """Fails where a row of length 0 without pages crashes, or where live rows read anything of it."""
    model = small_drafts.small_model()
    drafter = small_drafts.small_drafter(model)
    for request, length in (("a", 9), ("b", 5)):
        small_drafts.feed(drafter, request, small_drafts.taps(model, length, seed=length))
    view = drafter.context.view(["a", "b"])
    embedded = model.embed_tokens(torch.tensor([[3, 127, 127, 127], [90, 127, 127, 127]]))
    positions = torch.tensor([[9], [5]]) + torch.arange(4)
    live = model.draft_hidden(embedded, positions, view.pages, view.page_table, view.context_len)

    def padded(filler: float) -> torch.Tensor:
        rows = torch.tensor([0, 2])
        wide = torch.full((4, 4, embedded.shape[-1]), filler).index_copy(0, rows, embedded)
        table = torch.full((4, 3), -1, dtype=torch.int32).index_copy(0, rows, view.page_table)
        lengths = torch.zeros(4, dtype=torch.int32).index_copy(0, rows, view.context_len)
        at = torch.zeros(4, 4, dtype=torch.int64).index_copy(0, rows, positions)
        return model.draft_hidden(wide, at, view.pages, table, lengths)[rows]

    before = pool_bytes(drafter)
    torch.testing.assert_close(padded(poison), live, rtol=1e-5, atol=1e-6)
    assert torch.equal(padded(poison), padded(1.0)) and torch.equal(pool_bytes(drafter), before)


def test_n06_a_batch_of_padding_only() -> None:
    """Fails where nothing to do is an error."""
    drafter = small_drafts.small_drafter(small_drafts.small_model())
    drafter.extend([], small_drafts.taps(drafter.model, 0))
    proposal = drafter.propose([], torch.empty(0, dtype=torch.int64), 4)
    assert proposal.tokens.shape == (0, 4) and proposal.hidden.shape == (0, 4, 64)


def test_n08_a_dummy_step_leaves_real_pages_alone() -> None:
    """Fails where a step without tokens writes through the slots of the last real one."""
    model = small_drafts.small_model()
    drafter = small_drafts.small_drafter(model)
    small_drafts.feed(drafter, "real", small_drafts.taps(model, 7))
    before, z = pool_bytes(drafter), torch.full((7, 2, model.config.latent_width), torch.nan)
    angles = model.rope.angles(torch.arange(7))

    def write(slots: list[int]) -> None:
        context_append(z, model.latent_norm, *angles, torch.tensor(slots), drafter.context.pool.views, 1e-5)

    write([-1] * 7)
    drafter.extend([], small_drafts.taps(model, 0))
    drafter.extend([Segment("real", 7, 0)], small_drafts.taps(model, 0))
    drafter.propose(["real"], torch.tensor([3]), 4)
    assert torch.equal(pool_bytes(drafter), before)
    write(drafter.context.requests["real"].slots(0, 7))  # control: the stale slots would have been seen
    assert not torch.equal(pool_bytes(drafter), before)


@pytest.mark.parametrize("mscale_all_dim", [1.0, None], ids=["multiplier-1", "multiplier-other"])
def test_n20_rotated_keys_have_the_dtype_of_the_latents(mscale_all_dim: float | None) -> None:
    """Fails where the fp32 angles of YaRN without attention_factor leave the rotated lanes in fp32."""
    rope = {k: v for k, v in (RAW["rope_parameters"] | {"mscale_all_dim": mscale_all_dim}).items() if v is not None}
    exact, model = (small_drafts.small_model(dtype=d, rope_parameters=rope) for d in (torch.float32, torch.bfloat16))
    assert (model.rope.multiplier == 1.0) == (mscale_all_dim is not None)
    features, c = small_drafts.taps(model, 6), model.config.kv_lora_rank
    z = model.context_latents(model.project_context(features.bfloat16()))
    cos, sin = model.rope.angles(torch.arange(6))
    assert cos.dtype == torch.float32
    assert rotate_adjacent(z[:, 0, c:], cos, sin).dtype == z.dtype == torch.bfloat16
    finished = finish_latents(z, model.latent_norm, cos[:, None], sin[:, None], 1e-5)
    query = model.layers[0].self_attn.query(torch.zeros(1, 6, 64).bfloat16(), cos[None], sin[None])
    assert finished.dtype == query.dtype == torch.bfloat16
    kept = []
    for one in (exact, model):
        drafter = small_drafts.small_drafter(one)
        small_drafts.feed(drafter, "r", features)
        kept.append(small_drafts.rows_of(drafter, "r")[..., c:].float())
    assert float((kept[0] - kept[1]).abs().max()) < 0.1
    raw_bytes = kept[0].contiguous().view(torch.bfloat16).float()  # control: fp32 bytes taken for bf16
    assert float((raw_bytes[..., ::2] - kept[0]).nan_to_num(1e38).abs().max()) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_n20_a_pool_of_another_dtype_is_refused_and_untouched(dtype: torch.dtype) -> None:
    """Fails where latents are written into whatever the pool is."""
    model = small_drafts.small_model(dtype=torch.bfloat16)
    layout = PoolLayout.of(model.config, page_size=4, dtype=dtype)
    views = torch.zeros(2, 4, 4, layout.width).to(dtype).unbind(0)
    drafter = Drafter(model, DraftContext(ContextPool(layout, views)), small_drafts.lm_head(model))
    drafter.context.admit("r", 8)
    with pytest.raises(TypeError, match=f"{dtype}, the latents torch.bfloat16"):
        drafter.extend([Segment("r", 0, 3)], small_drafts.taps(model, 3))
    assert not any(bool(view.float().any()) for view in views) and drafter.context.length("r") == 0


def at_offset(offset: int, block_shift: int = 0) -> torch.Tensor:
    """[32, 4, D]: blocks behind 12 context tokens at positions offset .. offset+11, one a row with its own anchor."""
    model = small_drafts.small_model()
    rows, _ = model.precompute_context_kv(
        model.project_target_hidden(small_drafts.taps(model, 12)), torch.arange(offset, offset + 12)
    )
    pages = [rows[:, layer, 0].view(3, 4, -1)[:, None, None] for layer in range(2)]
    ids = torch.full((32, 4), 127)
    ids[:, 0] = torch.arange(32)
    positions = (offset + 12 + block_shift + torch.arange(4)).expand(32, 4)
    table = torch.arange(3, dtype=torch.int32).expand(32, 3)
    hidden = model.dflash_forward(
        model.embed_tokens(ids), positions, torch.full((32,), 12), None, None, torch.arange(32), pages, table
    )
    return hidden.unflatten(0, (32, 4))


def test_w01_the_block_follows_the_newest_context_row() -> None:
    """Fails where the block begins one position early or late, at prefill or after an accepted draft."""
    model, seen = small_drafts.small_model(), []
    drafter = small_drafts.small_drafter(model)
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(args[1].tolist()))
    small_drafts.feed(drafter, "r", small_drafts.taps(model, 12), tokens=20)
    drafter.propose(["r"], torch.tensor([3]), 4)
    drafter.extend([Segment("r", 12, 2)], small_drafts.taps(model, 2))  # the old anchor and one accepted draft
    drafter.propose(["r"], torch.tensor([5]), 4)
    handle.remove()
    assert seen == [[[12, 13, 14, 15]], [[14, 15, 16, 17]]]


@pytest.mark.parametrize("offset", [0, 10, 10_000])
def test_w01_drafts_equal_the_oracle_wherever_the_text_begins(offset: int) -> None:
    """Fails where drafts depend on the absolute position, and for a block shifted by +1 or -1."""
    raw, tensors, model = RAW, small_drafts.weights(RAW), small_drafts.small_model()
    ids = torch.tensor([7, 127, 127, 127])
    expected = plain_mla.hidden_states(raw, tensors, small_drafts.taps(model, 12), ids, offset + 12)
    limit = 1e-4 + offset * 2.0**-22
    found, tokens = at_offset(offset), small_drafts.lm_head(model)
    assert float((found[7].double() - expected).abs().max()) < limit
    for shift in (1, -1):
        moved = at_offset(offset, shift)
        assert float((moved[7].double() - expected).abs().max()) > 10 * limit
        assert not torch.equal(tokens(moved).argmax(-1), tokens(found).argmax(-1))


def selecting_model():  # type: ignore[no-untyped-def]
    """Projections with one entry a row: each output is one product, so it cannot depend on how rows are batched."""
    tensors = small_drafts.weights(RAW)
    for name, value in tensors.items():
        if "context_proj" in name or "kv_a_proj_with_mqa" in name:
            column = (7 * torch.arange(value.shape[0]) + 3) % value.shape[1]
            value.zero_()[torch.arange(value.shape[0]), column] = 2.0
    return small_drafts.small_model(tensors=tensors)


def test_w02_chunks_of_a_prompt_give_the_same_bytes() -> None:
    """Fails where a later chunk is stored from index 0, or rotated by its place in the chunk."""
    model, kept = selecting_model(), []
    features = small_drafts.taps(model, 10)
    for chunks in ([10], [4, 4, 2], [1, 9], [3, 0, 7]):
        drafter = small_drafts.small_drafter(model)
        drafter.context.admit("r", 10)
        done = 0
        for count in chunks:
            drafter.extend([Segment("r", done, count)], features[done : done + count])
            done += count
        kept.append(pool_bytes(drafter))
    assert all(torch.equal(kept[0], other) for other in kept[1:])
    local = RotaryEmbedding(model.config.rope, 8).angles(torch.tensor([*range(4), *range(4), *range(2)]))  # control
    z = model.context_latents(model.project_context(features))
    wrong = finish_latents(z, model.latent_norm, local[0][:, None], local[1][:, None], 1e-5)
    assert not torch.equal(wrong.transpose(0, 1), small_drafts.rows_of(drafter, "r"))


def test_w02_a_chunk_that_starts_over_is_refused() -> None:
    """Fails where the second chunk may come with positions of its own."""
    model = selecting_model()
    drafter = small_drafts.small_drafter(model)
    small_drafts.feed(drafter, "r", small_drafts.taps(model, 4), tokens=10)
    with pytest.raises(DSparkError, match="must be at position 4, it came at 0"):
        drafter.extend([Segment("r", 0, 4)], small_drafts.taps(model, 4))
