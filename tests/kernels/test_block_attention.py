"""block_attention: the twin against dense fp64 and VANILLA, the work list as arithmetic, and the kernel against the twin."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from cute_kernels.arch import ARCHES
from cute_kernels.block_attention import (
    BlockAttentionConfig,
    BlockAttentionWorkspace,
    block_attention,
    config,
    num_parts,
    plan,
    plan_block_attention,
    reason,
    workspace_shapes,
)
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.reference import block_attention as reference
from trtllm_dspark.attention import vanilla

C, R = 512, 64
SCALE = 192**-0.5
CPU = torch.device("cpu")


def make(
    lengths: list[int],
    *,
    starts: list[int] | None = None,
    rows: int = 7,
    heads: int = 3,
    page_size: int = 16,
    value: int = C,
    rotary: int = R,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    shared: int = 0,
    garbage: tuple[int, ...] = (-1, 10**6),
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of a call: shuffled pages, NaN wherever no live token lies, garbage in table entries that are not live.

    shared: so many leading pages of the table are the same for all requests.
    """
    generator = torch.Generator(device).manual_seed(seed)
    width, first = value + rotary, starts or [0] * len(lengths)
    live = [-(-n // page_size) for n in lengths]
    common = min([shared, *live])
    num_pages = common + sum(n - common for n in live) + 3
    free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).to(device)
    table = torch.tensor(garbage, dtype=torch.int32, device=device).repeat(len(lengths), max(live) // 2 + 2)
    pages = torch.full((num_pages, page_size, width), torch.nan, dtype=dtype, device=device)
    flat, taken = pages.view(-1, width), common
    for b, (start, stop) in enumerate(zip(first, lengths, strict=True)):
        own = live[b] - common
        ids = torch.cat((free[:common], free[taken : taken + own]))
        taken += own
        table[b, start // page_size : live[b]] = ids[start // page_size :].int()
        position = torch.arange(start, max(start, stop), device=device)
        slots = ids[position // page_size] * page_size + position % page_size
        fresh = flat[slots, 0].isnan()  # a shared page is filled once
        rows_of = torch.randn(len(slots), width, generator=generator, device=device).to(dtype)
        flat[slots[fresh]] = rows_of[fresh]
    return {
        "q": torch.randn(len(lengths), rows, heads, width, generator=generator, device=device).to(dtype),
        "block_latents": torch.randn(len(lengths), rows, width, generator=generator, device=device).to(dtype),
        "pages": pages,
        "page_table": table,
        "context_len": torch.tensor(lengths, dtype=torch.int32, device=device),
        "context_start": torch.tensor(starts, dtype=torch.int32, device=device) if starts else None,
        "scale": SCALE,
        "value_width": value,
    }


def latents_of(case: dict[str, Any], b: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, W]: the context of request b, gathered token by token's address, then its block."""
    start = 0 if case["context_start"] is None else int(case["context_start"][b])
    page_size = case["pages"].shape[1]
    position = torch.arange(start, max(start, int(case["context_len"][b])), device=case["q"].device)
    slots = case["page_table"][b, position // page_size].long() * page_size + position % page_size
    return torch.cat((case["pages"].flatten(0, 1)[slots], case["block_latents"][b])).to(dtype)


def plain(case: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Plain torch, all of it in one dtype: with fp64 the truth, with the kernel's own dtype the error to stay near."""
    found = []
    for b, q in enumerate(case["q"].to(dtype)):
        keys = latents_of(case, b, dtype)
        found.append((case["scale"] * (q @ keys.T)).softmax(-1) @ keys[:, : case["value_width"]])
    return torch.stack(found)


# ------------------------------------------------------------------------------------------------------------------ twin
LENGTHS = [[0], [1], [64], [0, 5, 130, 64, 63]]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_twin_equals_dense_fp64(lengths: list[int], page_size: int) -> None:
    case = make(lengths, page_size=page_size)
    out, lse = reference.block_attention(**case, return_lse=True)
    torch.testing.assert_close(out.double(), plain(case, torch.float64), rtol=1e-5, atol=1e-5)
    for b in range(len(lengths)):
        scores = SCALE * case["q"][b].double() @ latents_of(case, b, torch.float64).T
        torch.testing.assert_close(lse[b].double(), scores.exp().sum(-1).log2(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("starts", [None, [0, 3, 128, 70, 0]], ids=["whole", "windowed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_twin_equals_vanilla(starts: list[int] | None, dtype: torch.dtype) -> None:
    case = make([0, 5, 130, 64, 63], starts=starts, dtype=dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(reference.block_attention(**case), vanilla.block_attention(**case), rtol=2 * eps, atol=1e-5)


def test_twin_reads_nothing_past_the_context() -> None:
    case = make([0, 5, 64])
    for filler in (torch.nan, torch.inf, 1e30):
        pages = torch.where(case["pages"].isnan(), filler, case["pages"])
        assert torch.equal(reference.block_attention(**{**case, "pages": pages}), reference.block_attention(**case))


def test_twin_reads_zeros_from_a_live_page_that_does_not_exist() -> None:
    case = make([40])
    zeroed = case["pages"].clone()
    zeroed[case["page_table"][0, 1].long()] = 0.0
    for page in (-1, case["pages"].shape[0], 10**6):
        table = case["page_table"].clone()
        table[0, 1] = page
        found = reference.block_attention(**{**case, "page_table": table})
        assert torch.equal(found, reference.block_attention(**{**case, "pages": zeroed}))


def test_twin_clamps_a_context_to_its_table() -> None:
    case = make([32])
    case["page_table"] = case["page_table"][:, :2]
    longer = {**case, "context_len": torch.tensor([33], dtype=torch.int32)}
    assert torch.equal(reference.block_attention(**longer), reference.block_attention(**case))
    below = {**case, "context_len": torch.tensor([-5], dtype=torch.int32)}
    empty = {**case, "context_len": torch.tensor([0], dtype=torch.int32)}
    assert torch.equal(reference.block_attention(**below), reference.block_attention(**empty))


# ------------------------------------------------------------------------------------------------------------- work list
BATCHES = {
    "one-empty": [0],
    "one-short": [100],
    "one-long": [200_000],
    "million": [1_000_000],
    "padding": [0] * 9,
    "ragged": [0, 1, 63, 64, 65, 4096, 200_000, 31, 25, 24],
    "many": [(37 * i * i) % 3000 for i in range(256)],
    "more-than-threads": [(53 * i) % 700 for i in range(700)],
    "equal": [8192] * 8,
    "as-many-as-parts": [700] * 132,
}


def planned(lengths: list[int], parts: int, rows: int = 7, starts: list[int] | None = None, **more: int) -> tuple[Any, Any]:
    requests = torch.full((len(lengths), 4), -7, dtype=torch.int32)
    boundaries = torch.full((parts + 1, 4), -7, dtype=torch.int32)
    start = torch.tensor(starts, dtype=torch.int32) if starts else None
    more = {"block_rows": rows, "max_context": 1 << 30, **more}
    reference.plan_block_attention(torch.tensor(lengths, dtype=torch.int32), start, requests, boundaries, **more)
    return requests, boundaries


def items_of(requests: torch.Tensor, boundaries: torch.Tensor, rows: int) -> list[tuple[int, int, int, int, int]]:
    """What the blocks of each part do, in the kernel's own words: (part, request, first tile, last tile + 1, tiles)."""
    found, bounds = [], boundaries.tolist()
    for part, ((first, first_tile, *_), (last, last_tile, *_)) in enumerate(pairwise(bounds)):
        for request in range(first, last + (last_tile > 0)):
            tiles = -(-(int(requests[request, 1]) + rows) // config.BLOCK_N)
            begin = first_tile if request == first else 0
            end = last_tile if request == last else tiles
            found.append((part, request, begin, end, tiles))
    return found


def slot_of(part: int, begin: int) -> int:
    return 2 * part + (begin == 0)


def merges_of(requests: torch.Tensor, boundaries: torch.Tensor) -> dict[int, list[int]]:
    """What the combine does: request -> slots, in the kernel's own words."""
    found: dict[int, list[int]] = {}
    for part in range(1, len(boundaries) - 1):
        request, tile, *_ = boundaries[part].tolist()
        if tile > 0:
            first, pieces = requests[request, 2:].tolist()
            if part == first + 1:
                assert request not in found
                found[request] = [2 * (first + i) + (i == 0) for i in range(pieces)]
    return found


@pytest.mark.parametrize("parts", [1, 2, 5, 16, 132, 500])
@pytest.mark.parametrize("name", BATCHES)
def test_every_tile_is_done_once_and_every_piece_is_merged_once(name: str, parts: int) -> None:
    requests, boundaries = planned(BATCHES[name], parts)
    items = items_of(requests, boundaries, 7)
    covered: dict[int, list[tuple[int, int]]] = {}
    for _, request, begin, end, tiles in items:
        assert 0 <= begin < end <= tiles
        covered.setdefault(request, []).append((begin, end))
    assert sorted(covered) == list(range(len(requests)))
    for request, spans in covered.items():
        tiles = -(-(BATCHES[name][request] + 7) // config.BLOCK_N)
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])], spans
        assert spans[-1][1] == tiles
        assert len(spans) == int(requests[request, 3])
    pieces = [(r, slot_of(p, begin)) for p, r, begin, end, tiles in items if (begin, end) != (0, tiles)]
    assert not pieces or max(Counter(slot for _, slot in pieces).values()) == 1
    assert all(slot < 2 * parts for _, slot in pieces)
    merged = [(request, slot) for request, slots in merges_of(requests, boundaries).items() for slot in slots]
    assert merged == pieces


@pytest.mark.parametrize("parts", [5, 16, 132])
@pytest.mark.parametrize("name", BATCHES)
def test_parts_are_equal(name: str, parts: int) -> None:
    requests, boundaries = planned(BATCHES[name], parts)
    tiles = Counter()
    for part, _, begin, end, _ in items_of(requests, boundaries, 7):
        tiles[part] += end - begin
    total = sum(config.ITEM_COST - (-(n + 7) // config.BLOCK_N) for n in BATCHES[name])
    assert max(tiles.values()) <= max(config.MIN_QUANTUM, -(-total // parts))


def test_lengths_and_starts_that_no_table_holds_are_clamped() -> None:
    requests, _ = planned([100, -5, 90, 100, 100], 4, starts=[-3, 0, 20, 200, 64], max_context=80)
    assert requests[:, :2].tolist() == [[0, 80], [0, 0], [20, 60], [200, 0], [64, 16]]


def emulate(case: dict[str, Any], parts: int, drop: int | None = None) -> torch.Tensor:
    """The kernels' own arithmetic, in fp64: tile by tile with a running maximum, pieces into slots, slots merged."""
    batch, rows, heads, _ = case["q"].shape
    requests = torch.zeros(batch, 4, dtype=torch.int32)
    boundaries = torch.zeros(parts + 1, 4, dtype=torch.int32)
    reference.plan_block_attention(
        case["context_len"], case["context_start"], requests, boundaries, block_rows=rows, max_context=1 << 30
    )
    out = torch.full((batch, rows * heads, case["value_width"]), torch.nan, dtype=torch.float64)
    partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    scale_log2 = case["scale"] * math.log2(math.e)
    for part, request, begin, end, tiles in items_of(requests, boundaries, rows):
        latents = latents_of(case, request, torch.float64)
        q = case["q"][request].double().flatten(0, 1)
        top, weight, total = torch.full((len(q), 1), -torch.inf).double(), 0.0, 0.0
        for tile in range(begin, end):
            tokens = latents[tile * config.BLOCK_N : (tile + 1) * config.BLOCK_N]
            scores = q @ tokens.T
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            shrink, p = torch.exp2((top - new) * scale_log2), torch.exp2((scores - new) * scale_log2)
            weight, total, top = weight * shrink + p.sum(-1, keepdim=True), total * shrink + p @ tokens[:, : out.shape[-1]], new
        if begin == 0 and end == tiles:
            out[request] = total / weight
        else:
            partial[slot_of(part, begin)] = (total / weight, top * scale_log2 + weight.log2())
    for request, slots in merges_of(requests, boundaries).items():
        used = [partial[slot] for slot in slots[:drop]]
        lse = torch.stack([piece[1] for piece in used])
        share = torch.exp2(lse - lse.amax(0))
        out[request] = (share * torch.stack([piece[0] for piece in used])).sum(0) / share.sum(0)
    return out.view(batch, rows, heads, -1)


@pytest.mark.parametrize("starts", [None, [0, 3, 128, 40, 0, 600]], ids=["whole", "windowed"])
@pytest.mark.parametrize("parts", [1, 3, 11, 40])
def test_split_and_merged_is_dense(parts: int, starts: list[int] | None) -> None:
    case = make([0, 5, 130, 64, 63, 900], starts=starts, value=64, rotary=16)
    torch.testing.assert_close(emulate(case, parts), plain(case, torch.float64), rtol=1e-12, atol=1e-12)


def test_control_a_lost_piece_is_noticed() -> None:
    case = make([900], value=64, rotary=16)
    assert float((emulate(case, 5, drop=-1) - plain(case, torch.float64)).abs().max()) > 1e-2


# ------------------------------------------------------------------------------------------------- configuration, errors
def test_twin_and_kernel_plan_with_the_same_numbers() -> None:
    assert reference.plan_block_attention.__kwdefaults__ == {
        "block_tokens": config.BLOCK_N,
        "item_cost": config.ITEM_COST,
        "min_quantum": config.MIN_QUANTUM,
        "most_separate": plan.PLAN_THREADS,
        "most_tried": plan.PLAN_WARPS,
        "joins": config.PORTABLE.joins,
    }
    assert plan.SLACK == 32  # as the twin has it


@pytest.mark.parametrize("arch", ARCHES)
def test_shared_memory_fits_every_part(arch: str) -> None:
    published = BlockAttentionConfig(C, R, 64, "bfloat16")
    assert published.reason() is None
    assert published.shared_bytes == 92_160
    assert published.shared_bytes + 1024 <= ARCHES[arch].shared_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float32"}, "dtype must be bfloat16 or float16, it is float32"),
        ({"page_size": 48}, "page size must be one of 16, 32, 64, 128, it is 48"),
        ({"value_width": 96}, "value_width must be a multiple of 64 up to 512, it is 96"),
        ({"value_width": 1024}, "it is 1024"),
        ({"rotary": 0}, "it is by 0"),
        ({"rotary": 12}, "it is by 12"),
        ({"rotary": 128}, "it is by 128"),
    ],
    ids=str,
)
def test_an_illegal_configuration_says_why(change: dict[str, Any], said: str) -> None:
    assert said in (replace(BlockAttentionConfig(C, R, 64, "bfloat16"), **change).reason() or "")


@pytest.mark.parametrize("num_sms", [20, 108, 132, 148])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (8, 8), (8, 64), (7, 96), (16, 128), (5, 12), (12, 128)])
def test_parts_fill_the_device(rows: int, heads: int, num_sms: int) -> None:
    parts, row_tiles = num_parts(rows, heads, num_sms), -(-rows * heads // config.BLOCK_M)
    assert parts >= 1
    waves = -(-parts * row_tiles // num_sms)
    assert waves <= config.MAX_WAVES
    assert parts * row_tiles / (waves * num_sms) > 0.75
    shapes = workspace_shapes(3, rows, heads, C, num_sms)
    assert shapes["boundaries"] == (parts + 1, 4)
    assert shapes["partial_out"] == (2 * parts, rows * heads, C)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: {"q": c["q"][0]}, r"q must be \[B, S, H, W\]"),
        (lambda c: {"pages": c["pages"].unsqueeze(1)}, r"pages \[num_pages, P, W\], they are .*\[\d+, 1, 16, 576\]"),
        (lambda c: {"pages": c["pages"].half()}, r"layer 3: pages must be .* of torch.bfloat16 on cpu, it is .* torch.float16"),
        (lambda c: {"pages": c["pages"][..., :512]}, r"pages must be \[\d+, 16, 576\]"),
        (lambda c: {"block_latents": c["block_latents"][:, :6]}, r"block_latents must be \[2, 7, 576\]"),
        (lambda c: {"page_table": c["page_table"].long()}, "page_table must be .* torch.int32 on cpu, it is .* torch.int64"),
        (lambda c: {"page_table": c["page_table"][:1]}, r"page_table must be \[2, \d+\]"),
        (lambda c: {"context_len": c["context_len"].long()}, r"context_len must be \[2\] of torch.int32"),
        (lambda c: {"context_len": c["context_len"][:1]}, r"context_len must be \[2\]"),
        (lambda c: {"q": c["q"].to("meta")}, "block_latents must be .* on meta, it is .* on cpu"),
        (lambda c: {"q": c["q"].transpose(1, 2).contiguous().transpose(1, 2)}, "S and H of q must fold into one dim"),
        (lambda c: {"q": misaligned(c["q"])}, "rows of q must be 16-byte aligned; .* it starts 2 bytes past"),
        (lambda c: {"scale": 0.0}, "a scale above 0 is required, it is 0.0"),
        (lambda c: {"scale": math.nan}, "a scale above 0 is required, it is nan"),
        (lambda c: {"pages": misaligned(c["pages"])}, "rows of pages must be 16-byte aligned"),
        (lambda c: {"block_latents": c["block_latents"].repeat(1, 1, 2)[..., ::2]}, "last dim of block_latents must be cont"),
        (lambda c: {"pages": c["pages"].repeat(1, 1, 2)[..., :576]}, "a page must be contiguous, strides are"),
        (lambda c: {"page_table": c["page_table"].repeat(1, 2)[:, ::2]}, "last dim of page_table must be contiguous"),
    ],
)
def test_a_bad_argument_is_named_before_any_launch(change: Any, said: str) -> None:
    case = make([5, 20], dtype=torch.bfloat16)
    with pytest.raises(KernelError, match=said):
        block_attention(**{**case, **change(case)}, layer=3)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"heads": 129}, "heads must be 1 to 128, there are 129"),
        ({"rows": 17}, "block rows must be 1 to 16, there are 17"),
        ({"page_size": 8}, "page size must be one of 16, 32, 64, 128, it is 8"),
        ({"value": 96}, "value_width must be a multiple of 64"),
        ({"dtype": torch.float32}, "dtype must be bfloat16 or float16, it is float32"),
        ({}, "needs a CUDA device, this one is cpu|not installed"),
    ],
    ids=str,
)
def test_a_legal_call_that_no_kernel_covers_says_why(shape: dict[str, Any], said: str) -> None:
    case = make([5], **{"dtype": torch.bfloat16, **shape})
    with pytest.raises(UnsupportedKernelError, match=f"layer 2: .*({said}).*Use cute_kernels.reference.block_attention"):
        block_attention(**case, layer=2)
    assert reason(case["q"], case["pages"], case["value_width"]) is not None


def test_a_plan_says_what_is_wrong_with_its_lengths() -> None:
    workspace = small_workspace(4)
    lengths = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(KernelError, match=r"at most 4 requests fit the workspace, 5 came"):
        plan_block_attention(lengths, workspace=workspace, max_context=100)
    with pytest.raises(KernelError, match=r"context_len must be \[4\] of torch.int32 on cpu"):
        plan_block_attention(lengths[:4].long(), workspace=workspace, max_context=100)
    with pytest.raises(KernelError, match=r"context_start must be \[4\] of torch.int32"):
        plan_block_attention(lengths[:4], lengths[:3], workspace=workspace, max_context=100)
    with pytest.raises(KernelError, match="context_len must be contiguous"):
        plan_block_attention(torch.zeros(8, dtype=torch.int32)[::2], workspace=workspace, max_context=100)
    with pytest.raises(UnsupportedKernelError, match="heads must be 1 to 128"):
        BlockAttentionWorkspace.allocate(max_batch=1, block_rows=7, heads=0, value_width=C, device=CPU)


def small_workspace(max_batch: int, value: int = C) -> BlockAttentionWorkspace:
    return BlockAttentionWorkspace.allocate(
        max_batch=max_batch, block_rows=7, heads=3, value_width=value, device=CPU, num_sms=12
    )


# ------------------------------------------------------------------------------------------------------------------- ops
def op_arguments(case: dict[str, Any], workspace: BlockAttentionWorkspace) -> tuple[Any, ...]:
    q = case["q"]
    return (
        *(case[name] for name in ("q", "block_latents", "pages", "page_table")),
        workspace.requests[: q.shape[0]],
        workspace.boundaries,
        workspace.partial_out,
        workspace.partial_lse,
        q.new_zeros(*q.shape[:3], case["value_width"]),
        torch.zeros(q.shape[:3]),
        case["scale"],
    )


def test_ops_pass_torchs_own_check() -> None:
    case = make([5, 70], value=64, rotary=16)
    case["pages"] = case["pages"].nan_to_num(0.0)  # the check compares operands before and after
    workspace = small_workspace(2, value=64)
    for buffer in (workspace.requests, workspace.boundaries, workspace.partial_out, workspace.partial_lse):
        buffer.zero_()
    plan_arguments = (case["context_len"], None, workspace.requests, workspace.boundaries, 7, 1000)
    torch.library.opcheck(torch.ops.trtllm_dspark.plan_block_attention.default, plan_arguments)
    plan_block_attention(case["context_len"], workspace=workspace, max_context=1000)
    arguments = op_arguments(case, workspace)
    torch.library.opcheck(torch.ops.trtllm_dspark.block_attention.default, arguments)
    torch.ops.trtllm_dspark.block_attention(*arguments)
    assert torch.equal(arguments[-3], reference.block_attention(**case))


def test_ops_run_on_fake_cuda_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    case, workspace = make([5, 70], dtype=torch.bfloat16), small_workspace(2)
    arguments = op_arguments(case, workspace)
    with FakeTensorMode():
        fakes = [torch.empty(a.shape, dtype=a.dtype, device="cuda") if isinstance(a, torch.Tensor) else a for a in arguments]
        assert torch.ops.trtllm_dspark.block_attention(*fakes) is None
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
        assert torch.ops.trtllm_dspark.plan_block_attention(lengths, None, fakes[4], fakes[5], 7, 100) is None
    assert fakes[-3].device.type == "cuda"


# ------------------------------------------------------------------------------------------------------------------- gpu
@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda", 0)


def run(case: dict[str, Any], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel into outputs that hold NaN. Without a plan the portable one, unless another is named; None: the fastest."""
    if "plan" not in more:
        more.setdefault("schedule", "portable")
    shape, where = case["q"].shape[:3], case["q"].device
    out = torch.full((*shape, case["value_width"]), torch.nan, dtype=case["q"].dtype, device=where)
    lse = torch.full(shape, torch.nan, device=where)
    return block_attention(**case, out=out, lse=lse, return_lse=True, **more)  # type: ignore[return-value]


def wide(case: dict[str, Any]) -> dict[str, Any]:
    return {**case, **{k: case[k].float() for k in ("q", "block_latents", "pages")}}


def complaint(case: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None = None) -> str | None:
    """None where the error against the fp32 twin is at most twice that of plain torch in the same dtype, plus rounding."""
    truth, truth_lse = reference.block_attention(**wide(case), return_lse=True)
    if not bool(out.isfinite().all()):
        return f"{int((~out.isfinite()).sum())} elements are not finite"
    baseline, found = plain(case, case["q"].dtype).float() - truth, out.float() - truth
    rounding = torch.finfo(case["q"].dtype).eps / 2 * float(truth.abs().max())
    if float(found.abs().max()) > 2 * float(baseline.abs().max()) + rounding:
        return f"error {float(found.abs().max()):.2e}, plain torch {float(baseline.abs().max()):.2e}"
    if float(found.square().mean().sqrt()) > 2 * float(baseline.square().mean().sqrt()) + rounding / 16:
        return f"rms error {float(found.square().mean().sqrt()):.2e}, plain torch {float(baseline.square().mean().sqrt()):.2e}"
    if lse is not None and not torch.allclose(lse, truth_lse, rtol=1e-5, atol=1e-4):
        return f"lse is off by {float((lse - truth_lse).abs().max()):.2e}"
    return None


CONTEXTS = [0, 1, 63, 64, 65, 4096]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 5, 7, 8])
def test_kernel_equals_twin(device: torch.device, rows: int, page_size: int) -> None:
    for heads in (4, 8, 12, 16, 64, 96):
        case = make(CONTEXTS, rows=rows, heads=heads, page_size=page_size, dtype=torch.bfloat16, device=device, seed=heads)
        assert complaint(case, *run(case)) is None, heads


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("rows", "heads"), [(8, 64), (7, 96), (8, 8), (1, 4)])
def test_a_long_context(device: torch.device, rows: int, heads: int, page_size: int) -> None:
    case = make([200_000], rows=rows, heads=heads, page_size=page_size, dtype=torch.bfloat16, device=device)
    assert complaint(case, *run(case)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1 << 17, 300_001, 1 << 19, 1_000_000])
def test_n21_long_contexts_on_few_pages(device: torch.device, length: int) -> None:
    """Fails where a context of 131,072 tokens to a million is cut, faults or is merged wrongly. Control: a hundredth less."""
    case = make([4096, 4096], rows=8, heads=8, page_size=64, dtype=torch.bfloat16, device=device)
    case["page_table"] = case["page_table"][:, :64].repeat(1, 245)  # 245 times the same 64 pages
    case["context_len"].fill_(length)
    out, lse = run(case)
    assert complaint(case, out, lse) is None
    case["context_len"].sub_(length // 100)  # on repeated pages the sum of exponentials shows it, out does not
    assert complaint(case, out, lse) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0, 10])
def test_a_ragged_batch_of_256(device: torch.device, shared: int) -> None:
    lengths = [(37 * i * i) % 3000 for i in range(256)]
    if shared:
        lengths = [n + 320 for n in lengths]
    case = make(lengths, rows=8, heads=16, page_size=32, dtype=torch.bfloat16, device=device, shared=shared)
    assert complaint(case, *run(case)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_another_geometry(device: torch.device, dtype: torch.dtype, rotary: int) -> None:
    value = 64 if rotary == 16 else 512
    case = make(CONTEXTS, rows=7, heads=4, page_size=16, value=value, rotary=rotary, dtype=dtype, device=device)
    assert complaint(case, *run(case)) is None


@pytest.mark.gpu
def test_sharp_scores(device: torch.device) -> None:
    case = make(CONTEXTS, rows=7, heads=12, dtype=torch.bfloat16, device=device)
    case["q"] = case["q"] * 8
    assert complaint(case, *run(case)) is None


@pytest.mark.gpu
def test_windows(device: torch.device) -> None:
    case = make(
        [0, 5, 130, 64, 4096, 4096, 70],
        starts=[0, 3, 128, 64, 1, 4000, 500],
        rows=7,
        heads=12,
        page_size=16,
        dtype=torch.bfloat16,
        device=device,
    )
    assert complaint(case, *run(case)) is None
    assert complaint({**case, "context_start": case["context_start"] + 1}, run(case)[0]) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [1, 7, 40, 132, 1000])
def test_any_number_of_parts(device: torch.device, num_sms: int) -> None:
    case = make([4096, 0, 31, 700, 24, 25], rows=8, heads=8, page_size=64, dtype=torch.bfloat16, device=device)
    plan = BlockAttentionWorkspace.allocate(max_batch=9, block_rows=8, heads=8, value_width=C, device=device, num_sms=num_sms)
    for buffer in (plan.requests, plan.boundaries):
        buffer.fill_(1 << 30)
    for buffer in (plan.partial_out, plan.partial_lse):
        buffer.fill_(torch.nan)
    plan_block_attention(case["context_len"], workspace=plan, max_context=1 << 20)
    assert complaint(case, *run(case, plan=plan)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 5, 16, 66, 132, 500])
@pytest.mark.parametrize("name", BATCHES)
def test_the_device_plans_what_the_twin_plans(device: torch.device, name: str, parts: int) -> None:
    for starts in (None, [(11 * i) % 90 for i in range(len(BATCHES[name]))]):
        expected = planned(BATCHES[name], parts, rows=8, starts=starts, max_context=150_000)
        plan = BlockAttentionWorkspace.allocate(
            max_batch=1000, block_rows=8, heads=4, value_width=64, device=device, num_sms=parts
        )
        assert plan.parts == parts
        plan_block_attention(
            torch.tensor(BATCHES[name], dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device) if starts else None,
            workspace=plan,
            max_context=150_000,
        )
        assert torch.equal(plan.requests[: len(BATCHES[name])].cpu(), expected[0])
        assert torch.equal(plan.boundaries.cpu(), expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_poison_that_is_not_read_changes_nothing(device: torch.device, page_size: int) -> None:
    case = make([0, 5, 130, 64, 1000], rows=7, heads=8, page_size=page_size, dtype=torch.bfloat16, device=device)
    clean = {**case, "pages": case["pages"].nan_to_num(0.0)}
    clean["page_table"] = case["page_table"].clamp(0, case["pages"].shape[0] - 1)
    before = {name: case[name].clone() for name in ("q", "block_latents", "pages", "page_table")}
    for found, expected in zip(run(case), run(clean), strict=True):
        assert torch.equal(found, expected)
    for name, tensor in before.items():
        assert torch.equal(case[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.gpu
def test_a_live_page_that_does_not_exist_reads_as_zeros(device: torch.device) -> None:
    case = make([200, 64], rows=7, heads=8, page_size=16, dtype=torch.bfloat16, device=device)
    zeroed = case["pages"].clone()
    zeroed[case["page_table"][0, 1].long()] = 0.0
    for page in (-1, -(2**31), case["pages"].shape[0], 2**31 - 1):
        table = case["page_table"].clone()
        table[0, 1] = page
        assert torch.equal(run({**case, "page_table": table})[0], run({**case, "pages": zeroed})[0])


@pytest.mark.gpu
def test_a_length_past_the_table_is_clamped(device: torch.device) -> None:
    case = make([32, 40], rows=7, heads=8, page_size=16, dtype=torch.bfloat16, device=device)
    case["page_table"] = case["page_table"][:, :3].contiguous()
    beyond = {**case, "context_len": torch.tensor([32, 10**6], dtype=torch.int32, device=device)}
    case["context_len"][1] = 48
    case["pages"] = beyond["pages"] = case["pages"].nan_to_num(0.5)
    for found, expected in zip(run(beyond), run(case), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_strided_operands(device: torch.device) -> None:
    case = make([0, 5, 300], rows=7, heads=8, page_size=32, dtype=torch.bfloat16, device=device)
    batch, num_pages = 3, case["pages"].shape[0]
    q = torch.full((batch + 1, 7, 8, C + R + 16), torch.nan, dtype=torch.bfloat16, device=device)[1:, :, :, 8 : 8 + C + R]
    block = torch.full((batch, 9, 2, C + R), torch.nan, dtype=torch.bfloat16, device=device)[:, 2:, 1]
    pool = torch.full((num_pages, 5, 32, C + R), torch.nan, dtype=torch.bfloat16, device=device)[:, 3]
    table = torch.full((batch, 2 * case["page_table"].shape[1]), 10**6, dtype=torch.int32, device=device)
    table = table[:, : case["page_table"].shape[1]]
    strided = {"q": q, "block_latents": block, "pages": pool, "page_table": table}
    for name, view in strided.items():
        view.copy_(case[name])
    for found, expected in zip(run({**case, **strided}), run(case), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("empty", ["batch", "table", "pool"])
def test_empty_operands(device: torch.device, empty: str) -> None:
    case = make([0, 0], rows=7, heads=8, page_size=16, dtype=torch.bfloat16, device=device)
    if empty == "batch":
        sliced = {name: case[name][:0] for name in ("q", "block_latents", "page_table", "context_len")}
        assert run({**case, **sliced})[0].shape == (0, 7, 8, C)
        return
    case.update({"page_table": case["page_table"][:, :0]} if empty == "table" else {"pages": case["pages"][:0]})
    assert complaint(case, *run(case)) is None


@pytest.mark.gpu
def test_a_step_in_a_graph_follows_changed_lengths_tables_and_starts(device: torch.device) -> None:
    shape = {"rows": 7, "heads": 8, "page_size": 64, "dtype": torch.bfloat16, "device": device}
    steps = [
        make([4000, 0, 65, 1], starts=[0, 0, 0, 0], seed=1, **shape),
        make([0, 0, 0, 0], starts=[0, 0, 0, 0], seed=2, **shape),
        make([64, 3000, 4096, 17], starts=[3, 2900, 0, 16], seed=3, **shape),
    ]
    names = ("q", "block_latents", "pages", "page_table", "context_len", "context_start")
    room = {name: torch.Size(max(step[name].shape[d] for step in steps) for d in range(steps[0][name].dim())) for name in names}
    held = {name: torch.zeros(room[name], dtype=steps[0][name].dtype, device=device) for name in names}
    plan = BlockAttentionWorkspace.allocate(max_batch=4, block_rows=7, heads=8, value_width=C, device=device)
    outs = [torch.empty(4, 7, 8, C, dtype=torch.bfloat16, device=device) for _ in range(2)]
    lses = [torch.empty(4, 7, 8, device=device) for _ in range(2)]

    def step() -> None:
        planned = plan_block_attention(held["context_len"], held["context_start"], workspace=plan, max_context=4096)
        for layer in range(2):  # the second layer's queries are the first's, negated
            q = held["q"] if layer == 0 else -held["q"]
            arguments = {**held, "q": q, "scale": SCALE, "value_width": C}
            block_attention(**arguments, layer=layer, plan=planned, out=outs[layer], lse=lses[layer])

    step()  # warms up: nothing is compiled or loaded under capture
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()  # does not wait for the device anywhere
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in steps:
        for name in names:
            held[name].fill_(torch.nan if held[name].is_floating_point() else -1)
            held[name][tuple(slice(n) for n in case[name].shape)] = case[name]
        for tensor in (*outs, *lses, plan.partial_out, plan.partial_lse):
            tensor.fill_(torch.nan)
        plan.requests.fill_(1 << 30)
        plan.boundaries.fill_(1 << 30)
        graph.replay()
        torch.cuda.synchronize()
        assert complaint(case, outs[0], lses[0]) is None
        assert complaint({**case, "q": -case["q"]}, outs[1], lses[1]) is None


@pytest.mark.gpu
def test_a_kernel_that_was_never_loaded_is_refused_under_capture(device: torch.device) -> None:
    case = make([5], rows=7, heads=8, page_size=16, value=448, dtype=torch.bfloat16, device=device)
    held = torch.empty(1, 7, 8, 448, dtype=torch.bfloat16, device=device)
    plan = BlockAttentionWorkspace.allocate(max_batch=1, block_rows=7, heads=8, value_width=448, device=device)
    plan_block_attention(case["context_len"], workspace=plan, max_context=100)
    torch.cuda.synchronize()
    with pytest.raises(KernelError, match="block_attention must be compiled before a CUDA graph is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            held.zero_()
            block_attention(**case, plan=plan, out=held)


@pytest.mark.gpu
def test_the_current_stream_is_followed(device: torch.device) -> None:
    case = make([900], rows=8, heads=8, page_size=64, dtype=torch.bfloat16, device=device)
    run(case)
    late = {**case, "q": torch.zeros_like(case["q"])}
    torch.cuda.synchronize()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late["q"].copy_(case["q"])
        found = run(late)
    side.synchronize()
    assert complaint(case, *found) is None


@pytest.mark.gpu
def test_plans_of_another_shape_are_refused(device: torch.device) -> None:
    case = make([5], rows=7, heads=8, dtype=torch.bfloat16, device=device)
    plan = BlockAttentionWorkspace.allocate(max_batch=1, block_rows=8, heads=8, value_width=C, device=device)
    with pytest.raises(KernelError, match=r"\(7, 8, 512\) and 1 requests .* it is for \(8, 8, 512\)"):
        block_attention(**case, plan=plan)
    with pytest.raises(KernelError, match=r"out must be \[1, 7, 8, 512\]"):
        block_attention(**case, out=case["q"][..., :256])
    with pytest.raises(KernelError, match="out must be contiguous"):
        block_attention(**case, out=case["q"][..., :C])


@pytest.mark.gpu
@pytest.mark.parametrize("mistake", ["one token short", "swapped tables", "causal block", "half the rotary part"])
def test_control_a_wrong_answer_is_noticed(device: torch.device, mistake: str) -> None:
    case = make([64, 65], rows=7, heads=8, page_size=16, dtype=torch.bfloat16, device=device)
    wrong = dict(case)
    if mistake == "one token short":
        wrong["context_len"] = case["context_len"] - 1
    elif mistake == "swapped tables":
        wrong["context_len"] = torch.full_like(case["context_len"], 64)
        wrong["page_table"] = case["page_table"].flip(0).contiguous()
    elif mistake == "causal block":
        wrong["block_latents"] = case["block_latents"].clone()
        wrong["block_latents"][:, -1] = 0.0
    else:
        wrong["q"] = case["q"].clone()
        wrong["q"][..., C + R // 2 :] = 0.0
    assert complaint(case, run(wrong)[0]) is not None
    assert complaint(case, *run(case)) is None
