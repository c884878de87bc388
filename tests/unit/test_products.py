"""The matrix products of a draft step: which there are, who computes them, and that a backend is asked for all of them."""

from dataclasses import replace

import published
import pytest
import small_drafts
import torch
import torch.nn.functional as F

from cute_kernels.few_row_linear import Product
from cute_kernels.few_row_linear.config import SILU_MUL
from cute_kernels.reference.few_row_linear import few_row_linear, few_row_silu_mul
from trtllm_dspark.attention.products import multiplied, plain_linear
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.propose import Drafter

ANCHORS = torch.tensor([3, 60])


def drafter() -> Drafter:
    made = small_drafts.small_drafter(small_drafts.small_model())
    for request, length in enumerate((9, 4)):
        small_drafts.feed(made, request, small_drafts.taps(made.model, length, seed=length), tokens=length + 4)
    return made


def product_of(weight: torch.Tensor, form: str = "linear") -> Product:
    groups = weight.shape[0] if weight.ndim == 3 else 1
    return Product(weight.shape[-2], weight.shape[-1], groups, form, weight.ndim == 3 and weight.stride(-1) != 1)


def watched(made: Drafter) -> set[Product]:
    """What the draft is multiplied by from now on."""
    seen: set[Product] = set()

    def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.add(product_of(weight))
        return plain_linear(x, weight, out)

    def silu_mul(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        seen.add(product_of(gate, SILU_MUL))
        return few_row_silu_mul(x, gate, up)

    backend = made.model.backend
    made.model.use_backend(replace(backend, operations=replace(backend.operations, linear=linear, silu_mul=silu_mul)))
    return seen


def test_a_step_asks_its_backend_for_every_product_and_no_other() -> None:
    """Fails where a product of a step goes past the backend, or is missing in what is built and checked before."""
    made = small_drafts.small_drafter(small_drafts.small_model())
    made.lm_head = small_drafts.lm_head(made.model).weight
    seen = watched(made)
    small_drafts.feed(made, 0, small_drafts.taps(made.model, 5), tokens=9)
    made.propose([0], ANCHORS[:1], 4)
    config = made.model.config
    assert seen == set(multiplied(config, config.num_heads)) and len(seen) > 8


def test_a_rank_has_its_share_of_heads_and_columns() -> None:
    config = DraftConfig.from_dict(published.INFERACT | {"block_size": 8})
    whole, part = (multiplied(config, config.num_heads // ranks) for ranks in (1, 8))
    assert {product.outputs for product in whole if product.form == SILU_MUL} == {config.intermediate_size}
    assert {product.outputs for product in part if product.form == SILU_MUL} == {config.intermediate_size // 8}
    assert {product.groups for product in part} == {1, config.num_heads // 8}
    assert all(product.reason() is None for product in (*whole, *part))  # Hopper's kernel takes all of them


def test_a_head_may_be_its_weight() -> None:
    """Fails where the weight of a head is not what is multiplied by. Control: another weight."""
    called, weighed, other = drafter(), drafter(), drafter()
    weight = small_drafts.lm_head(called.model).weight
    weighed.lm_head, other.lm_head = weight, weight.roll(1, 0)
    drafts = [made.propose([0, 1], ANCHORS, 4, keep_logits=True) for made in (called, weighed, other)]
    assert torch.equal(drafts[0].logits, drafts[1].logits) and torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert not torch.equal(drafts[0].logits, drafts[2].logits)


@pytest.mark.parametrize("grad", [False, True])
def test_plain_products_go_where_they_are_told(grad: bool) -> None:
    """Fails where the part beside a given output is touched, or heads change places."""
    x, weight = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.randn(4, 6, 8, dtype=torch.float64)
    room = torch.full((2, 3, 4, 10), torch.nan, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        assert plain_linear(x, weight, room[..., 2:8]).data_ptr() == room[..., 2:8].data_ptr()
    torch.testing.assert_close(room[..., 2:8], few_row_linear(x, weight))
    assert not torch.allclose(room[..., 2:8], few_row_linear(x, weight.roll(1, 0)))
    assert bool(room[..., :2].isnan().all() and room[..., 8:].isnan().all())
    flat = torch.full((2, 6), torch.nan, dtype=torch.float64)
    assert torch.equal(plain_linear(x[0, 0, :2], weight[0], flat), F.linear(x[0, 0, :2], weight[0]))
