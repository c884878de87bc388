"""Bugs that users of other engines reported, as tests of ours: draft lengths, block layouts, acceptance figures.

Where each was reported stands in README.md.
"""

import pytest
import torch
from engine_pair import load_pair, small_drafter
from engine_targets import random_prompts, random_target, write_random_draft

from trtllm_dspark.context.draft_context import Segment
from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.loading import DraftOptions, load_drafter
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter
from trtllm_dspark.stats import AcceptanceCounter

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
BLOCK = 4


@pytest.fixture(scope="module")
def pair():
    return load_pair()


@pytest.fixture(scope="module")
def plain(pair):
    return Engine(pair.target).generate(pair.prompts[:4], PARAMS)


@pytest.fixture(scope="module")
def target():
    return random_target("llama")


def tokens(completions):
    return [completion.tokens for completion in completions]


def test_c01_fewer_drafts_than_the_block_keep_the_output(pair, plain):
    """Fails where K below the block is refused, changes the output, or drafts nothing."""
    for num_drafts in range(1, pair.block):
        engine = pair.engine(num_drafts)
        assert tokens(engine.generate(pair.prompts[:4], PARAMS)) == tokens(plain)
        summary = engine.acceptance.summary()
        assert summary.accept_len > 1.3 and len(summary.histogram) == num_drafts + 1


def test_c02_a_draft_for_every_row_keeps_the_output(pair, plain):
    """Fails where K = block, or one fewer, reads or writes past a buffer.

    The draft pool is exactly as large as the requests' pages, so that a write past one shows as another's wrong tokens.
    """
    for num_drafts in (pair.block, pair.block - 1):
        engine = pair.engine(num_drafts, drafter=pair.drafter(pool_tokens=4 * 80))
        assert tokens(engine.generate(pair.prompts[:4], PARAMS)) == tokens(plain)
        assert engine.acceptance.summary().accept_len > 1.5


@pytest.mark.parametrize(("first_row_predicts", "most"), [(True, BLOCK), (False, BLOCK - 1)])
def test_c02_more_drafts_than_the_block_are_refused_by_the_engine(tmp_path, target, first_row_predicts, most):
    """Fails where K is not checked, in either layout, or not with its numbers; every legal K keeps the output."""
    path = write_random_draft(tmp_path, sample_from_anchor=first_row_predicts)
    layout = "anchor-first" if first_row_predicts else "fill-in"
    loaded = load_drafter(path, target)
    assert loaded.num_drafts == most
    for refuse in (
        lambda: load_drafter(path, target, DraftOptions(num_drafts=most + 1)),
        lambda: Engine(target, loaded.drafter, num_drafts=most + 1),
    ):
        with pytest.raises(DSparkError) as caught:
            refuse()
        for word in (f"at most {most}", f"K={most + 1}", f"block_size is {BLOCK}", layout):
            assert word in str(caught.value)
    prompts = random_prompts(2, 9)
    for num_drafts in range(1, most + 1):
        engine = Engine(target, small_drafter(loaded.drafter.model, target), num_drafts=num_drafts)
        assert tokens(engine.generate(prompts, PARAMS)) == tokens(Engine(target).generate(prompts, PARAMS))


# --- C05: a mock, for control flow only. Row j of every block is made to say token 100 + j


class RowsSayTheirIndex:
    """The target's head: a row's first element is its index."""

    def __call__(self, hidden):
        return torch.nn.functional.one_hot(100 + hidden[..., 0].long(), 128).float()


def row_drafter(folder, target, monkeypatch):
    loaded = load_drafter(folder, target)
    model = loaded.drafter.model
    assert isinstance(model, MLADSparkForCausalLM) and model.markov_head is not None
    model.markov_head.markov_w2.weight.zero_()  # no bias: a draft is what its row says
    seen = []

    def rows(embeddings, positions, pages, page_table, context_len, context_start):
        seen.append((embeddings.shape, positions.tolist()))
        batch, count, width = embeddings.shape
        return torch.arange(count).float()[None, :, None].expand(batch, count, width)

    monkeypatch.setattr(model, "draft_hidden", rows)
    return Drafter(model, loaded.drafter.context, RowsSayTheirIndex()), loaded.notes, seen


