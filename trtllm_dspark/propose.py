"""One draft step: extend the context, run a block behind each anchor, chain the tokens.

anchor + masks -> embeddings -> block forward over the paged context -> lm_head -> Markov chain -> tokens, confidences
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.heads import greedy_chain
from trtllm_dspark.model.layers import with_company
from trtllm_dspark.model.mla import MLADSparkForCausalLM


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


class Drafter:
    """A draft model, its context, and the target's output head.

    Args:
        model: the draft model. context: where its latents live; one request id is one sequence.
        lm_head: [..., D] -> [..., V], the target's.
    """

    def __init__(
        self, model: MLADSparkForCausalLM, context: DraftContext, lm_head: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.model, self.context, self.lm_head = model, context, lm_head

    @torch.no_grad()
    def extend(self, segments: Sequence[Segment], taps: torch.Tensor) -> None:
        """Add target features to the context, of all requests of the step in one call.

        Args:
            segments: whose rows these are. taps: [T, n_taps * D_target], after the tapped layers, ascending.
        """
        model = self.model
        taps = taps.to(model.context_proj.weight.dtype)
        z = model.context_latents(model.project_context(taps))
        at = chain.from_iterable(range(s.first, s.first + s.count) for s in segments)
        positions = torch.tensor(list(at), dtype=torch.int64, device=taps.device)
        cos, sin = model.rope.angles(positions)
        self.context.append(segments, z, model.latent_norm, cos, sin, model.config.rms_norm_eps)

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
        model, config = self.model, self.model.config
        first_row = 0 if config.sample_from_anchor else 1
        rows = block_rows or config.block_size or num_drafts + first_row
        if not 1 <= num_drafts <= rows - first_row:
            raise DSparkError(
                f"propose: 1 to {rows - first_row} drafts fit a block of {rows} rows whose row {first_row} predicts first, "
                f"{num_drafts} were asked for. Lower num_drafts."
            )
        device = anchors.device
        view = self.context.view(requests, device)
        lengths = [self.context.length(request) for request in requests]
        start = torch.tensor(lengths, dtype=torch.int64, device=device)
        positions = start.unsqueeze(1) + torch.arange(rows, device=device)
        ids = torch.full((len(requests), rows), config.mask_token_id, device=device)
        ids[:, 0] = anchors
        hidden = model.draft_hidden(
            model.embed_tokens(ids), positions, view.pages, view.page_table, view.context_len, view.context_start
        )
        drafting = hidden[:, first_row : first_row + num_drafts]
        drafts = greedy_chain(model.markov_head, with_company(self.lm_head, drafting), anchors, keep_logits=keep_logits)
        confidence = None
        if model.confidence_head is not None:
            confidence = model.confidence_head(drafting, drafts.codes).sigmoid()
        return Proposal(drafts.tokens, confidence, hidden, drafts.logits)
