"""Public bugs in what a host does around a drafter, one test each, held against our plugin in the stand-in host.

A test's name begins with the bug's id, as in `tests/regressions/README.md`.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plugin.host.executor import FLAVOURS, StandIn
from plugin.hosted import DRAFT, SHORT, accept_len, bits, changed_pages, hosted, trace, with_stock_worker

from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.errors import DSparkError, UnsupportedError
from trtllm_dspark.plugin import builder, kv_charge, register
from trtllm_dspark.plugin.ledger import RequestLedger
from trtllm_dspark.plugin.manager import DraftPages, Grant, layout_of
from trtllm_dspark.plugin.worker import HostedWorker


def folder_with(tmp_path: Path, **changes: object) -> Path:
    """The tiny draft with other keys in its config.json."""
    folder = tmp_path / "draft"
    shutil.copytree(DRAFT, folder)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return folder


def slot_state(stand_in: StandIn, request: int) -> tuple[int, int]:
    """Readable positions of a request's draft context: start, end."""
    context = stand_in.model.spec_worker._context
    start, end = context.state[context.ledger.entries[request].slot].tolist()
    return start, end


# ------------------------------------------------------------------------------------------------------------------ config
def test_c02_more_drafts_than_the_block_are_refused_at_construction(host, pair) -> None:
    """Fails if max_draft_len 8 is built over a block of 7."""
    host("1.3.0rc28")
    register()
    with pytest.raises(DSparkError, match="at most 7, came K=8"):
        StandIn(pair.target, DRAFT, num_drafts=8)


@pytest.mark.parametrize("version", ["1.3.0rc28", "1.3.0rc29"])
def test_c11_one_decision_gives_model_and_worker(version, host, pair, tmp_path) -> None:
    """Fails if a draft in its own checkpoint, MLA or not, or one in the target's, gets the model or worker of another."""
    host(version)
    standalone = hosted(pair)
    assert type(standalone.model.draft_model).__name__ == "HostedMLADSpark"
    assert isinstance(standalone.model.spec_worker, HostedWorker)
    gqa = StandIn(pair.target, folder_with(tmp_path, kv_lora_rank=None))
    assert type(gqa.model.draft_model).__name__ == "GQADSparkForCausalLM"
    assert gqa.model.draft_model.dflash_attention_backend == gqa.spec_config.attention_backend
    assert type(gqa.model.spec_worker).__name__ == "DSparkWorker"
    embedded = SimpleNamespace(
        spec_config=SimpleNamespace(draft_is_embedded_in_target=True, attention_backend="VANILLA"), mapping=None
    )
    assert type(builder.build_draft(embedded, None, None, None)).__name__ == "DSv4DSparkForCausalLM"


def test_c12_who_is_ours_is_pinned_for_every_mode_and_kind(host) -> None:
    """Fails if the fp8 remedy reaches a mode, or a kind of draft, other than DSPARK with its own MLA checkpoint."""
    host("1.3.0rc28")
    from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode

    mla, gqa = (SimpleNamespace(pretrained_config=SimpleNamespace(kv_lora_rank=rank)) for rank in (512, None))
    ours = {
        (mode.name, kind, embedded)
        for mode in SpeculativeDecodingMode
        for kind, config in (("mla", mla), ("gqa", gqa), ("none", None))
        for embedded in (False, True)
        if kv_charge._is_ours(SimpleNamespace(spec_dec_mode=mode, draft_is_embedded_in_target=embedded), config)
    }
    assert ours == {("DSPARK", "mla", False)}


def test_c17_a_target_without_the_needed_parts_is_refused_by_name(host, pair, tmp_path) -> None:
    """Fails if a draft of another target, or a target without a standalone worker, ends in an error of Python's own."""
    host("1.3.0rc28")
    register()
    with pytest.raises(DSparkError, match="draft for another target"):
        StandIn(pair.target, folder_with(tmp_path, target_num_hidden_layers=9))
    drafter = StandIn(pair.target, DRAFT).model.draft_model
    target = torch.nn.Module()
    target.lm_head = None
    with pytest.raises(DSparkError, match="must have a standalone DSpark worker, Module has NoneType"):
        drafter.load_weights_from_target_model(target)


