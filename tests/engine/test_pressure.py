"""A draft pool that is too small: what gives way, in which order, and that nothing else is harmed."""

import copy
import logging

import pytest
import torch
from engine_pair import PAGE, small_drafter
from engine_targets import random_prompts, random_target, write_random_draft
from engine_watch import WatchedEngine, check_all_given_back

from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.loading import load_drafter
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.errors import DSparkError

PROMPT, NEW_TOKENS, REQUESTS = 24, 34, 6
PARAMS = SamplingParams(NEW_TOKENS, ignore_eos=True)
MODES = ("recompute", "keep", "slide")


@pytest.fixture(scope="module")
def prompts(pair):
    return [prompt[-PROMPT:] for prompt in pair.prompts[:REQUESTS]]


@pytest.fixture(scope="module")
def plain(pair, prompts):
    """Each prompt by the target alone."""
    return [completion.tokens for completion in Engine(pair.target).generate(prompts, PARAMS)]


def watched(pair, pool_tokens, on_pressure="recompute", **more):
    return WatchedEngine(
        pair.target, pair.drafter(pool_tokens=pool_tokens), num_drafts=pair.block, on_pressure=on_pressure, **more
    )


def tokens(completions):
    return [completion.tokens for completion in completions]


def accept_len(commits):
    verified = [commit for commit in commits if not commit.prefill]
    return 1 + sum(commit.accepted for commit in verified) / len(verified)


@pytest.mark.parametrize("on_pressure", MODES)
@pytest.mark.parametrize("pool", [48, 112, 480])
def test_every_request_ends_with_the_targets_text(pair, prompts, plain, assert_lossless, say_acceptance, pool, on_pressure):
    """Six requests of 24 + 34 tokens, four pages each at their end. `WatchedEngine` looks at every step of it."""
    engine = watched(pair, pool, on_pressure)
    done = engine.generate(prompts, PARAMS)
    label = f"pool {pool}, {on_pressure}"
    assert_lossless(label, prompts, plain, tokens(done))
    summary, counts = engine.acceptance.summary(), engine.scheduler.counts
    happened = f"{counts.preempted} preempted, {counts.left_out} left out, {counts.slid} slid"
    say_acceptance(f"{label} ({engine.steps} steps: {happened})", summary.accept_len)
    assert summary.accept_len > 1.5
    assert engine.steps < REQUESTS * (NEW_TOKENS + 4), "one after the other, a token at a time, would be faster"
    if pool == 480:
        assert (counts.preempted, counts.slid, counts.left_out) == (0, 0, 0) and engine.most_running == REQUESTS
    else:
        assert engine.most_running < REQUESTS
        assert counts.preempted == 0 or on_pressure == "recompute"
        assert counts.left_out == 0 or on_pressure == "keep"
    if pool == 112:
        assert {"recompute": counts.preempted, "keep": counts.left_out, "slide": counts.slid}[on_pressure] > 0
    if pool == 48:  # one at a time, three pages for four: whatever the mode, only its own oldest context can go
        assert counts.slid > 0 and counts.preempted == counts.left_out == 0
    check_all_given_back(engine)


def test_the_same_pressure_at_every_pool_size_leaves_no_request_behind(pair, prompts, plain):
    """Fewer pages than one request takes, and fewer than all take: bounded steps, whole texts, whole pool."""
    few, params = [expected[:10] for expected in plain[:4]], SamplingParams(10, ignore_eos=True)
    for pages in (2, 6):
        for on_pressure in MODES:
            engine = watched(pair, pages * PAGE, on_pressure, max_batch=4, prefill_chunk=9)
            assert tokens(engine.generate(prompts[:4], params)) == few, (pages, on_pressure)
            check_all_given_back(engine)


# --- sliding


def record_context(drafter):
    """What is appended from now on: [(request, first position, rows)], in order."""
    appended, extend = [], drafter.extend

    def recording(segments, taps):
        parts = taps.split([segment.count for segment in segments])
        appended.extend((segment.request, segment.first, part) for segment, part in zip(segments, parts, strict=True))
        extend(segments, taps)

    drafter.extend = recording
    return appended


