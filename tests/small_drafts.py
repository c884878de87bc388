"""Small MLA drafts with weights that keep activations near 1, and everything one needs to run them."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import published
import torch
import torch.nn.functional as F

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter

torch.set_num_threads(1)  # at these sizes threads only wait for each other


def weights(raw: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """By stored name: norms near 1, projections that keep the scale of what they read, unit embeddings and Markov rows."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, shape in published.layout(raw).items():
        value = torch.randn(shape, generator=generator)
        if name.startswith("confidence_head"):
            value = 0.2 * value
        elif len(shape) == 1:
            value = 1.0 + 0.2 * value
        elif "embed_tokens" not in name and "markov_w1" not in name:
            value = value * shape[1] ** -0.5
        made[name] = value.to(dtype)
    return made


def small_model(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, tensors: dict[str, torch.Tensor] | None = None, **changes: Any
) -> MLADSparkForCausalLM:
    """`published.tiny("mla")` with changes, filled from `tensors` or from random weights."""
    raw = published.tiny("mla", **changes)
    model = MLADSparkForCausalLM.empty(DraftConfig.from_dict(raw), dtype=dtype)
    model.load_weights(weights(raw, seed=seed) if tensors is None else tensors)
    return model.eval().requires_grad_(False)


def lm_head(model: MLADSparkForCausalLM, seed: int = 99) -> torch.nn.Linear:
    """A target's output head in the model's dtype."""
    config = model.config
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    value = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)) * config.hidden_size**-0.5
    head.weight.data = value.to(model.context_proj.weight.dtype)
    return head.requires_grad_(False)


def small_drafter(model: MLADSparkForCausalLM, *, page_size: int = 4, num_pages: int = 16) -> Drafter:
    """Over a pool that starts as NaN, in the model's dtype."""
    layout = PoolLayout.of(model.config, page_size=page_size, dtype=model.context_proj.weight.dtype)
    head = lm_head(model)
    return Drafter(model, DraftContext(ContextPool.allocate(layout, num_pages)), lambda hidden: F.linear(hidden, head.weight))


def taps(model: MLADSparkForCausalLM, count: int, seed: int = 7) -> torch.Tensor:
    """[count, n_taps * D_target] features."""
    width = model.config.num_taps * model.config.target_hidden_size
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def feed(drafter: Drafter, request: Hashable, features: torch.Tensor, *, tokens: int | None = None) -> None:
    """Admit a request for `tokens` tokens (by default what its features need) and write its context in one segment."""
    drafter.context.admit(request, len(features) if tokens is None else tokens)
    if len(features):
        drafter.extend([Segment(request, 0, len(features))], features)


def write_small(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """The same draft as a checkpoint folder."""
    raw = published.tiny("mla", **changes)
    return published.write_tiny(folder, raw, weights(raw, seed=seed, dtype=dtype))


def rows_of(drafter: Drafter, request: Hashable) -> torch.Tensor:
    """[L, T, W]: what the pages hold of a request's context."""
    held = drafter.context.requests[request]
    slots = torch.tensor([slot for slot in held.slots(0, held.length) if slot >= 0], dtype=torch.int64)
    return torch.stack([view.flatten(0, 1)[slots] for view in drafter.context.pool.views])
