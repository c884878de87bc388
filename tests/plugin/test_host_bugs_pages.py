"""Public bugs in which page a row of context goes to, one test each, in the stand-in host.

A test's name begins with the bug's id, as in `tests/regressions/README.md`.
"""

from typing import Any

import pytest
import torch
from plugin.host.executor import FLAVOURS, StandIn
from plugin.hosted import hosted

from trtllm_dspark.plugin.host_context import HostContext
from trtllm_dspark.plugin.manager import DraftPages, layout_of


def context_of(stand_in: StandIn, rows: int) -> HostContext:
    """A context on the stand-in's manager, outside of any worker."""
    pages = DraftPages(stand_in.manager, layout_of(stand_in.model.draft_model, 16))
    return HostContext(stand_in.model.draft_model, pages, rows, torch.device("cpu"))


def latents(drafter: Any, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What a page holds of these tokens, [T, layers, width], from the drafter's own method for a host."""
    return drafter.precompute_context_kv(drafter.project_target_hidden(taps), positions)[0][:, :, 0]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_k20_page_zero_is_a_page_and_padding_owns_none(flavour, host, pair) -> None:
    """Fails if 0 stands for no page, or if a padding row, whose table entries are 0 too, writes or reads there."""
    host("1.3.0rc28")
    stand_in = hosted(pair, flavour=flavour)
    from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDA_GRAPH_DUMMY_REQUEST_ID as padding

    manager, drafter, context = stand_in.manager, stand_in.model.draft_model, context_of(stand_in, 4)
    manager.resize(1, 16)
    assert manager.pages_of(1) == [0]
    manager.storage.fill_(7.0)
    offsets = torch.zeros(1, 4, 2, manager.max_blocks_per_seq, dtype=torch.int32)
    manager.copy_batch_block_offsets(offsets, [1], 1, 1, 1)
    context.begin_step([1, padding, padding - 1])
    context.refresh_table(offsets, 3)
    taps = torch.randn(24, stand_in.spec_metadata.captured_hidden_states.shape[1])
    positions, rows = torch.arange(8).repeat(3), torch.arange(3).repeat_interleave(8)
    context.append(taps, positions, rows, slice(0, 3), torch.zeros(3, dtype=torch.long), torch.full((3,), 8))
    wanted = latents(drafter, taps, positions)
    torch.testing.assert_close(manager.storage[0, :, :8], wanted[:8].transpose(0, 1))
    assert not torch.allclose(wanted[:8], wanted[8:16], atol=1e-2)  # control: the padding's rows would show
    assert bool((manager.storage[0, :, 8:] == 7).all()) and bool((manager.storage[1:] == 7).all())
    _, start, length = context.readable(slice(0, 3))
    assert start.tolist() == [0, 0, 0] and length.tolist() == [8, 0, 0]


def test_x01_a_million_tokens_in_a_row_has_its_own_page_and_angles(host, pair) -> None:
    """Fails if a position past a million lands on another page, or is rotated as another position."""
    host("1.3.0rc28")
    begin = 2**20
    stand_in = hosted(pair, max_seq_len=begin + 64)
    manager, drafter, context = stand_in.manager, stand_in.model.draft_model, context_of(stand_in, 1)
    manager.resize(1, 16)
    cache = manager.kv_cache_map[1]
    cache.pages, cache.capacity = [3] * (begin // 16) + [5], begin + 16
    manager.storage.fill_(7.0)
    offsets = torch.zeros(1, 1, 2, manager.max_blocks_per_seq, dtype=torch.int32)
    manager.copy_batch_block_offsets(offsets, [1], 1, 1, 1)
    context.begin_step([1])
    context.refresh_table(offsets, 1)
    taps = torch.randn(8, stand_in.spec_metadata.captured_hidden_states.shape[1])
    positions = begin + torch.arange(8)
    context.append(taps, positions, torch.zeros(8, dtype=torch.long), slice(0, 1), positions[:1], torch.tensor([8]))
    torch.testing.assert_close(manager.storage[5, :, :8], latents(drafter, taps, positions).transpose(0, 1))
    assert not torch.allclose(manager.storage[5, :, :8], latents(drafter, taps, positions + 1).transpose(0, 1), atol=1e-2)
    assert bool((manager.storage[:5] == 7).all()) and bool((manager.storage[6:] == 7).all())
    _, start, length = context.readable(slice(0, 1))
    assert start.tolist() == [begin] and length.tolist() == [begin + 8]