def test_c20_the_drafts_backend_is_resolved_apart_from_the_targets_words(host, pair, monkeypatch, caplog) -> None:
    """Fails if an older host's default VANILLA is taken by name, if the override is ignored, or if either goes unsaid."""
    host("1.3.0rc28")
    register()
    from trtllm_dspark.plugin import backend_choice

    asked = StandIn(pair.target, DRAFT)
    assert backend_choice.requested(asked.spec_config) == "AUTO" and "stands for AUTO" in caplog.text
    trtllm = StandIn.__new__(StandIn)
    with pytest.raises(DSparkError, match="TRTLLM was asked for"):
        trtllm.__init__(pair.target, DRAFT, extra={"attention_backend": "TRTLLM"})
    monkeypatch.setenv("TRTLLM_DSPARK_ATTENTION_BACKEND", "VANILLA")
    overridden = StandIn(pair.target, DRAFT, extra={"attention_backend": "TRTLLM"})  # the stock worker compares its own word
    drafter = overridden.model.draft_model
    assert drafter.backend.name == "VANILLA" and drafter.dflash_attention_backend == "TRTLLM"
    assert "from TRTLLM_DSPARK_ATTENTION_BACKEND" in caplog.text


def test_c20_where_auto_can_be_asked_for_vanilla_means_vanilla(host, pair, monkeypatch) -> None:
    """Fails if a newer host's VANILLA, which a user wrote, is turned into AUTO."""
    host("1.3.0rc29")
    register()
    from trtllm_dspark.plugin import backend_choice

    made = StandIn(pair.target, DRAFT, extra={"attention_backend": "VANILLA"})
    assert backend_choice.requested(made.spec_config) == "VANILLA"
    assert backend_choice.requested(StandIn(pair.target, DRAFT).spec_config) == "AUTO"


# ---------------------------------------------------------------------------------------------------------------------- kv
def test_k01_under_an_fp8_target_a_draft_token_is_charged_what_its_pool_costs(host) -> None:
    """Fails if the split gives the draft 2,880 bytes a token, as it does before the remedy, for a pool that costs 5,760."""
    from test_kv_charge import SIZES, bytes_of, creator

    host("1.3.0rc28")
    register()
    made = creator()
    assert made.draft_cost().slope == 2880
    assert kv_charge.ensure() is None
    assert made.draft_cost().slope == 5760 == bytes_of(made._create_one_model_draft_kv_cache_manager(**SIZES))


@pytest.mark.parametrize("mapping", [{}, {"tp_size": 8}, {"tp_size": 16, "enable_attention_dp": True}])
def test_k02_the_hosts_charge_does_not_depend_on_ranks(mapping, host) -> None:
    """Fails if the latent's bytes are divided by tensor parallelism or multiplied under attention-DP."""
    from test_kv_charge import creator

    host("1.3.0rc28")
    register()
    kv_charge.ensure()
    made = creator()
    made._mapping.__dict__.update(mapping)
    assert made.draft_cost().slope == 5760


def test_k08_there_is_no_private_arena(host, pair) -> None:
    """Fails if a host without a draft manager gets a context of the worker's own, or a dense one."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    stand_in.resources.resource_managers.clear()
    stand_in.add(pair.prompts[0], SHORT)
    with pytest.raises(DSparkError, match="a draft KV cache manager is required"):
        stand_in.step()


def test_k09_without_a_table_the_step_fails_and_page_zero_is_untouched(host, pair) -> None:
    """Fails if a step without block offsets runs on a table of zeros."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    stand_in.add(pair.prompts[0], SHORT)
    stand_in.step()
    before = bits(stand_in.manager.storage)
    build = stand_in.attention_metadata
    stand_in.attention_metadata = lambda *args: SimpleNamespace(**{**vars(build(*args)), "draft_kv_cache_block_offsets": None})
    with pytest.raises(DSparkError, match="must carry the draft's block table"):
        stand_in.step()
    assert changed_pages(before, bits(stand_in.manager.storage)) == set()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_k10_grants_come_from_the_manager(flavour, host, pair) -> None:
    """Fails if the tokens of a grant are counted off the table: its filler may be 0, a page's own number."""
    host("1.3.0rc28")
    stand_in = hosted(pair, flavour=flavour)
    pages = DraftPages(stand_in.manager, layout_of(stand_in.model.draft_model, 16))
    assert pages.grant(1) is None
    stand_in.manager.resize(1, 33)
    assert pages.grant(1).tokens == 48
    offsets = torch.full((1, 2, 2, stand_in.manager.max_blocks_per_seq), -7, dtype=torch.int32)
    stand_in.manager.copy_batch_block_offsets(offsets, [1], 1, 1, 1)
    held = stand_in.manager.pages_of(1)
    assert held == [0, 1, 2]
    for page, index in zip(held, pages.table(offsets, 1)[0, :3].tolist(), strict=True):
        for layer, view in enumerate(pages.pool.views):
            assert view[index].data_ptr() == stand_in.manager.storage[page, layer].data_ptr()


