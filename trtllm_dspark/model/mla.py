"""MLADSparkForCausalLM: the MLA-backboned DSpark drafter of Kimi-K3.

Shapes: B requests, S block rows, T context tokens, H heads on this rank, D hidden, L layers, V vocabulary, R Markov rank;
c = kv_lora_rank, r = qk_rope_head_dim, W = c + r, the width of a latent.

One block is `[anchor, MASK x (S-1)]` at positions p .. p+S-1. Its rows see the whole context (positions < p) and each
other in both directions; row k gives the token at p+k+1. Context latents come from target features and skip
`input_layernorm`: `context_norm` takes its place. The latents of all layers are one weight, so that a context token costs
one GEMM.

Source: TorchSpec 0d741940 `torchspec/models/draft/{dspark,deepseek_eagle}.py` for the training maths; tokenspeed f4d8ec6
`runtime/models/kimi_k3_dspark.py` for the absorbed form.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from cute_kernels.reference.query_rope import query_rope
from trtllm_dspark.attention.operations import DraftShape, LinearProduct, QueryRope
from trtllm_dspark.attention.policy import BackendChoice, resolve_backend
from trtllm_dspark.attention.products import plain_linear
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import UnsupportedError
from trtllm_dspark.model.heads import ConfidenceHead, MarkovHead
from trtllm_dspark.model.host_contract import HostWorkerContract
from trtllm_dspark.model.layers import Embedding, GatedMLP, Linear, ResidualNorm, RMSNorm, linear, with_company
from trtllm_dspark.model.loading import Binding
from trtllm_dspark.model.parallel import SINGLE, TensorParallel
from trtllm_dspark.model.rope import RotaryEmbedding, softmax_scale

Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [B, S, H, W], the block's latents [B, S, W]) -> weighted latents [B, S, H, c]."""


def per_head(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, product: LinearProduct = plain_linear
) -> torch.Tensor:
    """x [B, S, H, in] times weight [H, out, in], transposed, head by head -> [B, S, H, out]; see `with_company`.

    out: where it is written; rows of its last dim are contiguous, the others may be strided. product: what computes it.
    """
    if x.device.type != "cpu":
        return product(x, weight, out)
    heads = x.shape[-2]
    found = with_company(lambda rows: product(rows.unflatten(-1, (heads, -1)), weight).flatten(-2), x.flatten(-2))
    found = found.unflatten(-1, (heads, -1))
    return found if out is None else out.copy_(found)


class MLAAttention(nn.Module):
    """The query and output sides of one layer, absorbed: scores and values live in the latent space.

    Attributes:
        product: what multiplies head by head.
    """

    product: LinearProduct

    def __init__(self, config: DraftConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert config.q_lora_rank and config.kv_lora_rank and config.qk_nope_head_dim and config.v_head_dim
        self.heads = tp.share(config.num_heads, "num_attention_heads")
        self.nope, self.value, self.latent = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * config.qk_head_dim)
        self.kv_b_proj = Linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = Linear(self.heads * self.value, config.hidden_size)
        self.tp = tp
        self.product = plain_linear

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of kv_b_proj: W_UK [H, nope, c], W_UV [H, value, c]. Per head, the key rows come first."""
        per_head = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        return per_head[:, : self.nope], per_head[:, self.nope :]

    def query(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: QueryRope = query_rope) -> torch.Tensor:
        """x [B, S, D], cos and sin [B, S, r/2] -> [B, S, H, W]: W_UK^T q_nope beside RoPE(q_rope), each written in place."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        nope, rotary = q.split([self.nope, q.shape[-1] - self.nope], -1)
        out = q.new_empty(*q.shape[:-1], self.latent + rotary.shape[-1])
        per_head(nope, self.up_projections()[0].transpose(1, 2), out[..., : self.latent], self.product)
        rope(rotary, cos, sin, out)
        return out

    def output(self, weighted: torch.Tensor) -> torch.Tensor:
        """[B, S, H, c] -> [B, S, D]: W_UV per head, then o_proj, summed over tensor-parallel ranks."""
        values = per_head(weighted, self.up_projections()[1], product=self.product)
        return self.tp.sum(self.o_proj(values.flatten(-2)))


class MLALayer(nn.Module):
    """Attention and MLP, pre-norm, residual stream in the model's dtype."""

    def __init__(self, config: DraftConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = ResidualNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLAAttention(config, tp)
        self.post_attention_layernorm = ResidualNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, tp)


