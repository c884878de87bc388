"""Slots and reads from a host's page tables: one manager fills unused entries with -1, another with 0, and both are right.

The managers are stand-ins, for their tables only. How many tokens a request may hold comes from what it was granted.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.reference.context_append import context_append
from trtllm_dspark.attention.vanilla import block_attention
from trtllm_dspark.context.pages import NOT_WRITTEN, RequestPages, page_table, slot_vector

PAGE, NUM_PAGES, LAYERS, LATENT, ROTARY = 4, 10, 2, 8, 4
W, CANARY = LATENT + ROTARY, -777.0
FILLERS = {"python": -1, "cpp": 0}


class Manager:
    """Grants pages to requests; its table is as wide as its longest request may become.

    Args:
        filler: what unused entries hold. width: pages a row.
    """

    def __init__(self, filler: int, width: int = 5) -> None:
        self.filler, self.width = filler, width
        self.granted: dict[str, RequestPages] = {}

    def grant(self, request: str, ids: Sequence[int]) -> None:
        self.granted[request] = RequestPages(PAGE, list(ids))

    def table(self, order: Sequence[str]) -> torch.Tensor:
        found = page_table([self.granted[request] for request in order], filler=self.filler)
        wide = torch.full((len(order), self.width), self.filler, dtype=torch.int32)
        wide[:, : found.shape[1]] = found
        return wide

    def bound(self, order: Sequence[str]) -> torch.Tensor:
        return torch.tensor([self.granted[request].bound for request in order])

    def slots(self, order: Sequence[str], first: Sequence[int], rows: Sequence[int], at: Sequence[int]) -> torch.Tensor:
        rows_at = torch.tensor(rows, dtype=torch.int64), torch.tensor(at, dtype=torch.int64)
        return slot_vector(self.table(order), self.bound(order), torch.tensor(first), *rows_at, PAGE)


def pool() -> list[torch.Tensor]:
    return [torch.full((NUM_PAGES, PAGE, W), CANARY) for _ in range(LAYERS)]


def rows_of(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randn(count, ROTARY // 2, generator=generator)
    z = torch.randn(count, LAYERS, W, generator=generator)
    return {"z": z, "norm_weight": torch.ones(LAYERS, LATENT), "cos": angle.cos(), "sin": angle.sin()}


def touched(views: list[torch.Tensor]) -> list[int]:
    """Slots that no longer hold the canary in any layer."""
    return (torch.stack(views).flatten(1, 2) != CANARY).any(-1).any(0).nonzero().flatten().tolist()


# --- writes


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_rows_past_the_grant_are_not_written_and_page_zero_is_untouched(filler: int) -> None:
    manager = Manager(filler)
    manager.grant("a", [7, 8])
    for first in range(10):
        slots = manager.slots(["a"], [first], [0] * 4, range(first, first + 4))
        expected = [(7, 8)[p // PAGE] * PAGE + p % PAGE if p < 8 else NOT_WRITTEN for p in range(first, first + 4)]
        assert slots.tolist() == expected
        views = pool()
        context_append(**rows_of(4), slots=slots, pools=views, eps=1e-5)
        assert touched(views) == [slot for slot in expected if slot >= 0]


def test_control_a_bound_read_off_the_table_reaches_page_zero() -> None:
    """What the sign of an entry says: two pages where unused ones are -1, five where they are 0."""
    for filler, pages in ((-1, 2), (0, 5)):
        manager = Manager(filler)
        manager.grant("a", [7, 8])
        table = manager.table(["a"])
        bound = (table >= 0).sum(1) * PAGE
        slots = slot_vector(table, bound, torch.tensor([0]), torch.zeros(12, dtype=torch.int64), torch.arange(12), PAGE)
        assert bound.item() == pages * PAGE and (slots[8:].tolist() == [0, 1, 2, 3]) == (filler == 0)


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_page_zero_is_an_ordinary_page(filler: int) -> None:
    manager = Manager(filler)
    manager.grant("zero", [0])
    manager.grant("other", [3])
    slots = manager.slots(["other", "zero"], [0, 0], [1, 1, 0, 0, 1], [0, 1, 3, 4, 4])
    assert slots.tolist() == [0, 1, 15, NOT_WRITTEN, NOT_WRITTEN]


@given(st.data())
def test_both_managers_give_the_same_slots_and_only_granted_ones(data: st.DataObject) -> None:
    ids = data.draw(st.permutations(range(NUM_PAGES)))
    cut = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    order, managers = [f"r{i}" for i in range(len(cut))], [Manager(filler) for filler in FILLERS.values()]
    grants = {}
    for request, count in zip(order, cut, strict=True):
        grants[request], ids = ids[:count], ids[count:]
        for manager in managers:
            manager.grant(request, grants[request])
    first = data.draw(st.lists(st.integers(0, 12), min_size=len(order), max_size=len(order)))
    tokens = data.draw(st.lists(st.tuples(st.integers(0, len(order) - 1), st.integers(0, 30)), max_size=12, unique=True))
    rows, at = [row for row, _ in tokens], [position for _, position in tokens]
    found = [manager.slots(order, first, rows, at).tolist() for manager in managers]
    assert found[0] == found[1]
    for (row, position), slot in zip(tokens, found[0], strict=True):
        pages = grants[order[row]]
        written = first[row] <= position < len(pages) * PAGE
        assert slot == (pages[position // PAGE] * PAGE + position % PAGE if written else NOT_WRITTEN)


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_a_shared_prefix_is_never_written(filler: int) -> None:
    """Two requests hold page 5; both begin at position 6 of it, whatever rows a host passes."""
    manager = Manager(filler)
    manager.grant("a", [5, 1])
    manager.grant("b", [5, 2])
    rows, at = [0] * 8 + [1] * 8, [*range(8), *range(8)]
    slots = manager.slots(["a", "b"], [4, 6], rows, at)
    assert slots.tolist() == [NOT_WRITTEN] * 4 + [4, 5, 6, 7] + [NOT_WRITTEN] * 6 + [10, 11]
    views = pool()
    context_append(**rows_of(16), slots=slots, pools=views, eps=1e-5)
    assert all(bool((view[5] == CANARY).all()) for view in views)
    assert min(manager.slots(["a", "b"], [0, 0], rows, at).tolist()) >= 4  # control: without it page 5 would be written


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_a_page_that_was_given_up_is_not_written_whatever_its_entry_reads(filler: int) -> None:
    held = RequestPages(PAGE, [7, 8, 9], length=2, end=2)
    assert held.give_up_oldest() == 7 and held.writable_from == 4
    table, bound = page_table([held], filler=filler), torch.tensor([held.bound])
    at = torch.arange(2, 9)
    slots = slot_vector(table, bound, torch.tensor([held.writable_from]), torch.zeros_like(at), at, PAGE)
    assert slots.tolist() == [NOT_WRITTEN] * 2 + [32, 33, 34, 35, 36]
    assert held.slots(0, 6) == [NOT_WRITTEN] * 4 + [32, 33]
    held.advance(9)
    assert (held.start, held.end, held.suppressed) == (4, 9, 2)


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_a_row_shorter_than_the_grant_has_no_slot_past_its_end(filler: int) -> None:
    table = torch.tensor([[7, 8], [6, filler]], dtype=torch.int32)
    at = torch.tensor([7, 8, 11, 3, 4])
    slots = slot_vector(table, torch.tensor([12, 4]), torch.tensor([0, 0]), torch.tensor([0, 0, 0, 1, 1]), at, PAGE)
    assert slots.tolist() == [35, NOT_WRITTEN, NOT_WRITTEN, 27, NOT_WRITTEN]
    nothing = slot_vector(table[:, :0], torch.tensor([12, 4]), torch.tensor([0, 0]), torch.tensor([0]), torch.tensor([0]), PAGE)
    assert nothing.tolist() == [NOT_WRITTEN]


def test_slots_are_the_same_with_any_integer_types() -> None:
    manager = Manager(0)
    manager.grant("a", [7, 8])
    expected = manager.slots(["a"], [1], [0] * 5, range(5)).tolist()
    narrow = (t.int() for t in (manager.bound(["a"]), torch.tensor([1])))
    assert slot_vector(manager.table(["a"]).long(), *narrow, torch.zeros(5).long(), torch.arange(5), PAGE).tolist() == expected


# --- reads


@pytest.mark.parametrize("poison", [torch.nan, 1e30])
def test_reads_through_both_tables_are_equal_and_see_granted_rows_only(poison: float) -> None:
    generator = torch.Generator().manual_seed(1)
    grants, lengths, found = {"a": [7, 8], "b": [0], "c": []}, [6, 4, 0], []
    views = torch.full((NUM_PAGES, PAGE, W), poison)
    for ids, length in zip(grants.values(), lengths, strict=True):
        for position in range(length):
            views[ids[position // PAGE], position % PAGE] = torch.randn(W, generator=generator)
    q, block = torch.randn(3, 2, 2, W, generator=generator), torch.randn(3, 2, W, generator=generator)
    for filler in FILLERS.values():
        manager = Manager(filler)
        for request, ids in grants.items():
            manager.grant(request, ids)
        order = list(grants)
        length = torch.minimum(torch.tensor(lengths), manager.bound(order)).int()
        found.append(block_attention(q, block, views, manager.table(order), length, scale=0.3, value_width=LATENT))
    assert torch.equal(*found) and bool(found[0].isfinite().all())
    control = block_attention(
        q, block, views, Manager.table(manager, order), torch.tensor([8, 4, 0]).int(), scale=0.3, value_width=LATENT
    )
    assert not torch.equal(control[0], found[0][0])  # control: two rows more of "a" would have been seen


# --- context_append: one shape, whatever is written


def test_a_step_without_slots_leaves_the_pool_as_it_was() -> None:
    for fill in (CANARY, torch.nan):
        views = [torch.full((NUM_PAGES, PAGE, W), fill) for _ in range(LAYERS)]
        before = [view.clone() for view in views]
        context_append(**rows_of(5), slots=torch.full((5,), NOT_WRITTEN), pools=views, eps=1e-5)
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(views, before, strict=True))


def test_no_tokens_leave_the_pool_as_it_was() -> None:
    views = pool()
    context_append(**rows_of(0), slots=torch.empty(0, dtype=torch.int64), pools=views, eps=1e-5)
    assert touched(views) == []


@pytest.mark.parametrize("slots", [[39, -1, 0], [-1, -1, 17], [5, -1, -1], [-1, 0, -1], [0, -2, 39]], ids=str)
def test_rows_without_a_slot_change_nothing_and_the_others_are_right(slots: list[int]) -> None:
    """Rows without a slot repeat the write of the highest one: its row must be its own, whichever writes last."""
    given = rows_of(3)
    views, alone = pool(), pool()
    context_append(**given, slots=torch.tensor(slots), pools=views, eps=1e-5)
    for t, slot in enumerate(slots):
        if slot >= 0:
            one = {k: v if k == "norm_weight" else v[t : t + 1] for k, v in given.items()}
            context_append(**one, slots=torch.tensor([slot]), pools=alone, eps=1e-5)
    assert touched(views) == sorted(slot for slot in slots if slot >= 0)
    assert all(torch.equal(a, b) for a, b in zip(views, alone, strict=True))


def test_poison_in_a_row_without_a_slot_stays_out() -> None:
    given = rows_of(4)
    given["z"][1] = torch.nan
    given["z"][3] = torch.inf
    views = pool()
    context_append(**given, slots=torch.tensor([8, -1, 3, -1]), pools=views, eps=1e-5)
    assert touched(views) == [3, 8] and all(bool(view.isfinite().all()) for view in views)


def test_slots_of_either_width_and_interleaved_pools() -> None:
    given, plain = rows_of(3), pool()
    context_append(**given, slots=torch.tensor([4, -1, 9]), pools=plain, eps=1e-5)
    memory = torch.full((NUM_PAGES, LAYERS, PAGE, W), CANARY)  # one page of all layers, then the next
    context_append(**given, slots=torch.tensor([4, -1, 9], dtype=torch.int32), pools=memory.unbind(1), eps=1e-5)
    assert torch.equal(memory.transpose(0, 1), torch.stack(plain))


def test_no_tensor_shape_depends_on_the_slots() -> None:
    """What a captured graph replays: the same operations on the same shapes, whatever is written. No boolean indexing."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            shape = tuple(out.shape) if isinstance(out, torch.Tensor) else None
            seen.append((str(func), shape))
            return out

    runs = []
    for slots in ([4, 9, 17], [-1, -1, -1], [39, -1, 0]):
        seen: list[tuple[str, tuple[int, ...] | None]] = []
        tensor, views, given = torch.tensor(slots), pool(), rows_of(3)
        with Record():
            context_append(**given, slots=tensor, pools=views, eps=1e-5)
        runs.append(seen)
    assert runs[0] == runs[1] == runs[2] and len(runs[0]) > 10
    names = {name for name, _ in runs[0]}
    assert not any(word in name for name in names for word in ("nonzero", "_local_scalar_dense", "masked_select", "item"))
