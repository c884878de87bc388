"""Prefix reuse: a kept context continues as if it had been computed again, is never written, and goes when memory is short.

`target_only` is the fault that joint reuse avoids: the text stays right, and fewer drafts are accepted.
"""

import math
import statistics

import pytest
import torch
from engine_pair import PAGE
from engine_watch import WatchedEngine, bits, check_all_given_back, check_pages

from trtllm_dspark.context.draft_context import DraftContext
from trtllm_dspark.context.pages import RequestPages
from trtllm_dspark.context.prefix import KeptPrefix, PrefixStore
from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.evaluation.measure import measure
from trtllm_dspark.evaluation.multi_turn import conversations, run_turns

TALKS, TURNS = 12, 4
FIRST, THEN = 96, 8  # much history and little that is new: what a missing context costs shows
ANSWER = SamplingParams(12, ignore_eos=True)
MODES = ("off", "joint", "target_only")


def watched(pair, reuse="joint", **more):
    pool_tokens = more.pop("pool_tokens", 4096)
    return WatchedEngine(pair.target, pair.drafter(pool_tokens=pool_tokens), num_drafts=pair.block, reuse=reuse, **more)


def tokens(completions):
    return [completion.tokens for completion in completions]


@pytest.fixture(scope="module")
def talks(pair):
    return conversations(pair.target.tokenizer, TALKS, TURNS, first=FIRST, then=THEN)


@pytest.fixture(scope="module")
def results(pair, talks):
    """mode -> (engine, result), four conversations at a time."""
    held = {}
    for mode in MODES:
        engine = Engine(pair.target, pair.drafter(), num_drafts=pair.block, reuse=mode)
        held[mode] = engine, run_turns(engine, talks, ANSWER, batch=4)
    return held


# --- what it is worth


def test_joint_reuse_is_as_good_as_computing_again(results, say_acceptance):
    (off_engine, off), (on_engine, on) = results["off"], results["joint"]
    say_acceptance(f"reuse off ({off.verifications} verifications, ± {off.stderr:.2f})", off.accept_len)
    say_acceptance(f"reuse on ({on.reused_tokens} tokens reused)", on.accept_len)
    assert tokens(on.completions) == tokens(off.completions)
    assert off.reused_tokens == 0
    prompts = [completion.prompt for completion in on.completions]
    later_turns = [prompt for index, prompt in enumerate(prompts) if index % TURNS]
    assert on.reused_tokens >= sum(len(prompt) - THEN - 1 for prompt in later_turns), "all but what is new in each turn"
    histograms = [engine.acceptance.summary().histogram for engine in (off_engine, on_engine)]
    moved = sum(abs(a - b) for a, b in zip(*histograms, strict=True)) / 2
    # the context is the same but for its last bits, since a prompt is computed in other pieces
    assert moved <= 0.02 * off.verifications, histograms


def test_the_text_is_the_targets_in_every_mode(pair, results, assert_lossless):
    """Every third conversation, all of its turns, by the target alone; with its own reuse, which needs no draft."""
    for talk in range(0, TALKS, 3):
        turns = slice(talk * TURNS, (talk + 1) * TURNS)
        prompts = [list(completion.prompt) for completion in results["off"][1].completions[turns]]
        alone = Engine(pair.target, reuse="joint", max_batch=1)
        expected = [alone.generate([prompt], ANSWER)[0].tokens for prompt in prompts]
        assert alone.scheduler.counts.reused_tokens > 0
        for mode, (_, result) in results.items():
            got = result.completions[turns]
            assert [list(completion.prompt) for completion in got] == prompts
            assert_lossless(f"reuse {mode}, conversation {talk}", prompts, expected, tokens(got))


def test_reuse_of_the_target_alone_costs_acceptance(pair, results, say_acceptance):
    """The fault switch, conversation by conversation against joint reuse: lower by more than two standard errors."""
    on, fault = results["joint"][1], results["target_only"][1]
    say_acceptance("reuse on, draft context missing", fault.accept_len)
    assert fault.reused_tokens == on.reused_tokens > 0

    def later_turns(result, talk):
        return measure(result.completions[talk * TURNS + 1 : (talk + 1) * TURNS], pair.block).acceptance.accept_len

    lost = [later_turns(on, talk) - later_turns(fault, talk) for talk in range(TALKS)]
    stderr = statistics.stdev(lost) / math.sqrt(TALKS)
    say_acceptance(f"  lost in later turns (± {stderr:.2f})", statistics.fmean(lost))
    assert statistics.fmean(lost) > max(2 * stderr, 0.1), lost


