"""What peers of `block_attention` are given that know no block beside the pages: the block's latents behind each context.

To write them there is in nobody's clock.
"""

import torch

from cute_kernels.bench.cases import BlockAttentionCase, Inputs


def with_block(case: BlockAttentionCase, inputs: Inputs) -> torch.Tensor:
    """A copy of the pages with the block's latents at positions len .. len+S-1 of each request. [num_pages, P, W]."""
    pages, table = inputs["pages"].clone(), inputs["page_table"].long()
    position = inputs["context_len"].long()[:, None] + torch.arange(case.rows, device=table.device)
    pages[table.gather(1, position // case.page_size), position % case.page_size] = inputs["block_latents"]
    return pages


def lengths(case: BlockAttentionCase, inputs: Inputs) -> torch.Tensor:
    """Tokens that each request then has in its pages. [B], int32."""
    return inputs["context_len"] + case.rows
