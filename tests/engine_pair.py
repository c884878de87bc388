"""The tiny trained pair of examples/, loaded once a process in fp32, and drafters made of it: sound ones and damaged ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from trtllm_dspark.context.draft_context import DraftContext
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.loading import LoadedDraft, load_drafter
from trtllm_dspark.engine.requests import Completion, SamplingParams
from trtllm_dspark.engine.target import HuggingFaceTarget
from trtllm_dspark.evaluation.stdlib_text import held_out_prompts
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter

FOLDER = Path(__file__).parents[1] / "examples" / "tiny_pair"
PAGE = 16


@dataclass(frozen=True)
class Pair:
    """The target, its draft as `load_drafter` gives it, and 50 held-out prompts of 64 tokens."""

    target: HuggingFaceTarget
    loaded: LoadedDraft
    prompts: list[list[int]]

    @property
    def model(self) -> MLADSparkForCausalLM:
        return self.loaded.drafter.model

    @property
    def block(self) -> int:
        assert self.model.config.block_size is not None
        return self.model.config.block_size

    def drafter(self, model: MLADSparkForCausalLM | None = None, *, pool_tokens: int = 4096) -> Drafter:
        """A drafter with a pool of its own: a test that fails half-way leaves no request in another's."""
        return small_drafter(model or self.model, self.target, pool_tokens=pool_tokens)

    def engine(self, num_drafts: int | None = None, *, max_batch: int = 8, drafter: Drafter | None = None) -> Engine:
        """An engine with speculation; K is the whole block where None."""
        return Engine(self.target, drafter or self.drafter(), num_drafts=num_drafts or self.block, max_batch=max_batch)

    def alone(self, prompt: list[int], params: SamplingParams) -> Completion:
        """The target by itself, one request."""
        return Engine(self.target, max_batch=1).generate([prompt], params)[0]


@lru_cache(maxsize=1)
def load_pair() -> Pair:
    target = HuggingFaceTarget.from_pretrained(FOLDER / "target", dtype=torch.float32)
    return Pair(target, load_drafter(FOLDER / "draft", target), held_out_prompts(target.tokenizer, 50, 64))


def small_drafter(model: MLADSparkForCausalLM, target: HuggingFaceTarget, *, pool_tokens: int = 4096) -> Drafter:
    layout = PoolLayout.of(model.config, page_size=PAGE, dtype=torch.float32)
    return Drafter(model, DraftContext(ContextPool.allocate(layout, pool_tokens // PAGE)), target.lm_head)


def rebuilt(model: MLADSparkForCausalLM, change: Callable[[torch.Tensor], torch.Tensor]) -> MLADSparkForCausalLM:
    """A copy of a draft model with every tensor of its checkpoint changed."""
    tensors = model.checkpoint_tensors()
    copy = MLADSparkForCausalLM.empty(model.config, dtype=torch.float32)
    copy.fill(lambda name, dim: change(tensors[name]))
    return copy.eval().requires_grad_(False)


def _randomised(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda tensor: torch.randn(tensor.shape, generator=generator) * 0.05


def _shuffled(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda tensor: tensor[torch.randperm(tensor.shape[0], generator=generator)]


DAMAGES = {
    "random": _randomised(1),
    "nan": lambda tensor: torch.full_like(tensor, torch.nan),
    "shuffled": _shuffled(2),  # rows of every tensor permuted: the right values in the wrong places
}