def test_first_turns_are_the_same_in_every_mode(results):
    firsts = [[c.commits for c in result.completions[::TURNS]] for _, result in results.values()]
    assert firsts[0] == firsts[1] == firsts[2]


def test_accept_len_is_the_same_at_every_batch(pair, say_acceptance):
    """To the bit where drafting is the same to the bit, which it is on a CPU in fp32."""
    prompts = pair.prompts[:16]
    found = {}
    for batch in (1, 4, 16):
        engine = pair.engine(max_batch=batch)
        done = engine.generate(prompts, SamplingParams(14, ignore_eos=True))
        found[batch] = measure(done, pair.block), engine.acceptance.summary().histogram, tokens(done)
        say_acceptance(f"batch {batch} (± {found[batch][0].accept_len_stderr:.2f})", found[batch][0].acceptance.accept_len)
    for batch in (4, 16):
        figures, alone = found[batch][0], found[1][0]
        assert abs(figures.acceptance.accept_len - alone.acceptance.accept_len) < alone.accept_len_stderr
        assert found[batch][1:] == found[1][1:]


def test_one_at_a_time_and_in_chunks_reuse_is_as_good(pair, talks, results):
    """The same text and, but for ties of the draft, the same acceptance as four at a time."""
    engine, count = watched(pair, prefill_chunk=11), 2 * TURNS
    result, together = run_turns(engine, talks[:2], ANSWER, batch=1), results["joint"][1].completions[:count]
    assert tokens(result.completions) == tokens(together)
    expected = measure(together, pair.block).acceptance.accept_len
    assert result.accept_len == pytest.approx(expected, rel=0.05) and result.reused_tokens > 0


# --- how pages are shared


def kept_bytes(engine, prefix):
    """[L, tokens, W]: the rows of a kept prefix."""
    slots = RequestPages(PAGE, list(prefix.pages)).slots(0, len(prefix.tokens))
    return bits(engine.drafter.context)[:, slots]


def first_turn(pair, **more):
    """An engine with one kept prefix that ends inside a page, and the history that it holds."""
    engine = watched(pair, **more)
    prompt = pair.prompts[0][:41]
    history = [*prompt, *engine.generate([prompt], SamplingParams(12, ignore_eos=True))[0].tokens]
    (prefix,) = engine.scheduler.prefixes._kept
    assert list(prefix.tokens) == history[:-1] and len(prefix.tokens) % PAGE, "the newest token was never run"
    return engine, prefix, history


@pytest.mark.parametrize("company", [1, 2])
def test_a_kept_prefix_is_shared_and_never_written(pair, assert_lossless, company):
    """One continuation, and two different ones at once: full pages by reference, the partial one copied."""
    engine, prefix, history = first_turn(pair)
    before, pages = kept_bytes(engine, prefix), list(prefix.pages)
    full = len(prefix.tokens) // PAGE
    prompts = [history + pair.prompts[index][:20] for index in range(1, company + 1)]
    order = [engine.add(prompt, ANSWER) for prompt in prompts]
    engine.step()
    context = engine.drafter.context
    for number in order:
        ids = context.requests[number].ids
        assert ids[:full] == pages[:full] and ids[full] != pages[full]
    assert [context.allocator.holders(page) for page in pages] == [company + 1] * full + [1]
    assert engine.scheduler.counts.reused_tokens == company * len(prefix.tokens)
    engine.step()
    assert torch.equal(kept_bytes(engine, prefix), before)
    done = engine.run_to_end()
    expected = [pair.alone(prompt, ANSWER).tokens for prompt in prompts]
    assert_lossless(f"{company} continuations at once", prompts, expected, tokens(done[number] for number in order))
    fresh = pair.engine(max_batch=1).generate(prompts, ANSWER)
    assert [[c.accepted for c in done[number].commits] for number in order] == [
        [c.accepted for c in completion.commits] for completion in fresh
    ]
    engine.forget_prefixes()
    check_all_given_back(engine)


