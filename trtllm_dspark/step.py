"""The device side of a draft step: tensors in, tensors out, nothing read on the host. And the same as a CUDA graph.

extend_rows   target features of a step -> pages                  (project, normalise, rotate, write: all layers at once)
draft_block   anchors and tables -> tokens, confidences           (block forward, lm_head, Markov chain)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dspark.context.draft_context import ContextView
from trtllm_dspark.context.pages import NOT_WRITTEN
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.heads import greedy_chain
from trtllm_dspark.model.layers import linear, with_company
from trtllm_dspark.model.mla import MLADSparkForCausalLM

Head = Callable[[torch.Tensor], torch.Tensor] | torch.Tensor
"""The target's output head, [..., D] -> [..., V]. Or its weight [V, D], a constant, where it is nothing but a product in the
draft's dtype: then the draft's backend multiplies."""


@dataclass
class Proposal:
    """Drafts of a batch.

    Attributes:
        tokens: [B, K], int64, each in [0, V). confidence: [B, K], fp32 in [0, 1], or None without a confidence head.
        hidden: [B, S, D], final hidden states of all block rows. logits: [B, K, V] with the Markov bias, if asked for.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor | None
    hidden: torch.Tensor
    logits: torch.Tensor | None

    def first(self, count: int) -> "Proposal":
        """A copy of the first requests'."""
        parts = (self.tokens, self.confidence, self.hidden, self.logits)
        tokens, confidence, hidden, logits = (None if part is None else part[:count].clone() for part in parts)
        assert tokens is not None and hidden is not None
        return Proposal(tokens, confidence, hidden, logits)


def block_width(model: MLADSparkForCausalLM, num_drafts: int, block_rows: int | None = None) -> int:
    """S, the rows of a block for K drafts. block_rows None is the width that the checkpoint was trained for.

    Raises:
        DSparkError: K drafts need more rows than the block has.
    """
    first = model.config.first_draft_row
    rows = block_rows or model.config.block_size or num_drafts + first
    if not 1 <= num_drafts <= rows - first:
        raise DSparkError(
            f"propose: 1 to {rows - first} drafts fit a block of {rows} rows whose row {first} predicts first, "
            f"{num_drafts} were asked for. Lower num_drafts."
        )
    return rows


