"""The embedded engine: batching, ends, streams, the trace, the pool, and what it refuses."""

import pytest
import torch
from engine_targets import random_prompts, random_target, write_random_draft

from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.loading import DraftOptions, load_drafter
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.engine.target import TargetOutput
from trtllm_dspark.errors import DSparkError, UnsupportedError
from trtllm_dspark.evaluation.lossless import compare_greedy


def new(count, **more):
    return SamplingParams(max_new_tokens=count, **{"ignore_eos": True} | more)


def run_all(engine, commits=()):
    """Step until nothing runs or waits; every commit by request."""
    found = {}
    for commit in commits:
        found.setdefault(commit.request, []).append(commit)
    while engine.in_flight:
        for commit in engine.step():
            found.setdefault(commit.request, []).append(commit)
    return found


def tokens_of(commits):
    return tuple(token for commit in commits for token in commit.tokens)


def free_pages(drafter):
    return drafter.context.allocator.num_free


def said(caught, *words):
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


@pytest.fixture(scope="module")
def plain(pair):
    """Eight prompts decoded by the target alone, 32 tokens each."""
    return Engine(pair.target).generate(pair.prompts[:8], new(32))


@pytest.fixture(scope="module")
def drafted(pair):
    """The same with speculation, one at a time: the traces that tests pick places from."""
    return Engine(pair.target, pair.drafter(), num_drafts=pair.block, max_batch=1).generate(pair.prompts[:8], new(32))


# --- the target by itself


def test_without_a_drafter_it_is_generate_of_transformers(pair, plain):
    for prompt, completion in zip(pair.prompts[:3], plain, strict=False):
        ids = torch.tensor([prompt])
        theirs = pair.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, eos_token_id=None
        )
        assert compare_greedy(pair.target, prompt, theirs[0, len(prompt) :].tolist(), list(completion.tokens)) is None
        assert completion.finish == "length"
        assert completion.text == pair.target.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        assert [commit.submitted for commit in completion.commits] == [0] * 32


# --- several requests at once


def test_more_requests_than_the_batch_equal_each_alone(pair, plain):
    params = [new(count) for count in (32, 5, 17, 1, 24, 9)]
    engine = pair.engine(max_batch=2)
    order = [engine.add(prompt, p) for prompt, p in zip(pair.prompts[:6], params, strict=True)]
    most, found = 0, {}
    while engine.in_flight:
        for commit in engine.step():
            found.setdefault(commit.request, []).append(commit)
        most = max(most, len(engine.scheduler.running))
    assert most == 2
    for request, p, alone in zip(order, params, plain, strict=False):
        assert tokens_of(found[request]) == alone.tokens[: p.max_new_tokens]
        assert [c.finish for c in found[request]] == [None] * (len(found[request]) - 1) + ["length"]


def test_requests_that_come_while_others_run_equal_each_alone(pair, plain):
    engine = pair.engine(max_batch=3)
    order, commits = [], []
    for prompt in pair.prompts[:5]:
        order.append(engine.add(prompt, new(32)))
        commits += engine.step()
        commits += engine.step()
    found = run_all(engine, commits)
    assert {len(found[request]) for request in order} != {1}
    for request, alone in zip(order, plain, strict=False):
        assert tokens_of(found[request]) == alone.tokens


def test_the_same_prompt_twice_in_one_batch(pair, plain):
    first, second = pair.engine().generate([pair.prompts[0]] * 2, new(32))
    assert first.tokens == second.tokens == plain[0].tokens
    assert [c.accepted for c in first.commits] == [c.accepted for c in second.commits]


def test_completions_come_in_the_prompts_order(pair, plain):
    lengths = (24, 1, 7)
    engine = pair.engine(max_batch=3)
    order = [engine.add(prompt, new(n)) for prompt, n in zip(pair.prompts[:3], lengths, strict=True)]
    engine.step()
    assert order == [0, 1, 2]
    completions = engine.generate(pair.prompts[3:6], new(8))
    assert [c.prompt for c in completions] == [tuple(prompt) for prompt in pair.prompts[3:6]]
    assert [c.tokens for c in completions] == [c.tokens[:8] for c in plain[3:6]]