def test_a_prompt_that_leaves_a_kept_one_midway_shares_what_is_common(pair, assert_lossless):
    """Common beginnings of less than a page, of whole pages, and of everything that is kept."""
    engine, prefix, history = first_turn(pair)
    for common in (1, PAGE - 1, PAGE, 2 * PAGE, 37, len(prefix.tokens)):
        other = (history[common] + 1) % pair.target.vocab_size
        prompt = [*history[:common], other, *pair.prompts[5][:9]]
        before = engine.scheduler.counts.reused_tokens
        bytes_before = kept_bytes(engine, prefix)
        got = engine.generate([prompt], SamplingParams(6, ignore_eos=True))[0]
        assert engine.scheduler.counts.reused_tokens - before == common
        if common < len(prefix.tokens):  # else it was continued to the end, and let go for what continues it
            assert torch.equal(kept_bytes(engine, prefix), bytes_before)
        expected = pair.alone(prompt, SamplingParams(6, ignore_eos=True)).tokens
        assert_lossless(f"{common} tokens in common", [prompt], [expected], [got.tokens])
        for kept in [p for p in engine.scheduler.prefixes._kept if p is not prefix]:
            engine.scheduler.prefixes._drop(kept)


def test_the_same_prompt_again_computes_one_token(pair):
    engine = watched(pair)
    first = engine.generate([pair.prompts[0]], ANSWER)[0]
    engine.add(pair.prompts[0], ANSWER)
    engine.step()
    assert engine.scheduler.counts.reused_tokens == len(pair.prompts[0]) - 1, "its last token's logits are needed"
    assert engine.run_to_end()[1].tokens == first.tokens


def test_a_preempted_request_takes_up_a_kept_prefix(pair, assert_lossless):
    engine, prefix, history = first_turn(pair)
    prompt = history + pair.prompts[1][:20]
    request = engine.add(prompt, ANSWER)
    engine.step()
    engine.step()
    engine.preempt(request)
    engine.step()
    assert engine.scheduler.counts.reused_tokens == 2 * len(prefix.tokens)
    got = engine.run_to_end()[request]
    assert_lossless("preempted behind a prefix", [prompt], [pair.alone(prompt, ANSWER).tokens], [got.tokens])


