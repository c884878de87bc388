"""Our worker in the stand-in host: each fix at work, beside the stock worker that has the fault."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plugin.host.executor import FLAVOURS, StandIn
from plugin.hosted import DRAFT, SHORT, accept_len, bits, changed_pages, hosted, trace, with_stock_worker

from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.plugin import register
from trtllm_dspark.plugin.faults import FIXES
from trtllm_dspark.plugin.worker import HostedWorker

LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)


def test_the_worker_is_replaced_once_and_in_the_epilogue_too(host, pair) -> None:
    host("1.3.0rc28")
    register()
    stand_in = StandIn(pair.target, DRAFT)
    stock = stand_in.model.spec_worker
    assert not isinstance(stock, HostedWorker) and type(stock).__name__ == "DSparkWorker"
    stand_in.load()
    ours = stand_in.model.spec_worker
    assert isinstance(ours, HostedWorker) and isinstance(ours, type(stock))
    assert stand_in.model.epilogue == [stand_in.model.draft_model, ours]
    assert ours.fixes == {fix.name for fix in FIXES}
    stand_in.load()
    assert stand_in.model.spec_worker is ours
    assert not [name for name, _ in ours.named_parameters()]  # the draft's weights are listed once, under the target


def test_the_worker_inside_a_wrapper_is_replaced(host, pair) -> None:
    """A target with a vision encoder around its language model: the wrapper is what the draft is given."""
    host("1.3.0rc28")
    register()
    stand_in = StandIn(pair.target, DRAFT)
    wrapper = torch.nn.Module()
    wrapper.llm, wrapper.lm_head = stand_in.model, stand_in.model.lm_head
    stand_in.model.draft_model.load_weights_from_target_model(wrapper)
    assert isinstance(stand_in.model.spec_worker, HostedWorker) and not hasattr(wrapper, "spec_worker")


def test_a_model_built_without_memory_is_whole_once_loaded(host, pair) -> None:
    host("1.3.0rc28")
    register()
    stand_in = StandIn(pair.target, DRAFT)
    stand_in.model.draft_model.to(device="meta")
    assert trace(stand_in.load().generate(pair.prompts[:1], SHORT)) == trace(pair.engine(7).generate(pair.prompts[:1], SHORT))


def test_a_host_without_the_faults_keeps_its_worker(host, pair) -> None:
    host("1.3.0rc28")
    stand_in = with_stock_worker(pair)
    assert type(stand_in.model.spec_worker).__name__ == "DSparkWorker"


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_fewer_drafts_than_the_block(num_drafts, host, pair) -> None:
    """The block is run at the width it was trained for; the embedded engine does the same."""
    host("1.3.0rc28")
    done = hosted(pair, num_drafts=num_drafts).generate(pair.prompts[:2], SHORT)
    assert trace(done) == trace(pair.engine(num_drafts).generate(pair.prompts[:2], SHORT))


@pytest.mark.parametrize(
    ("version", "flavour"),
    [*(("1.3.0rc28", flavour) for flavour in FLAVOURS), ("1.3.0rc26", FLAVOURS[1]), ("1.3.0rc29", FLAVOURS[1])],
)
def test_every_step_stays_on_the_pages_of_its_own_requests(version, flavour, host, pair) -> None:
    """Four requests over a pool that holds canaries; one of them owns page 0."""
    host(version)
    stand_in = hosted(pair, flavour=flavour, chunk=24, max_batch=3)
    stand_in.manager.storage.fill_(7.0)
    order = [stand_in.add(prompt, SHORT) for prompt in pair.prompts[:4]]
    snapshot, owned, touched = bits(stand_in.manager.storage), {}, set()

    def look() -> None:
        nonlocal snapshot, owned
        snapshot = bits(stand_in.manager.storage)
        owned = {request: list(stand_in.manager.pages_of(request)) for request in stand_in.spec_metadata.request_ids}

    stand_in.before_step = look
    while stand_in.requests:
        stand_in.step()
        changed = changed_pages(snapshot, bits(stand_in.manager.storage))
        assert changed <= {page for pages in owned.values() for page in pages}
        touched |= changed
    assert 0 in touched and set(stand_in.done) == set(order)


def short_grants(stand_in: StandIn, tokens: int) -> None:
    """From now on the manager refuses whatever takes a request past so many tokens, as a full pool does."""
    resize = stand_in.manager.resize

    def refuse(request: int, wanted: int) -> bool:
        return resize(request, min(wanted, tokens)) and wanted <= tokens

    stand_in.manager.resize = refuse


def run_on_short_grants(stand_in: StandIn, prompt: list[int]) -> set[int]:
    """Pages that a generation touches which are not its request's."""
    stand_in.manager.storage.fill_(7.0)
    stand_in.manager.take([], 0)
    stand_in.manager.free = stand_in.manager.free[3:]  # pages 0 .. 2 are somebody else's
    short_grants(stand_in, 80)  # of a prompt of 64 and 20 new tokens
    stand_in.add(prompt, SHORT)
    before = bits(stand_in.manager.storage)
    pages: set[int] = set()
    while stand_in.requests:
        stand_in.before_step = lambda: pages.update(stand_in.manager.pages_of(1))
        stand_in.step()
    return changed_pages(before, bits(stand_in.manager.storage)) - pages


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_short_grant_is_a_bound_whatever_the_table_holds(flavour, host, pair) -> None:
    host("1.3.0rc28")
    stand_in = hosted(pair, flavour=flavour)
    assert run_on_short_grants(stand_in, pair.prompts[0]) == set() and stand_in.events
    (done,) = stand_in.done.values()
    assert done.tokens == pair.alone(pair.prompts[0], SHORT).tokens  # it goes on with what it has