@pytest.mark.parametrize(
    ("declared", "first"),
    [
        ({}, 0),
        ({"sample_from_anchor": True}, 0),
        ({"sample_from_anchor": False}, 1),
        ({"dspark_bonus_anchor": True}, 1),
        ({"dspark_bonus_anchor": False}, 0),
    ],
)
def test_c05_which_rows_become_drafts(tmp_path, target, monkeypatch, declared, first):
    """Fails where a row of the other layout becomes a draft, or the block has another width or place."""
    drafter, notes, seen = row_drafter(write_random_draft(tmp_path, **declared), target, monkeypatch)
    drafter.context.admit("a", 40)
    drafter.extend([Segment("a", 0, 5)], torch.zeros(5, 2 * 64))
    for num_drafts in range(1, BLOCK + 1 - first):
        proposal = drafter.propose(["a"], torch.tensor([7]), num_drafts)
        assert proposal.tokens.tolist() == [[100 + first + k for k in range(num_drafts)]]
        assert seen[-1] == ((1, BLOCK, 64), [[5, 6, 7, 8]]), "a block is as wide as it was trained, from the anchor's position"
    with pytest.raises(DSparkError):
        drafter.propose(["a"], torch.tensor([7]), BLOCK + 1 - first)
    assert any("block layout is fill-in" in note for note in notes) == (first == 1)


# --- figures


def test_m01_accept_len_does_not_depend_on_the_batch(pair):
    """Fails where engine iterations, not verifications of requests, are the divisor: 7.7 times too much at batch 8."""
    found = []
    for batch in (1, 8):
        engine = pair.engine(max_batch=batch)
        engine.generate(pair.prompts[:8], PARAMS)
        found.append(engine.acceptance.summary())
    assert found[0] == found[1] and 1.5 < found[0].accept_len <= pair.block + 1


def test_m01_accept_len_of_a_known_histogram():
    """Fails where ten iterations of a batch of eight are not eighty verifications."""
    counter = AcceptanceCounter(4)
    for _ in range(10):
        counter.record(torch.tensor([0, 0, 1, 1, 2, 2, 4, 4]), torch.full((8,), 4))
    summary = counter.summary()
    assert (summary.verifications, summary.histogram) == (80, (20, 20, 20, 0, 20))
    assert summary.accept_len == 1 + 140 / 80


def test_m02_figures_of_each_request_add_up(pair):
    """Fails where a request that drafted has no figures of its own, or they are not the engine's in sum."""
    engine = pair.engine(max_batch=2)
    completions = engine.generate(pair.prompts[:4], PARAMS)
    each = [[(c.accepted, c.submitted) for c in completion.commits if not c.prefill] for completion in completions]
    summary = engine.acceptance.summary()
    assert all(any(submitted for _, submitted in one) for one in each)
    assert summary.accepted == sum(accepted for one in each for accepted, _ in one)
    assert summary.submitted == sum(submitted for one in each for _, submitted in one)
    counter = AcceptanceCounter(4)
    counter.record(torch.tensor([2, 0, 4]), torch.tensor([4, 4, 4]))
    assert (counter.summary().accepted, counter.summary().submitted, counter.summary().accept_len) == (6, 12, 3.0)


def test_m03_drafted_counts_what_was_submitted(pair):
    """Fails where K times the steps is counted: the last steps of a text have no room for K drafts."""
    engine = pair.engine()
    completions = engine.generate(pair.prompts[:4], PARAMS)
    summary = engine.acceptance.summary()
    assert summary.submitted < pair.block * summary.verifications
    assert summary.verifications == sum(len(c.commits) - 1 for c in completions), "a prompt's pass is no verification"
    counter = AcceptanceCounter(4)
    counter.record(torch.tensor([2, 1, 0]), torch.tensor([2, 1, -1]))  # trimmed, short, padding
    assert (counter.summary().submitted, counter.summary().verifications) == (3, 2)


@pytest.mark.parametrize("garbage", ["nan", "constant", "out of range", "the anchor again"])
def test_m10_output_is_the_targets_for_any_drafts(pair, plain, monkeypatch, garbage):
    """Fails where verification trusts a draft: corrupt ones raised acceptance while the text became garbage.

    A mock, for control flow only, replaces what the drafter returns.
    """
    engine = pair.engine()
    propose, vocab = engine.drafter.propose, pair.target.vocab_size

    def corrupt(requests, anchors, num_drafts):
        proposal = propose(requests, anchors, num_drafts)
        if garbage == "nan":
            proposal.confidence.fill_(torch.nan)
            proposal.tokens.fill_(0)
        elif garbage == "constant":
            proposal.tokens.fill_(plain[0].tokens[0])
        elif garbage == "out of range":
            proposal.tokens[:, 1::2], proposal.tokens[:, 2::2] = vocab + 5, -1
        else:
            proposal.tokens.copy_(anchors[:, None].expand_as(proposal.tokens))
        return proposal

    monkeypatch.setattr(engine.drafter, "propose", corrupt)
    assert tokens(engine.generate(pair.prompts[:4], PARAMS)) == tokens(plain)
    summary = engine.acceptance.summary()
    assert summary.submitted > 0
    if garbage == "out of range":
        assert summary.submitted <= summary.verifications, "only the first draft is a token"