def context_rows(
    model: MLADSparkForCausalLM, taps: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """What `context_append` takes of T target rows: z [T, L, W], norm weights [L, c], cos and sin [T, r/2], eps.

    Args:
        taps: [T, n_taps * D_target], after the tapped layers, ascending. positions: [T], int64, absolute.
    """
    z = model.context_latents(model.project_context(taps.to(model.context_proj.weight.dtype)))
    return z, model.latent_norm, *model.rope.angles(positions), model.config.rms_norm_eps


def extend_rows(
    model: MLADSparkForCausalLM, pools: Sequence[torch.Tensor], taps: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write the context of T target rows; taps and positions as in `context_rows`.

    Args:
        slots: [T], int64, page * P + offset; -1: not written. pools: L views [num_pages, P, W].
    """
    z, weight, cos, sin, eps = context_rows(model, taps, positions)
    model.backend.operations.context_append(z, weight, cos, sin, slots, pools, eps)


def draft_block(
    model: MLADSparkForCausalLM,
    lm_head: Head,
    view: ContextView,
    anchors: torch.Tensor,
    positions: torch.Tensor,
    num_drafts: int,
    rows: int,
    *,
    keep_logits: bool = False,
) -> Proposal:
    """Draft behind each anchor.

    Args:
        view: pages, tables and readable ranges. anchors: [B], int64. positions: [B], int64, absolute, of the anchors.
        num_drafts: K. rows: S, see `block_width`. keep_logits: also return the biased logits.
    """
    config, first, operations = model.config, model.config.first_draft_row, model.backend.operations
    ids = torch.full((anchors.shape[0], rows), config.mask_token_id, device=anchors.device)
    ids[:, 0] = anchors
    at = positions.unsqueeze(1) + torch.arange(rows, device=anchors.device)
    hidden = model.draft_hidden(model.embed_tokens(ids), at, view.pages, view.page_table, view.context_len, view.context_start)
    # contiguous: torch multiplies strided rows request by request, and reads the whole head for each
    drafting = hidden[:, first : first + num_drafts].contiguous()
    drafts = greedy_chain(
        model.markov_head,
        linear(drafting, lm_head, operations.linear) if isinstance(lm_head, torch.Tensor) else with_company(lm_head, drafting),
        anchors,
        keep_logits=keep_logits,
        kernel=operations.markov_chain,
    )
    confidence = None
    if model.confidence_head is not None:
        confidence = model.confidence_head(drafting, drafts.codes).sigmoid()
    return Proposal(drafts.tokens, confidence, hidden, drafts.logits)


@dataclass
class StepBuffers:
    """What a captured step reads, at fixed addresses; see `draft_block` and `extend_rows` for the meanings.

    Attributes:
        anchors, positions: [B], int64. page_table: [B, max_pages], int32. context_start, context_len: [B], int32.
        taps: [T, n_taps * D_target]. tap_positions, slots: [T], int64. T may be 0.
    """

    anchors: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    context_start: torch.Tensor
    context_len: torch.Tensor
    taps: torch.Tensor
    tap_positions: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def allocate(cls, model: MLADSparkForCausalLM, batch: int, max_pages: int, rows: int = 0) -> "StepBuffers":
        """For `batch` requests and `rows` context rows. They start as requests without context and rows without slots."""
        weight = model.context_proj.weight

        def full(value: int, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(size, value, dtype=dtype, device=weight.device)

        return cls(
            anchors=full(0, batch),
            positions=full(0, batch),
            page_table=full(NOT_WRITTEN, batch, max_pages, dtype=torch.int32),
            context_start=full(0, batch, dtype=torch.int32),
            context_len=full(0, batch, dtype=torch.int32),
            taps=weight.new_zeros(rows, weight.shape[1]),
            tap_positions=full(0, rows),
            slots=full(NOT_WRITTEN, rows),
        )

    def view(self, pages: Sequence[torch.Tensor]) -> ContextView:
        """The tables as block attention takes them."""
        return ContextView(pages, self.page_table, self.context_start, self.context_len)


class CapturedStep:
    """A draft step as one CUDA graph: fill `buffers`, call `replay`.

    Args:
        model, lm_head: the drafter's. pages: L views of the pool; their addresses are captured, so the pool must stay.
        buffers: what it reads. num_drafts: K. block_rows: S, see `block_width`.
        memory: a graph memory pool to share with other steps, from `torch.cuda.graph_pool_handle()`.
    Raises:
        DSparkError: a backend that reads on the host, or another device than CUDA.
    """

    def __init__(
        self,
        model: MLADSparkForCausalLM,
        lm_head: Head,
        pages: Sequence[torch.Tensor],
        buffers: StepBuffers,
        num_drafts: int,
        *,
        block_rows: int | None = None,
        memory: Any = None,
    ) -> None:
        device = buffers.anchors.device
        if device.type != "cuda" or not model.backend.operations.capturable:
            raise DSparkError(
                f"CapturedStep: a CUDA device and a backend that reads nothing on the host are required, this is "
                f"{model.backend.name} on {device.type}. Draft without a graph."
            )
        self.buffers, self.pages = buffers, pages
        rows = block_width(model, num_drafts, block_rows)

        def run() -> Proposal:
            if buffers.taps.shape[0]:
                extend_rows(model, pages, buffers.taps, buffers.tap_positions, buffers.slots)
            return draft_block(model, lm_head, buffers.view(pages), buffers.anchors, buffers.positions, num_drafts, rows)

        with torch.no_grad(), torch.cuda.device(device):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):  # compiles what is missing, and lets libraries allocate what they keep
                run()
            torch.cuda.current_stream(device).wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=memory, stream=side):  # torch's own is on one device for all
                self.proposal = run()

    def takes(self, batch: int, view: ContextView) -> bool:
        """Whether a batch and its tables fit the buffers, and its pages are those whose addresses were captured."""
        return view.pages is self.pages and self.covers(batch, view.page_table.shape[1])

    def covers(self, batch: int, max_pages: int) -> bool:
        """Whether the buffers hold so many requests, and tables so wide."""
        rows, pages = self.buffers.page_table.shape
        return batch <= rows and max_pages <= pages

    def replay(self) -> Proposal:
        """Run the step on what the buffers hold. The proposal's tensors are overwritten by the next replay."""
        self._graph.replay()
        return self.proposal

    def load(self, anchors: torch.Tensor, positions: torch.Tensor, view: ContextView) -> None:
        """Fill the first rows of the buffers; those behind become requests without context, all slots become unwritten.

        What is written to the context of this step is filled in afterwards: taps, tap_positions, slots.
        """
        given = {
            "anchors": anchors,
            "positions": positions,
            "page_table": view.page_table,
            "context_start": view.context_start,
            "context_len": view.context_len,
        }
        batch = anchors.shape[0]
        for name, value in given.items():
            getattr(self.buffers, name)[tuple(slice(size) for size in value.shape)] = value
        self.buffers.context_len[batch:] = 0
        self.buffers.slots.fill_(NOT_WRITTEN)