def test_control_the_stock_worker_writes_to_page_zero(host, pair) -> None:
    """The same grants, the table filled with 0: the stock bound is the table's width, and page 0 is another request's."""
    host("1.3.0rc28")
    assert 0 in run_on_short_grants(with_stock_worker(pair, flavour="v2 fills 0"), pair.prompts[0])


def with_absence(stand_in: StandIn, prompts: list[list[int]]) -> list:
    """Both start; the first is left out of four steps; then both go on."""
    order = [stand_in.add(prompt, LONG) for prompt in prompts]
    for step in range(100):
        if not stand_in.requests:
            break
        stand_in.absent = {order[0]} if 2 <= step < 6 else set()
        stand_in.step()
    return [stand_in.done[request] for request in order]


def test_a_request_keeps_its_context_while_it_is_absent(host, pair) -> None:
    host("1.3.0rc28")
    expected = trace(hosted(pair).generate(pair.prompts[:2], LONG))
    assert trace(with_absence(hosted(pair), pair.prompts[:2])) == expected


def context_after_absence(stand_in: StandIn, prompts: list[list[int]]) -> tuple[int, int]:
    """Tokens of draft context that the first request has after it came back, and tokens of it that the target has run."""
    order = [stand_in.add(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True)) for prompt in prompts]
    for step in range(5):
        stand_in.absent = {order[0]} if step == 2 else set()
        stand_in.step()
    worker = stand_in.model.spec_worker
    if isinstance(worker, HostedWorker):
        start, end = worker._context.state[worker._context.ledger.entries[order[0]].slot].tolist()
        return end - start, stand_in.requests[0].computed
    return int(worker._ctx_len[worker._req_to_slot[order[0]]]), stand_in.requests[0].computed


def test_its_context_is_whole_and_the_stock_workers_is_not(host, pair) -> None:
    """One step of absence. The stock worker begins at 0 again, without the prompt and at wrong positions."""
    host("1.3.0rc29")
    kept, computed = context_after_absence(hosted(pair), pair.prompts[:2])
    assert kept == computed > 64
    kept, computed = context_after_absence(with_stock_worker(pair), pair.prompts[:2])
    assert kept < 64 < computed


