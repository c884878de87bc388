"""FlashInfer as a peer of the bench: what it is given, with a double where it is not installed, and its own signatures."""

import inspect
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_fabricated import ATTENTION, RAGGED, run_case_untimed

from cute_kernels.bench import flashinfer_mla
from cute_kernels.bench.cases import BlockAttentionCase, Inputs
from cute_kernels.bench.contestants import Contestant
from cute_kernels.bench.run import RIGHT, WRONG


class PagedMLA:
    """What FlashInfer's wrapper computes, read from its docstrings, in plain torch: a double for machines without it."""

    def __init__(self, float_workspace_buffer, use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr, backend) -> None:
        assert use_cuda_graph and backend in ("fa2", "fa3")
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
        q_data_type, kv_data_type,
    ) -> None:  # fmt: skip
        assert not causal and q_data_type == kv_data_type == torch.bfloat16
        for buffer, values in zip(self.buffers, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True):
            assert values.dtype == torch.int32
            buffer.copy_(values)
        self.scale, self.page_size, self.heads = sm_scale, page_size, num_heads
        self.widths = (head_dim_ckv, head_dim_kpe)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out) -> torch.Tensor:
        assert (q_nope.shape[1:], q_pe.shape[1:]) == ((self.heads, self.widths[0]), (self.heads, self.widths[1]))
        rows, pages, indices, lengths = (buffer.tolist() for buffer in self.buffers)
        for b, length in enumerate(lengths):
            own = indices[pages[b] : pages[b + 1]]
            assert len(own) == -(-length // self.page_size)
            values, keys = (cache[own].flatten(0, 1)[:length].float() for cache in (ckv_cache, kpe_cache))
            queries = torch.cat((q_nope, q_pe), -1)[rows[b] : rows[b + 1]].float()
            scores = self.scale * queries @ torch.cat((values, keys), -1).T
            out[rows[b] : rows[b + 1]] = (scores.softmax(-1) @ values).to(out.dtype)
        return out


@pytest.fixture
def paged_mla(monkeypatch: pytest.MonkeyPatch) -> type[PagedMLA]:
    double = ModuleType("flashinfer.mla")
    double.BatchMLAPagedAttentionWrapper = PagedMLA  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", double)
    monkeypatch.setattr(flashinfer_mla, "WORKSPACE_BYTES", 16)
    return PagedMLA


@pytest.mark.usefixtures("paged_mla")
@pytest.mark.parametrize(
    "case", [RAGGED, *(replace(ATTENTION, context=context) for context in (70, 64, 63, 60))], ids=lambda case: case.label
)
def test_flashinfer_is_given_context_and_block_in_its_pages(case: BlockAttentionCase) -> None:
    peer = Contestant("flashinfer fa2", partial(flashinfer_mla.prepare, backend="fa2"))
    (outcome,) = run_case_untimed(case, peer).outcomes
    assert (outcome.status, outcome.reason) == (RIGHT, None)


@pytest.mark.usefixtures("paged_mla")
@pytest.mark.parametrize(
    "change",
    [
        lambda lists: {"kv_len_arr": lists["kv_len_arr"] - 1},
        lambda lists: {"kv_indices": lists["kv_indices"].flip(0)},
        lambda lists: {"qo_indptr": lists["qo_indptr"].clamp(max=16)},
    ],
    ids=["a token short", "others' pages", "a request unwritten"],
)
def test_control_wrong_lists_for_flashinfer_are_noticed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    right = flashinfer_mla.lists

    def wrong(case: BlockAttentionCase, inputs: Inputs) -> dict[str, torch.Tensor]:
        found = right(case, inputs)
        return found | change(found)

    monkeypatch.setattr(flashinfer_mla, "lists", wrong)
    peer = Contestant("flashinfer fa2", partial(flashinfer_mla.prepare, backend="fa2"))
    (outcome,) = run_case_untimed(ATTENTION, peer).outcomes
    assert outcome.status == WRONG


def test_flashinfers_own_signatures_take_these_arguments() -> None:
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except Exception as error:
        pytest.skip(f"flashinfer: cannot be imported here: {type(error).__name__}")
    for name in ("__init__", "plan", "run"):
        theirs = inspect.signature(getattr(BatchMLAPagedAttentionWrapper, name)).parameters
        assert set(inspect.signature(getattr(PagedMLA, name)).parameters) <= set(theirs), name
