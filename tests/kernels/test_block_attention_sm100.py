"""The sm100 schedule of block_attention: where it is a candidate, what its program holds, and on Blackwell kernel against twin.

No Blackwell GPU has run the last part yet. It is skipped wherever the device is not sm_100.
"""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.schedules import (
    check_a_graph_that_follows_lengths,
    check_a_live_page_that_does_not_exist,
    check_poison_that_is_not_read,
    check_runs_agree_to_the_bit,
    poisoned_workspace,
)
from kernels.test_block_attention import BATCHES, CONTEXTS, CPU, C, R, complaint, make, run

from cute_kernels.arch import ARCHES
from cute_kernels.block_attention import (
    BlockAttentionConfig,
    BlockAttentionWorkspace,
    candidates,
    config,
    num_parts,
    pick_schedule,
    plan_block_attention,
    sm100,
    workspace_shapes,
)
from cute_kernels.errors import UnsupportedKernelError
from cute_kernels.reference import block_attention as reference
from cute_kernels.support import toolkit_reason

PAGES = config.SM100_PAGE_SIZES
PUBLISHED = BlockAttentionConfig(C, R, 64, "bfloat16")
TOKENS = config.SM100.block_tokens
needs_compiler = pytest.mark.skipif(toolkit_reason() is not None, reason=f"compiler: {toolkit_reason()}")


# ------------------------------------------------------------------------------------------------------------- selection
@pytest.mark.parametrize("arch", ARCHES)
def test_it_is_a_candidate_on_blackwell_and_nowhere_the_first(arch: str) -> None:
    """Fails where a schedule that no GPU has run is taken without a trial."""
    takes: tuple[dict[str, Any], ...] = ({}, {"page_size": 32}, {"page_size": 128}, {"dtype": "float16"})
    refuses: tuple[dict[str, Any], ...] = ({"page_size": 16}, {"value_width": 448}, {"rotary": 16})
    for change in takes:
        taken = candidates(replace(PUBLISHED, **change), arch)
        assert taken == {"sm_90a": ("sm90",), "sm_100a": ("portable", "sm100")}.get(arch, ("portable",))
        assert pick_schedule(replace(PUBLISHED, **change), arch) == taken[0] != "sm100"
    for change in refuses:
        assert candidates(replace(PUBLISHED, **change), arch) == ("portable",)


@pytest.mark.parametrize(
    ("change", "arch", "said"),
    [
        ({}, "sm_90a", "needs sm_100a, this is sm_90a"),
        ({}, "sm_120a", "needs sm_100a, this is sm_120a"),
        ({"page_size": 16}, "sm_100a", "needs pages of 32, 64, 128 tokens, they have 16"),
        ({"value_width": 448}, "sm_100a", "needs c = 512 and r = 64, they are 448 and 64"),
        ({"dtype": "float32"}, "sm_100a", "dtype must be bfloat16 or float16"),
    ],
)
def test_a_configuration_that_it_does_not_take_says_why(change: dict[str, Any], arch: str, said: str) -> None:
    wrong = replace(PUBLISHED, **change)
    assert said in (wrong.sm100_reason(arch) or "") and wrong.reason_of("sm100", arch) == wrong.sm100_reason(arch)
    with pytest.raises(UnsupportedKernelError, match="Use the portable schedule"):
        sm100.compile_for(wrong, arch)


