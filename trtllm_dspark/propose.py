"""One draft step: extend the context, run a block behind each anchor, chain the tokens.

anchor + masks -> embeddings -> block forward over the paged context -> lm_head -> Markov chain -> tokens, confidences
"""

import logging
from collections.abc import Hashable, Sequence
from itertools import chain

import torch

from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.step import CapturedStep, Head, Proposal, StepBuffers, block_width, context_rows, draft_block

log = logging.getLogger(__name__)


class Drafter:
    """A draft model, its context, and the target's output head.

    Args:
        model: the draft model. context: where its latents live; one request id is one sequence.
        lm_head: the target's.
    """

    def __init__(self, model: MLADSparkForCausalLM, context: DraftContext, lm_head: Head) -> None:
        self.model, self.context, self.lm_head = model, context, lm_head
        self._captured: dict[int, list[CapturedStep]] = {}  # num_drafts -> steps, smallest batch first
        self._said_uncaptured = False

    @torch.no_grad()
    def extend(self, segments: Sequence[Segment], taps: torch.Tensor) -> None:
        """Add target features to the context, of all requests of the step in one call.

        Args:
            segments: whose rows these are. taps: [T, n_taps * D_target], after the tapped layers, ascending.
        """
        at = chain.from_iterable(range(s.first, s.first + s.count) for s in segments)
        positions = torch.tensor(list(at), dtype=torch.int64, device=taps.device)
        self.context.append(segments, *context_rows(self.model, taps, positions))

    def capture(self, max_batch: int, num_drafts: int, max_tokens: int) -> None:
        """Capture the step as CUDA graphs for batches up to max_batch; `propose` then replays the smallest that fits.

        Args:
            num_drafts: K. max_tokens: position that a request may reach; past it, it is drafted without a graph.
        Raises:
            DSparkError: see `CapturedStep`.
        """
        pages = -(-max_tokens // self.context.page_size)  # a table is as wide as its newest position, whatever was given up
        held = self._captured.get(num_drafts)
        if held and held[-1].pages is self.context.pool.views and held[-1].covers(max_batch, pages):
            return
        sizes = [1 << power for power in range((max_batch - 1).bit_length())] + [max_batch]
        steps, memory = [], torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        for size in reversed(sizes):  # the largest first: the smaller ones fit into its memory
            buffers = StepBuffers.allocate(self.model, size, pages)
            step = CapturedStep(self.model, self.lm_head, self.context.pool.views, buffers, num_drafts, memory=memory)
            steps.append(step)
        self._captured[num_drafts] = steps[::-1]

    @torch.no_grad()
    def propose(
        self,
        requests: Sequence[Hashable],
        anchors: torch.Tensor,
        num_drafts: int,
        *,
        block_rows: int | None = None,
        keep_logits: bool = False,
    ) -> Proposal:
        """Draft behind each request's anchor. The anchor's position is the request's context length.

        Args:
            requests: B ids. anchors: [B], int, each request's newest committed token, not yet run by the target.
            num_drafts: K. block_rows: S; None is the width that the checkpoint was trained for.
            keep_logits: also return the biased logits.
        Raises:
            DSparkError: K drafts need more rows than the block has.
        """
        rows = block_width(self.model, num_drafts, block_rows)
        view = self.context.view(requests, anchors.device)
        lengths = [self.context.length(request) for request in requests]
        positions = torch.tensor(lengths, dtype=torch.int64, device=anchors.device)
        if block_rows is None and not keep_logits:
            for step in self._captured.get(num_drafts, ()):
                if step.takes(len(requests), view):
                    step.load(anchors, positions, view)
                    return step.replay().first(len(requests))
            if self._captured and not self._said_uncaptured:
                self._said_uncaptured = True
                log.warning(
                    "a draft step of %d requests and %d pages fits no captured one; it runs without a CUDA graph",
                    *view.page_table.shape,
                )
        return draft_block(self.model, self.lm_head, view, anchors, positions, num_drafts, rows, keep_logits=keep_logits)