def test_writing_into_a_shared_page_is_noticed(pair, monkeypatch):
    """Planted: the partial page is shared as well, not copied."""

    def share_all(self, request, pages, start, count):
        shared = list(pages[: -(-count // PAGE)])
        self.allocator.share(shared)
        self.requests[request] = RequestPages(PAGE, shared, length=count, start=start, end=count)

    engine, prefix, history = first_turn(pair)
    before = kept_bytes(engine, prefix)
    monkeypatch.setattr(DraftContext, "admit_behind", share_all)
    share_all(engine.drafter.context, "another", prefix.pages, 0, len(prefix.tokens))
    with pytest.raises(AssertionError, match="'another' may write a shared page"):
        check_pages(engine)
    engine.drafter.context.release("another")
    engine.add(history + pair.prompts[1][:20], ANSWER)
    with pytest.raises(AssertionError, match="Segment"):
        engine.step()
    changed = (kept_bytes(engine, prefix) != before).any(-1).any(0)
    assert not changed.any(), "only rows behind the kept ones: what a second continuation would have read"


# --- what is kept, and for how long


def test_a_request_that_slid_keeps_what_it_has(pair, assert_lossless):
    """Its prefix begins where its context begins: only a prompt that goes past that can continue it."""
    engine = watched(pair, pool_tokens=96, on_pressure="slide")
    prompt = pair.prompts[0]
    history = [*prompt, *engine.generate([prompt], SamplingParams(48, ignore_eos=True))[0].tokens]
    (prefix,) = engine.scheduler.prefixes._kept
    assert prefix.start > 0 and prefix.start % PAGE == 0 and prefix.pages[0] < 0
    assert engine.scheduler.prefixes.match(prompt[: prefix.start]) is None
    short = history[: prefix.start + 8]
    assert engine.scheduler.prefixes.match([*short, 5]) == (prefix, len(short))


def test_the_longest_usable_prefix_is_taken():
    """One that lost its beginning does not hide a shorter one that has it."""
    store = PrefixStore(None)
    whole = KeptPrefix((1, 2, 3, 9), [0], 0, "whole")
    slid = KeptPrefix((1, 2, 3, 4, 5, 6, 7, 8), [-1, 1], 4, "slid")
    store.keep(whole)
    store.keep(slid)
    assert store.match([1, 2, 3, 4, 0]) == (whole, 3)
    assert store.match([1, 2, 3, 4, 5, 6, 0]) == (slid, 6)
    assert store.match([2, 2, 3]) is None and store.match([1]) is None


def test_the_least_recently_used_prefix_goes_first(pair):
    """A pool for three kept prompts: the one that was just used stays, the next oldest goes."""
    engine = watched(pair, pool_tokens=4 * 48, max_batch=1)
    few = SamplingParams(4, ignore_eos=True)
    prompts = [prompt[:32] for prompt in pair.prompts[:5]]

    def reused(prompt):
        before = engine.scheduler.counts.reused_tokens
        engine.generate([prompt], few)
        return engine.scheduler.counts.reused_tokens - before

    assert [reused(prompt) for prompt in prompts[:4]] == [0, 0, 0, 0]
    assert len(engine.scheduler.prefixes) == 4 and engine.drafter.context.allocator.num_free == 0
    assert reused(prompts[0]) == 31
    assert reused(prompts[4]) == 0
    assert reused(prompts[0]) == 31, "used a moment ago, so it is still kept"
    assert reused(prompts[1]) == 0, "the least recently used made room"
    engine.forget_prefixes()
    check_all_given_back(engine)


def test_a_prefix_is_not_dropped_to_make_room_for_its_own_continuation(pair, assert_lossless):
    """Its full pages are shared, so they need no room. The pool holds the continuation once."""
    engine = watched(pair, pool_tokens=128, max_batch=1)
    prompt = pair.prompts[0]
    history = [*prompt, *engine.generate([prompt], ANSWER)[0].tokens, *pair.prompts[1][:10]]
    got = engine.generate([history], SamplingParams(8, ignore_eos=True))[0]
    assert engine.scheduler.counts.reused_tokens == 64 + ANSWER.max_new_tokens - 1
    expected = pair.alone(history, SamplingParams(8, ignore_eos=True)).tokens
    assert_lossless("in a tight pool", [history], [expected], [got.tokens])


def test_kept_prefixes_give_way_before_any_request_does(pair):
    engine = watched(pair, pool_tokens=160)
    engine.generate([prompt[:48] for prompt in pair.prompts[:2]], SamplingParams(2, ignore_eos=True))
    assert len(engine.scheduler.prefixes) == 2
    done = engine.generate([pair.prompts[3][:32]], SamplingParams(100, ignore_eos=True))[0]
    counts = engine.scheduler.counts
    assert counts.preempted == counts.slid == counts.left_out == 0
    assert done.tokens == pair.alone(pair.prompts[3][:32], SamplingParams(100, ignore_eos=True)).tokens


def test_prefixes_without_pages_stay_when_pages_are_short(pair):
    """What the target alone keeps frees no page of the draft."""
    engine = watched(pair, "target_only", pool_tokens=80, max_batch=2)  # five pages; each takes three
    few = SamplingParams(4, ignore_eos=True)
    engine.generate([prompt[:40] for prompt in pair.prompts[:3]], few)
    assert engine.most_running == 1 and len(engine.scheduler.prefixes) == 3
    engine.generate([pair.prompts[0][:41]], few)
    assert engine.scheduler.counts.reused_tokens == 40


@pytest.mark.parametrize("mode", MODES)
def test_forgetting_gives_back_everything(pair, mode):
    engine = watched(pair, reuse=mode)
    engine.generate(pair.prompts[:3], SamplingParams(4, ignore_eos=True))
    assert len(engine.scheduler.prefixes) == (0 if mode == "off" else 3)
    engine.forget_prefixes()
    check_all_given_back(engine)
    engine.generate(pair.prompts[:1], SamplingParams(4, ignore_eos=True))
    assert engine.scheduler.counts.reused_tokens == 0


def test_a_prefix_forgotten_while_it_is_continued_frees_only_what_nobody_reads(pair, assert_lossless):
    engine, prefix, history = first_turn(pair)
    prompt = history + pair.prompts[1][:20]
    request = engine.add(prompt, ANSWER)
    engine.step()
    full = len(prefix.tokens) // PAGE
    engine.forget_prefixes()
    holders = [engine.drafter.context.allocator.holders(page) for page in prefix.pages]
    assert holders == [1] * full + [0]
    got = engine.run_to_end()[request]
    assert_lossless("its prefix was forgotten", [prompt], [pair.alone(prompt, ANSWER).tokens], [got.tokens])


def test_no_more_prefixes_are_kept_than_allowed(pair):
    engine = watched(pair)
    engine.scheduler.prefixes.max_prefixes = 2
    engine.generate([prompt[:20] for prompt in pair.prompts[:5]], SamplingParams(2, ignore_eos=True))
    assert len(engine.scheduler.prefixes) == 2
    check_pages(engine)
