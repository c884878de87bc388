"""The work list of block_attention's sm90 schedule as arithmetic: what it covers, what it costs, how requests are cut."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernels.test_block_attention import BATCHES, merges_of, slot_of

from cute_kernels.block_attention import (
    config,
    plan,
)
from cute_kernels.reference import block_attention as reference

TOKENS = config.SM90.block_tokens
PLAN = {
    "block_tokens": TOKENS,
    "item_cost": config.SM90.item_cost,
    "min_quantum": config.SM90.min_quantum,
}


def planned(lengths: list[int], starts: list[int] | None, parts: int, rows: int = 7, **more: int) -> tuple[Any, Any]:
    requests = torch.full((len(lengths), 4), -7, dtype=torch.int32)
    boundaries = torch.full((parts + 1, 4), -7, dtype=torch.int32)
    first = torch.tensor(starts, dtype=torch.int32) if starts else None
    reference.plan_block_attention(
        torch.tensor(lengths, dtype=torch.int32),
        first,
        requests,
        boundaries,
        True,
        block_rows=rows,
        max_context=1 << 30,
        **PLAN,
        **more,
    )
    return requests, boundaries


def context_tiles(start: int, context: int) -> range:
    """Position that each tile of a context begins at."""
    base = start // TOKENS * TOKENS
    return range(base, start + context if context else base, TOKENS)


def positions(start: int, context: int, rows: int) -> list[list[int]]:
    """Tokens of every tile of a request, in the kernel's own words; the block's rows count down from -1."""
    found = [[p for p in range(t, t + TOKENS) if start <= p < start + context] for t in context_tiles(start, context)]
    return [*found, [-1 - row for row in range(rows)]]


def items_of(requests: torch.Tensor, boundaries: torch.Tensor) -> list[tuple[int, int, int, int, int]]:
    """(part, request, first tile, last tile + 1, tiles of the request)."""
    found, counts = [], [len(context_tiles(start, context)) + 1 for start, context, _, _ in requests.tolist()]
    for part, ((first, first_tile), (last, last_tile)) in enumerate(pairwise(boundaries[:, :2].tolist())):
        for request in range(first, last + (last_tile > 0)):
            begin = first_tile if request == first else 0
            found.append((part, request, begin, last_tile if request == last else counts[request], counts[request]))
    return found


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 5, 16, 132, 500])
@pytest.mark.parametrize("name", [name for name in BATCHES if name != "million"])
def test_every_token_is_in_one_tile_and_every_piece_is_merged_once(name: str, parts: int, windowed: bool) -> None:
    lengths = BATCHES[name]
    starts = [(11 * i) % 90 for i in range(len(lengths))] if windowed else None
    requests, boundaries = planned(lengths, starts, parts)
    items = items_of(requests, boundaries)
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for _, request, begin, end, tiles in items:
        assert 0 <= begin < end <= tiles
        spans.setdefault(request, []).append((begin, end, tiles))
    assert sorted(spans) == list(range(len(lengths)))
    for request, found in spans.items():
        start = starts[request] if starts else 0
        tokens = [t for tile in positions(*requests[request, :2].tolist(), 7) for t in tile]
        assert tokens == [*range(start, max(start, lengths[request])), *range(-1, -8, -1)]
        assert [begin for begin, _, _ in found] == [0, *(end for _, end, _ in found[:-1])]
        assert found[-1][1] == found[-1][2] and len(found) == int(requests[request, 3])
    pieces = [(r, slot_of(p, begin)) for p, r, begin, end, tiles in items if (begin, end) != (0, tiles)]
    assert [(request, slot) for request, slots in merges_of(requests, boundaries).items() for slot in slots] == pieces


def test_control_a_plan_of_the_other_schedule_does_not_cover_a_window() -> None:
    """Without `aligned`, a window from 63 to 65 has one tile; with it, one on each side of 64 and the block's."""
    requests, boundaries = planned([65], [63], 1)
    assert items_of(requests, boundaries) == [(0, 0, 0, 3, 3)]
    lengths, starts = torch.tensor([65], dtype=torch.int32), torch.tensor([63], dtype=torch.int32)
    reference.plan_block_attention(lengths, starts, requests, boundaries, block_rows=7, max_context=1 << 30, **PLAN)
    assert -(-(int(requests[0, 1]) + 7) // TOKENS) == 1


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("name", ["ragged", "many", "more-than-threads"])
def test_a_boundary_says_where_its_request_lies(name: str, joins: bool) -> None:
    """Fails where a part begins with another request's start or context than the one it names, or the end is not zeros."""
    starts = [(11 * i) % 90 for i in range(len(BATCHES[name]))]
    requests, boundaries = planned(BATCHES[name], starts, 132, joins=joins)
    known = [*requests[:, :2].tolist(), [0, 0]]
    assert boundaries[:, 2:].tolist() == [known[request] for request in boundaries[:, 0].tolist()]
    assert boundaries[-1].tolist() == [len(starts), 0, 0, 0]


Plan = tuple[torch.Tensor, torch.Tensor]


def contexts_of(tiles: list[int]) -> list[int]:
    """Lengths whose requests have so many tiles, the block's among them."""
    return [TOKENS * (n - 1) for n in tiles]


def fault(found: Plan, tiles: list[int]) -> str | None:
    """What is wrong with a list: every tile is in one part, in order, and a request knows its parts."""
    items = items_of(*found)
    done = [(request, tile) for _, request, begin, end, _ in items for tile in range(begin, end)]
    if done != [(request, tile) for request, n in enumerate(tiles) for tile in range(n)]:
        return "tiles"
    parts = [(request, first + i) for request, (_, _, first, pieces) in enumerate(found[0].tolist()) for i in range(pieces)]
    return None if parts == [(request, part) for part, request, *_ in items] else "parts"


def highest_cost(found: Plan) -> int:
    """Of a part, in tiles; every request that it works on costs item_cost more."""
    costs: Counter[int] = Counter()
    for part, _, begin, end, _ in items_of(*found):
        costs[part] += config.SM90.item_cost + end - begin
    return max(costs.values())


def is_separate(found: Plan) -> bool:
    """No part works on two requests."""
    return max(Counter(part for part, *_ in items_of(*found)).values()) == 1


def test_a_separate_list_costs_no_part_more_than_a_contiguous_may() -> None:
    """Fails where a piece is longer than quantum, a list loses a tile, or no random batch of several comes out separate."""
    draw, separate = random.Random(0), 0
    for _ in range(300):
        parts = draw.choice([1, 2, 5, 16, 66, 132])
        tiles = [draw.randint(1, draw.choice([2, 20, 200])) for _ in range(draw.randint(1, min(parts + 2, 40)))]
        found = planned(contexts_of(tiles), None, parts)
        assert fault(found, tiles) is None, (tiles, parts)
        contiguous = planned(contexts_of(tiles), None, parts, most_separate=0)
        assert fault(contiguous, tiles) is None, (tiles, parts)
        item_cost = config.SM90.item_cost
        quantum = max(config.SM90.min_quantum, -(-sum(item_cost + n for n in tiles) // parts))
        if not is_separate(found):
            assert torch.equal(found[0], contiguous[0]) and torch.equal(found[1], contiguous[1])
        else:
            separate += len(tiles) > 1 and not is_separate(contiguous)
            assert highest_cost(found) <= quantum + item_cost + quantum // plan.SLACK, (tiles, parts)
    assert separate > 30


@pytest.mark.parametrize("parts", [1, 2, 5, 16, 66, 132])
def test_equal_requests_are_cut_alike_and_hardly_ever_slower(parts: int) -> None:
    """Fails where equal requests that divide the parts share one, or where their longest piece is not the shortest possible."""
    for batch in {1, 2, 4, 8, 11, 16, 33, parts}:
        for n in (1, 2, 3, 17, 65, 129):
            found = planned(contexts_of([n] * batch), None, parts)
            assert fault(found, [n] * batch) is None
            contiguous = planned(contexts_of([n] * batch), None, parts, most_separate=0)
            least = config.SM90.item_cost + config.SM90.min_quantum
            known = highest_cost(contiguous)
            assert highest_cost(found) <= max(least, known + known // plan.SLACK), (batch, n)
            if parts % batch == 0:
                longest = max(config.SM90.min_quantum, -(-n * batch // parts))
                assert is_separate(found) and set(found[0][:, 3].tolist()) == {-(-n // longest)}, (batch, n)


@pytest.mark.parametrize(
    ("batch", "context", "parts", "pieces", "longest"),
    [
        (8, 8192, 16, 2, 65),
        (8, 1024, 16, 2, 9),
        (1, 1024, 16, 9, 2),
        (1, 8192, 132, 65, 2),
        (16, 8192, 16, 1, 129),
        (64, 8192, 132, 2, 65),
    ],
)
def test_shapes_of_the_benchmark_get_whole_parts(batch: int, context: int, parts: int, pieces: int, longest: int) -> None:
    """Fails where parts straddle requests, or where few requests are cut into longer pieces than the device likes."""
    found = planned([context] * batch, None, parts)
    assert found[0][:, 3].tolist() == [pieces] * batch
    assert found[0][:, 2].tolist() == [pieces * i for i in range(batch)]
    assert max(end - begin for _, _, begin, end, _ in items_of(*found)) == longest


def not_joined(found: Plan, tiles: list[int]) -> str | None:
    """What is wrong with a list of joined parts: every tile is in one part, pairs begin at even parts and hold one request."""
    items = items_of(*found)
    if [(r, t) for _, r, begin, end, _ in items for t in range(begin, end)] != [
        (r, t) for r, n in enumerate(tiles) for t in range(n)
    ]:
        return "tiles"
    for request, (_, _, first, pieces) in enumerate(found[0].tolist()):
        own = [part for part, of, *_ in items if of == request]
        count = -2 * pieces if pieces < 0 else pieces
        if own != list(range(first, first + count)):
            return "parts"
        if pieces < 0 and (first % 2 or any(of != request for part, of, *_ in items if part in own)):
            return "pairs"
    return None


def test_joined_parts_are_pairs_of_one_request() -> None:
    """Fails where a pair straddles requests, a tile is lost, or no random batch comes out joined. Without `joins` none does."""
    draw, joined = random.Random(1), 0
    for _ in range(600):
        parts, low = draw.choice([1, 2, 5, 16, 66, 132]), draw.choice([1, 1, 15])
        tiles = [draw.randint(low, draw.choice([2, 20]) + low) for _ in range(draw.randint(max(1, parts // 3), parts // 2 + 2))]
        found, plain = planned(contexts_of(tiles), None, parts, joins=True), planned(contexts_of(tiles), None, parts)
        assert not_joined(found, tiles) is None, (tiles, parts)
        assert not (plain[0][:, 3] < 0).any()
        if (found[0][:, 3] < 0).any():
            joined += 1
            quantum = max(config.SM90.min_quantum, -(-sum(config.SM90.item_cost + n for n in tiles) // parts))
            longest = max(end - begin for _, _, begin, end, _ in items_of(*found))
            assert config.may_join(len(tiles), parts) and longest <= quantum + quantum // plan.SLACK
        elif not config.may_join(len(tiles), parts):
            assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    assert joined > 30


@pytest.mark.parametrize(
    ("batch", "context", "parts", "pieces", "longest"),
    [
        (8, 8192, 16, -1, 65),
        (8, 1024, 16, -1, 9),
        (64, 8192, 132, -1, 65),
        (64, 1024, 132, -1, 9),
        (1, 1024, 16, 9, 2),
        (4, 8192, 132, 33, 4),
    ],
)
def test_shapes_of_the_benchmark_are_joined(batch: int, context: int, parts: int, pieces: int, longest: int) -> None:
    """Fails where requests of two parts leave pieces, where others are joined, or where joining lengthens a part."""
    found = planned([context] * batch, None, parts, joins=True)
    assert found[0][:, 3].tolist() == [pieces] * batch
    assert max(end - begin for _, _, begin, end, _ in items_of(*found)) == longest


def test_control_a_pair_of_two_requests_is_noticed() -> None:
    tiles = [9, 1, 9]
    requests, boundaries = planned(contexts_of(tiles), None, 6, joins=True)
    assert requests[:, 3].tolist() == [-1, 1, -1] and not_joined((requests, boundaries), tiles) is None
    assert boundaries[2:5, :2].tolist() == [[1, 0], [2, 0], [2, 0]]  # the second part of a request of one tile is empty
    lost = boundaries.clone()
    lost[1, 1] = 10
    assert not_joined((requests, lost), tiles) == "tiles"
    odd = requests.clone()
    odd[2, 2] = 3
    assert not_joined((odd, boundaries), tiles) == "parts"
    shared = boundaries.clone()
    shared[2, :2] = torch.tensor([0, 8])  # request 0 ends, and request 1 lies, in part 2
    shared[1, 1] = 4
    assert not_joined((torch.tensor([[0, 512, 0, -1], [0, 0, 2, 1], [0, 512, 4, -1]]), shared), tiles) == "parts"


def test_more_requests_than_parts_are_contiguous() -> None:
    """Fails where 64 equal requests in 16 parts are not 4 whole ones a part."""
    _, boundaries = planned([8192] * 64, None, 16)
    assert boundaries[:, :2].tolist() == [[4 * part, 0] for part in range(17)]


def test_control_a_list_without_a_tile_or_a_piece_is_noticed() -> None:
    tiles = [9, 9]
    requests, boundaries = planned(contexts_of(tiles), None, 4)
    assert fault((requests, boundaries), tiles) is None
    lost, shared = boundaries.clone(), boundaries.clone()
    lost[0, 1] = 1
    assert fault((requests, lost), tiles) == "tiles"
    shared[2, 1] = 1  # request 1 begins in a part of request 0
    assert fault((requests, shared), tiles) == "parts"
    fewer = requests.clone()
    fewer[1, 3] -= 1
    assert fault((fewer, boundaries), tiles) == "parts"
