"""What TensorRT-LLM's stock DFlash/DSpark worker reads from a drafter, under the names it reads.

Each name is a view of what the model already has; nothing is stored twice. Host words stay on this side of the border.

Source: NVIDIA/TensorRT-LLM `_torch/speculative/dflash.py` at 06d34b7b and `_torch/models/modeling_dspark.py` at 0391c3d1.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from cute_kernels.reference.context_append import finish_latents
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.heads import MarkovHead, greedy_chain
from trtllm_dspark.model.layers import Embedding, Linear, RMSNorm
from trtllm_dspark.model.loading import LoadableModel
from trtllm_dspark.model.rope import RotaryEmbedding
from trtllm_dspark.tensor_names import canonical_name, tensor_table


class HostWorkerContract(LoadableModel):
    """Mixed into `MLADSparkForCausalLM`. W below is the latent's width (576 in the published drafter)."""

    _uses_worker_attention_backend = False  # the drafter runs its own attention
    _paged_ctx_cache = True
    _num_kv_heads = 1
    _kv_factor = 1

    # what the drafter class has
    rope: RotaryEmbedding
    context_proj: Linear
    context_norm: RMSNorm
    embed_tokens: Embedding
    latent_norm: nn.Parameter
    markov_head: MarkovHead | None
    project_context: Callable[[torch.Tensor], torch.Tensor]
    context_latents: Callable[[torch.Tensor], torch.Tensor]
    draft_hidden: Callable[..., torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self._runtime_position_ceiling: int | None = None  # settable; angles are computed, so nothing is sized by it
        self.logits_processor: Any = None
        self.lm_head: Any = None
        self.context_start: torch.Tensor | None = None  # [B], int32, first readable position, of the next forward; None: 0

    # ---------------------------------------------------------------------------------------------------- attributes
    @property
    def fc(self) -> nn.Module:
        return self.context_proj

    @property
    def hidden_norm(self) -> nn.Module:
        return self.context_norm

    @property
    def model(self) -> nn.Module:
        return self

    @property
    def draft_model_full(self) -> nn.Module:
        return self

    @property
    def block_size(self) -> int | None:
        return self.config.block_size

    @property
    def mask_token_id(self) -> int:
        return self.config.mask_token_id

    @property
    def dflash_attention_backend(self) -> str:
        """The concrete name, never AUTO."""
        return self.backend.name

    @property
    def _dspark_shift_label(self) -> bool:
        return self.config.sample_from_anchor

    @property
    def _num_attn_layers(self) -> int:
        return self.config.num_layers

    @property
    def _num_heads(self) -> int:
        """On this rank."""
        return self.config.num_heads // self.tp.size

    @property
    def _head_dim(self) -> int:
        """W."""
        return self.config.latent_width

    @property
    def has_markov_head(self) -> bool:
        return self.markov_head is not None

    @property
    def markov_w2(self) -> torch.Tensor | None:
        """[V, R], or None."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    # ------------------------------------------------------------------------------------------------------- methods
    def _build_fused_kv_buffers(self) -> None:
        """The layers' latent projections are one parameter from the start, so there is nothing to build."""

    def project_target_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, n_taps * D_target] -> [T, D]."""
        return self.project_context(hidden)

    def precompute_context_kv(
        self,
        projected_hidden: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """[N, D] and absolute positions [N] -> finished latents [N, L, 1, W]; there is no second plane."""
        cos, sin = self.rope.angles(positions)
        z = self.context_latents(projected_hidden)
        rows = finish_latents(z, self.latent_norm, cos.unsqueeze(1), sin.unsqueeze(1), self.config.rms_norm_eps)
        return rows.unsqueeze(2), None

    def dflash_forward(
        self,
        noise_embedding: torch.Tensor,
        query_positions: torch.Tensor,
        num_ctx_per_req: torch.Tensor,
        ctx_k_cache: torch.Tensor | None,
        ctx_v_cache: torch.Tensor | None,
        ctx_cache_batch_idx: torch.Tensor,
        ctx_kv_cache: Sequence[torch.Tensor] | None = None,
        ctx_page_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the blocks over the host's paged pool.

        Args:
            noise_embedding: [B, S, D]. query_positions: [B, S], int64, absolute.
            num_ctx_per_req: [B], tokens of context. ctx_k_cache, ctx_v_cache: the host's dense arena; not used.
            ctx_cache_batch_idx: [B], the row of ctx_page_table that belongs to each request.
            ctx_kv_cache: L views [num_pages, 1, 1, P, W]. ctx_page_table: [rows, max_pages], int32.
        Returns:
            [B * S, D].
        Raises:
            DSparkError: the host passes no paged pool.
        """
        if ctx_kv_cache is None or ctx_page_table is None:
            raise DSparkError(
                "MLADSparkForCausalLM: the draft context must be paged (ctx_kv_cache and ctx_page_table), the host passed "
                "a dense arena. Keep the draft KV cache manager enabled."
            )
        for layer, view in enumerate(ctx_kv_cache):
            if view.dim() != 5 or tuple(view.shape[1:3]) != (1, 1) or view.shape[4] != self._head_dim:
                raise DSparkError(
                    f"MLADSparkForCausalLM: ctx_kv_cache must be [num_pages, 1, 1, P, {self._head_dim}], layer {layer} is "
                    f"{list(view.shape)}. Pass the draft pool's own views."
                )
        pages = [view[:, 0, 0] for view in ctx_kv_cache]
        table = ctx_page_table.index_select(0, ctx_cache_batch_idx.long())
        start, self.context_start = self.context_start, None
        hidden = self.draft_hidden(noise_embedding, query_positions, pages, table, num_ctx_per_req.int(), start)
        return hidden.flatten(0, 1)

    def apply_markov_chain_logits(
        self,
        base_logits: torch.Tensor,
        first_prev_tokens: torch.Tensor,
        argmax_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        vocab_slice: slice | None = None,
    ) -> torch.Tensor:
        """[B, K, V] and anchors [B] -> logits with the Markov bias, [B, K, V] in base_logits' dtype.

        argmax_fn and vocab_slice: see `greedy_chain`; for logits that are sharded over the vocabulary.
        Each step is conditioned on the argmax of the logits as returned, which is the token that the host will take.
        """
        dtype, pick = base_logits.dtype, argmax_fn or partial(torch.argmax, dim=-1)
        chain = greedy_chain(
            self.markov_head,
            base_logits,
            first_prev_tokens,
            argmax=lambda logits: pick(logits.to(dtype)),
            vocab=vocab_slice or slice(None),
            keep_logits=True,
        )
        assert chain.logits is not None
        return chain.logits.to(dtype)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Fill from whole tensors under their stored names, sliced here for this rank.

        Raises:
            DSparkError: a tensor that is missing, unknown, there under two names, of another shape or not finite.
        """
        stored_under: dict[str, str] = {}
        for stored in weights:
            other = stored_under.setdefault(canonical_name(stored), stored)
            if other != stored:
                raise DSparkError(f"MLADSparkForCausalLM: {other} and {stored} are the same tensor. Pass one of them.")
        switched_off = ("confidence_head.",) * (not self.config.confidence_head)
        switched_off += ("markov_head.",) * (not self.config.markov_rank)
        known = tensor_table(self.config)
        unknown = [stored for name, stored in stored_under.items() if name not in known and not name.startswith(switched_off)]
        if unknown:
            raise DSparkError(
                f"MLADSparkForCausalLM: every tensor must have a place in this draft, these have none: {', '.join(unknown)}. "
                "The weights do not belong to this config.json."
            )

        def read(name: str, dim: int | None) -> torch.Tensor:
            if name not in stored_under:
                raise DSparkError(
                    f"MLADSparkForCausalLM: {name} is required, the weights passed do not hold it. "
                    "Pass every tensor of the draft checkpoint."
                )
            value = weights[stored_under[name]]
            if tuple(value.shape) != known[name].shape:
                raise DSparkError(
                    f"MLADSparkForCausalLM: {name} must have shape {known[name].shape}, it has {tuple(value.shape)}. "
                    "Pass the checkpoint's own tensors, not a rank's slice of them."
                )
            if not bool(torch.isfinite(value).all()):
                raise DSparkError(f"MLADSparkForCausalLM: {name} must be finite, it is not. Fetch the checkpoint again.")
            return value if dim is None else value.chunk(self.tp.size, dim)[self.tp.rank]

        self.fill(read)

    def load_weights_from_target_model(self, target_model: Any) -> None:
        """Share the target's lm_head, by reference. It stays out of this module's own: no cast or move reaches it."""
        self.__dict__["lm_head"] = target_model.lm_head