def test_a_request_past_the_pool_drafts_from_its_most_recent_context(pair, say_acceptance):
    """Its drafts are those of a context that holds the recent positions only, and never held the others."""
    engine = watched(pair, 64, "slide")
    appended, context = record_context(engine.drafter), engine.drafter.context
    prompt = pair.prompts[0][-40:]
    request, starts, commits, checked = engine.add(prompt, SamplingParams(90, ignore_eos=True)), [], [], 0
    while request in engine._requests:
        commits += engine.step()
        if request not in engine._requests:
            break
        start, drafts = context.requests[request].start, engine._requests[request].drafts
        starts.append(start)
        if start and start != starts[-2]:
            assert drafts == drafts_from(pair, appended, start, engine._requests[request])
            checked += 1
    assert starts == sorted(starts) and starts[-1] > 32 and all(start % PAGE == 0 for start in starts) and checked > 2
    slid_at = next(index for index, start in enumerate(starts) if start)
    after = accept_len(commits[slid_at + 1 :])
    say_acceptance("after sliding", after)
    assert after > 1.5
    alone = pair.alone(prompt, SamplingParams(90, ignore_eos=True))
    assert tuple(token for commit in commits for token in commit.tokens) == alone.tokens
    check_all_given_back(engine)


def drafts_from(pair, appended, start, request):
    """What a drafter proposes that is told of positions `start` .. alone, in a pool with room for all."""
    drafter = pair.drafter()
    rows = torch.cat([part for _, _, part in appended])
    drafter.context.admit("recent", len(rows))
    drafter.context.skip_to("recent", start)
    drafter.extend([Segment("recent", start, len(rows) - start)], rows[start:])
    return drafter.propose(["recent"], torch.tensor([request.anchor]), pair.block).tokens[0].tolist()


@pytest.mark.parametrize("on_pressure", MODES)
def test_a_prompt_as_long_as_the_pool_is_served(pair, plain, assert_lossless, on_pressure):
    prompt = pair.prompts[0]
    engine = watched(pair, len(prompt), on_pressure)
    got = engine.generate([prompt], SamplingParams(24, ignore_eos=True))[0]
    alone = pair.alone(prompt, SamplingParams(24, ignore_eos=True))
    assert_lossless("prompt as long as the pool", [prompt], [alone.tokens], [got.tokens])
    assert engine.scheduler.counts.slid > 0 and accept_len(got.commits) > 1.5


def test_a_prompt_longer_than_the_pool_is_refused_and_the_engine_works_on(pair, prompts, plain):
    engine = watched(pair, 112)
    before = engine.add(prompts[0], PARAMS)
    engine.step()
    with pytest.raises(DSparkError, match=r"must fit the draft pool of 112 tokens, it has 128\."):
        engine.add(pair.prompts[0] * 2, SamplingParams(1))
    after = engine.add(prompts[1], PARAMS)
    done = engine.run_to_end()
    assert tokens([done[before], done[after]]) == plain[:2]
    check_all_given_back(engine)


# --- pauses under pressure


def test_a_paused_oldest_request_does_not_hold_up_those_that_keep(pair, prompts, plain):
    """The oldest that can run is the one that never waits; the paused one keeps all it has meanwhile."""
    engine = watched(pair, 112, "keep")
    order = [engine.add(prompt, PARAMS) for prompt in prompts[:3]]
    engine.step()
    engine.pause(order[0])
    held = list(engine.drafter.context.requests[order[0]].ids)
    for _ in range(2 * NEW_TOKENS + 8):
        engine.step()
    assert order[1] in engine._done and order[2] in engine._done
    assert engine.drafter.context.requests[order[0]].ids == held
    engine.resume(order[0])
    done = engine.run_to_end()
    assert tokens(done[request] for request in order) == plain[:3]


def test_a_paused_request_may_lose_its_memory_to_recompute_and_is_computed_again(pair, prompts, plain, assert_lossless):
    engine = watched(pair, 80, "recompute")  # five pages: one request takes four in the end, two take two at once
    order = [engine.add(prompt, PARAMS) for prompt in prompts[:2]]
    engine.step()
    engine.step()
    had = list(engine._requests[order[1]].tokens)
    engine.pause(order[1])
    while order[0] in engine._requests:
        engine.step()
    assert engine.scheduler.counts.preempted == 1
    assert engine._requests[order[1]].computed == 0 and engine._requests[order[1]].tokens == had
    engine.step()
    assert engine._requests[order[1]].computed == 0, "still paused"
    engine.resume(order[1])
    done = engine.run_to_end()
    assert_lossless("lost while paused", prompts[:2], plain[:2], tokens(done[request] for request in order))
    check_all_given_back(engine)


