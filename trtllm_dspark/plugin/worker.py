"""The worker that takes the place of the host's stock DSpark worker, once, for one model.

A subclass of the stock class that is installed, so that accepting, guided decoding, recurrent states, sampling and rewinds
stay the host's. It replaces how the draft context is kept (see `host_context`), drafts straight after a prompt, and counts
acceptance on the device. A host whose worker has none of the faults in `faults` keeps its own.

Source: NVIDIA/TensorRT-LLM `_torch/speculative/dflash.py` at 00679c66 and `dspark.py` for the methods and when they run.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin import reuse, settings
from trtllm_dspark.plugin.dummies import is_dummy
from trtllm_dspark.plugin.faults import DEVICE_ACCEPTANCE, FIRST_DRAFTS
from trtllm_dspark.plugin.host_context import HostContext
from trtllm_dspark.plugin.manager import DraftPages, layout_of
from trtllm_dspark.plugin.step_metadata import HostedMetadata, adopt
from trtllm_dspark.stats import AcceptanceCounter

log = logging.getLogger("trtllm_dspark.plugin")

WHO = "DSpark worker"


class HostedWorker:
    """Mixed in before the stock class by `replacement.hosted`."""

    # of the stock class
    max_draft_len: int
    spec_config: Any
    mapping: Any
    get_draft_kv_cache_manager: Callable[..., Any]
    sample_draft_tokens: Callable[..., torch.Tensor]
    _draft_slot_ids: Callable[..., torch.Tensor]
    _refine_block_logits: Callable[..., torch.Tensor]

    fixes: frozenset[str] = frozenset()

    def take_drafter(self, drafter: Any) -> None:
        """Begin without a context and without counts, which the stock class knows nothing of."""
        self.__dict__["_drafter"] = drafter  # not a submodule of the worker: its weights are the target's to list
        self._context: HostContext | None = None
        self._manager: Any = None
        self._real: torch.Tensor | None = None  # [max_requests], bool: batch rows that are requests, not padding
        self._prompt_ends: torch.Tensor | None = None  # [contexts], position of the next token of each prompt of the step
        self._steps = 0
        self.acceptance: AcceptanceCounter | None = None
        self._report_every = settings.count(settings.STATS_EVERY)

    # ------------------------------------------------------------------------------------------------- before a step
    def begin_step(self, requests: list[int]) -> None:
        """Called by the step's metadata when the host prepares it, before a forward or a graph replay."""
        if self._context is None or len(requests) > self._context.max_requests:  # the forward that follows binds
            return
        assert self._real is not None
        self._context.begin_step(requests)
        real = torch.tensor([not is_dummy(request, self.max_draft_len) for request in requests], dtype=torch.bool)
        self._real[: len(requests)].copy_(real.pin_memory() if self._real.is_cuda else real, non_blocking=True)
        self._steps += 1
        if self._report_every and self._steps % self._report_every == 0:
            self.report()

    def report(self) -> None:
        """Log acceptance so far. Reads counts back from the device."""
        if self.acceptance is not None:
            found = self.acceptance.summary()
            log.info("accept_len %.3f over %d verifications, %s", found.accept_len, found.verifications, found.histogram)

    # ------------------------------------------------------------------------------------------------------- a step
    def _forward_impl(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        resource_manager: Any = None,
    ) -> dict[str, torch.Tensor]:
        step = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "hidden_states": hidden_states,
            "logits": logits,
            "attn_metadata": attn_metadata,
            "spec_metadata": spec_metadata,
            "draft_model": draft_model,
            "resource_manager": resource_manager,
        }
        if getattr(spec_metadata, "runtime_draft_len", self.max_draft_len) == 0:  # speculation is off for this batch
            return super()._forward_impl(**step)  # type: ignore[misc]
        self._enter(attn_metadata, spec_metadata, resource_manager)
        out = super()._forward_impl(**step)  # type: ignore[misc]
        # where the host keeps drafts' probabilities, a prompt's are placeholders: drafts beside them would not be theirs
        kept = any(getattr(held, "use_rejection_sampling", False) for held in (spec_metadata, self.spec_config))
        drafting = FIRST_DRAFTS in self.fixes and not self._ranks_draft_together and not kept
        if self._prompt_ends is not None and drafting:
            self._draft_for_prompts(out, self._prompt_ends, attn_metadata, spec_metadata)
        return out

    @property
    def _ranks_draft_together(self) -> bool:
        """Whether the output head joins ranks that have different requests: an extra call on one of them would hang."""
        return bool(getattr(self.mapping, "enable_lm_head_tp_in_adp", False))

    def _enter(self, attn_metadata: Any, spec_metadata: Any, resource_manager: Any) -> None:
        self._prompt_ends = None
        manager = self.get_draft_kv_cache_manager(resource_manager)
        bound = self._is_bound(manager, attn_metadata.num_seqs)
        if not bound:
            self._bind(manager, attn_metadata, spec_metadata)
        offsets = getattr(attn_metadata, "draft_kv_cache_block_offsets", None)
        if offsets is None:
            raise DSparkError(
                f"{WHO}: the attention metadata must carry the draft's block table, {type(attn_metadata).__name__} has none in "
                "this step. Use the TRTLLM attention backend for the target."
            )
        assert self._context is not None
        self._ctx_len = self._context.state  # what the stock class saves, and puts back after a failed or a warm-up forward
        if not bound or not isinstance(spec_metadata, HostedMetadata):  # this step was not prepared for this context
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise DSparkError(
                    f"{WHO}: a step's metadata must run once before it is captured, this one has not. Warm up first."
                )
            adopt(spec_metadata, self)
            self.begin_step(list(spec_metadata.request_ids or []))
        self._context.refresh_table(offsets, attn_metadata.num_seqs)

    def _is_bound(self, manager: Any, requests: int) -> bool:
        """Estimation of the KV size swaps managers, and some warm-up batches are larger than the metadata says."""
        return self._context is not None and manager is self._manager and requests <= self._context.max_requests

    def _bind(self, manager: Any, attn_metadata: Any, spec_metadata: Any) -> None:
        drafter = self.__dict__["_drafter"]
        page_size = int(getattr(manager, "tokens_per_block", 0))
        pages = DraftPages(manager, layout_of(drafter, max(page_size, 1)))
        sizes = (spec_metadata.max_num_requests, getattr(manager, "max_batch_size", 0) or 0, attn_metadata.num_seqs)
        most = max(int(size) for size in sizes)
        weight = drafter.fc.weight
        device = weight.device
        # kernels for pages of this size are checked and compiled now, not in the first step or inside a capture
        shape = DraftShape.of(drafter.config, dtype=weight.dtype, page_size=pages.pool.layout.page_size, tp=drafter.tp)
        drafter.use_backend(drafter.resolve_backend(drafter.config, device, drafter.backend.name, shape))
        self._context, self._manager = HostContext(drafter, pages, most, device), manager
        with torch.inference_mode(False):  # see `HostContext`
            self._real = torch.zeros(most, dtype=torch.bool, device=device)
            if DEVICE_ACCEPTANCE in self.fixes and self.acceptance is None:
                self.acceptance = AcceptanceCounter(self.max_draft_len, device)
        # read by the stock class
        self._compute_block_size = drafter.config.block_size
        self._ctx_buf_inited = False  # its slots are not used: neither its metadata nor its forward touches them
        reuse.warn(pages, attn_metadata)
        layout = pages.pool.layout
        log.info(
            "DSpark draft context: in the draft KV manager's pool, pages of %d tokens, %d layers x %d, %s, %d bytes a token",
            layout.page_size,
            layout.num_layers,
            layout.width,
            layout.dtype,
            layout.bytes_per_token,
        )

    def _lazy_init_ctx_buffers(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `_enter` binds the manager's pool, and there is no other."""

    def _refresh_ctx_block_tables(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def _validate_draft_attention_backend(self, draft_model: Any) -> None:
        """Nothing: the draft's backend is our policy's choice."""

    def sample_and_accept_draft_tokens(
        self, logits: torch.Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, counts = super().sample_and_accept_draft_tokens(logits, attn_metadata, spec_metadata)  # type: ignore[misc]
        first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
        if self.acceptance is not None and self._real is not None and last > first:
            accepted = counts[first:last].long() - 1
            submitted = torch.where(self._real[first:last], getattr(spec_metadata, "runtime_draft_len", self.max_draft_len), -1)
            self.acceptance.record(accepted, submitted)
        return tokens, counts

    def _store_prefill_context(
        self,
        draft_model: Any,
        spec_metadata: Any,
        attn_metadata: Any,
        position_ids: torch.Tensor,
        total_target_tokens: int,
        **kwargs: Any,
    ) -> None:
        assert self._context is not None
        requests, tokens = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        if not tokens:
            return
        taps = spec_metadata.get_hidden_states(total_target_tokens)[:tokens]
        lengths = torch.as_tensor(attn_metadata._seq_lens)[:requests].cpu().long()  # a host tensor of the host's
        starts = lengths.cumsum(0) - lengths
        device = taps.device
        rows = _send(torch.repeat_interleave(torch.arange(requests), lengths, output_size=tokens), device)
        positions = position_ids.reshape(-1)[:tokens].long()
        first, count = positions.index_select(0, _send(starts.clamp(max=tokens - 1), device)), _send(lengths, device)
        self._context.append(taps, positions, rows, slice(0, requests), first, count)
        self._prompt_ends = first + count

    def prepare_1st_drafter_inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        accepted_tokens: torch.Tensor,
        num_accepted_tokens: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        total_target_tokens: int = 0,
        **kwargs: Any,
    ) -> dict[str, Any]:
        assert self._context is not None
        contexts, requests = attn_metadata.num_contexts, attn_metadata.num_seqs
        decoding = requests - contexts
        device = accepted_tokens.device
        if not decoding:
            return {"first_prev_tokens": torch.empty(0, dtype=torch.long, device=device)}
        begin, width = attn_metadata.num_ctx_tokens, self.max_draft_len + 1
        taps = spec_metadata.get_hidden_states(total_target_tokens)[begin : begin + decoding * width]
        positions = position_ids.reshape(-1)[begin : begin + decoding * width].long()
        rows = torch.arange(contexts, requests, device=device).repeat_interleave(width, output_size=decoding * width)
        first = positions.view(decoding, width)[:, 0]
        count = num_accepted_tokens[contexts:requests].long()
        batch = slice(contexts, requests)
        self._context.append(taps, positions, rows, batch, first, count)
        anchors = accepted_tokens[contexts:requests].gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1).long()
        return self._block_inputs(batch, anchors, first + count)

    def _block_inputs(self, batch: slice, anchors: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """The blocks of these batch rows behind anchors [B] at positions [B], as the drafter's `dflash_forward` takes them."""
        assert self._context is not None
        drafter = self.__dict__["_drafter"]
        count, rows = anchors.shape[0], drafter.config.block_size
        ids = torch.full((count, rows), drafter.config.mask_token_id, dtype=torch.long, device=anchors.device)
        ids[:, 0] = anchors
        table, start, length = self._context.readable(batch)
        drafter.context_start = start
        return {
            "noise_embedding": drafter.embed_tokens(ids),
            "query_positions": positions.unsqueeze(1) + torch.arange(rows, device=anchors.device),
            "num_ctx_per_req": length,
            "ctx_k_cache": None,
            "ctx_v_cache": None,
            "ctx_cache_batch_idx": torch.arange(count, device=anchors.device),
            "ctx_kv_cache": [view.unsqueeze(1).unsqueeze(1) for view in self._context.pages.pool.views],
            "ctx_page_table": table,
            "first_prev_tokens": anchors,
        }

    def _draft_for_prompts(
        self, out: dict[str, torch.Tensor], ends: torch.Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> None:
        """Real drafts for the prompts of this step, in the place of the stock class's placeholders.

        A prompt whose last chunk is still to come is drafted for too, and the host drops it: which one that is, is not
        told to the worker.
        """
        drafter, requests = self.__dict__["_drafter"], attn_metadata.num_contexts
        num_drafts = getattr(spec_metadata, "runtime_draft_len", self.max_draft_len)
        anchors = out["new_tokens"][:requests, 0].long()
        inputs = self._block_inputs(slice(0, requests), anchors, ends)
        blocks = {name: value for name, value in inputs.items() if name != "first_prev_tokens"}
        hidden = drafter.dflash_forward(**blocks)
        rows = self._draft_slot_ids(drafter, requests, self._compute_block_size, num_drafts)
        logits = drafter.logits_processor(hidden[rows], drafter.lm_head, attn_metadata, True)
        logits = self._refine_block_logits(drafter, logits.unflatten(0, (requests, num_drafts)), inputs, spec_metadata)
        tokens = self.sample_draft_tokens(logits, spec_metadata, requests, num_contexts=0)
        out["next_draft_tokens"][:requests] = tokens
        out["next_new_tokens"][:requests, 1:] = tokens


def _send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
