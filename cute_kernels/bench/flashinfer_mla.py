"""FlashInfer's paged MLA as a peer of `block_attention`.

Source of the interface: flashinfer-python 0.6.6, flashinfer/mla.py, BatchMLAPagedAttentionWrapper.
"""

from collections.abc import Callable
from functools import partial

import torch

from cute_kernels.bench import paged
from cute_kernels.bench.cases import BlockAttentionCase, Inputs

WORKSPACE_BYTES = 128 << 20  # what its documentation recommends


def lists(case: BlockAttentionCase, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The ragged lists of a batch, int32: rows and pages of request b are those from indptr[b] to indptr[b+1]."""
    table, live = inputs["page_table"], torch.tensor((0, *case.pages_of_requests))
    is_live = torch.arange(table.shape[1]) < live[1:, None]
    return {
        "qo_indptr": torch.arange(case.batch + 1, dtype=torch.int32, device=table.device) * case.rows,
        "kv_indptr": live.cumsum(0, dtype=torch.int32).to(table.device),
        "kv_indices": table[is_live.to(table.device)],
        "kv_len_arr": paged.lengths(case, inputs),
    }


def prepare(case: BlockAttentionCase, sets: list[Inputs], *, backend: str) -> list[Callable[[], torch.Tensor]]:
    """One call a set; all share one plan, as the sets share lengths and table.

    Args:
        backend: fa2 or fa3.
    """
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    first = sets[0]
    device, batch_lists = first["q"].device, lists(case, first)
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device),
        use_cuda_graph=True,
        backend=backend,
        **{name: torch.empty_like(values) for name, values in batch_lists.items()},
    )
    wrapper.plan(
        **batch_lists,
        num_heads=case.heads,
        head_dim_ckv=case.value_width,
        head_dim_kpe=case.rotary,
        page_size=case.page_size,
        causal=False,
        sm_scale=case.scale,
        q_data_type=first["q"].dtype,
        kv_data_type=first["pages"].dtype,
    )

    def call(inputs: Inputs, pages: torch.Tensor) -> torch.Tensor:
        q_latent, q_rotary = inputs["q"].flatten(0, 1).split([case.value_width, case.rotary], -1)
        latents, rotary = pages.split([case.value_width, case.rotary], -1)
        wrapper.run(q_latent, q_rotary, latents, rotary, out=inputs["out"].flatten(0, 1))
        return inputs["out"]

    return [partial(call, inputs, paged.with_block(case, inputs)) for inputs in sets]