# --- the draft's last position


def with_positions(model, count):
    """The same weights under a config of fewer positions."""
    short = copy.copy(model)
    short.config = model.config.model_copy(update={"max_position_embeddings": count})
    return short


def test_past_the_drafts_positions_a_request_goes_on_without_drafts(pair, caplog):
    limit, params = 80, SamplingParams(40, ignore_eos=True)
    long, short = pair.prompts[0], pair.prompts[1][:16]
    drafter = small_drafter(with_positions(pair.model, limit), pair.target)
    engine = WatchedEngine(pair.target, drafter, num_drafts=pair.block)
    with caplog.at_level(logging.WARNING, logger="trtllm_dspark"):
        order = [engine.add(long, params), engine.add(short, params)]
        while len(engine._requests[order[0]].tokens) < 30:
            engine.step()
        engine.preempt(order[0])  # being computed again does not say it again
        done = engine.run_to_end()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and said[0].startswith(f"request {order[0]}: ") and f"the draft's {limit} positions" in said[0]
    first_at = [len(long) + commit.offset - 1 for commit in done[order[0]].commits]
    for position, commit in zip(first_at, done[order[0]].commits, strict=True):
        drafted = not commit.prefill and position + pair.block <= limit
        assert commit.submitted == (pair.block if drafted else 0), (position, commit)
    assert max(first_at) > limit
    for prompt, number in zip((long, short), order, strict=True):
        assert done[number].tokens == pair.alone(prompt, params).tokens
    roomy = pair.engine().generate([short], params)[0]
    assert [c.accepted for c in done[order[1]].commits] == [c.accepted for c in roomy.commits]
    check_all_given_back(engine)


def test_each_request_past_the_drafts_positions_is_said_once(tmp_path, caplog):
    """An untrained pair: control flow only."""
    target = random_target("llama")
    loaded = load_drafter(write_random_draft(tmp_path, max_position_embeddings=16), target)
    engine = WatchedEngine(target, small_drafter(loaded.drafter.model, target), num_drafts=4)
    prompts, params = random_prompts(3, 10), SamplingParams(20, ignore_eos=True)
    with caplog.at_level(logging.WARNING, logger="trtllm_dspark"):
        done = engine.generate(prompts, params)
    assert sorted(record.args[0] for record in caplog.records) == [0, 1, 2]
    assert all(commit.submitted == 0 for completion in done for commit in completion.commits if 10 + commit.offset > 14)
    assert tokens(done) == tokens(Engine(target).generate(prompts, params))


# --- the watch itself can fail


def test_a_page_with_two_owners_is_noticed(pair, prompts, monkeypatch):
    """Planted: an allocator that hands a page out although it is held."""
    engine = watched(pair, 480)
    allocator = engine.drafter.context.allocator
    take = allocator.take
    monkeypatch.setattr(allocator, "take", lambda count: [allocator.num_pages - 1] * bool(count) + take(count)[1:])
    with pytest.raises(AssertionError):
        engine.generate(prompts[:2], PARAMS)


def test_a_write_into_another_requests_page_is_noticed(pair, prompts, monkeypatch):
    """Planted: slots of the step's first request, whoever's rows they are."""
    engine = watched(pair, 480)
    slots = DraftContext._slots
    monkeypatch.setattr(DraftContext, "_slots", lambda *given: slots(*given) + PAGE)
    with pytest.raises(AssertionError, match="were written and are none of"):
        engine.generate(prompts[:2], PARAMS)


def test_a_read_of_a_page_that_is_not_held_is_noticed(pair, prompts, monkeypatch):
    """Planted: a table that is shifted by one page."""
    engine = watched(pair, 480)
    view = DraftContext.view

    def shifted(self, requests, device="cpu"):
        right = view(self, requests, device)
        right.page_table.add_(8).remainder_(self.pool.num_pages)
        return right

    monkeypatch.setattr(DraftContext, "view", shifted)
    with pytest.raises(AssertionError, match="a NaN was read"):
        engine.generate(prompts[:1], PARAMS)


def test_an_oldest_request_that_stands_still_is_noticed(pair, prompts, monkeypatch):
    engine = watched(pair, 480)
    plan = engine.scheduler.plan
    monkeypatch.setattr(engine.scheduler, "plan", lambda: plan()[1:])
    with pytest.raises(AssertionError, match="is the oldest and stands still"):
        engine.generate(prompts[:2], PARAMS)