def test_k12_a_prefix_that_was_not_computed_here_is_not_read(host, pair) -> None:
    """Fails if a request whose first 32 tokens the target took from its cache reads draft pages of them: those hold NaN."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    prompt = pair.prompts[0]
    request = stand_in.add(prompt, SHORT)
    live = stand_in.requests[0]
    cache = stand_in.target.caches[request] = pair.target.new_cache()
    pair.target.forward(torch.tensor(prompt[:32]), cache, 1)
    live.computed = 32
    out = stand_in.step()
    assert slot_state(stand_in, request) == (32, 64)
    assert torch.isnan(stand_in.manager.storage[stand_in.manager.pages_of(request)[0]]).all()
    assert out["next_draft_tokens"].unique().numel() > 1
    while stand_in.requests:
        stand_in.step()
    assert stand_in.done[request].tokens == pair.alone(prompt, SHORT).tokens
    assert accept_len([stand_in.done[request]]) > 1


def test_k14_reuse_without_the_drafts_pages_is_said_once_with_its_cost(host, pair, caplog) -> None:
    """Fails if the target's reuse is turned off for the draft's sake, or goes on at the draft's cost without a word."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    stand_in.target_manager.enable_block_reuse = True
    stand_in.generate(pair.prompts[:2], SHORT)
    assert stand_in.target_manager.enable_block_reuse
    (warning,) = (record.message for record in caplog.records if "enable_block_reuse" in record.message)
    assert "2.21 instead of 2.87" in warning and "enable_block_reuse: false" in warning


def test_k13_a_joint_prefix_is_read_and_never_written(host, pair, caplog) -> None:
    """Fails if a prefix whose draft pages came with the target's is not used, or if one byte of these shared pages changes."""
    host("1.3.0rc28")
    first = hosted(pair)
    first.manager.enable_joint_kv_cache_reuse = first.target_manager.enable_block_reuse = True
    prompt = pair.prompts[0]
    expected = trace(first.generate([prompt], SHORT))
    sharer = first.add(prompt, SHORT)
    first.step()
    shared = list(first.manager.pages_of(sharer))[:2]
    request = first.add(prompt, SHORT)
    live = next(one for one in first.requests if one.id == request)
    first.manager.resize(request, 16)
    first.manager.free.insert(0, first.manager.kv_cache_map[request].pages.pop())
    first.manager.kv_cache_map[request].pages = list(shared)
    cache = first.target.caches[request] = pair.target.new_cache()
    pair.target.forward(torch.tensor(prompt[:32]), cache, 1)
    live.computed = 32
    before = bits(first.manager.storage)[shared]
    first.step()
    assert slot_state(first, request)[0] == 0
    while first.requests:
        first.step()
    assert torch.equal(before, bits(first.manager.storage)[shared])
    assert trace([first.done[request]]) == expected
    assert "enable_block_reuse" not in caplog.text


def test_k17_absence_from_a_batch_is_not_the_end(host) -> None:
    """Fails if the ledger gives a row away while the manager still holds the request's pages."""
    granted = {1: Grant(64, "a"), 2: Grant(64, "b")}
    ledger = RequestLedger(4, granted.get)
    first = ledger.step([1, 2])
    assert ledger.step([2]).begun == [] and ledger.step([1, 2]) == type(first)(first.slots, first.bounds, [])
    del granted[1]
    ledger.step([2])
    assert set(ledger.entries) == {2}
    granted[1] = Grant(32, "c")  # the id comes again: another request
    again = ledger.step([1, 2])
    assert again.begun == [again.slots[0]] and again.bounds == [32, 64]


def test_k17_a_request_begun_again_is_a_new_one(host) -> None:
    """Fails if a preempted request that is computed again reads what its old pages held."""
    granted = {1: Grant(64, object())}
    ledger = RequestLedger(4, granted.get)
    ledger.step([1])
    granted[1] = Grant(64, object())
    assert ledger.step([1]).begun == [ledger.entries[1].slot]


def test_k18_more_requests_than_rows_cost_the_longest_absent_its_context(host) -> None:
    """Fails if a full ledger raises, hands one row to two requests of a batch, or frees a row twice."""
    granted = {request: Grant(16, request) for request in range(1, 8)}
    ledger = RequestLedger(3, granted.get)
    ledger.step([1, 2])
    ledger.step([2, 3])
    rows = ledger.step([2, 3, 4])
    assert len(set(rows.slots)) == 3 and ledger.evicted == 1 and set(ledger.entries) == {2, 3, 4}
    granted.clear()
    assert ledger.step([2, 3, 4]).slots == [ledger.padding] * 3 and sorted(ledger._free) == [0, 1, 2]
    ledger.step([])
    assert sorted(ledger._free) == [0, 1, 2]