# --- how a request ends


def place_inside_drafts(drafted):
    """(prompt index, commit, token) of an accepted draft that is neither first nor last of its commit, and new to its text."""
    for index, completion in enumerate(drafted):
        for commit in completion.commits:
            for i in range(1, commit.accepted):
                at = commit.offset + i
                if commit.tokens[i] not in completion.tokens[:at]:
                    return index, commit, i
    raise AssertionError("no prompt has a new token inside accepted drafts: take more prompts")


def test_stop_token_inside_accepted_drafts(pair, drafted):
    index, commit, i = place_inside_drafts(drafted)
    stop = commit.tokens[i]
    params = new(32, stop_token_ids=(stop,))
    got = pair.engine().generate([pair.prompts[index]], params)[0]
    alone = pair.alone(pair.prompts[index], params)
    assert (got.tokens, got.text, got.finish) == (alone.tokens, alone.text, "stop_token")
    assert got.tokens == drafted[index].tokens[: commit.offset + i + 1]
    assert got.commits[-1].tokens == commit.tokens[: i + 1]
    assert got.commits[-1].accepted == i, "the stop takes the place of the bonus token"


@pytest.mark.parametrize("ignored", [False, True])
def test_the_targets_own_end_of_sequence(pair, drafted, monkeypatch, ignored):
    index, commit, i = place_inside_drafts(drafted)
    monkeypatch.setattr(pair.target.model.generation_config, "eos_token_id", [commit.tokens[i], 5])
    got = pair.engine().generate([pair.prompts[index]], SamplingParams(max_new_tokens=32, ignore_eos=ignored))[0]
    end = 32 if ignored else commit.offset + i + 1
    assert got.finish == ("length" if ignored else "stop_token")
    assert got.tokens == drafted[index].tokens[:end]


def test_stop_string_inside_accepted_drafts(pair, drafted):
    index, commit, i = place_inside_drafts(drafted)
    decode = pair.target.tokenizer.decode
    before, whole = decode(drafted[index].tokens[: commit.offset + i]), decode(drafted[index].tokens[: commit.offset + i + 1])
    stop = whole[len(before) :]
    assert stop, "the token must add text"
    got = pair.engine().generate([pair.prompts[index]], new(32, stop=("never in any text", stop)))[0]
    cut = drafted[index].text.index(stop)
    assert got.finish == "stop_string"
    assert got.text == drafted[index].text[:cut]
    assert len(got.tokens) <= commit.offset + i + 1
    assert got.tokens == drafted[index].tokens[: len(got.tokens)]
    assert "".join(c.text for c in got.commits) == got.text, "nothing of the stop string may be streamed"
    if cut == len(before):
        assert got.commits[-1].accepted == i


def test_stop_string_over_several_tokens(pair, drafted):
    text = drafted[0].text
    stop = text[10:22]
    got = pair.engine().generate([pair.prompts[0]], new(32, stop=(stop,)))[0]
    assert (got.finish, got.text) == ("stop_string", text[: text.index(stop)])
    assert "".join(c.text for c in got.commits) == got.text


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_new_tokens(pair, plain, count):
    assert count < pair.block
    engine = pair.engine()
    got = engine.generate(pair.prompts[:8], new(count))
    for completion, alone in zip(got, plain, strict=True):
        assert (completion.tokens, completion.finish) == (alone.tokens[:count], "length")
    assert (engine.acceptance.summary().verifications == 0) == (count == 1)


# --- the trace


def drafts_from_the_start(completions, num_drafts):
    """Whether the first verification of every request submitted all the drafts it could."""
    firsts = [(c.commits[1], len(c.tokens)) for c in completions if len(c.commits) > 1]
    return bool(firsts) and all(commit.submitted == num_drafts for commit, _ in firsts)


