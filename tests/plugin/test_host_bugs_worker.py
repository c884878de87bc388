"""Public bugs in what a host's worker does in a step, one test each, in the stand-in host.

A test's name begins with the bug's id, as in `tests/regressions/README.md`.
"""

import pytest
import torch
from engine_pair import Pair
from plugin.host.executor import FLAVOURS, StandIn
from plugin.hosted import DRAFT, SHORT, bits, changed_pages, hosted, slot_state, trace, with_stock_worker

from trtllm_dspark.engine.requests import Request, SamplingParams
from trtllm_dspark.errors import UnsupportedError
from trtllm_dspark.plugin import register


def test_c06_three_widths_are_three_numbers(host, pair) -> None:
    """Fails if drafts (3), rows of a block (7) and rows of a verification (4) are taken for one another."""
    host("1.3.0rc28")
    stand_in = hosted(pair, num_drafts=3)
    forward, seen = stand_in.model.draft_model.dflash_forward, []
    stand_in.model.draft_model.dflash_forward = lambda **step: seen.append(step["noise_embedding"].shape[:2]) or forward(**step)
    stand_in.add(pair.prompts[0], SHORT)
    stand_in.step()
    out = stand_in.step()
    assert seen == [(1, 7), (1, 7)]
    assert out["next_draft_tokens"].shape == (1, 3) and out["next_new_tokens"].shape == (1, 4) == out["new_tokens"].shape


def test_c14_blocks_may_have_more_rows_than_a_step_of_the_target(host, pair) -> None:
    """Fails if a buffer for 4 blocks of 7 rows is sized by max_num_tokens, which here is the 8 rows that the target runs."""
    host("1.3.0rc28")
    stand_in = hosted(pair, num_drafts=1, chunk=2, max_batch=4)
    spec = stand_in.spec_metadata
    spec.max_num_tokens, spec.captured_hidden_states = 8, spec.captured_hidden_states[:8].clone()
    forward, rows = stand_in.model.draft_model.dflash_forward, []
    stand_in.model.draft_model.dflash_forward = lambda **step: (
        rows.append(step["noise_embedding"].shape[:2].numel()) or forward(**step)
    )
    prompts = [prompt[:16] for prompt in pair.prompts[:4]]
    done = stand_in.generate(prompts, SHORT)
    assert max(rows) == 28 and [one.tokens for one in done] == [pair.alone(prompt, SHORT).tokens for prompt in prompts]


