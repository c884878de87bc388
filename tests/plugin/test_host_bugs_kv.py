"""Public bugs in how a host charges and hands out draft pages, one test each, in the stand-in host.

A test's name begins with the bug's id, as in `tests/regressions/README.md`.
"""

import shutil
from types import SimpleNamespace

import pytest
import torch
from plugin.host.executor import FLAVOURS
from plugin.hosted import SHORT, accept_len, bits, changed_pages, hosted, slot_state, trace

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin import kv_charge, register
from trtllm_dspark.plugin.ledger import RequestLedger
from trtllm_dspark.plugin.manager import DraftPages, Grant, layout_of


def test_c15_a_grant_needs_no_room_for_the_trained_block(host, pair) -> None:
    """Fails if K=1 over a block of 7 needs pages past the rows that a step writes, or reads less without them."""
    host("1.3.0rc28")
    expected = trace(hosted(pair, num_drafts=1).generate(pair.prompts[:2], SHORT))
    stand_in, read, tight = hosted(pair, num_drafts=1), {}, 0
    stand_in.grant = lambda request, tokens: stand_in.manager.resize(request.id, request.computed + (request.pending or 2))
    forward = stand_in.model.draft_model.dflash_forward

    def watched(**step):
        read.update(zip(stand_in.spec_metadata.request_ids, step["num_ctx_per_req"].tolist(), strict=True))
        return forward(**step)

    stand_in.model.draft_model.dflash_forward = watched
    order = [stand_in.add(prompt, SHORT) for prompt in pair.prompts[:2]]
    while stand_in.requests:
        stand_in.step()
        for request in stand_in.requests:
            held = 16 * len(stand_in.manager.pages_of(request.id))
            assert held < request.computed + 2 + 16 and read[request.id] == request.computed
            tight += request.computed + 7 > held  # the rule that keeps room for the block would read less here
    assert trace(stand_in.done[request] for request in order) == expected and tight > 2


def test_k01_under_an_fp8_target_a_draft_token_is_charged_what_its_pool_costs(host) -> None:
    """Fails if the split gives the draft 2,880 bytes a token, as it does before the remedy, for a pool that costs 5,760."""
    from test_kv_charge import SIZES, bytes_of, creator

    host("1.3.0rc28")
    register()
    made = creator()
    assert made.draft_cost().slope == 2880
    assert kv_charge.ensure() is None
    assert made.draft_cost().slope == 5760 == bytes_of(made._create_one_model_draft_kv_cache_manager(**SIZES))


def test_k01_where_our_drafts_cannot_be_told_from_others_the_charge_is_refused(host, tmp_path, monkeypatch) -> None:
    """Fails if a host that renamed what the remedy reads gets it all the same: its start-up would end in an AttributeError."""
    shutil.copytree(host("1.3.0rc28"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tensorrt_llm/_torch/pyexecutor/_util.py"
    file.write_text(file.read_text().replace("_speculative_config", "_spec_config"))
    monkeypatch.syspath_prepend(str(tmp_path))
    register()
    assert kv_charge.ensure() == "KvCacheCreator has no _speculative_config"


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


def test_k04_what_was_split_holds_both_pools(host) -> None:
    """Fails if target and draft, at the tokens that a budget was split into, take more than it; and after a failed allocation.

    The control is the same split before the charge is corrected.
    """
    from test_kv_charge import K3, SIZES, bytes_of, creator

    host("1.3.0rc28")
    register()
    from tensorrt_llm._torch.model_config import ModelConfig, QuantConfig
    from tensorrt_llm.mapping import Mapping

    made, budget = creator(), 10**9
    target = ModelConfig(SimpleNamespace(**{**K3, "num_hidden_layers": 24}), Mapping(), quant_config=QuantConfig("FP8"))
    theirs = made._cost(target).slope
    assert theirs == 24 * 576

    def spent() -> int:
        tokens = budget // (theirs + made.draft_cost().slope)
        return tokens * (theirs + bytes_of(made._create_one_model_draft_kv_cache_manager(**SIZES)))

    assert spent() > 1.1 * budget
    kv_charge.ensure()
    assert 0.99 * budget < spent() <= budget
    with pytest.raises(TypeError):
        made._create_one_model_draft_kv_cache_manager(**{**SIZES, "num_blocks": None})
    assert 0.99 * budget < spent() <= budget and made._draft_config.quant_config.kv_cache_quant_algo == "FP8"


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


def test_k18_more_requests_than_rows_cost_the_longest_absent_its_context(host, caplog) -> None:
    """Fails if a full ledger raises, says nothing, hands one row to two requests of a batch, or frees a row twice."""
    granted = {request: Grant(16, request) for request in range(1, 8)}
    ledger = RequestLedger(3, granted.get)
    ledger.step([1, 2])
    ledger.step([2, 3])
    rows = ledger.step([2, 3, 4])
    assert len(set(rows.slots)) == 3 and ledger.evicted == 1 and set(ledger.entries) == {2, 3, 4}
    assert [record.message.split(":")[0] for record in caplog.records] == ["more than 3 requests in flight"]
    granted.clear()
    assert ledger.step([2, 3, 4]).slots == [ledger.padding] * 3 and sorted(ledger._free) == [0, 1, 2]
    ledger.step([])
    assert sorted(ledger._free) == [0, 1, 2]


def test_k18_a_request_of_the_batch_keeps_its_row(host) -> None:
    """Fails if a full ledger takes the row of a request that is in the batch itself, while an absent one has one."""
    granted = {request: Grant(16, request) for request in range(1, 5)}
    ledger = RequestLedger(3, granted.get)
    first = dict(zip([2, 3, 1], ledger.step([2, 3, 1]).slots, strict=True))
    rows = ledger.step([4, 2, 3])
    assert rows.slots == [first[1], first[2], first[3]] and rows.begun == [first[1]] and ledger.evicted == 1


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