def test_the_first_verification_has_drafts(pair):
    assert drafts_from_the_start(pair.engine(max_batch=2).generate(pair.prompts[:4], new(16)), pair.block)


def test_drafts_that_come_one_step_late_are_noticed(pair):
    class Late(Engine):
        """Drafts only for requests that have been verified once."""

        def _propose(self, drafter, requests):
            seasoned = [request for request in requests if len(request.commits) > 1]
            if seasoned:
                super()._propose(drafter, seasoned)

    late = Late(pair.target, pair.drafter(), num_drafts=pair.block)
    completions = late.generate(pair.prompts[:4], new(16))
    assert not drafts_from_the_start(completions, pair.block)
    assert any(commit.submitted for c in completions for commit in c.commits), "it did draft later"


def test_drafts_that_could_not_be_committed_are_not_submitted(drafted, pair):
    for completion in drafted:
        for commit in completion.commits[1:]:
            assert commit.submitted == min(pair.block, 32 - commit.offset - 1)
    assert any(commit.submitted < pair.block for completion in drafted for commit in completion.commits[1:])


def test_commits_concatenate_to_the_completion(pair, drafted):
    for completion in drafted:
        assert tokens_of(completion.commits) == completion.tokens
        assert "".join(commit.text for commit in completion.commits) == completion.text
        assert [commit.prefill for commit in completion.commits] == [True] + [False] * (len(completion.commits) - 1)
        at = 0
        for commit in completion.commits:
            assert commit.offset == at and len(commit.tokens) == 1 + commit.accepted
            at += len(commit.tokens)
        verifications = [c for c in completion.commits if not c.prefill]
        assert 1 + sum(1 + c.accepted for c in verifications) == len(completion.tokens)


def test_a_stream_is_the_completion(pair, drafted):
    stream, commits = pair.engine().stream(pair.prompts[0], new(32)), []
    while True:
        try:
            commits.append(next(stream))
        except StopIteration as end:
            completion = end.value
            break
    assert completion == drafted[0]
    assert tuple(commits) == completion.commits


def test_accepted_tokens_are_the_drafts(pair, monkeypatch):
    engine, proposed, seen = pair.engine(max_batch=3), {}, 0
    propose = engine.drafter.propose

    def recording(requests, anchors, num_drafts, **more):
        proposal = propose(requests, anchors, num_drafts, **more)
        proposed.update(zip(requests, proposal.tokens.tolist(), strict=True))
        return proposal

    monkeypatch.setattr(engine.drafter, "propose", recording)
    for prompt in pair.prompts[:3]:
        engine.add(prompt, new(24))
    while engine.in_flight:
        before = dict(proposed)
        for commit in engine.step():
            if not commit.prefill:
                drafts = before[commit.request]
                assert list(commit.tokens[: commit.accepted]) == drafts[: commit.accepted]
                if commit.accepted < commit.submitted:
                    assert commit.tokens[-1] != drafts[commit.accepted]
                seen += commit.accepted
    assert seen > 10


def test_the_counter_is_the_trace(pair):
    engine = pair.engine(max_batch=3)
    completions = engine.generate(pair.prompts[:7], new(20))
    trace = [commit for c in completions for commit in c.commits if not commit.prefill]
    summary = engine.acceptance.summary()
    assert summary.verifications == len(trace)
    assert summary.submitted == sum(commit.submitted for commit in trace)
    assert summary.accepted == sum(commit.accepted for commit in trace)
    assert summary.histogram == tuple(sum(c.accepted == k for c in trace) for k in range(pair.block + 1))
    assert summary.accept_len == 1 + summary.accepted / len(trace) > 1.5


# --- the pool


def test_pages_come_back(pair):
    drafter = pair.drafter()
    total = free_pages(drafter)
    engine = pair.engine(drafter=drafter, max_batch=3)
    engine.add(pair.prompts[0], new(16))
    engine.step()
    assert free_pages(drafter) < total
    run_all(engine)
    assert free_pages(drafter) == total and not drafter.context.requests
    engine.generate(pair.prompts[:4], new(1))
    engine.generate(pair.prompts[:4], new(32, stop=(" ", "\n")))
    assert free_pages(drafter) == total and not drafter.context.requests