@pytest.mark.parametrize(
    "change", [{"dtype": torch.float16}, {"width": 81}, {"num_layers": 3}], ids=["dtype", "width", "layers"]
)
def test_k19_a_pool_of_another_shape_or_dtype_is_an_error(change, host, pair) -> None:
    """Fails if the host's pool is not what the draft needs, and it is cast, reinterpreted or replaced."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    stand_in.make_manager(FLAVOURS[0], page=16, blocks=8, **change)
    stand_in.add(pair.prompts[0], SHORT)
    with pytest.raises(DSparkError, match=r"layer 0 must be|must share one pool, 3 do|must follow the last"):
        stand_in.step()


def test_l11_the_draft_owns_no_head_and_is_whole_before_the_budget(host, pair) -> None:
    """Fails if the target's head is among the draft's parameters, or a value is left as it was allocated."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    drafter = stand_in.model.draft_model
    assert drafter.lm_head is stand_in.model.lm_head
    assert not any("lm_head" in name for name, _ in drafter.named_parameters())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in drafter.parameters())


# ------------------------------------------------------------------------------------------------------------------ worker
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


def test_w04_a_request_that_arrives_decoding_keeps_its_positions(host, pair) -> None:
    """Fails if a request whose prompt was computed elsewhere is numbered from 0, as the stock worker does."""
    host("1.3.0rc29")
    first_positions = {}
    for name, stand_in in (("ours", hosted(pair)), ("stock", with_stock_worker(pair))):
        stand_in.add(pair.prompts[1], SamplingParams(max_new_tokens=60, ignore_eos=True))
        stand_in.step()  # binds
        request = stand_in.add(pair.prompts[0], SHORT)
        live = next(one for one in stand_in.requests if one.id == request)
        cache = stand_in.target.caches[request] = pair.target.new_cache()
        out = pair.target.forward(torch.tensor(pair.prompts[0]), cache, 1)
        live.commit([int(out.logits[-1].argmax())], submitted=0, prefill=True)
        live.computed, live.drafts = 64, [5] * 7
        stand_in.manager.resize(request, 64 + 6)
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


# ------------------------------------------------------------------------------------------------------------------- serve
def test_s03_the_storage_in_use_is_said_once(host, pair, caplog) -> None:
    """Fails if a log does not prove that the managed pool, and no arena, holds the context."""
    host("1.3.0rc28")
    hosted(pair).generate(pair.prompts[:2], SHORT)
    lines = [record.message for record in caplog.records if "DSpark draft context" in record.message]
    assert len(lines) == 1 and "draft KV manager's pool" in lines[0] and "640 bytes a token" in lines[0]


def test_s04_one_line_has_every_setting_that_two_deployments_may_differ_in(host, pair, caplog) -> None:
    """Fails if a setting that changes acceptance or speed cannot be read off the log by a program."""
    host("1.3.0rc28")
    hosted(pair)
    (line,) = (r.message for r in caplog.records if r.message.startswith("DSpark draft: "))
    said = dict(word.split("=", 1) for word in line.removeprefix("DSpark draft: ").split())
    assert said["layout"] == "anchor-first" and said["taps"] == "0,2,4" and said["bytes_per_token"] == "640"
    names = "draft layout block max_draft_len taps rope markov_rank aux_stream backend dtype bytes_per_token tp fixes"
    assert list(said) == names.split()


def test_x02_acceptance_is_logged_when_asked_for(host, pair, monkeypatch, caplog) -> None:
    """Fails if a drafter that proposes nothing cannot be told from one that does."""
    host("1.3.0rc28")
    monkeypatch.setenv("TRTLLM_DSPARK_STATS_EVERY", "2")
    hosted(pair).generate(pair.prompts[:2], SHORT)
    lines = [record.message for record in caplog.records if record.message.startswith("accept_len")]
    assert lines and "verifications" in lines[-1]


def test_x02_a_bad_number_of_steps_is_said_when_the_worker_is_made(host, pair, monkeypatch) -> None:
    """Fails if a setting that cannot be read turns the report off in silence."""
    host("1.3.0rc28")
    monkeypatch.setenv("TRTLLM_DSPARK_STATS_EVERY", "often")
    with pytest.raises(DSparkError, match="TRTLLM_DSPARK_STATS_EVERY: a whole number of 0 or more is required, 'often' came"):
        hosted(pair)