class MLADSparkForCausalLM(HostWorkerContract):
    """The drafter: target features in, S rows of hidden states out.

    Args:
        config: of family "mla".
        backend: the resolved attention backend.
        tp: which slice of heads and MLP columns this rank holds.

    The module is built without values. `from_pretrained` fills every parameter or raises; `bindings` names them all.
    """

    def __init__(self, config: DraftConfig, *, backend: BackendChoice, tp: TensorParallel = SINGLE) -> None:
        super().__init__()
        if config.family != "mla":
            raise UnsupportedError(
                f"MLADSparkForCausalLM: a draft of family mla is required, {config.architecture} is {config.family}. "
                "Only its config and tensors can be inspected in this version."
            )
        assert config.kv_lora_rank and config.qk_rope_head_dim
        hidden, eps, taps = config.hidden_size, config.rms_norm_eps, config.num_taps
        self.config, self.tp = config, tp
        self.scale = softmax_scale(config)
        self.rope = RotaryEmbedding(config.rope, config.qk_rope_head_dim)
        self.tap_norms = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in range(taps * config.per_tap_norm))
        self.context_proj = Linear(taps * config.target_hidden_size, hidden)
        self.context_norm = RMSNorm(hidden, eps)
        self.embed_tokens = Embedding(config.vocab_size, hidden)
        # kv_a_proj_with_mqa and kv_a_layernorm of every layer, stacked
        self.latent_proj = nn.Parameter(torch.empty(config.num_layers, config.latent_width, hidden))
        self.latent_norm = nn.Parameter(torch.empty(config.num_layers, config.kv_lora_rank))
        self.layers = nn.ModuleList(MLALayer(config, tp) for _ in range(config.num_layers))
        self.final_norm = ResidualNorm(hidden, eps)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank) if config.markov_rank else None
        code = config.markov_rank if config.confidence_with_markov else 0
        self.confidence_head = ConfidenceHead(hidden, code, config.confidence_bias) if config.confidence_head else None
        self.use_backend(backend)

    def use_backend(self, backend: BackendChoice) -> None:
        """Compute with the operations of this backend from now on. A `DraftContext` keeps the append that it was made with."""
        self.backend = backend
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.add_norm = backend.operations.add_rms_norm
            elif isinstance(module, (Linear, MLAAttention)):
                module.product = backend.operations.linear
            elif isinstance(module, GatedMLP):
                module.gated = backend.operations.silu_mul

    @classmethod
    def resolve_backend(
        cls, config: DraftConfig, device: torch.device, requested: str = "AUTO", shape: DraftShape | None = None
    ) -> BackendChoice:
        """The attention backend for this draft on this device; see `attention.policy`."""
        return resolve_backend(config, device, requested, shape=shape, owner=cls.__name__)

    # ------------------------------------------------------------------------------------------------------- context
    def project_context(self, taps: torch.Tensor) -> torch.Tensor:
        """Target features of context tokens. Computed once a token, shared by all layers.

        Args:
            taps: [T, n_taps * D_target], hidden states after the tapped layers, in ascending layer order.
        Returns:
            [T, D].
        """
        if len(self.tap_norms):
            parts = taps.chunk(len(self.tap_norms), -1)
            taps = torch.cat([norm(part.contiguous()) for norm, part in zip(self.tap_norms, parts, strict=True)], -1)
        return self.context_norm(self.context_proj(taps))

    def context_latents(self, projected: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, L, W]: the latents of all layers in one GEMM, neither normalised nor rotated."""
        weight = self.latent_proj.flatten(0, 1)
        return linear(projected, weight, self.backend.operations.linear).unflatten(-1, self.latent_proj.shape[:2])

    # --------------------------------------------------------------------------------------------------------- block
    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run blocks through all layers.

        Args:
            embeddings: [B, S, D]. positions: [B, S], integer, absolute. attend: see `Attend`.
        Returns:
            [B, S, D], after final_norm: what lm_head and the confidence head read.
        """
        if not self.backend.operations.differentiable and torch.is_grad_enabled() and embeddings.requires_grad:
            raise UnsupportedError(
                f"MLADSparkForCausalLM: a backend with gradients is required to train, {self.backend.name} has none. "
                "Take attention_backend='VANILLA'."
            )
        cos, sin = self.rope.angles(positions)
        stream, made = embeddings, None
        for index, layer in enumerate(cast("list[MLALayer]", self.layers)):
            x, stream = layer.input_layernorm(stream, made)
            latents = self.block_latents(index, x, cos, sin)
            q = layer.self_attn.query(x, cos, sin, self.backend.operations.query_rope)
            x, stream = layer.post_attention_layernorm(stream, layer.self_attn.output(attend(index, q, latents)))
            made = layer.mlp(x)
        return self.final_norm(stream, made)[0]

    def block_latents(self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The block's own latents of one layer, finished. x [B, S, D], after input_layernorm -> [B, S, W]."""
        z = linear(x, self.latent_proj[layer], self.backend.operations.linear)
        finish = self.backend.operations.finish_latents
        return finish(z, self.latent_norm[layer], cos, sin, self.config.rms_norm_eps)

    def draft_hidden(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        pages: Sequence[torch.Tensor],
        page_table: torch.Tensor,
        context_len: torch.Tensor,
        context_start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` over the paged context with the resolved backend.

        Args:
            embeddings: [B, S, D]. positions: [B, S], integer.
            pages: L views [num_pages, P, W]. page_table: [B, max_pages], int32.
            context_len, context_start: [B], int32: positions start .. len-1 are the context; start None is 0.
        Returns:
            [B, S, D].
        """
        latent, operations = self.latent_norm.shape[-1], self.backend.operations
        plan = operations.plan(
            context_len,
            context_start,
            block_rows=embeddings.shape[1],
            heads=cast(MLALayer, self.layers[0]).self_attn.heads,
            value_width=latent,
            pages=pages[0],
            page_table=page_table,
        )

        def attend(layer: int, q: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
            return operations.block_attention(
                q,
                latents,
                pages=pages[layer],
                page_table=page_table,
                context_len=context_len,
                scale=self.scale,
                value_width=latent,
                layer=layer,
                context_start=context_start,
                plan=plan,
            )

        return self(embeddings, positions, attend)

    # ------------------------------------------------------------------------------------------------------- weights
    def bindings(self) -> dict[str, Binding]:
        """Canonical checkpoint name -> where its values go, and the dim that tensor parallelism slices."""
        found = {
            "context_proj.weight": Binding(self.context_proj.weight),
            "context_norm.weight": Binding(self.context_norm.weight),
            "embed_tokens.weight": Binding(self.embed_tokens.weight),
            "final_norm.weight": Binding(self.final_norm.weight),
        }
        found |= {f"fc_norm.{i}.weight": Binding(norm.weight) for i, norm in enumerate(cast("list[RMSNorm]", self.tap_norms))}
        if self.markov_head is not None:
            found["markov_head.markov_w1.weight"] = Binding(self.markov_head.markov_w1.weight)
            found["markov_head.markov_w2.weight"] = Binding(self.markov_head.markov_w2.weight)
        if self.confidence_head is not None:
            found["confidence_head.proj.weight"] = Binding(self.confidence_head.weight)
            if self.confidence_head.bias is not None:
                found["confidence_head.proj.bias"] = Binding(self.confidence_head.bias)
        for index, layer in enumerate(cast("list[MLALayer]", self.layers)):
            attention, mlp = layer.self_attn, layer.mlp
            of_layer = {
                "input_layernorm": Binding(layer.input_layernorm.weight),
                "post_attention_layernorm": Binding(layer.post_attention_layernorm.weight),
                "self_attn.q_a_proj": Binding(attention.q_a_proj.weight),
                "self_attn.q_a_layernorm": Binding(attention.q_a_layernorm.weight),
                "self_attn.q_b_proj": Binding(attention.q_b_proj.weight, 0),
                "self_attn.kv_a_proj_with_mqa": Binding(self.latent_proj.detach()[index]),
                "self_attn.kv_a_layernorm": Binding(self.latent_norm.detach()[index]),
                "self_attn.kv_b_proj": Binding(attention.kv_b_proj.weight, 0),
                "self_attn.o_proj": Binding(attention.o_proj.weight, 1),
                "mlp.gate_proj": Binding(mlp.gate_proj.weight, 0),
                "mlp.up_proj": Binding(mlp.up_proj.weight, 0),
                "mlp.down_proj": Binding(mlp.down_proj.weight, 1),
            }
            found |= {f"layers.{index}.{name}.weight": binding for name, binding in of_layer.items()}
        return found