def test_a_pool_too_small_for_all_makes_requests_wait(pair, plain):
    drafter = pair.drafter(pool_tokens=224)  # 64 + 32 tokens each: two at once
    engine = pair.engine(drafter=drafter)
    order = [engine.add(prompt, new(32)) for prompt in pair.prompts[:5]]
    most, found = 0, {}
    while engine.in_flight:
        for commit in engine.step():
            found.setdefault(commit.request, []).append(commit)
        most = max(most, len(drafter.context.requests))
    assert most == 2
    for request, alone in zip(order, plain, strict=False):
        assert tokens_of(found[request]) == alone.tokens


# --- what is refused


def test_bad_requests_are_refused_and_leave_the_engine_as_it_was(pair, plain):
    engine = pair.engine(drafter=pair.drafter(pool_tokens=512), max_batch=2)
    good = engine.add(pair.prompts[0], new(32))
    commits = engine.step()
    vocab, positions = pair.target.vocab_size, pair.target.max_positions
    for prompt, params, words in [
        ([], new(4), ("Engine:", "one or more token ids", "none came", "tokenizer")),
        ([5, vocab], new(4), ("Engine:", f"0..{vocab - 1}", f"token {vocab} came", "tokenizer")),
        ([-1], new(4), ("Engine:", "token -1 came")),
        (pair.prompts[1] * 9, new(1), ("Engine:", "the draft pool of 512 tokens", "it has 576", "more tokens")),
        (pair.prompts[1], new(positions), ("Engine:", f"positions of {positions} tokens", "Shorten")),
    ]:
        with pytest.raises(DSparkError) as caught:
            engine.add(prompt, params)
        said(caught, *words)
    with pytest.raises(DSparkError) as caught:
        SamplingParams(max_new_tokens=0)
    said(caught, "SamplingParams:", "at least 1", "it is 0", "Ask for")
    fits = engine.add(pair.prompts[1] * 7, new(64))  # 448 + 64: the whole pool, so it waits for the first
    last = engine.add(pair.prompts[2], new(32))
    found = run_all(engine, commits)
    assert tokens_of(found[good]) == plain[0].tokens and tokens_of(found[last]) == plain[2].tokens
    assert len(tokens_of(found[fits])) == 64


def test_bad_engines_are_refused(pair):
    for num_drafts in (pair.block + 1, 0, -1):
        with pytest.raises(DSparkError) as caught:
            Engine(pair.target, pair.drafter(), num_drafts=num_drafts)
        said(caught, f"{num_drafts}", "num_drafts")
    with pytest.raises(DSparkError) as caught:
        Engine(pair.target, max_batch=0)
    said(caught, "Engine: max_batch must be at least 1, it is 0.")
    with pytest.raises(DSparkError) as caught:
        load_drafter_over(pair)
    said(caught, f"at most {pair.block}", f"K={pair.block + 1}", "Set max_draft_len")


def load_drafter_over(pair):
    from engine_pair import FOLDER

    return load_drafter(FOLDER / "draft", pair.target, DraftOptions(num_drafts=pair.block + 1))


def test_stop_strings_without_a_tokenizer(pair):
    engine = Engine(random_target("llama"))
    with pytest.raises(DSparkError) as caught:
        engine.add([1, 2], new(4, stop=("a",)))
    said(caught, "Engine: stop strings need a tokenizer", "stop_token_ids")
    assert engine.generate([[1, 2]], new(4))[0].text == ""


def test_a_target_that_cannot_take_rows_back_is_refused_with_a_drafter(tmp_path):
    """A real one: Qwen3-Next keeps a recurrent state, from which no row can be removed."""
    target = random_target("qwen3-next")
    loaded = load_drafter(write_random_draft(tmp_path), target)
    with pytest.raises(UnsupportedError) as caught:
        Engine(target, loaded.drafter, num_drafts=2)
    said(caught, "take rows back", "Qwen3NextForCausalLM", "without a drafter")
    assert len(Engine(target).generate([[1, 2, 3]], new(4))[0].tokens) == 4


