"""Who runs when: chunks, pauses, preemption, admission. None of it changes a request's text, positions or context."""

import pytest
import torch
from engine_pair import PAGE
from engine_watch import WatchedEngine, bits, check_all_given_back

from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.evaluation.measure import measure

NEW_TOKENS = 16
PARAMS = SamplingParams(NEW_TOKENS, ignore_eos=True)
PROMPT = 64


@pytest.fixture(scope="module")
def plain(pair):
    """Four prompts decoded by the target alone."""
    return tokens(Engine(pair.target).generate(pair.prompts[:4], PARAMS))


@pytest.fixture(scope="module")
def undisturbed(pair):
    """The first three prompts on a watched engine, each by itself: their commits, and the drafts of every step."""
    engine = watched(pair, max_batch=1)
    return engine.generate(pair.prompts[:3], PARAMS), engine.proposals


def watched(pair, *, pool_tokens=4096, **more):
    return WatchedEngine(pair.target, pair.drafter(pool_tokens=pool_tokens), num_drafts=pair.block, **more)


def tokens(completions):
    return [completion.tokens for completion in completions]


def find(engine, request):
    return engine._requests[request]


def trace(completion):
    return [(commit.tokens, commit.accepted, commit.submitted) for commit in completion.commits]


def step_until(engine, condition):
    for _ in range(200):
        if condition():
            return
        engine.step()
    raise AssertionError("200 steps and no end")


# --- chunked prefill


