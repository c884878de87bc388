"""The host's draft KV manager: its pages as our pool, what it granted to a request, and its block table decoded.

Both of the host's managers are known. V2 keeps one cache object a request, whose `capacity` is the tokens granted. V1
answers with the list of a request's blocks. A grant is never read off the table: the C++ code writes 0 where V2's Python
wrote -1, and 0 is a page.

Source: NVIDIA/TensorRT-LLM `_torch/pyexecutor/kv_cache/kv_cache_manager_v2.py`, `_torch/pyexecutor/resource_manager.py`
for the managers; `_torch/speculative/dflash.py` at 00679c66 for what a table entry must be divided by.
"""

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.errors import DSparkError

WHO = "draft KV pool"


@dataclass(frozen=True)
class Grant:
    """What a request may use.

    Attributes:
        tokens: that its pages carry, whole pages. owner: the manager's own object or first block; another one means that
            the request was given up and begun again.
    """

    tokens: int
    owner: Any


class DraftPages:
    """A draft KV manager as the draft context needs it.

    Args:
        manager: of the host. layout: what its pool must be.
    Raises:
        DSparkError: no manager, no way to learn a grant, or a pool that is not of this layout. There is no private pool.
    """

    def __init__(self, manager: Any, layout: PoolLayout) -> None:
        if manager is None:
            raise DSparkError(
                f"{WHO}: a draft KV cache manager is required, the host has made none: this version turns it off under "
                "attention-DP or in disaggregated serving. Upgrade tensorrt_llm, or turn those off."
            )
        self.manager = manager
        self._caches: dict[int, Any] | None = getattr(manager, "kv_cache_map", None)
        if self._caches is None and not hasattr(manager, "get_batch_cache_indices"):
            raise DSparkError(
                f"{WHO}: what a request was granted must be known; {type(manager).__name__} has neither kv_cache_map nor "
                "get_batch_cache_indices. Run `trtllm-dspark doctor` and report what it prints."
            )
        views = [manager.get_buffers(layer, kv_layout="HND") for layer in range(layout.num_layers)]
        for layer, view in enumerate(views):
            if view.dim() != 5 or tuple(view.shape[1:3]) != (1, 1):
                raise DSparkError(
                    f"{WHO}: layer {layer} must be [pages, 1, 1, {layout.page_size}, {layout.width}] of {layout.dtype}, it is "
                    f"{list(view.shape)} of {view.dtype}. The pool was made for another kind of draft."
                )
        # V2's views overlap: layer l's begins l pages into one allocation, so the last ones end early
        shortest = min(view.shape[0] for view in views)
        self.pool = ContextPool(layout, [view[:shortest, 0, 0] for view in views])
        self._pool_index, self._divisor = _table_encoding(manager, layout, views[0])

    @property
    def joint_reuse(self) -> bool:
        """Whether a matched prefix has its draft pages too."""
        return bool(getattr(self.manager, "enable_joint_kv_cache_reuse", False))

    def grant(self, request: int) -> Grant | None:
        """None for a request that the manager does not know."""
        page = self.pool.layout.page_size
        if self._caches is not None:
            cache = self._caches.get(request)
            return None if cache is None else Grant(-(-int(cache.capacity) // page) * page, cache)
        try:
            (blocks,) = self.manager.get_batch_cache_indices([request], layer_idx=0)
        except (KeyError, IndexError, RuntimeError):  # the C++ manager throws for an unknown sequence
            return None
        return Grant(len(blocks) * page, blocks[0] if len(blocks) else None)

    def table(self, offsets: torch.Tensor, rows: int) -> torch.Tensor:
        """Page ids of a batch, [rows, max_blocks] int32. Entries past a request's grant mean nothing.

        Args:
            offsets: the attention metadata's draft_kv_cache_block_offsets, [pools, rows, 2, max_blocks].
        """
        encoded = offsets[self._pool_index, :rows, 0].clamp(min=0)
        return (encoded // self._divisor).int()


def _table_encoding(manager: Any, layout: PoolLayout, view: torch.Tensor) -> tuple[int, int]:
    """Which pool of the table is the draft's, and what an entry is a multiple of.

    An entry counts pages of one layer. In V1's page-major pool the L layers of a page lie together; V2's view of a layer is
    dense over pages that the layers take turns in, and its entries index it as they are.
    """
    mapping = torch.as_tensor(manager.kv_cache_pool_mapping)
    pool_index = int(mapping[manager.layer_offsets[0], 0])
    sharing = int((mapping[:, 0] == pool_index).sum())
    if sharing != layout.num_layers:
        raise DSparkError(
            f"{WHO}: the draft's {layout.num_layers} layers must share one pool, {sharing} do. "
            "Use the default attention windows."
        )
    elements = layout.page_size * layout.width
    by_stride = {elements: 1, layout.num_layers * elements: layout.num_layers}
    stride = view.stride(0)
    if stride not in by_stride:
        raise DSparkError(
            f"{WHO}: a page of a layer must follow the last after {' or '.join(map(str, by_stride))} elements, it does after "
            f"{stride}. Run `trtllm-dspark doctor` and report what it prints."
        )
    return pool_index, by_stride[stride]


def layout_of(drafter: Any, page_size: int) -> PoolLayout:
    """What this drafter's pool must be."""
    return PoolLayout.of(drafter.config, page_size=page_size, dtype=drafter.fc.weight.dtype)