# --- text


class Scripted:
    """A mock, for control flow only: a target that writes a given text, whatever came before."""

    max_positions, device = None, torch.device("cpu")

    def __init__(self, tokenizer, script, prompt, stop_token_ids=()):
        self.tokenizer, self.vocab_size, self.stop_token_ids = tokenizer, len(tokenizer), stop_token_ids
        self.text = [*prompt, *script]

    def new_cache(self):
        return []

    def forward(self, ids, cache, logit_rows, *, with_taps=False):
        cache += ids.tolist()
        logits = torch.zeros(logit_rows, self.vocab_size)
        for row in range(logit_rows):
            logits[row, self.text[len(cache) - logit_rows + row + 1]] = 1.0
        return TargetOutput(logits, None)

    def take_back(self, cache, rows):
        assert rows == 0, "without drafts nothing is rejected"


TEXT = "naïve café, 東京 ὕβρις 🚀🧪 done"


def test_characters_of_several_tokens_are_streamed_whole(pair):
    tokenizer = pair.target.tokenizer
    script = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces = [tokenizer.decode([token]) for token in script]
    assert any("�" in piece for piece in pieces), "the text must split characters over tokens, or this tests nothing"
    target = Scripted(tokenizer, [*script, 0], [5, 6])
    stream = list(Engine(target).stream([5, 6], new(len(script))))
    assert "".join(commit.text for commit in stream) == TEXT
    assert all("�" not in commit.text for commit in stream)
    assert any(commit.text == "" for commit in stream), "a cut character gives no text yet"


def test_a_character_that_never_completes_is_shown_at_the_end(pair):
    tokenizer = pair.target.tokenizer
    script = tokenizer.encode("ok 🚀", add_special_tokens=False)[:-1]
    got = Engine(Scripted(tokenizer, [*script, 0], [5])).generate([[5]], new(len(script)))[0]
    assert got.text.startswith("ok ") and got.text.endswith("�")
    assert "".join(commit.text for commit in got.commits) == got.text


def test_a_stop_string_of_split_characters(pair):
    tokenizer = pair.target.tokenizer
    script = tokenizer.encode(TEXT, add_special_tokens=False)
    got = Engine(Scripted(tokenizer, [*script, 0], [5])).generate([[5]], new(len(script), stop=("京",)))[0]
    assert (got.finish, got.text) == ("stop_string", TEXT[: TEXT.index("京")])
    assert "".join(commit.text for commit in got.commits) == got.text


# --- other architectures


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_taps_are_the_outputs_of_the_decoder_layers(name):
    """Against hooks of our own; the last layer's tap lies before the final norm, where `hidden_states` has it behind."""
    target = random_target(name)
    target.set_taps(range(4))
    by_hook = {}
    handles = [
        layer.register_forward_hook(
            lambda module, args, output, index=index: by_hook.__setitem__(
                index, output[0] if isinstance(output, tuple) else output
            )
        )
        for index, layer in enumerate(target.model.model.layers)
    ]
    ids = torch.tensor(random_prompts(1, 12)[0])
    output = target.forward(ids, target.new_cache(), 3, with_taps=True)
    for handle in handles:
        handle.remove()
    assert output.logits.shape == (3, 128) and output.taps.shape == (12, 4 * 64)
    for index, tap in enumerate(output.taps.chunk(4, -1)):
        assert torch.equal(tap, by_hook[index].view(12, 64)), f"layer {index}"

    states = target.model(ids[None], output_hidden_states=True).hidden_states
    for index, tap in enumerate(output.taps.chunk(4, -1)[:-1]):
        torch.testing.assert_close(tap, states[index + 1][0])
    last = output.taps.chunk(4, -1)[-1]
    assert not torch.allclose(last, states[-1][0], atol=1e-2)
    torch.testing.assert_close(target.model.model.norm(last), states[-1][0])


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_taps_leave_the_target_as_it_was(name):
    """Logits with taps and without are the same bits, and our hook does not stay behind."""
    target = random_target(name)
    target.set_taps([0, 3])
    ids = torch.tensor(random_prompts(1, 12)[0])
    with_taps = target.forward(ids, target.new_cache(), 12, with_taps=True)
    without = target.forward(ids, target.new_cache(), 12)
    assert without.taps is None and torch.equal(with_taps.logits, without.logits)
    assert not target.model.model.norm._forward_pre_hooks