def test_n08_a_step_of_dummies_leaves_every_page_alone(host, pair) -> None:
    """Fails if a warm-up step with ids that no manager knows writes through the rows of the step before."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    stand_in.add(pair.prompts[0], SHORT)
    stand_in.step()
    stand_in.step()
    before, live = bits(stand_in.manager.storage), stand_in.requests[0]
    state = stand_in.model.spec_worker._context.state.clone()
    from tensorrt_llm._torch.pyexecutor.llm_request import ATTENTION_DP_DUMMY_REQUEST_ID as dummy

    build, counted = stand_in.attention_metadata, stand_in.model.spec_worker.acceptance.summary().verifications

    def of_a_dummy(batch, lengths, prompts):
        attn = build(batch, lengths, prompts)
        attn.request_ids = [dummy]
        return attn

    target = stand_in.target.forward
    stand_in.target.forward = lambda ids, positions, attn, spec: torch.zeros(8, pair.target.vocab_size)
    stand_in.attention_metadata = of_a_dummy
    stand_in.commit = lambda *args: None
    stand_in.step()
    stand_in.target.forward = target
    assert changed_pages(before, bits(stand_in.manager.storage)) == set()
    assert torch.equal(state[:-1], stand_in.model.spec_worker._context.state[:-1]) and live.finish is None
    assert stand_in.model.spec_worker.acceptance.summary().verifications == counted


def test_w02_chunks_of_a_prompt_give_the_same_bytes(host, pair) -> None:
    """Fails if a later chunk is stored from index 0, or rotated at other positions than its own."""
    host("1.3.0rc28")
    pages = {}
    for chunk in (64, 24, 7):
        stand_in = hosted(pair, chunk=chunk)
        request = stand_in.add(pair.prompts[0], SHORT)
        while stand_in.requests[0].pending:
            stand_in.step()
        assert slot_state(stand_in, request) == (0, 64)
        pages[chunk] = stand_in.manager.storage[stand_in.manager.pages_of(request)[:4]]
    for chunk in (24, 7):
        torch.testing.assert_close(pages[chunk], pages[64], rtol=2e-5, atol=2e-5)  # the target's own taps differ in rounding


def test_w03_accept_len_does_not_depend_on_the_batch(host, pair) -> None:
    """Fails if requests of one batch share a row: alone and together each has the same trace."""
    host("1.3.0rc28")
    together = trace(hosted(pair).generate(pair.prompts[:6], SHORT))
    alone = [trace(hosted(pair).generate([prompt], SHORT))[0] for prompt in pair.prompts[:6]]
    assert together == alone


def transferred(stand_in: StandIn, pair: Pair, prompt: list[int]) -> Request:
    """A request whose prompt another server has computed: the target's cache and first token came, the draft's rows did not."""
    request = stand_in.add(prompt, SHORT)
    live = next(one for one in stand_in.requests if one.id == request)
    cache = stand_in.target.caches[request] = pair.target.new_cache()
    out = pair.target.forward(torch.tensor(prompt), cache, 1)
    live.commit([int(out.logits[-1].argmax())], submitted=0, prefill=True)
    live.computed, live.drafts = len(prompt), [5] * 7
    stand_in.manager.resize(request, len(prompt) + 6)
    return live


def test_w04_a_request_that_arrives_decoding_keeps_its_positions(host, pair) -> None:
    """Fails if a request whose prompt was computed elsewhere is numbered from 0, as the stock worker does."""
    host("1.3.0rc29")
    first_positions = {}
    for name, stand_in in (("ours", hosted(pair)), ("stock", with_stock_worker(pair))):
        stand_in.add(pair.prompts[1], SamplingParams(max_new_tokens=60, ignore_eos=True))
        stand_in.step()  # binds
        live = transferred(stand_in, pair, pair.prompts[0])
        request = live.id
        drafter, seen = stand_in.model.draft_model, []
        forward = drafter.dflash_forward
        drafter.dflash_forward = lambda forward=forward, seen=seen, **step: (
            seen.append(step["query_positions"][:, 0].tolist()) or forward(**step)
        )
        stand_in.step()
        first_positions[name] = seen[-1][1], live.computed
        if name == "ours":
            assert slot_state(stand_in, request) == (64, live.computed)
            while any(one.id == request for one in stand_in.requests):
                stand_in.step()
            assert stand_in.done[request].tokens == pair.alone(pair.prompts[0], SHORT).tokens
    assert first_positions["ours"][0] == first_positions["ours"][1] > 64
    assert first_positions["stock"][0] < 10


def test_w05_after_a_failed_forward_drafts_are_those_of_a_fresh_worker(host, pair) -> None:
    """Fails if a step that raised half-way leaves a length, a flag or a page behind that the next one trips over."""
    host("1.3.0rc28")
    expected = trace(hosted(pair).generate(pair.prompts[:2], SHORT))
    stand_in = hosted(pair)
    order = [stand_in.add(prompt, SHORT) for prompt in pair.prompts[:2]]
    stand_in.step()
    drafter = stand_in.model.draft_model
    forward = drafter.dflash_forward
    caches = {request: pair.target.copy_cache(cache, 0) for request, cache in stand_in.target.caches.items()}

    def fails(**step):
        raise torch.OutOfMemoryError("at this moment")

    drafter.dflash_forward = fails
    with pytest.raises(torch.OutOfMemoryError):
        stand_in.step()
    drafter.dflash_forward = forward
    stand_in.target.caches.update(caches)
    while stand_in.requests:
        stand_in.step()
    assert trace(stand_in.done[request] for request in order) == expected


def test_w06_an_idle_ranks_head_is_not_called_alone(host, pair) -> None:
    """Fails if prompts are drafted for where the output head joins ranks: an extra call on one of them would hang."""
    host("1.3.0rc28")
    stand_in = hosted(pair, mapping={"enable_attention_dp": True, "enable_lm_head_tp_in_adp": True})
    stand_in.add(pair.prompts[0], SHORT)
    assert stand_in.step()["next_draft_tokens"].tolist() == [[0] * 7]
    apart = hosted(pair, mapping={"enable_attention_dp": True})
    apart.add(pair.prompts[0], SHORT)
    assert apart.step()["next_draft_tokens"].any()


def test_w07_a_dummy_that_no_manager_took_is_no_crash(host, pair) -> None:
    """Fails if a full manager, whose add_dummy_requests gave nothing, ends the step."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    stand_in.add(pair.prompts[0], SHORT)
    stand_in.step()
    context = stand_in.model.spec_worker._context
    context.begin_step([10**9])
    assert context._rows[:, 0].tolist() == [context.ledger.padding, 0]


