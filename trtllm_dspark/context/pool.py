"""The pool that holds draft latents: its layout, its dtype, and what a token costs.

One allocation, seen as L views `[num_pages, P, W]`. `bytes_per_token` is the only place where the cost of a token is
computed; what is budgeted and what is allocated both come from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError


@dataclass(frozen=True)
class PoolLayout:
    """Shape and dtype of a draft pool.

    Attributes:
        num_layers: L. width: W, elements of a latent (576 in the published MLA drafter).
        page_size: P, tokens a page. dtype: of the pool; the draft keeps its own when the target's KV cache is fp8.
    """

    num_layers: int
    width: int
    page_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "page_size"):
            if getattr(self, name) < 1:
                raise DSparkError(f"PoolLayout: {name} must be at least 1, it is {getattr(self, name)}. Give a positive size.")

    @classmethod
    def of(cls, config: DraftConfig, *, page_size: int, dtype: torch.dtype) -> "PoolLayout":
        """The layout that this draft needs. GQA keys and values are counted as one row of 2 * num_kv_heads * head_dim."""
        return cls(config.num_layers, context_width(config), page_size, dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of context takes over all layers, on one rank."""
        return self.num_layers * self.width * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page id over all layers."""
        return self.bytes_per_token * self.page_size


def context_width(config: DraftConfig) -> int:
    """Elements that one layer keeps of a token: c + r for MLA (not divided by tensor parallelism), K and V for GQA."""
    if config.family == "mla":
        return config.latent_width
    assert config.head_dim is not None
    return 2 * config.num_kv_heads * config.head_dim


def bytes_per_token(config: DraftConfig, dtype: torch.dtype) -> int:
    """Draft KV bytes a token, unsharded: 5 x 576 x 2 = 5,760 for the published MLA drafter in bf16, 20,480 for the GQA one."""
    return PoolLayout.of(config, page_size=1, dtype=dtype).bytes_per_token


class ContextPool:
    """L page views of one layout, whoever owns the memory.

    Args:
        layout: what the views must be. views: L tensors [num_pages, P, W] of the layout's dtype.
    Raises:
        DSparkError: a view of another shape or dtype. It is never copied into a private pool.
    """

    def __init__(self, layout: PoolLayout, views: Sequence[torch.Tensor]) -> None:
        if len(views) != layout.num_layers:
            raise DSparkError(
                f"ContextPool: {layout.num_layers} layer views are required, {len(views)} came. Pass one view a layer."
            )
        for layer, view in enumerate(views):
            expected = (views[0].shape[0], layout.page_size, layout.width)
            if tuple(view.shape) != expected or view.dtype != layout.dtype:
                raise DSparkError(
                    f"ContextPool: layer {layer} must be {list(expected)} of {layout.dtype}, it is {list(view.shape)} of "
                    f"{view.dtype}. Allocate the pool at the layout and dtype it was budgeted at."
                )
        self.layout = layout
        self.views = tuple(views)

    @classmethod
    def allocate(cls, layout: PoolLayout, num_pages: int, device: torch.device | str = "cpu") -> "ContextPool":
        """A pool of num_pages pages. A float pool starts as NaN: a row that is read before it is written shows."""
        if num_pages < 1:
            raise DSparkError(f"ContextPool: num_pages must be at least 1, it is {num_pages}. Give the pool more memory.")
        shape = (layout.num_layers, num_pages, layout.page_size, layout.width)
        return cls(layout, torch.full(shape, torch.nan, dtype=layout.dtype, device=device).unbind(0))

    @property
    def num_pages(self) -> int:
        return self.views[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages over all layers."""
        return self.num_pages * self.layout.bytes_per_page