def test_taps_outside_the_target_are_refused():
    target = random_target("llama")
    with pytest.raises(DSparkError) as caught:
        target.set_taps([0, 4, -1])
    said(caught, "target: taps must lie in 0..3", "[4, -1]", "another target")
    assert target.target_layer_ids == ()


def test_a_last_layer_tap_on_an_unknown_final_norm_is_refused():
    target = random_target("llama")
    base = target.model.base_model
    base.some_norm = base.norm
    del base.norm
    target.set_taps([0, 2])
    with pytest.raises(UnsupportedError) as caught:
        target.set_taps([0, 3])
    said(caught, "final norm", "LlamaModel", "earlier layer")


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen3-next"])
def test_other_targets_by_themselves_are_generate_of_transformers(name):
    target, prompts = random_target(name), random_prompts(2, 12)
    for prompt, completion in zip(prompts, Engine(target).generate(prompts, new(16)), strict=True):
        ids = torch.tensor([prompt])
        theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert compare_greedy(target, prompt, theirs[0, len(prompt) :].tolist(), list(completion.tokens)) is None


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_other_targets_keep_their_output_with_random_drafts(tmp_path, name):
    """With the last layer tapped too."""
    target, prompts = random_target(name), random_prompts(4, 12)
    plain = Engine(target).generate(prompts, new(24))
    folder = write_random_draft(tmp_path, target_layer_ids=[1, 3])
    engine = Engine(target, load_drafter(folder, target, DraftOptions(pool_tokens=512)).drafter, num_drafts=4)
    check_equal(target, plain, engine.generate(prompts, new(24)))
    summary = engine.acceptance.summary()
    assert summary.submitted > summary.accepted and len({c.tokens for c in plain}) == 4


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_other_targets_take_back_any_number_of_rows(tmp_path, monkeypatch, name):
    """Drafts are a mock, for control flow only: the right tokens with one wrong among them, at a place that moves.

    Mistral has a window of 8: rejected rows are removed from a cache that also drops old ones.
    """
    target, prompts = random_target(name), random_prompts(4, 12)
    plain = Engine(target).generate(prompts, new(24))
    engine = Engine(target, load_drafter(write_random_draft(tmp_path), target).drafter, num_drafts=4)
    propose = engine.drafter.propose

    def nearly_right(requests, anchors, num_drafts):
        proposal = propose(requests, anchors, num_drafts)
        for row, request in enumerate(requests):
            at = engine.drafter.context.length(request) - 12 + 1  # the anchor is new token at - 1
            right = torch.tensor([*plain[request].tokens[at : at + 4], 0, 0, 0, 0][:4])
            wrong = (at + request) % 5
            right[wrong : wrong + 1] += 1  # at 4, none is wrong
            proposal.tokens[row] = right % 128
        return proposal

    monkeypatch.setattr(engine.drafter, "propose", nearly_right)
    check_equal(target, plain, engine.generate(prompts, new(24)))
    assert min(engine.acceptance.summary().histogram) > 0, "every number of accepted drafts must occur"


def check_equal(target, plain, drafted):
    for alone, got in zip(plain, drafted, strict=True):
        divergence = compare_greedy(target, alone.prompt, alone.tokens, got.tokens)
        assert divergence is None or divergence.excused, str(divergence)