def test_first_verification_has_real_drafts(host, pair) -> None:
    """The control's first pass accepts none: its drafts are placeholders."""
    host("1.3.0rc28")
    done = hosted(pair).generate(pair.prompts[:4], SHORT)
    assert sum(one.commits[1].accepted for one in done) > 0
    stock = with_stock_worker(pair).generate(pair.prompts[:4], SHORT)
    assert [one.commits[1].accepted for one in stock] == [0] * 4
    assert accept_len(done) > accept_len(stock)


@pytest.mark.parametrize("chunk", [5, 40])
def test_chunks_of_prompts_beside_decoding_requests(chunk, host, pair) -> None:
    host("1.3.0rc28")
    stand_in = hosted(pair, chunk=chunk, max_batch=2)
    done = stand_in.generate(pair.prompts[:3], SHORT)
    together = pair.engine(7).generate(pair.prompts[:3], SHORT)
    assert [one.tokens for one in done] == [one.tokens for one in together]
    assert accept_len(done) == pytest.approx(accept_len(together), abs=0.15)  # the taps of chunks differ in rounding


def test_acceptance_is_counted_on_the_device(host, pair) -> None:
    """Whole steps, as the worker sees them: what a request cuts off at its length is counted too."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    accepted: list[int] = []
    commit = stand_in.commit

    def watch(request, length, out, index) -> None:
        if not request.pending:
            accepted.append(int(out["new_tokens_lens"][index]) - 1)
        commit(request, length, out, index)

    stand_in.commit = watch
    stand_in.generate(pair.prompts[:3], SHORT)
    found = stand_in.model.spec_worker.acceptance.summary()
    assert found.verifications == len(accepted) > 0 and found.accepted == sum(accepted)
    assert found.submitted == 7 * len(accepted)
    assert list(found.histogram) == [accepted.count(count) for count in range(8)]


def test_padding_is_not_counted_and_touches_nothing(host, pair) -> None:
    """A step of a graph that is larger than its batch: the padding's id is in no manager."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    expected = trace(hosted(pair).generate(pair.prompts[:1], SHORT))
    from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDA_GRAPH_DUMMY_REQUEST_ID as padding

    build = stand_in.attention_metadata

    def padded(batch, lengths, prompts):
        attn = build(batch, lengths, prompts)
        if prompts:
            return attn
        attn.num_seqs, attn.request_ids = attn.num_seqs + 1, [*attn.request_ids, padding]
        attn._seq_lens = torch.tensor([*lengths, 8], dtype=torch.int32)
        attn.draft_kv_cache_block_offsets[:, len(batch)] = 0
        return attn

    forward = stand_in.model.forward

    def with_padding(attn, ids, positions, spec, resources):
        if attn.num_contexts:
            return forward(attn, ids, positions, spec, resources)
        spec.draft_tokens = torch.cat((spec.draft_tokens.view(-1, 7), torch.zeros(1, 7, dtype=torch.int)))
        spec.gather_ids = torch.arange(16)
        ids = torch.cat((ids, torch.zeros(8, dtype=torch.long)))
        return forward(attn, ids, torch.cat((positions, torch.arange(8)[None]), 1), spec, resources)

    stand_in.attention_metadata, stand_in.model.forward = padded, with_padding
    stand_in.manager.storage.fill_(7.0)
    page_zero = None

    def look() -> None:
        nonlocal page_zero
        page_zero = bits(stand_in.manager.storage)

    stand_in.before_step = look
    stand_in.add(pair.prompts[0], SHORT)
    while stand_in.requests:
        stand_in.step()
        own = set(stand_in.manager.pages_of(1)) if stand_in.requests else None
        if own is not None:
            assert changed_pages(page_zero, bits(stand_in.manager.storage)) <= own
    assert trace(stand_in.done.values()) == expected
    counted = stand_in.model.spec_worker.acceptance.summary()
    assert counted.verifications == len(expected[0]) - 1


