"""Public bugs of a drafter's worker: slots, padding, dummies, ranks, scheduled verification. Ids: see README.md."""

import pytest
import small_drafts
import torch
from traffic import NUM_DRAFTS, PAGE, World

from trtllm_dspark.context.draft_context import Segment
from trtllm_dspark.context.pages import NOT_WRITTEN
from trtllm_dspark.context.prefix import KeptPrefix, PrefixStore
from trtllm_dspark.engine.requests import Request, SamplingParams
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.propose import Drafter, Proposal
from trtllm_dspark.verify import verify_greedy


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def pool_bits(drafter: Drafter) -> torch.Tensor:
    return torch.stack(drafter.context.pool.views).view(torch.int32).clone()


def add(drafter: Drafter, request: object, features: torch.Tensor, count: int) -> None:
    """The next `count` rows of an admitted request."""
    first = drafter.context.length(request)
    assert drafter.context.grow(request, first + count)
    drafter.extend([Segment(request, first, count)], features[first : first + count])


def propose(drafter: Drafter, requests: list, anchors: list[int]) -> Proposal:  # type: ignore[type-arg]
    return drafter.propose(requests, torch.tensor(anchors, dtype=torch.int64), NUM_DRAFTS, keep_logits=True)


def test_k17_a_request_left_out_of_a_batch_keeps_its_context(world: World) -> None:
    """Fails where absence from a batch ends a request: batches [1, 2], [2], [2], [1, 2]."""
    drafter, (one, two) = world.drafter(12), world.texts[:2]
    for request in (1, 2):
        drafter.context.admit(request)
    add(drafter, 1, one.features, 7)
    add(drafter, 2, two.features, 5)
    propose(drafter, [1, 2], [one.tokens[7], two.tokens[5]])
    for done in (6, 7):
        add(drafter, 2, two.features, 1)
        propose(drafter, [2], [two.tokens[done]])
    assert drafter.context.length(1) == 7 and drafter.context.view([1]).context_len.tolist() == [7]
    back = propose(drafter, [1, 2], [one.tokens[7], two.tokens[7]])
    for row, (text, length) in enumerate(((one, 7), (two, 7))):
        assert torch.equal(back.hidden[row], world.alone(text, 0, length, length).hidden[0])
    drafter.context.release(1)
    drafter.context.admit(1)  # control: what was reported
    assert not torch.equal(propose(drafter, [1], [one.tokens[7]]).hidden[0], back.hidden[0])


@pytest.mark.parametrize("restored", [0, 4, 6])
def test_w02_tokens_restored_from_a_prefix_give_the_same_bytes(world: World, restored: int) -> None:
    """Fails where the first chunk behind restored tokens is stored from index 0, or rotated by its place in the chunk."""
    drafter, text = world.drafter(12), world.texts[0]
    context, order = drafter.context, []
    for name, chunks in (("whole", [10]), ("chunks", [4, 4, 2])):
        context.admit(name)
        for count in chunks:
            add(drafter, name, text.features, count)
        order.append(name)
    context.admit("first")
    add(drafter, "first", text.features, restored)
    context.admit_behind("restored", context.detach("first").ids, 0, restored)
    add(drafter, "restored", text.features, 10 - restored)
    rows = [small_drafts.rows_of(drafter, name) for name in (*order, "restored")]
    assert rows[0].shape[1] == 10 and all(torch.equal(rows[0], other) for other in rows[1:])
    context.admit("local")  # control: positions counted from the restored prefix
    add(drafter, "local", text.features[restored:], 10 - restored)
    local = small_drafts.rows_of(drafter, "local")
    assert torch.equal(local, rows[0][:, restored:]) == (restored == 0)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_w03_drafts_do_not_depend_on_the_batch(world: World, batch: int) -> None:
    """Fails where requests that never ran their prompt here share a slot: acceptance fell from 4.51 to 1.49 at batch 16."""
    drafter, requests = world.drafter(40), [f"gen {i}" for i in range(batch)]
    texts = [world.texts[i % len(world.texts)] for i in range(batch)]
    for i, request in enumerate(requests):  # their prompts were run elsewhere
        drafter.context.admit(request)
        drafter.context.skip_to(request, 3 + i % 7)
    for i, (request, text) in enumerate(zip(requests, texts, strict=True)):
        add(drafter, request, text.features, 1 + i % 5)
    pages = [page for request in requests for page in drafter.context.requests[request].held]
    assert len(set(pages)) == len(pages), "two live requests share a page"
    lengths = [drafter.context.length(request) for request in requests]
    anchors = [text.tokens[length] for text, length in zip(texts, lengths, strict=True)]
    found = propose(drafter, requests, anchors)
    for i, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        alone = world.alone(text, 3 + i % 7, length, length)
        assert torch.equal(found.hidden[i], alone.hidden[0]) and torch.equal(found.tokens[i], alone.tokens[0])
    before, live = pool_bits(drafter), set(pages)
    drafter.context.admit("padding")
    add_nothing = Segment("padding", 0, 3)
    drafter.extend([add_nothing], world.texts[0].features[:3])
    assert torch.equal(pool_bits(drafter), before) and not live & set(drafter.context.requests["padding"].held)


