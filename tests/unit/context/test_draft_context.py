"""Admit, append, view, release: every write in its own pages, every position once."""

import pytest
import torch

from cute_kernels.reference.context_append import finish_latents
from cute_kernels.reference.rotation import rms_norm, rotate_adjacent
from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.errors import DSparkError

LAYERS, LATENT, ROTARY, PAGE = 3, 8, 4, 4
W, EPS = LATENT + ROTARY, 1e-5


def context(num_pages: int = 6, dtype: torch.dtype = torch.float32) -> DraftContext:
    return DraftContext(ContextPool.allocate(PoolLayout(LAYERS, W, PAGE, dtype), num_pages))


def material(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randn(count, ROTARY // 2, generator=generator)
    return {
        "z": torch.randn(count, LAYERS, W, generator=generator).to(dtype),
        "norm_weight": torch.linspace(0.5, 2.0, LAYERS * LATENT).view(LAYERS, LATENT).to(dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }


def pages_of(ctx: DraftContext) -> torch.Tensor:
    """[L, num_pages * P, W], a copy."""
    return torch.stack([view.flatten(0, 1) for view in ctx.pool.views])


def test_append_equals_the_reference_row_by_row() -> None:
    ctx, given = context(), material(9)
    ctx.admit("a", 4)
    ctx.admit("b", 8)
    ctx.append([Segment("b", 0, 6), Segment("a", 0, 3)], **given, eps=EPS)
    for request, rows in (("b", range(6)), ("a", range(6, 9))):
        for position, t in enumerate(rows):
            slot = ctx.requests[request].slots(position, 1)[0]
            for layer in range(LAYERS):
                latent = rms_norm(given["z"][t, layer, :LATENT], given["norm_weight"][layer], EPS)
                rotary = rotate_adjacent(given["z"][t, layer, LATENT:], given["cos"][t], given["sin"][t])
                found = pages_of(ctx)[layer, slot]
                torch.testing.assert_close(found, torch.cat((latent, rotary)), rtol=1e-6, atol=1e-6)
    view = ctx.view(["b", "a"])
    assert view.context_len.tolist() == [6, 3] and view.page_table.shape == (2, 2)


def test_control_the_rotary_part_is_not_normed_and_each_layer_has_its_own_weight() -> None:
    given = material(5)
    found = finish_latents(given["z"], given["norm_weight"], given["cos"][:, None], given["sin"][:, None], EPS)
    lengths = found[..., LATENT:].norm(dim=-1)
    torch.testing.assert_close(lengths, given["z"][..., LATENT:].norm(dim=-1))
    shuffled = finish_latents(given["z"], given["norm_weight"].flip(0), given["cos"][:, None], given["sin"][:, None], EPS)
    assert float((found - shuffled)[..., :LATENT].abs().max()) > 0.1


def test_what_is_not_written_stays_nan() -> None:
    ctx = context()
    ctx.admit("a", 8)
    ctx.append([Segment("a", 0, 5)], **material(5), eps=EPS)
    written = set(ctx.requests["a"].slots(0, 5))
    rows = pages_of(ctx)
    for slot in range(rows.shape[1]):
        row = rows[:, slot]
        assert bool(row.isfinite().all()) if slot in written else bool(row.isnan().all()), slot


def test_writes_past_the_bound_are_counted_and_the_request_goes_on() -> None:
    ctx = context()
    ctx.admit("a", 4)
    ctx.admit("b", 4)
    ctx.append([Segment("b", 0, 4)], **material(4, seed=1), eps=EPS)
    before = pages_of(ctx)
    ctx.append([Segment("a", 0, 3)], **material(3), eps=EPS)
    ctx.append([Segment("a", 3, 5)], **material(5, seed=2), eps=EPS)
    assert ctx.length("a") == 8 and ctx.requests["a"].suppressed == 4
    assert ctx.view(["a"]).context_len.tolist() == [4]
    ctx.append([Segment("a", 8, 2)], **material(2), eps=EPS)
    assert ctx.requests["a"].suppressed == 6 and ctx.requests["b"].suppressed == 0
    others = [slot for slot in range(24) if slot not in ctx.requests["a"].slots(0, 4)]
    assert torch.equal(pages_of(ctx)[:, others].nan_to_num(7.0), before[:, others].nan_to_num(7.0))


def test_page_zero_is_an_ordinary_page() -> None:
    ctx = context()
    ctx.admit("first", 4)
    assert ctx.requests["first"].ids == [0]
    ctx.append([Segment("first", 0, 2)], **material(2), eps=EPS)
    view = ctx.view(["first"])
    assert view.page_table.tolist() == [[0]] and view.context_len.tolist() == [2]
    assert bool(ctx.pool.views[0][0, :2].isfinite().all())


@pytest.mark.parametrize("first", [2, 4, 0])
def test_a_gap_or_an_overwrite_is_refused(first: int) -> None:
    ctx = context()
    ctx.admit("a", 12)
    ctx.append([Segment("a", 0, 3)], **material(3), eps=EPS)
    before = pages_of(ctx)
    with pytest.raises(DSparkError, match=rf"request 'a' must be at position 3, it came at {first}"):
        ctx.append([Segment("a", first, 2)], **material(2), eps=EPS)
    assert ctx.length("a") == 3 and torch.equal(pages_of(ctx).nan_to_num(7.0), before.nan_to_num(7.0))


def test_a_refused_segment_leaves_the_segments_before_it_as_they_were() -> None:
    ctx = context()
    ctx.admit("a", 8)
    ctx.admit("b", 8)
    with pytest.raises(DSparkError, match="request 'b' must be at position 0, it came at 1"):
        ctx.append([Segment("a", 0, 2), Segment("b", 1, 2)], **material(4), eps=EPS)
    assert ctx.length("a") == 0 and ctx.length("b") == 0  # nothing was written, so nothing may be counted
    ctx.append([Segment("a", 0, 2), Segment("b", 0, 2)], **material(4), eps=EPS)


def test_a_request_may_come_twice_in_one_call() -> None:
    ctx = context()
    ctx.admit("a", 8)
    ctx.append([Segment("a", 0, 2), Segment("a", 2, 3)], **material(5), eps=EPS)
    together = context()
    together.admit("a", 8)
    together.append([Segment("a", 0, 5)], **material(5), eps=EPS)
    assert ctx.length("a") == 5
    assert torch.equal(pages_of(ctx).nan_to_num(7.0), pages_of(together).nan_to_num(7.0))


def test_an_unknown_request_is_an_error_that_names_the_known_ones() -> None:
    ctx = context()
    ctx.admit("a", 4)
    for call in (
        lambda: ctx.append([Segment("x", 0, 1)], **material(1), eps=EPS),
        lambda: ctx.view(["a", "x"]),
        lambda: ctx.length("x"),
    ):
        with pytest.raises(DSparkError, match=r"'x' must be admitted first; known: \['a'\]"):
            call()


def test_admission_is_all_or_nothing() -> None:
    ctx = context()
    assert ctx.capacity == 24 and ctx.allocator.num_free == 6
    ctx.admit("a", 5)
    assert ctx.requests["a"].bound == 8 and ctx.allocator.num_free == 4
    with pytest.raises(DSparkError, match="5 pages are required, 4 of 6 are free"):
        ctx.admit("b", 17)
    assert "b" not in ctx.requests and ctx.allocator.num_free == 4
    with pytest.raises(DSparkError, match="'a' is already admitted"):
        ctx.admit("a", 1)
    assert ctx.allocator.num_free == 4


def test_release_gives_pages_back_once() -> None:
    ctx = context()
    ctx.admit("a", 12)
    ctx.release("a")
    ctx.release("a")
    ctx.release("never")
    assert ctx.allocator.num_free == 6
    ctx.admit("b", 24)
    assert sorted(ctx.requests["b"].ids) == list(range(6))


def test_a_reused_page_shows_nothing_of_its_last_owner() -> None:
    ctx = context(num_pages=1)
    ctx.admit("a", 4)
    ctx.append([Segment("a", 0, 4)], **material(4), eps=EPS)
    ctx.release("a")
    ctx.admit("b", 4)
    assert ctx.length("b") == 0 and ctx.view(["b"]).context_len.tolist() == [0]


def test_rows_that_do_not_match_the_segments_are_our_own_bug() -> None:
    ctx = context()
    ctx.admit("a", 8)
    with pytest.raises(AssertionError, match="4 rows"):
        ctx.append([Segment("a", 0, 3)], **material(4), eps=EPS)


def test_an_empty_step_writes_nothing() -> None:
    ctx = context()
    ctx.append([], **material(0), eps=EPS)
    assert bool(pages_of(ctx).isnan().all())
    assert ctx.view([]).page_table.shape == (0, 0)
