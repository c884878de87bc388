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
            is replaced.
        fixes: of `faults.FIXES`, needed on this host.
    """

    asked_backend: str = "AUTO"
    fixes: frozenset[str] = frozenset()

    @property
    def dflash_attention_backend(self) -> str:
        return self.backend.name if self.asked_backend == "AUTO" else self.asked_backend

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