@pytest.mark.parametrize("num_sms", [1, 7, 132, 148, 160])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (8, 8), (8, 64), (7, 96), (16, 128), (5, 12)])
def test_parts_fill_the_pairs_of_the_device(rows: int, heads: int, num_sms: int) -> None:
    """Fails where a part is counted as one block: two share each of its tiles."""
    parts, row_tiles = num_parts(rows, heads, num_sms, config.SM100), -(-rows * heads // 128)
    pairs = max(num_sms // 2, 1)
    waves = -(-parts * row_tiles // pairs)
    assert parts >= 1
    if pairs >= 16:
        assert waves <= config.MAX_WAVES and parts * row_tiles / (waves * pairs) > 0.75


def test_pieces_are_rows_as_the_plain_merge_reads_them() -> None:
    shapes = workspace_shapes(3, 8, 12, C, 148, config.SM100)
    assert shapes["partial_out"] == (2 * 74, 96, C) and shapes["partial_lse"] == (2 * 74, 96)


def planned(lengths: list[int], starts: list[int], workspace: BlockAttentionWorkspace) -> tuple[torch.Tensor, torch.Tensor]:
    """What the twin plans with tiles of 128."""
    requests, boundaries = torch.empty(len(lengths), 4, dtype=torch.int32), torch.empty_like(workspace.boundaries, device=CPU)
    reference.plan_block_attention(
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        requests,
        boundaries,
        True,
        block_rows=workspace.block_rows,
        max_context=1 << 20,
        block_tokens=128,
        item_cost=config.SM100_ITEM_COST,
        min_quantum=config.MIN_QUANTUM,
    )
    return requests, boundaries


def tokens_of(requests: torch.Tensor, boundaries: torch.Tensor, rows: int) -> dict[int, list[int]]:
    """Request -> tokens in the order in which parts walk them, tiles as `sm100_tiles` counts them; the block's from -1 down."""
    found: dict[int, list[int]] = {}
    for (first, first_tile), (last, last_tile) in pairwise(boundaries[:, :2].tolist()):
        for request in range(first, last + (last_tile > 0)):
            start, context = requests[request, :2].tolist()
            context_tiles = (start + context + TOKENS - 1) // TOKENS - start // TOKENS if context else 0
            end = last_tile if request == last else context_tiles + 1
            for tile in range(first_tile if request == first else 0, end):
                base = (start // TOKENS + tile) * TOKENS
                live = [t for t in range(base, base + TOKENS) if start <= t < start + context]
                found.setdefault(request, []).extend(live if tile < context_tiles else [-1 - row for row in range(rows)])
    return found


@pytest.mark.parametrize("num_sms", [1, 6, 32, 148])
@pytest.mark.parametrize("name", [name for name in BATCHES if name not in ("million", "one-long")])
def test_every_token_is_walked_once(name: str, num_sms: int) -> None:
    """Fails with tiles of another size, or where they do not begin at multiples of it (the control below)."""
    lengths = [min(n, 5000) for n in BATCHES[name]]
    starts = [(11 * i) % 300 for i in range(len(lengths))]
    workspace = BlockAttentionWorkspace.allocate(
        max_batch=len(lengths), block_rows=7, heads=8, value_width=C, device=CPU, num_sms=num_sms, schedule="sm100"
    )
    plan_block_attention(
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        workspace=workspace,
        max_context=1 << 20,
    )
    expected = planned(lengths, starts, workspace)
    assert torch.equal(workspace.requests, expected[0]) and torch.equal(workspace.boundaries, expected[1])
    walked = tokens_of(workspace.requests, workspace.boundaries, 7)
    for request, (start, stop) in enumerate(zip(starts, lengths, strict=True)):
        assert walked[request] == [*range(start, max(start, stop)), *range(-1, -8, -1)], request


def test_control_a_plan_with_tiles_of_64_is_noticed() -> None:
    workspace = BlockAttentionWorkspace.allocate(
        max_batch=1, block_rows=7, heads=8, value_width=C, device=CPU, num_sms=6, schedule="sm90"
    )
    plan_block_attention(torch.tensor([1000], dtype=torch.int32), workspace=workspace, max_context=1 << 20)
    assert tokens_of(workspace.requests, workspace.boundaries, 7)[0] != [*range(1000), *range(-1, -8, -1)]


# --------------------------------------------------------------------------------------------------------------- program
@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PTX for pages of 64."""
    folder: Path = tmp_path_factory.mktemp("sm100")
    sm100.compile_for(PUBLISHED, "sm_100a", f"--keep-ptx --dump-dir {folder}")
    (source,) = folder.rglob("*.ptx")
    return source.read_text()


def unguarded(program: str) -> list[str]:
    """What is not as `sm100` says: loads not waited for, barriers in one block's scope only, global memory before its time."""
    lines = [line.strip() for line in program.splitlines() if line.strip() and not line.strip().startswith("//")]
    found = []
    for before, line, behind in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("tcgen05.ld") and not (before.startswith("bar.warp.sync") and behind.startswith("tcgen05.wait::ld")):
            found.append(line[:60])
    found += [line for line in lines if "mbarrier.try_wait" in line and ".acquire.cluster" not in line]
    found += [
        line for line in lines if "mbarrier.arrive." in line and "expect_tx" not in line and ".release.cluster" not in line
    ]
    ends = next(i for i, line in enumerate(lines) if line.startswith("griddepcontrol.wait"))
    found += [line for line in lines[:ends] if re.match(r"(@!?%p\d+ )?(ld|st)\.global|cp\.async", line)]
    return found


@needs_compiler
def test_the_program_guards_what_the_argument_rests_on(program: str) -> None:
    assert unguarded(program) == []
    assert program.count("griddepcontrol.") == 2 and program.count("tcgen05.mma.cta_group::2.kind::f16") == 36 + 16
    broken = {
        "tcgen05.wait::ld.sync.aligned;": "",
        "bar.warp.sync -1;": "",
        ".acquire.cluster": "",
        ".release.cluster.shared::cluster.b64": ".shared::cluster.b64",
        "griddepcontrol.wait;": "ld.global.b32 %r1, [%rd1];\n\tgriddepcontrol.wait;",
    }
    for was, becomes in broken.items():  # control: each guard that is taken away is missed
        assert was in program and unguarded(program.replace(was, becomes)), was


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("columns", "is_by_columns"), [(128, False), (256, True)])
def test_products_are_described_as_the_isa_has_it(dtype: str, columns: int, is_by_columns: bool) -> None:
    """Reads the bits back: PTX ISA 8.8, tcgen05, instruction descriptor of kind::f16."""
    import cutlass

    from cute_kernels.block_attention import sm100_ptx

    word = sm100_ptx.product({"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype], columns, is_by_columns)

    def bits(first: int, end: int) -> int:
        return word >> first & (1 << end - first) - 1

    operand = {"float16": 0, "bfloat16": 1}[dtype]
    assert (bits(4, 6), bits(7, 10), bits(10, 13)) == (1, operand, operand)  # fp32 result, kinds of the operands
    assert (bits(15, 16), bits(16, 17)) == (0, int(is_by_columns))  # which dim is contiguous
    assert (bits(17, 23) * 8, bits(24, 29) * 16) == (columns, 128)
    assert (bits(0, 4), bits(6, 7), bits(13, 15), bits(23, 24), bits(29, 32)) == (0, 0, 0, 0, 0)


# ------------------------------------------------------------------------------------------------------------------- gpu
@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if torch.cuda.get_device_capability() != (10, 0):
        pytest.skip("the device is not sm_100")
    return torch.device("cuda", 0)


def case_of(lengths: list[int], device: torch.device, **more: Any) -> dict[str, Any]:
    return make(lengths, device=device, **{"dtype": torch.bfloat16, "page_size": 64, **more})


def blackwell(case: dict[str, Any], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return run(case, schedule="sm100", **more)


def workspace(case: dict[str, Any], **more: Any) -> BlockAttentionWorkspace:
    return poisoned_workspace(case, "sm100", **more)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("rows", [1, 5, 8, 16])
def test_kernel_equals_twin(device: torch.device, rows: int, page_size: int, dtype: torch.dtype) -> None:
    for heads in (1, 4, 8, 12, 16, 64, 96, 128):
        lengths = [*CONTEXTS, 127, 128, 129, 700]
        case = case_of(lengths, device, rows=rows, heads=heads, page_size=page_size, seed=heads, dtype=dtype)
        assert complaint(case, *blackwell(case)) is None, heads


@pytest.mark.gpu
def test_control_a_wrong_page_is_noticed(device: torch.device) -> None:
    """The comparison must fail where 64 tokens are taken from another page."""
    case = case_of([4096], device, rows=8, heads=8)
    table = case["page_table"].clone()
    table[0, 3] = table[0, 4]
    assert complaint(case, blackwell({**case, "page_table": table})[0]) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [2, 7, 40, 148, 1000])
@pytest.mark.parametrize("page_size", PAGES)
def test_any_number_of_parts(device: torch.device, page_size: int, num_sms: int) -> None:
    case = case_of([4096, 0, 31, 700, 24, 25], device, rows=8, heads=8, page_size=page_size)
    assert complaint(case, *blackwell(case, plan=workspace(case, num_sms=num_sms))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize(("rows", "heads"), [(8, 64), (7, 96), (8, 8), (1, 4)])
def test_a_long_context(device: torch.device, rows: int, heads: int, page_size: int) -> None:
    case = case_of([200_000], device, rows=rows, heads=heads, page_size=page_size)
    assert complaint(case, *blackwell(case)) is None


@pytest.mark.gpu
def test_sharp_scores(device: torch.device) -> None:
    case = case_of(CONTEXTS, device, rows=7, heads=12)
    case["q"] = case["q"] * 8
    assert complaint(case, *blackwell(case)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
def test_windows(device: torch.device, page_size: int) -> None:
    starts = [0, 3, 128, 64, 1, 4000, 500, 127, 95]
    case = case_of([0, 5, 130, 64, 4096, 4096, 70, 129, 97], device, starts=starts, rows=7, heads=12, page_size=page_size)
    assert complaint(case, *blackwell(case)) is None
    shifted = {**case, "context_start": case["context_start"] + 1}
    assert complaint(shifted, blackwell(case)[0]) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
def test_poison_that_is_not_read_changes_nothing(device: torch.device, page_size: int) -> None:
    starts = [0, 2, 70, 63, 100]
    case = case_of([0, 5, 130, 64, 1000], device, starts=starts, rows=7, heads=8, page_size=page_size)
    check_poison_that_is_not_read(blackwell, case)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
def test_a_live_page_that_does_not_exist_reads_as_zeros(device: torch.device, page_size: int) -> None:
    check_a_live_page_that_does_not_exist(blackwell, case_of([400, 64], device, rows=7, heads=8, page_size=page_size))


@pytest.mark.gpu
@pytest.mark.parametrize("empty", ["table", "pool"])
def test_empty_operands(device: torch.device, empty: str) -> None:
    case = case_of([0, 0], device, rows=7, heads=8)
    case.update({"page_table": case["page_table"][:, :0]} if empty == "table" else {"pages": case["pages"][:0]})
    assert complaint(case, *blackwell(case)) is None


@pytest.mark.gpu
def test_a_graph_follows_changed_lengths(device: torch.device) -> None:
    case = case_of([4000, 0, 65, 1], device, starts=[0, 0, 0, 0], rows=7, heads=8)
    check_a_graph_that_follows_lengths(case, workspace(case))


@pytest.mark.gpu
def test_runs_agree_to_the_bit(device: torch.device) -> None:
    check_runs_agree_to_the_bit(blackwell, case_of([4096, 0, 700, 65], device, rows=8, heads=64))