def test_graph_copies_of_the_metadata_prepare_our_worker_too(host, pair) -> None:
    """What a replay relies on: no line of the worker runs then, only `prepare`; here outside of inference mode."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    stand_in.add(pair.prompts[0], SHORT)
    stand_in.step()
    worker = stand_in.model.spec_worker
    copied = stand_in.spec_metadata.create_cuda_graph_metadata(4)
    copied.request_ids, copied.num_generations = [1], 1
    address, bound = worker._context._rows.data_ptr(), int(worker._context._rows[1, 0])
    assert stand_in.manager.resize(1, bound + 16)
    copied.prepare()
    assert worker._context._rows.data_ptr() == address
    assert int(worker._context._rows[1, 0]) == bound + 16


def test_n22_a_new_manager_is_bound_and_the_old_one_left_alone(host, pair) -> None:
    """Fails if a step writes to the manager that the estimation of the KV size ran on and threw away."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    expected = trace(stand_in.generate(pair.prompts[:2], SHORT))
    old = stand_in.manager
    before = bits(old.storage)
    metadata = stand_in.spec_metadata
    stand_in.make_manager(FLAVOURS[1], page=16, blocks=32)
    stand_in.spec_metadata = metadata  # it was prepared for the old manager in the first step on the new one
    assert trace(stand_in.generate(pair.prompts[:2], SHORT)) == expected
    assert changed_pages(before, bits(old.storage)) == set()


def test_a_batch_larger_than_the_metadata_says(host, pair) -> None:
    """Warm-up batches of graphs may be."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    stand_in.manager.max_batch_size = stand_in.spec_metadata.max_num_requests = 2
    done = stand_in.generate(pair.prompts[:4], SHORT)
    assert trace(done) == trace(pair.engine(7).generate(pair.prompts[:4], SHORT))


def test_prefill_reads_nothing_back(host, pair, monkeypatch) -> None:
    """Appending a step's prompts is one call, and asks no device tensor for its value; the stock worker asks for each."""
    host("1.3.0rc28")
    calls, reads = [], []
    item, tolist = torch.Tensor.item, torch.Tensor.tolist
    stand_in, stock = hosted(pair), with_stock_worker(pair)
    drafter = stand_in.model.draft_model
    append = drafter.backend.operations.context_append
    counting = replace(drafter.backend.operations, context_append=lambda z, *rest: calls.append(z.shape[0]) or append(z, *rest))
    counted = replace(drafter.backend, operations=counting)
    monkeypatch.setattr(drafter, "resolve_backend", lambda *asked: counted)  # binding resolves for the manager's pages

    def count(run, *args) -> int:
        reads.clear()
        monkeypatch.setattr(torch.Tensor, "item", lambda t: reads.append("item") or item(t))
        monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append("tolist") or tolist(t))
        run(*args)
        monkeypatch.setattr(torch.Tensor, "item", item)
        monkeypatch.setattr(torch.Tensor, "tolist", tolist)
        return len(reads)

    found = {}
    for name, one in (("ours", stand_in), ("stock", stock)):
        for prompt in pair.prompts[:3]:
            one.add(prompt, SHORT)
        one.step()  # binds
        worker = one.model.spec_worker
        store = type(worker)._store_prefill_context
        monkeypatch.setattr(
            type(worker),
            "_store_prefill_context",
            lambda self, *args, store=store, name=name: found.update({name: count(store, self, *args)}),
        )
        for prompt in pair.prompts[3:5]:
            one.add(prompt, SHORT)
        calls.clear()
        one.step()
        if name == "ours":
            assert calls == [128, 24]  # two prompts of 64 in one call, three verifications of 8 rows in one
    assert found == {"ours": 0, "stock": found["stock"]} and found["stock"] >= 4


