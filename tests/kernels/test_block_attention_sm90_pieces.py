"""The sm90 schedule of block_attention: registers of its warpgroups, a reference that rises seldom, pieces and their merge."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.test_block_attention import complaint, make
from kernels.test_block_attention_sm90 import C, device, hopper, workspace

from cute_kernels.block_attention import block_attention, config, sm90_combine, workspace_shapes
from cute_kernels.support import toolkit_reason

__all__ = ["device"]  # a fixture
REGISTERS = 168  # of a thread, when 384 threads share a multiprocessor's 65,536


# ------------------------------------------------------------------------------------------------------------------- cpu
@pytest.mark.skipif(toolkit_reason() is not None, reason=f"compiler: {toolkit_reason()}")
def test_registers_that_are_given_are_there() -> None:
    """Fails where the computing warpgroups ask for more than the fetching one gives, as 32 and 240: a block waits for ever."""
    from cute_kernels.block_attention import sm90_kernel
    from cute_kernels.block_attention.sm90_roles import COMPUTING

    threads = sm90_kernel.THREADS

    def fit(few: int, many: int) -> bool:
        return few % 8 == many % 8 == 0 and (threads - COMPUTING) * few + COMPUTING * many <= threads * REGISTERS

    assert threads * REGISTERS <= 65_536 < threads * (REGISTERS + 8)
    assert not fit(32, 240) and not fit(36, 232)
    assert set(sm90_kernel.REGISTERS) == {config.SM90_BLOCK // min(size, config.SM90_BLOCK) for size in config.SM90_PAGE_SIZES}
    assert all(fit(few, many) for few, many in sm90_kernel.REGISTERS.values())


@pytest.mark.parametrize(("rows", "row_tiles"), [(64, 1), (65, 2), (512, 8), (84, 2), (4, 1)])
def test_pieces_have_room_for_whole_row_tiles(rows: int, row_tiles: int) -> None:
    shapes = workspace_shapes(3, 1, rows, C, 132, config.SM90)
    parts = config.num_parts(1, rows, 132, config.SM90)
    assert shapes["partial_out"] == (2 * parts, row_tiles * config.SM90_UNITS, config.SM90_UNIT)
    assert config.SM90_UNITS * config.SM90_UNIT == config.SM90_BLOCK * C
    assert shapes["partial_lse"] == (2 * parts, rows)


@pytest.mark.parametrize(
    ("batch", "parts", "row_tiles", "sharing", "by_request"),
    [
        (1, 16, 8, 4, True),
        (2, 16, 8, 2, True),
        (4, 16, 8, 1, True),
        (15, 16, 8, 1, True),
        (16, 16, 8, 1, False),
        (1, 132, 1, 8, True),
        (8, 132, 1, 4, True),
        (64, 132, 1, 1, True),
    ],
)
def test_which_merge_takes_a_batch(batch: int, parts: int, row_tiles: int, sharing: int, by_request: bool) -> None:
    """Fails where four requests of 8 row tiles get four warps a unit: 4,096 blocks, of which most wait, took 29 us for 21."""
    found = sm90_combine.config_for(C, "bfloat16", batch, parts, row_tiles * config.SM90_UNITS)
    assert (found.sharing, found.by_request) == (sharing, by_request)
    assert found in sm90_combine.configs(C, "bfloat16")


@pytest.mark.skipif(toolkit_reason() is not None, reason=f"compiler: {toolkit_reason()}")
@pytest.mark.parametrize("merge", sm90_combine.configs(C, "bfloat16"), ids=str)
def test_a_merge_waits_for_the_attention(merge: sm90_combine.CombineConfig, tmp_path: Path) -> None:
    """Fails where a block may read pieces, or return, before the attention has ended."""
    sm90_combine.compile_for(merge, "sm_90a", f"--keep-ptx --dump-dir {tmp_path}")
    (source,) = tmp_path.rglob("*.ptx")
    text = source.read_text()
    assert text.count("griddepcontrol.") == 2
    waited = text.index("griddepcontrol.wait")
    for access in ("ld.global", "st.global", "ret;"):
        assert waited < text.index(access), access


# ------------------------------------------------------------------------------------------------------------------- gpu
def climbing(device: torch.device, step: float, dtype: torch.dtype, tiles: int = 9) -> dict[str, Any]:
    """Scores that rise by `step` powers of two from each tile of 64 tokens to the next (fall where it is negative)."""
    case = make([64 * tiles + 10], rows=8, heads=8, page_size=64, dtype=dtype, device=device, garbage=(0, 0))
    position = torch.arange(64 * tiles + 10, device=device)
    pages, table = case["pages"], case["page_table"][0, : tiles + 1].long()
    case["q"][..., 0] = 1.0
    rise = step * (position // 64 - (tiles // 2)).float() / (case["scale"] * 1.4426950408889634)
    pages[table[position // 64], position % 64, 0] = rise.to(dtype)
    return case


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [3.0, 7.9, 8.1, 20.0, 60.0, -5.0, -40.0])
def test_a_maximum_that_keeps_rising(device: torch.device, step: float, dtype: torch.dtype) -> None:
    """Fails where the reference stays behind: at 20 powers of two a tile weights overflow, or where sums are not shrunk."""
    case = climbing(device, step, dtype)
    for num_sms in (1, 3, 132):
        assert complaint(case, *hopper(case, plan=workspace(case, num_sms=num_sms))) is None, num_sms


@pytest.mark.gpu
def test_control_a_tile_that_is_not_shrunk_is_noticed(device: torch.device) -> None:
    """The comparison must fail where the tiles before the last count as much as it: scores that do not rise by 3."""
    rising, level = climbing(device, 3.0, torch.bfloat16), climbing(device, 0.0, torch.bfloat16)
    assert complaint(rising, hopper(level)[0]) is not None


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads"), [(1, 64), (1, 8), (2, 64), (5, 64), (16, 64), (20, 64), (40, 8), (3, 12)])
def test_every_merge(device: torch.device, batch: int, heads: int) -> None:
    lengths = [(1777 * (i + 1)) % 5000 for i in range(batch)]
    case = make(lengths, rows=7, heads=heads, page_size=64, dtype=torch.bfloat16, device=device)
    assert complaint(case, *hopper(case, plan=workspace(case))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("heads", [64, 8])
def test_requests_of_one_tile_beside_others(device: torch.device, heads: int, page_size: int) -> None:
    """Fails where rows are laid over those that are still being stored: requests of one tile fill no second buffer."""
    lengths = [0, 0, 0, 64, 0, 1, 700, 0, 0, 130, 0, 0] * 6
    case = make(lengths, rows=7, heads=heads, page_size=page_size, dtype=torch.bfloat16, device=device)
    for num_sms in (1, 8, 40, 132):
        assert complaint(case, *hopper(case, plan=workspace(case, num_sms=num_sms))) is None, num_sms


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (5, 3), (7, 12), (8, 64)])
def test_only_the_rows_that_are_there_are_written(device: torch.device, rows: int, heads: int) -> None:
    """Fails where a store of 64 rows passes the last of a request, or of the batch."""
    case = make([100, 0, 300], rows=rows, heads=heads, page_size=64, dtype=torch.bfloat16, device=device)
    canary = 7.0
    room = torch.full((5, rows, heads, C), canary, dtype=torch.bfloat16, device=device)
    for num_sms in (1, 132):
        room[1:4] = float("nan")
        lse = torch.full((3, rows, heads), float("nan"), device=device)
        plan = workspace(case, num_sms=num_sms)
        block_attention(**case, plan=plan, out=room[1:4], lse=lse, schedule="sm90")
        assert complaint(case, room[1:4], lse) is None
        assert (room[0] == canary).all() and (room[4] == canary).all()