def test_w04_a_request_that_arrives_late_starts_at_its_position(world: World) -> None:
    """Fails where it starts at position 0, exposes rows that were never written, or hands over pages of the look-ahead."""
    drafter, text = world.drafter(12), world.texts[0]
    context = drafter.context
    context.admit("gen")
    context.skip_to("gen", 9)
    empty = propose(drafter, ["gen"], [text.tokens[9]])
    assert torch.equal(empty.hidden, world.alone(text, 0, 0, 9).hidden) and bool(empty.hidden.isfinite().all())
    assert not torch.equal(empty.hidden, world.alone(text, 0, 0, 0).hidden)  # control: position 0
    add(drafter, "gen", text.features, 2)
    view = context.view(["gen"])
    assert (view.context_start.tolist(), view.context_len.tolist()) == ([9], [11])
    assert torch.equal(propose(drafter, ["gen"], [text.tokens[11]]).hidden, world.alone(text, 9, 11, 11).hidden)
    context.admit("ctx")
    add(drafter, "ctx", text.features, 9)
    assert context.grow("ctx", 9 + 2 * PAGE)  # pages for rows to come are no history
    held = context.detach("ctx")
    manifest = held.ids[held.start // PAGE : -(-held.end // PAGE)]
    assert len(held.ids) == 5 and len(manifest) == 3
    rows = torch.stack(context.pool.views)[:, manifest].flatten(1, 2)
    assert bool(rows[:, :9].isfinite().all()) and bool(rows[:, 9:].isnan().all())


@pytest.mark.parametrize("end", ["finished", "kept", "aborted", "failed in a forward", "failed in a write"])
def test_w05_nothing_of_the_last_request_reaches_the_next(world: World, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a request begins with what the one before it left: 20 tokens, then 5 under the same name."""
    drafter, old, text = world.drafter(8), world.texts[0], world.texts[1]
    context = drafter.context
    context.admit("slot")
    add(drafter, "slot", old.features, 18)
    store = PrefixStore(context)
    if end == "kept":
        held = context.detach("slot")
        store.keep(KeptPrefix(old.tokens[:18], held.ids, held.start, None))
    elif end.startswith("failed"):
        where = "context_latents" if end.endswith("forward") else "rope"
        with monkeypatch.context() as patch, pytest.raises((RuntimeError, AttributeError)):
            patch.setattr(drafter.model, where, broken if where == "context_latents" else None)
            add(drafter, "slot", old.features, 2)
        assert context.length("slot") == 18 and context.view(["slot"]).context_len.tolist() == [18]
        add(drafter, "slot", old.features, 2)  # it can be tried again
        assert torch.equal(propose(drafter, ["slot"], [old.tokens[20]]).hidden, world.alone(old, 0, 20, 20).hidden)
    context.release("slot")
    context.release("slot")
    context.admit("slot")
    assert context.length("slot") == 0 and context.view(["slot"]).context_len.tolist() == [0]
    add(drafter, "slot", text.features, 5)
    found, fresh = propose(drafter, ["slot"], [text.tokens[5]]), world.alone(text, 0, 5, 5)
    assert all(torch.equal(getattr(found, name), getattr(fresh, name)) for name in ("tokens", "hidden", "logits"))
    context.release("slot")
    store.clear()
    assert context.allocator.num_free == 8


def broken(projected: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a forward that fails half-way")


def test_w06_padded_rows_and_idle_ranks_touch_no_page(world: World) -> None:
    """Fails where the padded number of rows is taken for the number of requests: 3 of 4 tokens padded to 16, and none."""
    drafter, model = world.drafter(12), world.model
    lengths = (7, 4, 9)
    for request, text in enumerate(world.texts[:3]):
        drafter.context.admit(request)
        add(drafter, request, text.features, lengths[request])
    before, width = pool_bits(drafter), 8
    ids = torch.full((width, 2), model.config.mask_token_id)
    ids[:3, 0] = torch.tensor([text.tokens[length] for text, length in zip(world.texts, lengths, strict=False)])
    view = drafter.context.view(range(3))
    start = torch.zeros(width, dtype=torch.int64)
    start[:3] = torch.tensor(lengths)
    table = torch.full((width, view.page_table.shape[1]), 10**6, dtype=torch.int32)  # nothing of padding may be looked at
    table[:3] = view.page_table
    rows = model.embed_tokens(ids)
    rows[3:] = torch.nan
    padded = model.draft_hidden(rows, start[:, None] + torch.arange(2), view.pages, table, start.int())
    assert padded.shape[:2] == (width, 2)
    for row, (text, length) in enumerate(zip(world.texts, lengths, strict=False)):
        assert torch.equal(padded[row], world.alone(text, 0, length, length).hidden[0])
    drafter.extend([], world.texts[0].features[:0])
    idle = propose(drafter, [], [])
    assert idle.tokens.shape == (0, NUM_DRAFTS) and torch.equal(pool_bits(drafter), before)


def test_w07_a_dummy_takes_no_page_and_a_full_pool_is_no_crash(world: World) -> None:
    """Fails where a pad dummy needs a page, stays behind, or where there is none for it and nobody looks."""
    drafter, text = world.drafter(3), world.texts[0]
    context = drafter.context
    context.admit("real")
    add(drafter, "real", text.features, 12)
    assert context.allocator.num_free == 0
    before = pool_bits(drafter)
    for _ in range(3):
        context.admit("dummy")
        found = propose(drafter, ["real", "dummy"], [text.tokens[12], 0])
        assert torch.equal(found.hidden[0], world.alone(text, 0, 12, 12).hidden[0]) and bool(found.hidden.isfinite().all())
        context.release("dummy")
        context.release("dummy")
        with pytest.raises(DSparkError, match="1 pages are required, 0 of 3 are free"):
            context.admit("dummy", 1)  # a refusal with its reason, not None
        assert list(context.requests) == ["real"] and torch.equal(pool_bits(drafter), before)
    context.release("real")
    assert context.allocator.num_free == 3


def test_w08_no_shape_and_no_page_depends_on_a_ranks_arithmetic(world: World) -> None:
    """Fails where values that may drift between ranks decide how many rows, pages or drafts there are."""
    ranks = [world.drafter(6) for _ in range(3)]
    drift = (0.0, 1e-3, torch.nan)
    text, plans = world.texts[0], []
    for drafter, by in zip(ranks, drift, strict=True):
        context, done, seen = drafter.context, 0, []
        context.admit("r")
        for count in (9, 1, 3, 2, 8, 4):
            seen.append((context.slide("r", done + count), context.allocator.num_free))
            drafter.extend([Segment("r", done, count)], text.features[done : done + count] + by)
            done += count
            proposal = propose(drafter, ["r"], [text.tokens[done]])
            view = context.view(["r"])
            seen.append((proposal.tokens.shape, proposal.hidden.shape, view.page_table.tolist(), view.context_len.tolist()))
            assert bool(((proposal.tokens >= 0) & (proposal.tokens < 32)).all())
        plans.append(seen)
    assert plans[0] == plans[1] == plans[2]
    hidden = [propose(drafter, ["r"], [text.tokens[27]]).hidden for drafter in ranks]
    assert not torch.equal(hidden[0], hidden[1])  # control: the drift was there


@pytest.mark.parametrize("confidence", [-20.0, 0.0, 20.0])
def test_w17_without_a_schedule_every_draft_is_verified(confidence: float) -> None:
    """Fails where an estimate shortens what is proposed or submitted though no schedule was asked for."""
    model = small_drafts.small_model()
    model.confidence_head.bias.data.fill_(confidence)
    drafter = small_drafts.small_drafter(model)
    for request, length in enumerate((5, 0, 9)):
        small_drafts.feed(drafter, request, small_drafts.taps(model, length, seed=length))
    proposal = drafter.propose(range(3), torch.tensor([3, 60, 100]), 4)
    assert proposal.tokens.shape == (3, 4) and proposal.confidence.shape == (3, 4)
    assert bool(((proposal.confidence >= 0) & (proposal.confidence <= 1)).all())
    request = Request(0, (1, 2), SamplingParams(max_new_tokens=9), frozenset(), None, computed=2, tokens=[5])
    request.drafts = proposal.tokens[0].tolist()
    assert request.next_rows(1) == [5, *proposal.tokens[0].tolist()]


def test_w17_acceptance_is_cumulative_for_any_batch() -> None:
    """Fails where a draft behind a rejected one counts, batch 1 is assumed, or nothing accepted means nothing committed."""
    right = torch.tensor([[7, 8, 9, 4], [7, 8, 9, 4], [7, 8, 9, 4]])
    drafts = torch.tensor([[7, 8, 0, 4], [0, 8, 9, 4], [7, 8, 9, 4]])
    logits = torch.nn.functional.one_hot(torch.cat((right, torch.full((3, 1), 5)), 1), 12).float()
    verdict = verify_greedy(logits, drafts)
    assert verdict.accepted.tolist() == [2, 0, 4]
    committed = [row[: n + 1].tolist() for row, n in zip(verdict.tokens, verdict.accepted.tolist(), strict=True)]
    assert committed == [[7, 8, 9], [7], [7, 8, 9, 4, 5]]
    assert (right == drafts).sum(1).tolist() == [3, 3, 4]  # control: without the cumulative rule
    assert NOT_WRITTEN not in committed[1]