def test_speculation_off_for_a_while(host, pair) -> None:
    """Draft length 0: the host skips us; behind the gap the context begins anew, at its position."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    request = stand_in.add(pair.prompts[0], SamplingParams(max_new_tokens=30, ignore_eos=True))
    stand_in.step()
    stand_in.step()
    live = stand_in.requests[0]
    worker, spec = stand_in.model.spec_worker, stand_in.spec_metadata
    K, drafts = stand_in.K, list(live.drafts)
    spec.runtime_draft_len, stand_in.K, live.drafts = 0, 0, []
    position = live.computed
    stand_in.step()
    assert live.computed == position + 1 and live.drafts == []
    spec.runtime_draft_len = stand_in.K = K
    live.drafts = drafts
    stand_in.step()
    start, end = worker._context.state[worker._context.ledger.entries[request].slot].tolist()
    assert start == position + 1 and end == live.computed
    while stand_in.requests:
        stand_in.step()
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    assert stand_in.done[request].tokens == pair.alone(pair.prompts[0], params).tokens


def test_tensor_parallel_sums_are_the_hosts(host, pair) -> None:
    """Each rank has its heads; under attention-DP each has the whole draft and no collective."""
    host("1.3.0rc28")
    register()
    halves = StandIn(pair.target, DRAFT, mapping={"tp_size": 2, "tp_rank": 1}).model.draft_model
    assert halves._num_heads == 4 and halves.tp.rank == 1
    assert torch.equal(halves.tp.sum(torch.ones(3)), torch.full((3,), 2.0)) and halves.tp.group.calls == 1
    whole = StandIn(pair.target, DRAFT, mapping={"tp_size": 2, "enable_attention_dp": True}).model.draft_model
    assert whole._num_heads == 8 and whole.tp.size == 1


def without_values(run, *args, **kwargs) -> None:
    """Call on tensors that have shapes and no values, as a graph's capture does: reading one back is an error."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value):
            if isinstance(value, torch.Tensor):
                return mode.from_tensor(value)
            if isinstance(value, SimpleNamespace):
                # lengths of rows are known on the host, and stay there
                return SimpleNamespace(**{k: item if k == "_seq_lens" else fake(item) for k, item in vars(value).items()})
            return value

        run(*map(fake, args), **{name: fake(value) for name, value in kwargs.items()})


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_nothing_of_a_step_is_read_back(kind, host, pair) -> None:
    """Prompts and decoding: what a capture forbids on the host's side of a step. The stock worker's prompts fail."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    host("1.3.0rc28")
    stand_in = hosted(pair) if kind == "ours" else with_stock_worker(pair)
    worker = stand_in.model.spec_worker
    names = ("_store_prefill_context", "prepare_1st_drafter_inputs", "sample_and_accept_draft_tokens")
    methods = {name: getattr(worker, name) for name in names}
    kept: dict[str, tuple] = {}
    for name in names:

        def keep(*args, name=name, **kwargs):
            kept[name] = args, kwargs
            return methods[name](*args, **kwargs)

        setattr(worker, name, keep)
    for prompt in pair.prompts[:2]:
        stand_in.add(prompt, SHORT)
    stand_in.step()
    stand_in.add(pair.prompts[2], SHORT)
    stand_in.step()
    if kind == "ours":
        for name in names:
            without_values(methods[name], *kept[name][0], **kept[name][1])
    else:
        with pytest.raises(DataDependentOutputException):
            without_values(methods[names[0]], *kept[names[0]][0], **kept[names[0]][1])


def test_where_the_host_keeps_draft_probabilities_a_prompt_gets_no_drafts(host, pair) -> None:
    """Fails where drafts stand beside the placeholder probabilities of a prompt's step. Control: without, it gets some."""
    host("1.3.0rc28")
    kept, plain = hosted(pair), hosted(pair)
    kept.spec_metadata.use_rejection_sampling = True
    for stand_in in (kept, plain):
        stand_in.add(pair.prompts[0], SHORT)
    assert not kept.step()["next_draft_tokens"].any() and plain.step()["next_draft_tokens"].any()
