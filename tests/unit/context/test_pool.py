"""The pool: what a token costs, what is allocated, and which views are refused."""

import published
import pytest
import torch

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.pool import ContextPool, PoolLayout, bytes_per_token
from trtllm_dspark.errors import DSparkError

LAYOUT = PoolLayout(num_layers=3, width=12, page_size=4, dtype=torch.bfloat16)


def draft(name: str) -> DraftConfig:
    return DraftConfig.from_dict(published.CONFIGS[name][0], require_block_size=False)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("inferact", torch.bfloat16, 5_760),
        ("inferact", torch.float32, 11_520),
        ("inferact", torch.float8_e4m3fn, 2_880),
        ("radixark", torch.bfloat16, 20_480),
        ("radixark-yarn", torch.float8_e4m3fn, 10_240),
    ],
)
def test_bytes_of_a_token(name: str, dtype: torch.dtype, expected: int) -> None:
    assert bytes_per_token(draft(name), dtype) == expected
    assert PoolLayout.of(draft(name), page_size=64, dtype=dtype).bytes_per_page == 64 * expected


def test_what_is_allocated_is_what_was_counted() -> None:
    pool = ContextPool.allocate(LAYOUT, 5)
    assert pool.nbytes == 5 * 4 * LAYOUT.bytes_per_token == sum(v.numel() * v.itemsize for v in pool.views)
    storage = {view.untyped_storage().data_ptr() for view in pool.views}
    assert len(storage) == 1 and pool.views[0].untyped_storage().nbytes() == pool.nbytes


def test_layers_are_views_of_the_documented_shape() -> None:
    pool = ContextPool.allocate(LAYOUT, 5)
    assert pool.num_pages == 5 and len(pool.views) == 3
    assert {(tuple(view.shape), view.dtype) for view in pool.views} == {((5, 4, 12), torch.bfloat16)}
    assert all(view[0].is_contiguous() for view in pool.views)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_float_pool_starts_as_nan(dtype: torch.dtype) -> None:
    layout = PoolLayout(num_layers=2, width=6, page_size=2, dtype=dtype)
    assert all(bool(view.float().isnan().all()) for view in ContextPool.allocate(layout, 3).views)


def test_foreign_views_are_used_in_place() -> None:
    memory = torch.zeros(5, 3, 4, 12, dtype=torch.bfloat16)  # interleaved: one page of all layers, then the next
    pool = ContextPool(LAYOUT, memory.unbind(1))
    pool.views[1][4, 3] = 1.0
    assert float(memory.sum()) == 12.0 and bool((memory[4, 1, 3] == 1.0).all())


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (1, (5, 4, 13), torch.bfloat16),
        (2, (5, 8, 12), torch.bfloat16),
        (1, (6, 4, 12), torch.bfloat16),
        (0, (5, 1, 4, 12), torch.bfloat16),
        (2, (5, 4, 12), torch.float16),
        (0, (5, 4, 12), torch.uint8),
        (1, (5, 4, 12), torch.float8_e4m3fn),
    ],
)
def test_a_view_of_another_shape_or_dtype_is_refused(layer: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    views = [torch.zeros(5, 4, 12, dtype=torch.bfloat16) for _ in range(3)]
    views[layer] = torch.zeros(shape, dtype=dtype)
    with pytest.raises(DSparkError, match=rf"layer {layer} must be \[\d+, 4, 12\] of torch.bfloat16") as error:
        ContextPool(LAYOUT, views)
    assert str(list(shape)) in str(error.value) and str(dtype) in str(error.value)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_layers_is_refused(count: int) -> None:
    with pytest.raises(DSparkError, match=f"3 layer views are required, {count} came"):
        ContextPool(LAYOUT, [torch.zeros(5, 4, 12, dtype=torch.bfloat16)] * count)


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_without_pages_is_refused(num_pages: int) -> None:
    with pytest.raises(DSparkError, match=f"num_pages must be at least 1, it is {num_pages}"):
        ContextPool.allocate(LAYOUT, num_pages)


@pytest.mark.parametrize("field", ["num_layers", "width", "page_size"])
def test_a_layout_without_extent_is_refused(field: str) -> None:
    sizes = {"num_layers": 3, "width": 12, "page_size": 4} | {field: 0}
    with pytest.raises(DSparkError, match=f"{field} must be at least 1, it is 0"):
        PoolLayout(**sizes, dtype=torch.bfloat16)
