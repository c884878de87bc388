"""One draft step: which rows draft, how many fit, and that a block sees what it should and nothing else."""

from collections.abc import Callable

import published
import pytest
import small_drafts
import torch

from trtllm_dspark import step
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.draft_context import Segment
from trtllm_dspark.errors import DSparkError, UnsupportedError
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter

ANCHORS = torch.tensor([3, 60, 100])


def drafter(**changes: object) -> Drafter:
    made = small_drafts.small_drafter(small_drafts.small_model(**changes))
    for request, length in enumerate((9, 0, 4)):
        small_drafts.feed(made, request, small_drafts.taps(made.model, length, seed=length), tokens=length + 4)
    return made


def test_a_proposal_holds_tokens_of_the_vocabulary_and_probabilities() -> None:
    found = drafter().propose([0, 1, 2], ANCHORS, 4, keep_logits=True)
    assert found.tokens.shape == (3, 4) and found.tokens.dtype == torch.int64
    assert bool(((found.tokens >= 0) & (found.tokens < 128)).all())
    assert found.confidence.dtype == torch.float32 and bool(((found.confidence >= 0) & (found.confidence <= 1)).all())
    assert torch.equal(found.logits.argmax(-1), found.tokens) and found.hidden.shape == (3, 4, 64)


@pytest.mark.parametrize("count", [2, 4])
def test_the_head_is_given_rows_without_gaps(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Fails where the head is given strided rows: on a GPU torch then reads all of it again for each request."""
    seen: list[torch.Tensor] = []

    def as_on_a_gpu(project: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return project(rows)

    monkeypatch.setattr(step, "with_company", as_on_a_gpu)
    drafter().propose([0, 1, 2], ANCHORS, count)
    assert [rows.shape[:2] for rows in seen] == [(3, count)] and seen[0].is_contiguous()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_drafts_are_the_first_of_all(count: int) -> None:
    full, short = (drafter().propose([0, 1, 2], ANCHORS, k) for k in (4, count))
    assert torch.equal(short.tokens, full.tokens[:, :count])
    torch.testing.assert_close(short.confidence, full.confidence[:, :count], rtol=1e-6, atol=1e-6)
    assert torch.equal(short.hidden, full.hidden)  # the block keeps the width that it was trained with


def test_the_number_of_rows_matters() -> None:
    wide, narrow = (drafter().propose([0, 1, 2], ANCHORS, 2, block_rows=rows) for rows in (4, 2))
    assert narrow.hidden.shape[1] == 2 and not torch.allclose(wide.hidden[:, :2], narrow.hidden, atol=1e-3)


def test_row_0_drafts_where_the_layout_says_so() -> None:
    """Anchor-first: K rows from 0. Fill-in: the anchor's row predicts nothing."""
    first, fill = drafter(), drafter(sample_from_anchor=False)
    hidden = first.propose([0, 1, 2], ANCHORS, 3).hidden
    base = first.lm_head(hidden)
    markov = first.model.markov_head
    found = {name: made.propose([0, 1, 2], ANCHORS, 3).tokens for name, made in (("first", first), ("fill", fill))}
    for name, row in (("first", 0), ("fill", 1)):
        assert torch.equal(found[name][:, 0], (base[:, row] + markov(ANCHORS)).argmax(-1))
    assert not torch.equal(found["first"], found["fill"])


@pytest.mark.parametrize(("changes", "asked", "limit"), [({}, 5, 4), ({"sample_from_anchor": False}, 4, 3), ({}, 0, 4)])
def test_more_drafts_than_rows_are_refused(changes: dict[str, bool], asked: int, limit: int) -> None:
    with pytest.raises(DSparkError, match=f"1 to {limit} drafts fit a block of 4 rows.* {asked} were asked for"):
        drafter(**changes).propose([0, 1, 2], ANCHORS, asked)


def test_a_batch_is_its_requests() -> None:
    together = drafter().propose([0, 1, 2], ANCHORS, 4)
    for b in range(3):
        alone = drafter().propose([b], ANCHORS[b : b + 1], 4)
        assert torch.equal(alone.tokens[0], together.tokens[b])
        torch.testing.assert_close(alone.hidden[0], together.hidden[b], rtol=1e-5, atol=1e-5)
    turned = drafter().propose([2, 0, 1], ANCHORS[[2, 0, 1]], 4)
    assert torch.equal(turned.tokens, together.tokens[[2, 0, 1]])


def test_proposing_changes_nothing() -> None:
    made = drafter()
    pages = [view.clone() for view in made.context.pool.views]
    once, twice = (made.propose([0, 1, 2], ANCHORS, 4) for _ in range(2))
    assert torch.equal(once.hidden, twice.hidden)
    for view, before in zip(made.context.pool.views, pages, strict=True):
        assert torch.equal(view.nan_to_num(7.0), before.nan_to_num(7.0))


def test_drafts_depend_on_the_context_and_on_the_anchor() -> None:
    base = drafter().propose([0, 1, 2], ANCHORS, 4).hidden
    assert not torch.equal(drafter().propose([0, 1, 2], ANCHORS.flip(0), 4).hidden, base)
    longer = drafter()
    longer.extend([Segment(0, 9, 1)], small_drafts.taps(longer.model, 1))
    moved = longer.propose([0, 1, 2], ANCHORS, 4).hidden
    assert not torch.allclose(moved[0], base[0], atol=1e-3) and torch.equal(moved[1:], base[1:])


def test_context_past_the_bound_is_left_out_and_positions_go_on() -> None:
    made = drafter()  # request 2: 4 tokens, pages for 8
    made.extend([Segment(2, 4, 6)], small_drafts.taps(made.model, 6))
    seen: list[list[int]] = []
    handle = made.model.register_forward_pre_hook(lambda module, args: seen.append(args[1][0].tolist()))
    found = made.propose([2], ANCHORS[2:], 4)
    handle.remove()
    assert seen == [[10, 11, 12, 13]] and made.context.view([2]).context_len.tolist() == [8]
    assert bool(found.hidden.isfinite().all()) and made.context.requests[2].suppressed == 2


def test_without_heads_there_are_tokens_and_no_confidence() -> None:
    bare = published.tiny("mla", markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    tensors = {name: value for name, value in small_drafts.weights(published.tiny("mla")).items() if "_head" not in name}
    model = MLADSparkForCausalLM.empty(DraftConfig.from_dict(bare))
    model.load_weights(tensors)
    made = small_drafts.small_drafter(model)
    small_drafts.feed(made, 0, small_drafts.taps(model, 5))
    found = made.propose([0], ANCHORS[:1], 4)
    assert found.confidence is None and torch.equal(found.tokens, made.lm_head(found.hidden).argmax(-1))


def test_per_tap_norms_come_before_the_projection() -> None:
    config = DraftConfig.from_dict(published.tiny("mla", fc_norm=True))
    model = MLADSparkForCausalLM.empty(config)
    norms = {f"fc_norm.{i}.weight": torch.linspace(0.5, 2.0, 64) * (i + 1) for i in range(2)}
    tensors = small_drafts.weights(published.tiny("mla"))
    model.load_weights(tensors | norms)
    features = small_drafts.taps(model, 3)
    parts = [
        x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
        for x, w in zip(features.chunk(2, -1), norms.values(), strict=True)
    ]
    plain = small_drafts.small_model()
    expected = plain.project_context(torch.cat(parts, -1))
    torch.testing.assert_close(model.project_context(features), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain.project_context(features), expected, atol=1e-2)


def test_an_unfilled_model_drafts_nan() -> None:
    model = MLADSparkForCausalLM.empty(DraftConfig.from_dict(published.tiny("mla")))
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
    assert not list(model.buffers())


def test_the_other_family_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="DSparkDraftModel is gqa"):
        MLADSparkForCausalLM.empty(DraftConfig.from_dict(published.tiny("gqa")))