@pytest.mark.parametrize("chunk", [1, 7, PAGE, 1000])
def test_a_prompt_in_chunks_of_any_size_gives_the_same_tokens(pair, plain, undisturbed, assert_lossless, say_acceptance, chunk):
    engine = watched(pair, prefill_chunk=chunk)
    prompts = pair.prompts[:2]
    order = [engine.add(prompt, PARAMS) for prompt in prompts]
    step_until(engine, lambda: all(find(engine, request).tokens for request in order))
    assert engine.steps == -(-PROMPT // chunk)
    done = engine.run_to_end()
    assert_lossless(f"chunk {chunk}", prompts, plain[:2], tokens(done[request] for request in order))
    summary = engine.acceptance.summary()
    say_acceptance(f"chunk {chunk}", summary.accept_len)
    whole = measure(undisturbed[0][:2], pair.block).acceptance.accept_len
    assert summary.accept_len == pytest.approx(whole, rel=0.1) and summary.accept_len > 1.5
    check_all_given_back(engine)


def test_others_decode_while_a_prompt_is_read_in_chunks(pair, plain, assert_lossless):
    engine = watched(pair, prefill_chunk=7)
    first = engine.add(pair.prompts[0], PARAMS)
    step_until(engine, lambda: find(engine, first).tokens)
    second = engine.add(pair.prompts[1], PARAMS)
    for read in range(7, PROMPT, 7):
        committed = [commit.request for commit in engine.step()]
        assert find(engine, second).computed == read and not find(engine, second).tokens
        if first in engine._requests or first in committed:
            assert committed == [first]
    done = engine.run_to_end()
    assert first in done and done[first].commits[1].submitted == pair.block
    assert_lossless("beside chunks", pair.prompts[:2], plain[:2], tokens([done[first], done[second]]))


@pytest.mark.parametrize(("name", "value"), [("prefill_chunk", 0), ("prefill_chunk", -3), ("max_batch", 0)])
def test_a_chunk_or_a_batch_of_nothing_is_refused(pair, name, value):
    with pytest.raises(DSparkError, match=rf"{name} must be at least 1, it is {value}\."):
        Engine(pair.target, pair.drafter(), num_drafts=pair.block, **{name: value})


# --- pause


@pytest.mark.parametrize("pause", [1, 5])
def test_a_paused_request_keeps_its_context_and_its_drafts(pair, undisturbed, pause):
    """To the bit: what it proposes and commits afterwards is what it would have without the pause and without company."""
    alone, proposals = undisturbed
    engine = watched(pair)
    order = [engine.add(prompt, PARAMS) for prompt in pair.prompts[:3]]
    engine.step()
    engine.step()
    request, context = find(engine, order[1]), engine.drafter.context
    held = context.requests[order[1]]
    slots = held.slots(0, held.length)
    before = bits(context)[:, slots], list(request.drafts), request.computed, list(held.ids), held.length
    assert request.drafts and request.computed > PROMPT
    engine.pause(order[1])
    for _ in range(pause):
        assert order[1] not in {commit.request for commit in engine.step()}
    after = bits(context)[:, slots], list(request.drafts), request.computed, list(held.ids), held.length
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    engine.resume(order[1])
    done = engine.run_to_end()
    for index, number in enumerate(order):
        assert trace(done[number]) == trace(alone[index])
        assert engine.proposals[number] == proposals[index]
    check_all_given_back(engine)


def test_a_request_paused_between_chunks_goes_on_where_it_was(pair, plain, assert_lossless):
    engine = watched(pair, prefill_chunk=9)
    first, second = (engine.add(prompt, PARAMS) for prompt in pair.prompts[:2])
    engine.step()
    engine.pause(second)
    for _ in range(4):
        engine.step()
    assert (find(engine, first).computed, find(engine, second).computed) == (45, 9)
    engine.resume(second)
    engine.step()
    assert find(engine, second).computed == 18
    done = engine.run_to_end()
    assert_lossless("paused in its prompt", pair.prompts[:2], plain[:2], tokens([done[first], done[second]]))


def test_a_waiting_request_that_is_paused_lets_others_pass(pair, plain):
    engine = watched(pair, max_batch=1)
    first, second, third = (engine.add(prompt, PARAMS) for prompt in pair.prompts[:3])
    engine.pause(second)
    step_until(engine, lambda: third in engine._done)
    assert first in engine._done and find(engine, second).computed == 0 and not find(engine, second).tokens
    engine.resume(second)
    done = engine.run_to_end()
    assert tokens(done[request] for request in (first, second, third)) == plain[:3]


def test_waiting_for_what_paused_requests_hold_is_an_error_and_not_for_ever(pair, plain):
    engine = watched(pair, max_batch=1)
    first = engine.add(pair.prompts[0], PARAMS)
    engine.step()
    engine.pause(first)
    with pytest.raises(DSparkError, match=rf"none can: requests \[{first}\] are paused"):
        engine.generate([pair.prompts[1]], PARAMS)
    engine.step()  # not an error: whoever steps may resume
    engine.resume(first)
    done = engine.run_to_end()
    assert tokens(done[request] for request in (first, first + 1)) == plain[:2]


def test_a_stream_whose_request_is_paused_says_so(pair):
    engine = watched(pair)
    stream = engine.stream(pair.prompts[0], PARAMS)
    engine.pause(next(stream).request)
    with pytest.raises(DSparkError, match=r"requests \[0\] are paused"):
        next(stream)


# --- preemption


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("chunk", [None, 10])
def test_a_preempted_request_computes_again_and_gives_the_same_tokens(pair, plain, undisturbed, assert_lossless, chunk, times):
    engine = watched(pair, prefill_chunk=chunk)
    order = [engine.add(prompt, PARAMS) for prompt in pair.prompts[:3]]
    request, context = find(engine, order[1]), engine.drafter.context
    step_until(engine, lambda: len(request.commits) == 2)
    for _ in range(times):
        had, free = len(request.tokens), context.allocator.num_free
        assert request.computed > PROMPT
        engine.preempt(order[1])
        assert (request.computed, request.cache, request.drafts) == (0, None, [])
        assert order[1] not in context.requests and context.allocator.num_free > free
        step_until(engine, lambda: not request.pending and request in engine.scheduler.running)
        assert len(request.tokens) == had and request.drafts, "computed again, nothing committed, and drafting already"
        engine.step()
        assert len(request.tokens) > had
    done = engine.run_to_end()
    assert engine.scheduler.counts.preempted == times
    assert [commit.prefill for commit in done[order[1]].commits].count(True) == 1
    assert_lossless(f"preempted {times} times", pair.prompts[:3], plain[:3], tokens(done[number] for number in order))
    if chunk is None:  # in chunks, the last bits of their context are others
        for index in (0, 2):
            assert trace(done[order[index]]) == trace(undisturbed[0][index]), "the others are as they were"
    check_all_given_back(engine)


def test_preempted_in_its_prompt_while_paused_and_while_waiting(pair, plain, assert_lossless):
    engine = watched(pair, prefill_chunk=10, max_batch=2)
    order = [engine.add(prompt, PARAMS) for prompt in pair.prompts[:3]]
    engine.step()
    engine.step()
    engine.preempt(order[2])  # it waits: nothing to take
    assert engine.scheduler.counts.preempted == 0 and find(engine, order[2]) in engine.scheduler.waiting
    engine.pause(order[1])
    engine.preempt(order[1])  # in its prompt
    engine.preempt(order[1])  # nothing is left to take
    assert engine.scheduler.counts.preempted == 1 and engine.scheduler.waiting[0] is find(engine, order[1])
    step_until(engine, lambda: order[2] in engine._done)
    assert find(engine, order[1]).computed == 0, "it is still paused"
    engine.resume(order[1])
    done = engine.run_to_end()
    assert_lossless("preempted in its prompt", pair.prompts[:3], plain[:3], tokens(done[number] for number in order))
    check_all_given_back(engine)


def test_the_target_by_itself_can_be_paused_and_preempted(pair, plain):
    engine = WatchedEngine(pair.target, prefill_chunk=20)
    order = [engine.add(prompt, PARAMS) for prompt in pair.prompts[:3]]
    for _ in range(6):
        engine.step()
    engine.pause(order[0])
    engine.preempt(order[1])
    for _ in range(3):
        engine.step()
    engine.resume(order[0])
    done = engine.run_to_end()
    assert tokens(done[number] for number in order) == plain[:3] and engine.scheduler.counts.preempted == 1


# --- ends


@pytest.mark.parametrize("event", ["pause", "resume", "preempt"])
def test_a_request_that_is_not_in_flight_is_named_and_others_are_unaffected(pair, undisturbed, event):
    engine = watched(pair)
    done = engine.add(pair.prompts[0], SamplingParams(1))
    running = engine.add(pair.prompts[1], PARAMS)
    engine.step()
    for unknown in (99, -1, done):
        with pytest.raises(DSparkError, match=rf"in flight is required, {unknown} is not; in flight: \[{running}\]"):
            getattr(engine, event)(unknown)
    assert trace(engine.run_to_end()[running]) == trace(undisturbed[0][1])


def test_every_page_is_taken_and_given_back_once(pair, monkeypatch):
    engine = watched(pair)
    allocator, context = engine.drafter.context.allocator, engine.drafter.context
    taken, given = [], []
    take, give_back = allocator.take, allocator.give_back
    monkeypatch.setattr(allocator, "take", lambda count: taken.extend(pages := take(count)) or pages)
    monkeypatch.setattr(allocator, "give_back", lambda ids: given.extend(ids) or give_back(ids))
    order = [engine.add(prompt, PARAMS) for prompt in pair.prompts[:3]]
    engine.step()
    engine.preempt(order[1])
    engine.run_to_end()
    assert sorted(given) == sorted(taken) and len(taken) > 12
    context.release(order[0])  # an end that is told twice
    assert sorted(given) == sorted(taken)
    check_all_given_back(engine)
    assert engine.completion(order[0]) is not None and engine.completion(order[0]) is None, "handed over once"


# --- admission


def test_requests_are_admitted_only_to_pages_that_nobody_else_was_promised(pair, plain, undisturbed):
    """Four requests in a pool for two: none is preempted, slides, or is left out, for they wait."""
    for on_pressure in ("recompute", "keep", "slide"):
        engine = watched(pair, pool_tokens=224, on_pressure=on_pressure)
        done = engine.generate(pair.prompts[:4], PARAMS)
        assert tokens(done) == plain[:4]
        assert [trace(c) for c in done[:3]] == [trace(c) for c in undisturbed[0]], "drafting as if alone"
        counts = engine.scheduler.counts
        assert (engine.most_running, counts.preempted, counts.slid, counts.left_out) == (2, 0, 0, 0)
        check_all_given_back(engine)


def test_requests_begin_in_the_order_they_came(pair):
    engine, begun = watched(pair, max_batch=2), []
    order = [engine.add(prompt, SamplingParams(4, ignore_eos=True)) for prompt in pair.prompts[:5]]
    while engine._requests:
        begun += [commit.request for commit in engine.step() if commit.prefill]
    assert begun == order and engine.most_running == 2


def test_two_engines_with_other_taps_share_one_target(pair, plain):
    """Each pass taps its own engine's layers: one set by the other engine would cost acceptance in silence."""
    engine = pair.engine(max_batch=1)
    alone = engine.generate([pair.prompts[0]], SamplingParams(24))[0]
    other = pair.engine(max_batch=1)
    request = other.add(pair.prompts[0], SamplingParams(24))
    while other.in_flight:
        other.step()
        pair.target.set_taps([1, 3])  # as a second draft, loaded for the same target, would
    found = other.completion(request)
    assert found.tokens == alone.tokens
    assert [c.accepted for c in found.commits] == [c.accepted for c in alone.commits]
    pair.target.set_taps(engine.drafter.model.config.target_layer_ids)
