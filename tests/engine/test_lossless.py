"""Greedy output with speculation is the target's own, token for token, whatever K, the batch and the drafter.

An accept_len is asserted beside every comparison: near 1 for a damaged drafter, well above for the trained one. Without
that, a drafter that never ran would pass.
"""

import pytest
import torch
from engine_pair import DAMAGES, rebuilt

import trtllm_dspark.engine.engine as engine_module
from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.evaluation.lossless import Divergence, compare_greedy
from trtllm_dspark.verify import Verdict, verify_greedy

NEW_TOKENS = 24
NEW_TOKENS_ALONE = 16
NEW_TOKENS_DAMAGED = 12  # one pass a token: the same number of passes as with the trained drafter
NEW_TOKENS_SLOW = 128
ALL_K = range(1, 8)


def decode(engine, prompts, new_tokens):
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    return [completion.tokens for completion in completions]


@pytest.fixture(scope="module")
def plain(pair):
    """The target by itself, 50 prompts."""
    return decode(Engine(pair.target), pair.prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def plain_long(pair):
    return decode(Engine(pair.target), pair.prompts, NEW_TOKENS_SLOW)


def check_trained(pair, assert_lossless, say_acceptance, num_drafts, batch, expected):
    label = f"K={num_drafts} batch {batch}"
    engine = pair.engine(num_drafts, max_batch=batch)
    assert_lossless(label, pair.prompts, expected, decode(engine, pair.prompts, len(expected[0])))
    accept_len = engine.acceptance.summary().accept_len
    say_acceptance(label, accept_len)
    assert accept_len > 1.5, f"no speculation to speak of: accept_len {accept_len}"


def check_damaged(pair, assert_lossless, say_acceptance, damage, num_drafts, batch, expected):
    label = f"{damage} drafter, K={num_drafts} batch {batch}"
    engine = pair.engine(num_drafts, max_batch=batch, drafter=pair.drafter(rebuilt(pair.model, DAMAGES[damage])))
    assert_lossless(label, pair.prompts, expected, decode(engine, pair.prompts, len(expected[0])))
    summary = engine.acceptance.summary()
    say_acceptance(label, summary.accept_len)
    assert summary.submitted > len(pair.prompts), "drafts must have been verified"
    assert summary.accept_len < 1.1, f"the drafter is not bad enough for this test: accept_len {summary.accept_len}"


def test_the_prompts_are_fifty_distinct_ones(pair):
    assert len({tuple(prompt) for prompt in pair.prompts}) == 50
    assert all(len(prompt) >= 64 for prompt in pair.prompts)


@pytest.mark.parametrize("num_drafts", ALL_K)
def test_output_is_the_targets_for_every_k(pair, plain, assert_lossless, say_acceptance, num_drafts):
    check_trained(pair, assert_lossless, say_acceptance, num_drafts, 8, plain)


@pytest.mark.parametrize("num_drafts", [1, 4, 7])
def test_output_is_the_targets_one_request_at_a_time(pair, plain, assert_lossless, say_acceptance, num_drafts):
    check_trained(pair, assert_lossless, say_acceptance, num_drafts, 1, [tokens[:NEW_TOKENS_ALONE] for tokens in plain])


@pytest.mark.parametrize("damage", DAMAGES)
def test_output_is_the_targets_with_a_damaged_drafter(pair, plain, assert_lossless, say_acceptance, damage):
    expected = [tokens[:NEW_TOKENS_DAMAGED] for tokens in plain]
    check_damaged(pair, assert_lossless, say_acceptance, damage, 7, 8, expected)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("num_drafts", ALL_K)
def test_long_output_is_the_targets(pair, plain_long, assert_lossless, say_acceptance, num_drafts, batch):
    check_trained(pair, assert_lossless, say_acceptance, num_drafts, batch, plain_long)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("num_drafts", ALL_K)
@pytest.mark.parametrize("damage", DAMAGES)
def test_long_output_is_the_targets_with_a_damaged_drafter(
    pair, plain_long, assert_lossless, say_acceptance, damage, num_drafts, batch
):
    check_damaged(pair, assert_lossless, say_acceptance, damage, num_drafts, batch, plain_long)


# --- the comparison itself can fail


def one_too_many(target_logits, drafts):
    right = verify_greedy(target_logits, drafts)
    return Verdict((right.accepted + 1).clamp(max=drafts.shape[1]), right.tokens)


def first_draft_unseen(target_logits, drafts):
    """Commits the first draft itself without looking at the target."""
    right = verify_greedy(target_logits, drafts)
    return Verdict(right.accepted, torch.cat((drafts[:, :1], right.tokens[:, 1:]), 1)) if drafts.numel() else right


@pytest.mark.parametrize("wrong_verify", [one_too_many, first_draft_unseen])
def test_a_wrong_verification_is_a_fault(pair, plain, monkeypatch, wrong_verify):
    monkeypatch.setattr(engine_module, "verify_greedy", wrong_verify)
    prompts = pair.prompts[:8]
    got = decode(pair.engine(), prompts, NEW_TOKENS)
    found = [compare_greedy(pair.target, *texts) for texts in zip(prompts, plain, got, strict=False)]
    faults = [divergence for divergence in found if divergence is not None and not divergence.excused]
    assert len(faults) > 1, [str(divergence) for divergence in found]


def test_equal_tokens_do_not_run_the_target():
    assert compare_greedy(None, [1, 2], [3, 4], [3, 4]) is None
    assert compare_greedy(None, [1, 2], [], []) is None


@pytest.mark.parametrize(("expected", "got", "tokens"), [([3, 4], [3], (4, None)), ([3], [3, 4], (None, 4))])
def test_one_side_ending_early_is_a_fault(expected, got, tokens):
    found = compare_greedy(None, [1, 2], expected, got)
    assert (found.offset, found.expected, found.got, found.excused) == (1, *tokens, False)


def test_a_token_that_is_not_the_targets_is_a_fault(pair, plain):
    prompt, right = pair.prompts[0], plain[0]
    wrong = [*right[:5], (right[5] + 1) % pair.target.vocab_size, *right[6:]]
    found = compare_greedy(pair.target, prompt, right, wrong)
    assert (found.offset, found.expected, found.got) == (5, right[5], wrong[5])
    assert found.gap > 100 * found.noise and not found.excused
    assert str(found).startswith(f"new token 5: {right[5]} without speculation, {wrong[5]} with it; top-two gap ")
    assert str(found).endswith(": a fault") and "\n" not in str(found)


def test_the_targets_second_choice_is_a_fault_unless_it_is_a_tie(pair, plain):
    """The same two tokens, first as they are, then with the head's rows made one: an exact tie."""
    target, prompt, right = pair.target, pair.prompts[0], plain[0]
    logits = target.forward(torch.tensor([*prompt, *right[:5]]), target.new_cache(), 1).logits[-1]
    first, second = logits.topk(2).indices.tolist()
    assert first == right[5]
    swapped = [*right[:5], second]
    assert not compare_greedy(target, prompt, right[:6], swapped).excused

    class Tied:
        """A mock: the pair's target with both tokens' logits within its own noise of each other."""

        device, new_cache = target.device, staticmethod(target.new_cache)

        def forward(self, ids, cache, rows):
            output = target.forward(ids, cache, rows)
            output.logits[-1, second] = output.logits[-1, first] - 1e-6 * (len(ids) > 8) + 1e-6 * (len(ids) <= 8)
            return output

    tie = compare_greedy(Tied(), prompt, right[:6], swapped)
    assert tie.excused and 0 <= tie.gap <= 2 * tie.noise
    assert str(tie).endswith("a tie within the target's noise")
    third = int(logits.topk(3).indices[2])
    assert not compare_greedy(Tied(), prompt, right[:6], [*right[:5], third]).excused


def test_a_target_of_nan_excuses_nothing():
    class Broken:
        """A mock: every logit is NaN."""

        device, new_cache = torch.device("cpu"), staticmethod(lambda: None)

        def forward(self, ids, cache, rows):
            return type("Output", (), {"logits": torch.full((1, 8), torch.nan)})

    found = compare_greedy(Broken(), [1, 2], [3], [4])
    assert isinstance(found, Divergence) and not found.excused
