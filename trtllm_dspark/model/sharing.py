"""What a drafter shares with its target, compared by value when both are loaded.

Training freezes the draft's embedding as a copy of the target's, yet published copies are reported to differ. The draft
runs on its own; this says whether that is the same thing.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EmbeddingReport:
    """Draft embedding against the target's.

    Attributes:
        rows: how many were compared. equal_rows: of these, bit for bit. mask_row_equal: the row of the mask token.
        max_abs_diff: over the compared rows; nan where a row is.
    """

    rows: int
    equal_rows: int
    mask_row_equal: bool
    max_abs_diff: float

    def __str__(self) -> str:
        mask = "equal" if self.mask_row_equal else "different"
        return (
            f"draft embedding: {self.equal_rows} of {self.rows} sampled rows equal the target's "
            f"(max difference {self.max_abs_diff:.3g}), mask row {mask}"
        )


def compare_embeddings(draft: torch.Tensor, target: torch.Tensor, mask_token_id: int, *, samples: int = 64) -> EmbeddingReport:
    """Compare evenly spaced rows and the mask row, in the draft's dtype.

    Args:
        draft, target: [V, D]. mask_token_id: its row is always compared. samples: how many other rows.
    """
    rows = torch.linspace(0, draft.shape[0] - 1, min(samples, draft.shape[0])).long()
    rows = torch.cat((rows, torch.tensor([mask_token_id]))).unique()
    ours = draft[rows.to(draft.device)].cpu()
    theirs = target[rows.to(target.device)].cpu().to(ours.dtype)
    equal = (ours == theirs).all(-1)
    return EmbeddingReport(
        rows=len(rows),
        equal_rows=int(equal.sum()),
        mask_row_equal=bool(equal[rows == mask_token_id]),
        max_abs_diff=float((ours.float() - theirs.float()).abs().max()),
    )