def test_w09_pipeline_stages_are_refused(host, pair) -> None:
    """Fails if a draft is built where some of its taps lie on other stages."""
    host("1.3.0rc28")
    register()
    with pytest.raises(UnsupportedError, match="pp_size is 2"):
        StandIn(pair.target, DRAFT, mapping={"pp_size": 2})


def test_w11_context_parallelism_is_refused(host, pair) -> None:
    """Fails if a draft is built where its context is spread over ranks."""
    host("1.3.0rc28")
    register()
    with pytest.raises(UnsupportedError, match="cp_size is 2"):
        StandIn(pair.target, DRAFT, mapping={"cp_size": 2})


def test_w10_the_stream_that_the_draft_was_trained_on_is_compared(host, pair, monkeypatch, caplog) -> None:
    """Fails if a Kimi target gives the other of its two streams and nothing says so."""
    host("1.3.0rc28")
    register()
    monkeypatch.setattr(pair.target.model.config, "model_type", "kimi_linear")
    monkeypatch.setenv("KIMI_K3_AUX_ATTN_RES_STREAM", "0")
    StandIn(pair.target, DRAFT)
    assert "stream" not in caplog.text.replace("aux_stream", "")
    monkeypatch.delenv("KIMI_K3_AUX_ATTN_RES_STREAM")
    StandIn(pair.target, DRAFT)
    assert "set KIMI_K3_AUX_ATTN_RES_STREAM=0 before the first import" in caplog.text


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_w12_after_every_step_the_context_is_what_the_target_has_run(flavour, host, pair) -> None:
    """Fails if a row of context is lost or added anywhere: prompts in chunks, decoding, both in one step."""
    host("1.3.0rc28")
    stand_in = hosted(pair, chunk=20, max_batch=3, flavour=flavour)
    for prompt in pair.prompts[:4]:
        stand_in.add(prompt, SHORT)
    while stand_in.requests:
        stand_in.step()
        for request in stand_in.requests:
            if request.computed:
                assert slot_state(stand_in, request.id) == (0, request.computed)


def test_s01_a_transferred_request_drafts_from_what_is_generated_here(host, pair) -> None:
    """Fails if the first step of a request without a local prompt crashes, reads pages that hold NaN, or never recovers."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    live = transferred(stand_in, pair, pair.prompts[0])
    out = stand_in.step()
    start, end = slot_state(stand_in, live.id)
    assert (start, end) == (64, live.computed) and out["next_draft_tokens"].unique().numel() > 1
    while stand_in.requests:
        stand_in.step()
    done = stand_in.done[live.id]
    assert done.tokens == pair.alone(pair.prompts[0], SHORT).tokens and sum(one.accepted for one in done.commits[2:]) > 0


def test_w08_no_shape_and_no_page_depends_on_a_ranks_arithmetic_in_a_host(host, pair) -> None:
    """Fails where what may drift between ranks, accepted counts, decides shapes of a call or pages: the ranks would hang."""
    host("1.3.0rc28")
    plans, ends = [], []
    for count in (1, 4, 8):
        stand_in = hosted(pair)
        order = [stand_in.add(prompt, SHORT) for prompt in pair.prompts[:2]]
        stand_in.step()
        worker, drafter, shapes = stand_in.model.spec_worker, stand_in.model.draft_model, []
        accept, append, forward = worker.sample_and_accept_draft_tokens, worker._context.append, drafter.dflash_forward

        def drifted(*args, count=count, accept=accept):
            tokens, counts = accept(*args)
            return tokens, torch.full_like(counts, count)

        def appended(*args, append=append, shapes=shapes):
            shapes.append([getattr(one, "shape", one) for one in args])
            append(*args)

        def forwarded(forward=forward, shapes=shapes, **step):
            shapes.append({name: one.shape for name, one in step.items() if isinstance(one, torch.Tensor)})
            return forward(**step)

        worker.sample_and_accept_draft_tokens, worker._context.append, drafter.dflash_forward = drifted, appended, forwarded
        stand_in.commit = lambda *args: None
        out = stand_in.step()
        held = [list(stand_in.manager.pages_of(request)) for request in order]
        plans.append((shapes, {name: one.shape for name, one in out.items()}, held))
        ends.append([slot_state(stand_in, request)[1] for request in order])
    assert len(plans[0][0]) == 2 and plans[0] == plans[1] == plans[2]
    assert ends == [[64 + count] * 2 for count in (1, 4, 8)]  # control: the drift was there
