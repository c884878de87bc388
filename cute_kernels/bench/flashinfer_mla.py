"""FlashInfer's paged MLA as a peer of `block_attention`.

It knows no block beside the pages: it is given pages that hold the context and the block's latents behind it.
Source of the interface: flashinfer-python 0.6.6, flashinfer/mla.py, BatchMLAPagedAttentionWrapper.
"""

from collections.abc import Callable
from functools import partial

import torch

from cute_kernels.bench.cases import BlockAttentionCase, Inputs

WORKSPACE_BYTES = 128 << 20  # what its documentation recommends


def paged(case: BlockAttentionCase, inputs: Inputs) -> torch.Tensor:
    """A copy of the pages with the block's latents at positions context .. context+S-1 of each request."""
    pages, table = inputs["pages"].clone(), inputs["page_table"].long()
    position = torch.arange(case.context, case.context + case.rows, device=table.device)
    pages[table[:, position // case.page_size], position % case.page_size] = inputs["block_latents"]
    return pages


def lists(case: BlockAttentionCase, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The ragged lists of a batch, int32: rows and pages of request b are those from indptr[b] to indptr[b+1]."""
    table = inputs["page_table"]
    steps = torch.arange(case.batch + 1, dtype=torch.int32, device=table.device)
    return {
        "qo_indptr": steps * case.rows,
        "kv_indptr": steps * case.pages_of_request,
        "kv_indices": table.flatten(),
        "kv_len_arr": inputs["context_len"] + case.rows,
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

    return [partial(call, inputs, paged(case, inputs)) for inputs in sets]
