"""Our drafter as TensorRT-LLM holds it: what differs between it and the same class in the embedded engine."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.model.parallel import TensorParallel
from trtllm_dspark.model.sharing import compare_embeddings

log = logging.getLogger("trtllm_dspark.plugin")


def host_device() -> torch.device:
    """Where this process's part of the model lives."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class HostedMLADSpark(MLADSparkForCausalLM):
    """Built by `builder`, filled by the host's loader, given its worker when the target's head is shared with it.

    Attributes:
        asked_backend: the host's own word for the attention backend; its stock worker compares ours with it once, before it
            is replaced. context_start: [B], int32, the first readable position of each request of the next forward; None: 0.
        fixes: of `faults.FIXES`, needed on this host.
    """

    asked_backend: str = "AUTO"
    context_start: torch.Tensor | None = None
    fixes: frozenset[str] = frozenset()

    @property
    def dflash_attention_backend(self) -> str:
        return self.backend.name if self.asked_backend == "AUTO" else self.asked_backend

    def dflash_forward(
        self,
        noise_embedding: torch.Tensor,
        query_positions: torch.Tensor,
        num_ctx_per_req: torch.Tensor,
        ctx_k_cache: torch.Tensor | None,
        ctx_v_cache: torch.Tensor | None,
        ctx_cache_batch_idx: torch.Tensor,
        ctx_kv_cache: Any = None,
        ctx_page_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the contract's, from `context_start` on where our worker has set it."""
        start, self.context_start = self.context_start, None
        if start is None:
            return super().dflash_forward(
                noise_embedding,
                query_positions,
                num_ctx_per_req,
                ctx_k_cache,
                ctx_v_cache,
                ctx_cache_batch_idx,
                ctx_kv_cache,
                ctx_page_table,
            )
        assert ctx_kv_cache is not None and ctx_page_table is not None, "our worker passes its pages"
        pages = [view[:, 0, 0] for view in ctx_kv_cache]
        table = ctx_page_table.index_select(0, ctx_cache_batch_idx)
        hidden = self.draft_hidden(noise_embedding, query_positions, pages, table, num_ctx_per_req.int(), start)
        return hidden.flatten(0, 1)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """As the contract's, also where the host built the model without memory and has not given it any."""
        if self.latent_proj.is_meta:
            self.to_empty(device=host_device())
        super().load_weights(weights)

    def load_weights_from_target_model(self, target_model: Any) -> None:
        """Share the target's head, and put our worker in the place of the target's."""
        from trtllm_dspark.plugin.replacement import replace_worker

        super().load_weights_from_target_model(target_model)
        replace_worker(target_model, self, self.fixes)
        table = getattr(getattr(getattr(target_model, "model", None), "embed_tokens", None), "weight", None)
        if isinstance(table, torch.Tensor) and table.shape == self.embed_tokens.weight.shape:  # not where it is sharded
            report = compare_embeddings(self.embed_tokens.weight, table, self.config.mask_token_id)
            log.info("%s", report)


class HostTensorParallel(TensorParallel):
    """The ranks of a host's mapping, joined by the host's own collective."""

    @classmethod
    def of(cls, mapping: Any) -> "TensorParallel":
        """One rank's slice; the whole draft on each rank under attention-DP."""
        size = int(getattr(mapping, "tp_size", 1))
        if size == 1 or getattr(mapping, "enable_attention_dp", False):
            return TensorParallel()
        from tensorrt_llm._torch.distributed.ops import AllReduce

        return cls(int(mapping.tp_rank), size, AllReduce(mapping=mapping))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return self.group(partial)
