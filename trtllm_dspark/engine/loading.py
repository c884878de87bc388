"""A target folder and a draft folder -> an engine, with every mismatch between them refused before anything runs."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.draft_context import DraftContext
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.engine.target import HuggingFaceTarget
from trtllm_dspark.errors import DSparkError, UnsupportedError
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.model.sharing import compare_embeddings
from trtllm_dspark.propose import Drafter


@dataclass(frozen=True)
class DraftOptions:
    """How a draft is loaded.

    Attributes:
        num_drafts: K; None is all that the block gives. attention_backend: AUTO or a name.
        page_size: tokens a page. pool_tokens: of the draft pool. dtype: None is the target's.
        rope_theta, aux_stream: override the checkpoint's, and are said.
    """

    num_drafts: int | None = None
    attention_backend: str = "AUTO"
    page_size: int = 64
    pool_tokens: int = 16384
    dtype: torch.dtype | None = None
    rope_theta: float | None = None
    aux_stream: str | None = None


@dataclass(frozen=True)
class LoadedDraft:
    """A drafter ready for an engine. notes: facts worth one line each, for the log or the screen."""

    drafter: Drafter
    num_drafts: int
    notes: tuple[str, ...]


def load_drafter(path: str | Path, target: HuggingFaceTarget, options: DraftOptions = DraftOptions()) -> LoadedDraft:
    """Load a draft for this target, on the target's device.

    Raises:
        DSparkError: whatever is wrong with the folder, or that it was trained for another target.
    """
    config = DraftConfig.from_pretrained(
        path,
        max_draft_len=options.num_drafts,
        rope_theta=options.rope_theta,
        aux_stream=options.aux_stream,
    )
    config.check_target(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_layers)
    if config.aux_stream != "prefix":
        raise UnsupportedError(
            f"load_drafter: a draft trained on the residual stream (aux_stream prefix) is required, this one was trained on "
            f"{config.aux_stream}, which a Hugging Face target does not give. Pass aux_stream='prefix' to run it all the same."
        )
    if options.pool_tokens < 1 or options.page_size < 1:
        raise DSparkError(
            f"load_drafter: pool_tokens and page_size must be at least 1, they are {options.pool_tokens} and "
            f"{options.page_size}. Give positive sizes."
        )
    dtype = options.dtype or target.dtype
    model = MLADSparkForCausalLM.from_pretrained(
        path,
        config=config,
        device=target.device,
        dtype=dtype,
        attention_backend=options.attention_backend,
        page_size=options.page_size,
    )
    layout = PoolLayout.of(config, page_size=options.page_size, dtype=dtype)
    pool = ContextPool.allocate(layout, -(-options.pool_tokens // options.page_size), target.device)
    own = target.model.get_input_embeddings().weight
    report = compare_embeddings(model.embed_tokens.weight, own, config.mask_token_id)
    target.set_taps(config.target_layer_ids)
    taps = ", ".join(map(str, config.target_layer_ids))
    notes = (
        *config.notes,
        str(model.backend),
        f"taps: residual stream after layers {taps} of {target.num_layers}, counted from 0",
        str(report),
    )
    num_drafts = config.check_num_drafts(options.num_drafts or config.max_drafts)
    context = DraftContext(pool, model.backend.operations.context_append)
    return LoadedDraft(Drafter(model, context, target.output_head(dtype)), num_drafts, notes)
