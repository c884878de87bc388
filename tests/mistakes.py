"""Mistakes that a drafter could make, each applied to a real one: what the numeric tests must notice."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F

from cute_kernels.reference import context_append as append_kernel
from cute_kernels.reference import query_rope
from cute_kernels.reference.rotation import rms_norm, rotate_half_split
from trtllm_dspark.context.draft_context import ContextView
from trtllm_dspark.model.rope import RotaryEmbedding
from trtllm_dspark.propose import Drafter

Mistake = Callable[[pytest.MonkeyPatch, Drafter], None]


def half_split_rope(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    patch.setattr(query_rope, "rotate_adjacent", rotate_half_split)
    patch.setattr(append_kernel, "rotate_adjacent", rotate_half_split)


def half_split_query_only(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    patch.setattr(query_rope, "rotate_adjacent", rotate_half_split)


def input_layernorm_on_context(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    model = drafter.model

    def latents(projected: torch.Tensor) -> torch.Tensor:
        rows = (F.linear(x.input_layernorm(projected)[0], w) for x, w in zip(model.layers, model.latent_proj, strict=True))
        return torch.stack(list(rows), 1)

    patch.setattr(model, "context_latents", latents)


def scale_of_the_latent(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    patch.setattr(drafter.model, "scale", drafter.model.config.latent_width**-0.5)


def scale_without_mscale(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    patch.setattr(drafter.model, "scale", drafter.model.config.qk_head_dim**-0.5)


def causal_block(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    backend = drafter.model.backend

    def causal(q: torch.Tensor, block_latents: torch.Tensor, **rest: object) -> torch.Tensor:
        rows = range(q.shape[1])
        parts = [backend.block_attention(q[:, s : s + 1], block_latents[:, : s + 1], **rest) for s in rows]
        return torch.cat(parts, 1)

    patch.setattr(drafter.model, "backend", replace(backend, operations=replace(backend.operations, block_attention=causal)))


def _context_shifted(by: int) -> Mistake:
    def apply(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
        append = drafter.context.append

        def shifted(segments, z, norm_weight, cos, sin, eps) -> None:  # type: ignore[no-untyped-def]
            at = chain.from_iterable(range(s.first + by, s.first + by + s.count) for s in segments)
            append(segments, z, norm_weight, *drafter.model.rope.angles(torch.tensor(list(at))), eps)

        patch.setattr(drafter.context, "append", shifted)

    return apply


def context_past_the_anchor(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    """A row at the anchor's own position: a copy of the one before it, or zeros."""
    view, context = drafter.context.view, drafter.context

    def longer(requests, device="cpu") -> ContextView:  # type: ignore[no-untyped-def]
        for request in requests:
            length = context.length(request)
            slot, before = context.requests[request].slots(length, 1)[0], context.requests[request].slots(length - 1, 1)
            for pages in context.pool.views:
                rows = pages.view(-1, pages.shape[-1])
                rows[slot] = rows[before[0]] if length else 0.0
        found = view(requests, device)
        return replace(found, context_len=found.context_len + 1)

    patch.setattr(context, "view", longer)


def normed_rotary_key(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    finish = append_kernel.finish_latents

    def wrong(z, norm_weight, cos, sin, eps) -> torch.Tensor:  # type: ignore[no-untyped-def]
        c = norm_weight.shape[-1]
        z = torch.cat((z[..., :c], rms_norm(z[..., c:], torch.ones_like(z[..., c:]), eps)), -1)
        return finish(z, norm_weight, cos, sin, eps)

    backend = drafter.model.backend
    patch.setattr(drafter.model, "backend", replace(backend, operations=replace(backend.operations, finish_latents=wrong)))
    patch.setattr(append_kernel, "finish_latents", wrong)


def swapped_key_and_value_rows(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    for layer in drafter.model.layers:
        keys, values = layer.self_attn.up_projections()
        patch.setattr(layer.self_attn, "up_projections", lambda swapped=(values, keys): swapped)


def another_theta(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    rope = drafter.model.config.rope.model_copy(update={"theta": 10000.0})
    patch.setattr(drafter.model, "rope", RotaryEmbedding(rope, drafter.model.rope.dim))


MISTAKES: dict[str, Mistake] = {
    "half-split-rope": half_split_rope,
    "half-split-query-only": half_split_query_only,
    "input-layernorm-on-context": input_layernorm_on_context,
    "scale-of-the-latent": scale_of_the_latent,
    "scale-without-mscale": scale_without_mscale,
    "causal-block": causal_block,
    "context-shifted-by-1": _context_shifted(1),
    "context-shifted-by-minus-1": _context_shifted(-1),
    "context-past-the-anchor": context_past_the_anchor,
    "normed-rotary-key": normed_rotary_key,
    "swapped-key-and-value-rows": swapped_key_and_value_rows,
    "another-theta": another_theta,
}
