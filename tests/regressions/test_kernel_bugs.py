"""Public bugs of kernels, their choice and their pools, each as the smallest case that shows it. Ids: see README.md.

Without the marker `gpu`, `cuda` is a name and launches are watched, not made. More of these bugs are held in tests/kernels.
"""

import logging
import re
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any

import gpu_drafts
import launches
import published
import pytest
import small_drafts
import torch
from launches import Launch, append_case, attention_case, call_all, chain_case, rope_case

from cute_kernels import cache, support
from cute_kernels.block_attention import BlockAttentionWorkspace, block_attention, num_parts, plan_block_attention
from cute_kernels.block_attention.config import BLOCK_M, Schedule, shape_reason
from cute_kernels.context_append import context_append
from cute_kernels.errors import KernelError
from cute_kernels.markov_chain import markov_chain
from cute_kernels.query_rope import query_rope
from cute_kernels.reference.block_attention import block_attention as twin
from trtllm_dspark.attention import cutedsl, policy, vanilla
from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.attention.policy import FAMILIES, Backend
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter
from trtllm_dspark.step import CapturedStep, StepBuffers

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
NARROW = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}  # what the kernels take, and quick on a CPU


def config(**changes: Any) -> DraftConfig:
    return DraftConfig.from_dict(published.tiny("mla", **(NARROW | changes)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    return launches.watch(monkeypatch)


# --- C21: one decision


def table_of_backends(out: dict[str, str]) -> tuple[dict[str, Backend], Callable[..., str | None]]:
    """(backends, self-check). out: backend -> why it is out: no device, a shape that it does not take, a wrong result."""
    operations = {name: Operations(vanilla.block_attention) for name in ("CUTEDSL", "TRTLLM", "VANILLA")}

    def reason_of(name: str) -> Callable[[DraftConfig, torch.device, DraftShape], str | None]:
        def reason(draft: DraftConfig, device: torch.device, shape: DraftShape) -> str | None:
            why = out.get(name)
            return None if why == "result" or (why == "shape" and shape.heads != 129) else why

        return reason

    def check(name: str, *arguments: object) -> str | None:
        return "result" if out.get(name) == "result" else None

    backends = {
        name: Backend(name, reason_of(name), lambda name=name: operations[name], checked=name != "VANILLA")
        for name in operations
    }
    return backends, check


OUT = [names for count in range(3) for names in combinations(("CUTEDSL", "TRTLLM"), count)]


@pytest.mark.parametrize("why", ["device", "shape", "result"])
@pytest.mark.parametrize("out", OUT, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_c21_preference_availability_and_shape_are_one_decision(family: str, out: tuple[str, ...], why: str) -> None:
    """Fails where a backend that the device, the shape or the self-check rules out is picked, or MLA falls to plain torch."""
    draft = DraftConfig.from_dict(published.tiny(family))
    backends, check = table_of_backends(dict.fromkeys(out, why))

    def resolve(requested: str, heads: int = 129) -> str:
        shape = DraftShape(BF16, 64, heads, 8)
        with_check = {"backends": backends, "check": check, "measure": lambda *arguments: 1.0}
        return policy.resolve_backend(draft, CUDA, requested, shape=shape, **with_check).name

    preferred = ("CUTEDSL", "TRTLLM") if family == "mla" else ("TRTLLM", "VANILLA")
    left = [name for name in preferred if name not in out]
    if left:
        assert resolve("AUTO") == left[0]
    else:
        with pytest.raises(DSparkError, match=rf"CUTEDSL: .*{why}.*TRTLLM: .*{why}"):
            resolve("AUTO")
    for name in FAMILIES[family].choices:
        if name in out:
            with pytest.raises(DSparkError, match=rf"attention_backend {name} was asked for .*{why}"):
                resolve(name)
        else:
            assert resolve(name) == name
    if why == "shape":  # control: another shape of the same draft is not ruled out
        assert resolve("AUTO", heads=128) == preferred[0]


def test_c21_what_the_reason_passes_the_kernels_take(launched: list[Launch]) -> None:
    """Fails where CUTEDSL is available for a draft or a shape that one of its kernels then refuses, or the reverse."""
    shape = DraftShape(BF16, 64, 6, 7)
    cases = [(config(), replace(shape, page_size=size)) for size in (1, 8, 16, 32, 48, 64, 128, 256)]
    cases += [(config(), replace(shape, dtype=dtype)) for dtype in (BF16, torch.float16, torch.float32)]
    cases += [(config(kv_lora_rank=c), shape) for c in (32, 64, 96, 448, 512, 576)]
    cases += [(config(qk_rope_head_dim=r), shape) for r in (8, 12, 48, 64, 72)]
    cases += [(config(markov_rank=rank), shape) for rank in (4, 8, 12, 256, 512, 520)]
    verdicts = set()
    for draft, at in cases:
        why = cutedsl.reason(draft, CUDA, at)
        try:
            call_all(draft, at, [at.page_size + 1])
            said = None
        except KernelError as error:
            said = str(error)
        assert (why is None) == (said is None), (draft, at, why, said)
        verdicts.add(why is None)
    assert verdicts == {True, False} and launched


def test_c21_the_model_reports_the_resolved_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the model tells the host AUTO, or another name than that of the backend it runs."""
    ours = Backend("CUTEDSL", lambda *arguments: None, lambda: Operations(vanilla.block_attention), checked=False)
    monkeypatch.setitem(policy.BACKENDS, "CUTEDSL", ours)
    for requested, device, name in (
        ("AUTO", CPU, "VANILLA"), ("VANILLA", CPU, "VANILLA"), ("AUTO", CUDA, "CUTEDSL"), ("VANILLA", CUDA, "VANILLA"),
    ):  # fmt: skip
        choice = MLADSparkForCausalLM.resolve_backend(config(), device, requested)
        model = MLADSparkForCausalLM(config(), backend=choice)
        assert model.dflash_attention_backend == model.backend.name == choice.name == name


# --- N02: rows of a block


@pytest.mark.parametrize(
    ("rows", "heads", "tiles", "flattened"),
    [(7, 16, 4, 7), (8, 6, 2, 8), (16, 1, 1, 16), (8, 64, 16, 16), (7, 96, 21, 21), (1, 128, 4, 4)],
)
def test_n02_a_token_is_read_once_for_a_tile_of_rows(
    rows: int, heads: int, tiles: int, flattened: int, launched: list[Launch]
) -> None:
    """Fails where a block is flattened into S requests of one row, each of which reads the whole context again."""
    lengths = [4096, 63, 0]
    block_attention(**attention_case(config(), DraftShape(BF16, 64, heads, rows), lengths))
    (attend,) = [call.operands for call in launched if call.kernel == "block_attention"]
    q, block, _, table, requests = attend[:5]
    assert q.shape == (3, rows * heads, 80) and block.shape == (3, rows, 80) and len(table) == len(requests) == 3
    assert requests[:, 1].tolist() == lengths  # tokens that each tile of a request's rows reads
    blocks = 1 << 20
    assert round(blocks / num_parts(rows, heads, blocks)) == tiles == -(-rows * heads // BLOCK_M)
    assert rows * -(-heads // BLOCK_M) == flattened  # control: the tiles of S requests of one row


@pytest.mark.gpu
def test_n02_every_row_sees_the_prefix_and_the_whole_block() -> None:
    """Fails where a row of a block sees only the rows before it. Control: a causal block, as in a verification."""
    case = gpu_drafts.attention_case([4096] * 16, rows=7, heads=16, loud=4)
    assert gpu_drafts.complaint(case, block_attention(**case)) is None
    rows = [twin(**case | {"q": case["q"][:, s : s + 1], "block_latents": case["block_latents"][:, : s + 1]}) for s in range(7)]
    assert gpu_drafts.complaint(case, torch.cat(rows, 1)) is not None


# --- N03: head counts


HEADS, ROWS = (1, 3, 6, 12, 24, 48, 96, 128, 129), tuple(range(1, 18))


def test_n03_the_predicate_is_exact(launched: list[Launch]) -> None:
    """Fails where a number of heads or rows passes the predicate and is then refused, or is refused without a reason."""
    draft = config()
    for heads, rows in product(HEADS, ROWS):
        shape, legal = DraftShape(BF16, 64, heads, rows), heads <= 128 and rows <= 16
        why = shape_reason(rows, heads)
        assert (why is None) == legal and cutedsl.reason(draft, CUDA, shape) == why
        case = attention_case(draft, shape, [5])
        launched.clear()
        if legal:
            block_attention(**case)
            assert launched[0].operands[0].shape[1] == rows * heads
        else:
            with pytest.raises(KernelError, match=f"(heads|rows) must be 1 to .*there are ({heads}|{rows})"):
                block_attention(**case)
            assert not launched
    for heads, rows in ((0, 8), (8, 0), (-1, 8)):
        assert shape_reason(rows, heads) is not None


GUARD = 64 * 1024  # elements before and behind a tensor


def guarded(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, guard: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor full of NaN, the memory around it and it)."""
    size = torch.Size(shape).numel()
    room = torch.full((size + 2 * GUARD,), guard, dtype=dtype, device=gpu_drafts.GPU)
    tensor = room[GUARD : GUARD + size].view(shape)
    return tensor.fill_(torch.nan), room


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (2, 3), (16, 1), (5, 6), (3, 11), (7, 9), (13, 127), (16, 128)])
def test_n03_rows_that_fill_up_a_tile_reach_nothing(rows: int, heads: int) -> None:
    """Fails where a shape that the predicate passes does not run, or where rows past S * H are read or written."""
    case = gpu_drafts.attention_case([0, 1, 65, 3000], rows, heads)
    q, _ = guarded(case["q"].shape, BF16, torch.nan)
    case["q"] = q.copy_(case["q"])
    made = BlockAttentionWorkspace.allocate(max_batch=4, block_rows=rows, heads=heads, value_width=512, device=gpu_drafts.GPU)
    shapes = {
        "out": ((4, rows, heads, 512), BF16),
        "lse": ((4, rows, heads), torch.float32),
        "partial_out": (made.partial_out.shape, torch.float32),
        "partial_lse": (made.partial_lse.shape, torch.float32),
    }
    tensors = {name: guarded(shape, dtype, 7.0) for name, (shape, dtype) in shapes.items()}
    plan = replace(made, partial_out=tensors["partial_out"][0], partial_lse=tensors["partial_lse"][0])
    plan_block_attention(case["context_len"], workspace=plan, max_context=1 << 20)
    out = block_attention(**case, plan=plan, out=tensors["out"][0], lse=tensors["lse"][0])
    assert gpu_drafts.complaint(case, out) is None and bool(tensors["lse"][0].isfinite().all())
    for name, (_, room) in tensors.items():
        assert bool((room[:GUARD] == 7).all()) and bool((room[-GUARD:] == 7).all()), name
    assert gpu_drafts.complaint(case, out.flip(0)) is not None  # control


# --- N04: views of a pool


def test_n04_a_pool_has_one_layout_and_another_is_named(launched: list[Launch]) -> None:
    """Fails where the documentation gives one number of dims and the check takes another, or a view is copied."""
    shape = DraftShape(BF16, 64, 6, 7)
    attend, append = attention_case(config(), shape, [65, 3]), append_case(config(), shape, 5)
    for function in (block_attention, context_append):
        assert "[num_pages, P, W]" in str(function.__doc__)
    block_attention(**attend)
    context_append(**append)
    given = {call.kernel: call.operands for call in launched}
    assert given["block_attention"][2].data_ptr() == attend["pages"].data_ptr()
    assert given["context_append"][5].data_ptr() == append["pools"][0].data_ptr()
    count = len(launched)
    with pytest.raises(KernelError, match=r"pages \[num_pages, P, W\], they are .* and \[\d+, 1, 64, 80\]"):
        block_attention(**attend | {"pages": attend["pages"].unsqueeze(1)})
    with pytest.raises(KernelError, match=r"pools must be \[num_pages, P, W\], the one of layer 0 is \[2, 1, 64, 80\]"):
        context_append(**append | {"pools": [view.unsqueeze(1) for view in append["pools"]]})
    layout = small_drafts.small_drafter(small_drafts.small_model()).context.pool.layout
    with pytest.raises(DSparkError, match=r"layer 0 must be \[3, 4, 40\] .* it is \[3, 1, 4, 40\]"):
        ContextPool(layout, [torch.zeros(3, 1, 4, 40)] * 2)
    assert len(launched) == count


def test_n04_the_hosts_five_dims_are_adapted() -> None:
    """Fails where the host's [num_pages, 1, 1, P, W] is taken for another layout. Control: its pages in another order."""
    model = small_drafts.small_model()
    drafter = small_drafts.small_drafter(model)
    small_drafts.feed(drafter, "a", small_drafts.taps(model, 9))
    view, embedded = drafter.context.view(["a"]), model.embed_tokens(torch.tensor([[3, 127, 127, 127]]))
    positions = 9 + torch.arange(4)[None]
    expected = model.draft_hidden(embedded, positions, view.pages, view.page_table, view.context_len)

    def host(table: torch.Tensor) -> torch.Tensor:
        interleaved = torch.stack(view.pages, 1)  # [num_pages, L, P, W]: pages of all layers side by side
        five = [interleaved[:, layer, None, None] for layer in range(2)]
        row = torch.tensor([0])
        return model.dflash_forward(embedded, positions, view.context_len, None, None, row, five, table)

    assert torch.equal(host(view.page_table), expected.flatten(0, 1))
    assert not torch.equal(host(view.page_table.flip(1)), expected.flatten(0, 1))


@pytest.mark.parametrize(
    "shape", [(3, 4, 40), (3, 1, 4, 40), (3, 2, 1, 4, 40), (3, 1, 2, 4, 40), (3, 1, 1, 4, 48), (3, 1, 1, 1, 4, 40)], ids=str
)
def test_n04_a_host_view_of_another_layout_is_refused_with_both(shape: tuple[int, ...]) -> None:
    """Fails where planes or heads beyond the first are dropped, or a view of other dims fails with no word of the layout."""
    model = small_drafts.small_model()
    one, row = torch.zeros(1, dtype=torch.int32), torch.tensor([0])
    with pytest.raises(DSparkError, match=rf"must be \[num_pages, 1, 1, P, 40\], layer 0 is {re.escape(str(list(shape)))}"):
        model.dflash_forward(
            torch.zeros(1, 4, 64), torch.zeros(1, 4).long(), one, None, None, row, [torch.zeros(shape)] * 2, one[None]
        )


# --- N06: padding rows of a captured step


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    """12 pages of numbers."""
    made = gpu_drafts.drafter(12)
    made.context.pool = gpu_drafts.pool(12, seed=1)
    return made


LIVE = (130, 5, 64)  # tokens of context
MAX_PAGES = 4
NEAR = 4e-2  # of two runs in bf16 whose matrix products are tiled otherwise; this draft in bf16 is 1.5e-2 from itself in fp32
FAR = 0.5


def fill(buffers: StepBuffers, lengths: tuple[int, ...], garbage: bool) -> list[int]:
    """Requests of these lengths, then padding. Each writes its last tokens but one, which was rejected. Returns the slots.

    garbage: padding as a step before has left it, where only its lengths and slots are set; else as `allocate` makes it.
    """
    batch, count = len(buffers.anchors), len(buffers.slots) // len(buffers.anchors)
    fresh = {"page_table": -1, "slots": -1}
    stale = {"anchors": 4095, "positions": 10**6, "context_start": 500, "taps": torch.nan, "tap_positions": 10**6, "slots": -1}
    for name, tensor in vars(buffers).items():
        tensor.fill_((stale if garbage else fresh).get(name, 0))
    if garbage:
        ids = torch.tensor([0, 10**6, -5, 2**31 - 1], dtype=torch.int32)
        buffers.page_table.copy_(ids.repeat(batch, 1))
    generator, slots = torch.Generator().manual_seed(0), []
    for b, length in enumerate(lengths):
        pages = torch.tensor([3 * b + 2, 3 * b, 3 * b + 1], dtype=torch.int32)[: -(-length // gpu_drafts.PAGE)]
        at = torch.arange(length - count, length).clamp(min=0)
        slot = pages[at // gpu_drafts.PAGE].long() * gpu_drafts.PAGE + at % gpu_drafts.PAGE
        slot[: max(count - length, 0) + 1] = -1
        own = slice(b * count, (b + 1) * count)
        buffers.anchors[b], buffers.positions[b] = 100 + b, length
        buffers.context_start[b], buffers.context_len[b] = 0, length
        buffers.page_table[b, : len(pages)] = pages
        buffers.taps[own] = torch.randn(count, buffers.taps.shape[1], generator=generator)
        buffers.tap_positions[own], buffers.slots[own] = at, slot
        slots += [int(s) for s in slot if s >= 0]
    return slots


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", range(1, 8))
def test_n06_a_captured_step_with_fewer_live_rows(drafter: Drafter, num_drafts: int) -> None:
    """Fails where a padding row of a graph (length 0, ids of no page or stale ones) crashes, writes, or reaches a live row."""
    context = drafter.context
    before = gpu_drafts.bits(context.pool)

    def captured(batch: int) -> CapturedStep:
        buffers = StepBuffers.allocate(drafter.model, batch, MAX_PAGES, rows=batch * (num_drafts + 1))
        views = context.pool.views
        return CapturedStep(drafter.model, drafter.lm_head, views, buffers, num_drafts, block_rows=num_drafts)

    def replay(step: CapturedStep, lengths: tuple[int, ...], garbage: bool = False, **changed: torch.Tensor) -> Any:
        for view, was in zip(context.pool.views, before, strict=True):
            view.view(torch.int16).copy_(was)
        slots = fill(step.buffers, lengths, garbage)
        for name, value in changed.items():
            getattr(step.buffers, name)[0] = value
        found = step.replay().first(len(step.buffers.anchors))
        written = (gpu_drafts.bits(context.pool) != before).any(-1).any(0).flatten().nonzero().flatten().tolist()
        assert written == sorted(slots)
        assert bool(found.hidden.isfinite().all()) and bool(found.confidence.isfinite().all())
        assert bool(((found.tokens >= 0) & (found.tokens < 4096)).all())
        return found

    wide = captured(4)
    for live in (1, 2, 3):
        alone = replay(captured(live), LIVE[:live])
        clean, stale = (replay(wide, LIVE[:live], garbage) for garbage in (False, True))
        for name in ("hidden", "tokens", "confidence"):
            assert torch.equal(getattr(clean, name)[:live], getattr(stale, name)[:live]), name
        for b in range(live):
            assert gpu_drafts.distance(clean.hidden[b], alone.hidden[b]) < NEAR
        as_padding = replay(wide, LIVE[:live], context_len=torch.tensor(0))  # control: a live row that loses its context
        assert gpu_drafts.distance(as_padding.hidden[0], alone.hidden[0]) > FAR


# --- N11: the cost of a call


def test_n11_nothing_that_varies_is_in_a_key(launched: list[Launch]) -> None:
    """Fails where batch, length, heads or rows are compiled in: each new one would stop a server for seconds."""
    draft = config()

    def keys() -> set[tuple[str, Any]]:
        found = {(call.kernel, call.settings) for call in launched}
        launched.clear()
        return found

    call_all(draft, DraftShape(BF16, 64, 6, 7), [5])
    first = keys()
    for heads, rows, lengths in product((1, 96), (1, 8), ([0], [1, 63, 900], [64] * 8)):
        call_all(draft, DraftShape(BF16, 64, heads, rows), lengths)
    again = keys()
    assert again == first and len(first) == 6
    settings = [given for _, given in again if given is not None and not isinstance(given, Schedule)]  # of tiles: constants
    names = {name for given in settings for name in vars(given)}
    assert not names & {"batch", "tokens", "length", "heads", "rows", "block_rows", "steps", "stream", "num_pages"}
    for batch in (9, 33, 64, 65, 200):
        markov_chain(**chain_case(draft, DraftShape(BF16, 64, 6, 7), batch))
    assert {key[1].groups for key in keys()} == {4, 8}  # and 1 above: three sizes, whatever the batch
    call_all(draft, DraftShape(BF16, 32, 6, 7), [5])  # control: the page size is compiled in
    assert keys() - again


@pytest.mark.gpu
def test_n11_a_call_is_cheap_for_the_host_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a call traces its kernel again (13 ms), or where another batch or length compiles it again (seconds)."""

    def calls(batch: int, length: int) -> dict[str, Callable[[], object]]:
        shape = DraftShape(BF16, gpu_drafts.PAGE, 12, 8)
        case = gpu_drafts.attention_case([length] * batch, shape.block_rows, shape.heads)
        plan = BlockAttentionWorkspace.allocate(max_batch=8, block_rows=8, heads=12, value_width=512, device=gpu_drafts.GPU)
        append = append_case(gpu_drafts.CONFIG, shape, 8 * batch, gpu_drafts.GPU)
        rope = rope_case(gpu_drafts.CONFIG, shape, batch, gpu_drafts.GPU)
        chain = chain_case(gpu_drafts.CONFIG, shape, batch, gpu_drafts.GPU)
        return {
            "plan": lambda: plan_block_attention(case["context_len"], workspace=plan, max_context=1 << 20),
            "block_attention": lambda: block_attention(**case, plan=plan),
            "context_append": lambda: context_append(**append),
            "query_rope": lambda: query_rope(**rope),
            "markov_chain": lambda: markov_chain(**chain),
        }

    def compiles(*arguments: object) -> object:
        raise AssertionError(f"compiled again: {arguments}")

    for call in calls(8, 500).values():
        call()
    monkeypatch.setattr(cache, "_build", compiles)
    held = set(cache._memory)
    for shapes in ([(8, 500)], list(product((1, 2, 7, 8), (0, 1, 63, 64, 900)))):
        times: dict[str, list[float]] = {}
        made = [calls(*shape) for shape in shapes]
        torch.cuda.synchronize()
        for _ in range(200 // len(shapes)):
            for name, call in (pair for some in made for pair in some.items()):
                start = time.perf_counter()
                call()
                times.setdefault(name, []).append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        middle = {name: round(median(values)) for name, values in times.items()}
        print(f"host time of a call, us: {middle}")
        assert all(us < 200 for us in middle.values()), middle
    assert set(cache._memory) == held


# --- N15: a half-overwritten compiler


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An environment whose wheels of the compiler are found before any other."""
    monkeypatch.setattr(support, "find_spec", lambda module: object())
    monkeypatch.syspath_prepend(str(tmp_path))
    support.toolkit_reason.cache_clear()
    yield tmp_path
    support.toolkit_reason.cache_clear()


def install(site: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> None:
    """A wheel's metadata, its RECORD, and its files over whatever is there."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    needed = "".join(f"Requires-Dist: {other}\n" for other in requires)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
    rows = [f"{folder.name}/RECORD,,"]
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    (folder / "RECORD").write_text("\n".join(rows) + "\n")


def test_n15_wheels_of_two_versions_are_named(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails where a stale wheel of the compiler beside a new one is found by the first kernel that does not compile."""
    pins = ("nvidia-cutlass-dsl-libs-base==4.8.1", 'nvidia-cutlass-dsl-libs-cu13==4.8.1; extra == "cu13"')
    install(site, "nvidia-cutlass-dsl", "4.8.1", {}, pins)
    install(site, "nvidia-cutlass-dsl-libs-base", "4.8.1", {"dsl/mma.py": "new"})
    with caplog.at_level(logging.INFO, logger=support.__name__):
        assert support.toolkit_reason() is None and support.toolkit_reason() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "compiler: nvidia-cutlass-dsl 4.8.1, nvidia-cutlass-dsl-libs-base 4.8.1"
    install(site, "nvidia-cutlass-dsl-libs-cu13", "4.5.0", {"dsl/old.py": "old"})
    support.toolkit_reason.cache_clear()
    reason = str(support.toolkit_reason())
    assert "nvidia-cutlass-dsl 4.8.1 needs nvidia-cutlass-dsl-libs-cu13 4.8.1, 4.5.0 is installed" in reason
    assert "pip uninstall -y nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-cu13, then" in reason


@pytest.mark.parametrize(
    ("on_disk", "whole"),
    [(("base", "base"), True), (("cu13", "cu13"), True), (("base", "cu13"), False), (("cu13", None), False)],
    ids=["base-last", "cu13-last", "mixed", "half-uninstalled"],
)
def test_n15_files_that_two_wheels_wrote_in_turn_are_named(site: Path, on_disk: tuple[str | None, ...], whole: bool) -> None:
    """Fails where one wheel's Python runs on another wheel's library. Control: where one wrote last, all is well."""
    libs, paths = ("base", "cu13"), ("dsl/mma.py", "dsl/ir.so")
    install(site, "nvidia-cutlass-dsl", "4.5.1", {}, tuple(f"nvidia-cutlass-dsl-libs-{lib}==4.5.1" for lib in libs))
    for lib in libs:
        own = {path: f"{lib} of {path}" for path in paths} | {"dsl/both.py": "the same", f"dsl/{lib}.py": "its own"}
        install(site, f"nvidia-cutlass-dsl-libs-{lib}", "4.5.1", own)
    for path, lib in zip(paths, on_disk, strict=True):
        if lib is None:
            (site / path).unlink()
        else:
            (site / path).write_text(f"{lib} of {path}")
    reason = support.toolkit_reason()
    if whole:
        assert reason is None
    else:
        for part in ("libs-base and nvidia-cutlass-dsl-libs-cu13 bring 2 files", "none of them is whole", str(site / "dsl")):
            assert part in str(reason)


# --- N20: dtype of what is written


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_n20_the_kernel_writes_no_pool_of_another_dtype(dtype: torch.dtype, launched: list[Launch]) -> None:
    """Fails where bf16 latents are launched at a pool of another dtype. Control: one of their own."""
    case = append_case(config(), DraftShape(BF16, 64, 6, 7), 5)
    with pytest.raises(KernelError, match=f"the pool of layer 0 must be .* of torch.bfloat16 .*, it is .* of {dtype}"):
        context_append(**case | {"pools": [view.to(dtype) for view in case["pools"]]})
    assert not launched
    context_append(**case)
    assert len(launched) == 1


# --- N22: another pool


def test_n22_a_pool_bound_later_takes_all_reads_and_writes() -> None:
    """Fails where a view or a pointer of the first pool is kept, as of one that was there to measure memory with."""
    model = small_drafts.small_model()
    drafter = small_drafts.small_drafter(model)
    first, features = drafter.context.pool, small_drafts.taps(model, 9)
    small_drafts.feed(drafter, "a", features, tokens=16)
    expected = drafter.propose(["a"], torch.tensor([3]), 4, keep_logits=True)
    drafter.context.release("a")
    second = ContextPool.allocate(first.layout, first.num_pages)
    for view in first.views:
        view.fill_(torch.inf)  # freed: whatever is there now
    drafter.context.pool = second
    small_drafts.feed(drafter, "a", features[:6], tokens=16)
    drafter.extend([Segment("a", 6, 3)], features[6:])
    found = drafter.propose(["a"], torch.tensor([3]), 4, keep_logits=True)
    assert all(bool(view.isinf().all()) for view in first.views)  # not written
    assert all(int((~view.isnan()).any(-1).sum()) == 9 for view in second.views)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    drafter.context.pool = first  # control: a read of the first pool shows
    assert not bool(drafter.propose(["a"], torch.tensor([3]), 4, keep_logits=True).logits.isfinite().all())


def test_n22_kernels_are_given_the_pointers_of_each_call(launched: list[Launch]) -> None:
    """Fails where a base pointer is taken once and kept for later calls of the same shape."""
    draft, shape = config(), DraftShape(BF16, 64, 6, 7)
    layout = PoolLayout.of(draft, page_size=64, dtype=BF16)
    context = DraftContext(ContextPool.allocate(layout, 3), context_append)
    context.admit("a", 64)
    for first in (0, 4):
        if first:
            context.pool = ContextPool.allocate(layout, 3)
        case = append_case(draft, shape, 4)
        context.append([Segment("a", first, 4)], *(case[name] for name in ("z", "norm_weight", "cos", "sin", "eps")))
        view = context.view(["a"])
        attend = attention_case(draft, shape, [4]) | {"pages": view.pages[1], "page_table": view.page_table}
        block_attention(**attend)
        given = {call.kernel: call.operands for call in launched}
        assert given["context_append"][5].data_ptr() == context.pool.views[0].data_ptr()
        assert given["block_attention"][2].data_ptr() == context.pool.views[1].data_ptr()
        launched.clear()


@pytest.mark.gpu
def test_n22_a_captured_step_is_not_replayed_over_another_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a graph goes on with the pool whose addresses it holds. Control: that graph, replayed all the same."""
    replays = []
    replay = CapturedStep.replay

    def counted(step: CapturedStep) -> Any:
        replays.append(step)
        return replay(step)

    monkeypatch.setattr(CapturedStep, "replay", counted)
    anchors = torch.tensor([5, 6], device=gpu_drafts.GPU)

    def bound(pool: ContextPool) -> Drafter:
        made = gpu_drafts.drafter(6)
        made.context.pool = pool
        for request, tokens in enumerate((130, 5)):
            made.context.admit(request, tokens)
            made.context.requests[request].advance(tokens)
        return made

    first, second = (gpu_drafts.pool(6, seed=seed) for seed in (1, 2))
    made = bound(first)
    made.capture(2, 4, 200)
    before = made.propose([0, 1], anchors, 4)
    assert len(replays) == 1
    for view in first.views:
        view.fill_(torch.nan)  # freed: whatever is there now
    made.context.pool = second
    after = made.propose([0, 1], anchors, 4)
    assert len(replays) == 1
    fresh = bound(second).propose([0, 1], anchors, 4)
    assert torch.equal(after.hidden, fresh.hidden) and torch.equal(after.tokens, fresh.tokens)
    assert bool(after.hidden.isfinite().all()) and gpu_drafts.distance(after.hidden, before.hidden) > FAR
    assert not bool(replay(replays[0]).hidden.isfinite().all())
    made.capture(2, 4, 200)  # and captured anew it is replayed again
    again = made.propose([0, 1], anchors, 4)
    assert len(replays) == 2 and gpu_drafts.distance(again.hidden, after.hidden) < NEAR
