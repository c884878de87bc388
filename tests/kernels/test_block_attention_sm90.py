"""The sm90 schedule of block_attention: when it is chosen, and on Hopper kernel against twin."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import test_block_attention as portable
from kernels.schedules import (
    check_a_graph_that_follows_lengths,
    check_a_live_page_that_does_not_exist,
    check_poison_that_is_not_read,
    check_runs_agree_to_the_bit,
    poisoned_workspace,
)
from kernels.test_block_attention import BATCHES, CONTEXTS, CPU, C, R, complaint, make, run
from kernels.test_block_attention_work_list import planned

from cute_kernels import add_rms_norm, context_append, query_rope
from cute_kernels.arch import ARCHES
from cute_kernels.block_attention import (
    BlockAttentionConfig,
    BlockAttentionWorkspace,
    combine,
    config,
    num_parts,
    pick_schedule,
    plan,
    plan_block_attention,
)
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.support import toolkit_reason

PAGES = config.SM90_PAGE_SIZES


# ------------------------------------------------------------------------------------------------------------- selection
@pytest.mark.parametrize("arch", ARCHES)
def test_the_schedule_is_chosen_by_part_and_configuration(arch: str) -> None:
    published = BlockAttentionConfig(C, R, 64, "bfloat16")
    for change in ({}, {"page_size": 32}, {"page_size": 128}, {"dtype": "float16"}):
        assert pick_schedule(replace(published, **change), arch) == ("sm90" if arch == "sm_90a" else "portable")
    for change in ({"page_size": 16}, {"value_width": 448}, {"rotary": 16}):
        assert pick_schedule(replace(published, **change), arch) == "portable"


@pytest.mark.parametrize(
    ("change", "arch", "said"),
    [
        ({}, "sm_80", "needs sm_90a, this is sm_80"),
        ({"page_size": 16}, "sm_90a", "needs pages of 32, 64, 128 tokens, they have 16"),
        ({"value_width": 448}, "sm_90a", "needs c = 512 and r = 64, they are 448 and 64"),
        ({"dtype": "float32"}, "sm_90a", "dtype must be bfloat16 or float16"),
    ],
)
def test_a_configuration_that_it_does_not_take_says_why(change: dict[str, Any], arch: str, said: str) -> None:
    assert said in (replace(BlockAttentionConfig(C, R, 64, "bfloat16"), **change).sm90_reason(arch) or "")


@pytest.mark.parametrize("num_sms", [78, 114, 132])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (8, 8), (8, 64), (7, 96), (16, 128), (5, 12)])
def test_parts_fill_the_device(rows: int, heads: int, num_sms: int) -> None:
    parts, row_tiles = num_parts(rows, heads, num_sms, config.SM90), -(-rows * heads // config.SM90.block_rows)
    waves = -(-parts * row_tiles // num_sms)
    assert parts >= 1 and waves <= config.MAX_WAVES
    assert parts * row_tiles / (waves * num_sms) > 0.75


def test_a_workspace_knows_its_schedule() -> None:
    shape = {"max_batch": 2, "block_rows": 8, "heads": 16, "value_width": C, "device": CPU, "num_sms": 132}
    assert BlockAttentionWorkspace.allocate(**shape).parts == 132 // 4
    workspace = BlockAttentionWorkspace.allocate(**shape, schedule="sm90")
    assert workspace.parts == 132 // 2
    lengths = torch.tensor([130, 0], dtype=torch.int32)
    plan_block_attention(lengths, workspace=workspace, max_context=1000)
    expected = planned([130, 0], None, workspace.parts, rows=8, joins=True)
    assert torch.equal(workspace.requests, expected[0]) and torch.equal(workspace.boundaries, expected[1])
    with pytest.raises(KernelError, match="a schedule must be one of portable, sm90, sm100, it is sm91"):
        BlockAttentionWorkspace.allocate(**shape, schedule="sm91")


@pytest.mark.skipif(toolkit_reason() is not None, reason=f"compiler: {toolkit_reason()}")
@pytest.mark.parametrize(("arch", "instructions"), [("sm_80", 0), ("sm_90a", 2)])
def test_dependent_launches_from_sm_90_on(arch: str, instructions: int, tmp_path: Path) -> None:
    """Fails where a small kernel waits for the one before on a part that has no such wait, or does not where it has."""
    merge = combine.CombineConfig(64, "bfloat16")
    for name, compile_for in (
        ("plan", partial(plan.compile_for, config.PORTABLE)),
        ("merge", partial(combine.compile_for, merge)),
        ("norm", partial(add_rms_norm.compile_for, add_rms_norm.AddRMSNormConfig(1536, "bfloat16", True))),
        ("rope", partial(query_rope.compile_for, query_rope.QueryRopeConfig(64, "bfloat16"))),
        ("append", partial(context_append.compile_for, context_append.ContextAppendConfig(512, 64, 64, "bfloat16"))),
    ):
        folder = tmp_path / name
        folder.mkdir()
        compile_for(arch, f"--keep-ptx --dump-dir {folder}")
        (source,) = folder.rglob("*.ptx")
        assert source.read_text().count("griddepcontrol.") == instructions, name


# ------------------------------------------------------------------------------------------------------------------- gpu
@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the device is not sm_90")
    return torch.device("cuda", 0)


def case_of(lengths: list[int], device: torch.device, **more: Any) -> dict[str, Any]:
    return make(lengths, device=device, **{"dtype": torch.bfloat16, "page_size": 64, **more})


def hopper(case: dict[str, Any], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return run(case, schedule="sm90", **more)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("rows", [1, 5, 7, 8, 16])
def test_kernel_equals_twin(device: torch.device, rows: int, page_size: int) -> None:
    for heads in (1, 4, 8, 12, 16, 64, 96, 128):
        case = case_of(CONTEXTS, device, rows=rows, heads=heads, page_size=page_size, seed=heads)
        assert complaint(case, *hopper(case)) is None, heads


@pytest.mark.gpu
def test_control_a_wrong_tile_is_noticed(device: torch.device) -> None:
    """The comparison must fail where one tile of 64 tokens is taken from another page."""
    case = case_of([4096], device, rows=8, heads=8)
    table = case["page_table"].clone()
    table[0, 3] = table[0, 4]
    assert complaint(case, hopper({**case, "page_table": table})[0]) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", range(1, 10))
def test_even_and_odd_numbers_of_tiles(device: torch.device, tiles: int) -> None:
    for lengths in ([64 * tiles - 64], [64 * tiles - 1], [64 * tiles - 63, 0, 64 * tiles - 64, 0, 0]):
        case = case_of(lengths, device, rows=8, heads=8, seed=tiles)
        plan = workspace(case, num_sms=1)
        assert complaint(case, *hopper(case, plan=plan)) is None, lengths


def workspace(case: dict[str, Any], **more: Any) -> BlockAttentionWorkspace:
    return poisoned_workspace(case, "sm90", **more)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [1, 7, 40, 132, 1000])
@pytest.mark.parametrize("page_size", PAGES)
def test_any_number_of_parts(device: torch.device, page_size: int, num_sms: int) -> None:
    case = case_of([4096, 0, 31, 700, 24, 25], device, rows=8, heads=8, page_size=page_size)
    assert complaint(case, *hopper(case, plan=workspace(case, num_sms=num_sms))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize(("rows", "heads"), [(8, 64), (7, 96), (8, 8), (1, 4)])
def test_a_long_context(device: torch.device, rows: int, heads: int, page_size: int) -> None:
    case = case_of([200_000], device, rows=rows, heads=heads, page_size=page_size)
    assert complaint(case, *hopper(case)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0, 10])
def test_a_ragged_batch_of_256(device: torch.device, shared: int) -> None:
    lengths = [(37 * i * i) % 3000 + 32 * shared for i in range(256)]
    case = case_of(lengths, device, rows=8, heads=16, page_size=32, shared=shared)
    assert complaint(case, *hopper(case)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
def test_fp16(device: torch.device, page_size: int) -> None:
    case = case_of(CONTEXTS, device, rows=7, heads=12, page_size=page_size, dtype=torch.float16)
    assert complaint(case, *hopper(case)) is None


@pytest.mark.gpu
def test_sharp_scores(device: torch.device) -> None:
    case = case_of(CONTEXTS, device, rows=7, heads=12)
    case["q"] = case["q"] * 8
    assert complaint(case, *hopper(case)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
def test_windows(device: torch.device, page_size: int) -> None:
    starts = [0, 3, 128, 64, 1, 4000, 500, 63, 95]
    case = case_of([0, 5, 130, 64, 4096, 4096, 70, 65, 97], device, starts=starts, rows=7, heads=12, page_size=page_size)
    assert complaint(case, *hopper(case)) is None
    shifted = {**case, "context_start": case["context_start"] + 1}
    assert complaint(shifted, hopper(case)[0]) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 5, 16, 66, 132, 500])
@pytest.mark.parametrize("name", BATCHES)
def test_the_device_plans_what_the_twin_plans(device: torch.device, name: str, parts: int) -> None:
    lengths = [min(n, 150_000) for n in BATCHES[name]]
    for starts in (None, [(11 * i) % 90 for i in range(len(lengths))]):
        expected = planned(lengths, starts, parts, rows=8, joins=True)
        plan = BlockAttentionWorkspace.allocate(
            max_batch=1000, block_rows=8, heads=8, value_width=C, device=device, num_sms=parts, schedule="sm90"
        )
        assert plan.parts == parts
        plan_block_attention(
            torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device) if starts else None,
            workspace=plan,
            max_context=150_000,
        )
        assert torch.equal(plan.requests[: len(lengths)].cpu(), expected[0])
        assert torch.equal(plan.boundaries.cpu(), expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
def test_poison_that_is_not_read_changes_nothing(device: torch.device, page_size: int) -> None:
    starts = [0, 2, 70, 63, 100]
    case = case_of([0, 5, 130, 64, 1000], device, starts=starts, rows=7, heads=8, page_size=page_size)
    check_poison_that_is_not_read(hopper, case)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGES)
def test_a_live_page_that_does_not_exist_reads_as_zeros(device: torch.device, page_size: int) -> None:
    check_a_live_page_that_does_not_exist(hopper, case_of([400, 64], device, rows=7, heads=8, page_size=page_size))


@pytest.mark.gpu
def test_a_length_past_the_table_is_clamped(device: torch.device) -> None:
    case = case_of([32, 40], device, rows=7, heads=8, page_size=32)
    case["page_table"] = case["page_table"][:, :2].contiguous()
    beyond = {**case, "context_len": torch.tensor([32, 10**6], dtype=torch.int32, device=device)}
    case["context_len"][1] = 64
    case["pages"] = beyond["pages"] = case["pages"].nan_to_num(0.5)
    for found, expected in zip(hopper(beyond), hopper(case), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7])
def test_strided_operands(device: torch.device, rows: int) -> None:
    case = case_of([0, 5, 300], device, rows=rows, heads=8, page_size=32)
    num_pages, width = case["pages"].shape[0], C + R
    options = {"dtype": torch.bfloat16, "device": device}
    strided = {
        "q": torch.full((4, rows, 8, width + 16), torch.nan, **options)[1:, :, :, 8 : 8 + width],
        "block_latents": torch.full((3, rows + 2, 2, width), torch.nan, **options)[:, 2:, 1],
        "pages": torch.full((num_pages, 5, 32, width), torch.nan, **options)[:, 3],
    }
    for name, view in strided.items():
        view.copy_(case[name])
    for found, expected in zip(hopper({**case, **strided}), hopper(case), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("empty", ["batch", "table", "pool"])
def test_empty_operands(device: torch.device, empty: str) -> None:
    case = case_of([0, 0], device, rows=7, heads=8)
    if empty == "batch":
        sliced = {name: case[name][:0] for name in ("q", "block_latents", "page_table", "context_len")}
        assert hopper({**case, **sliced})[0].shape == (0, 7, 8, C)
        return
    case.update({"page_table": case["page_table"][:, :0]} if empty == "table" else {"pages": case["pages"][:0]})
    assert complaint(case, *hopper(case)) is None


@pytest.mark.gpu
def test_a_graph_follows_changed_lengths(device: torch.device) -> None:
    case = case_of([4000, 0, 65, 1], device, starts=[0, 0, 0, 0], rows=7, heads=8)
    check_a_graph_that_follows_lengths(case, workspace(case))


@pytest.mark.gpu
def test_runs_agree_to_the_bit(device: torch.device) -> None:
    check_runs_agree_to_the_bit(hopper, case_of([4096, 0, 700, 65], device, rows=8, heads=64))


@pytest.mark.gpu
def test_the_schedules_agree_and_the_fastest_is_the_default(device: torch.device) -> None:
    case = case_of([1000, 65], device, rows=8, heads=16)
    for found, expected in zip(run(case, schedule=None), hopper(case), strict=True):
        assert torch.equal(found, expected)
    assert complaint(case, *run(case, schedule="portable")) is None


@pytest.mark.gpu
def test_a_plan_of_another_schedule_or_an_illegal_page_is_refused(device: torch.device) -> None:
    case = case_of([100], device, rows=7, heads=3)
    with pytest.raises(KernelError, match="a plan for the portable schedule is required, it is for sm90"):
        run(case, plan=workspace(case), schedule="portable")
    small = case_of([100], device, rows=7, heads=3, page_size=16)
    with pytest.raises(UnsupportedKernelError, match="needs pages of 32, 64, 128 tokens, they have 16"):
        hopper(small)
    assert complaint(small, *run(small)) is None


def test_the_yardstick_is_the_portable_schedules() -> None:
    """Shared helpers must be the very ones of the portable tests, or the two schedules are judged differently."""
    assert complaint is portable.complaint and math.isclose(portable.SCALE, 192**-0.5)
