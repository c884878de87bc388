"""Acceptance statistics. Counts live on the device of the verdicts; nothing is read back until a figure is asked for.

accept_len (AL) counts the bonus token: 1 + accepted drafts, per verification. accept_rate (AR) is accepted over submitted
drafts. accept_rate@k is the share of verifications that accepted draft k among those that submitted one. AR falls with K by
arithmetic alone; tune by accept_len.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Acceptance:
    """Figures over a number of verifications.

    Attributes:
        verifications: how many. submitted, accepted: drafts. accept_len, accept_rate: see above; nan over nothing.
        accept_rate_at: accept_rate@k for k = 1..K, nan where none was submitted. histogram: of accepted, 0..K.
    """

    verifications: int
    submitted: int
    accepted: int
    accept_len: float
    accept_rate: float
    accept_rate_at: tuple[float, ...]
    histogram: tuple[int, ...]


class AcceptanceCounter:
    """Counts of accepted and submitted drafts per position, for up to K = num_drafts.

    Args:
        num_drafts: K. device: where verdicts are.
    """

    def __init__(self, num_drafts: int, device: torch.device | str = "cpu") -> None:
        self.num_drafts = num_drafts
        self._accepted = torch.zeros(num_drafts + 1, dtype=torch.int64, device=device)
        self._submitted = torch.zeros(num_drafts + 1, dtype=torch.int64, device=device)

    def record(self, accepted: torch.Tensor, submitted: torch.Tensor) -> None:
        """Count one verification per row, without a host sync.

        Args:
            accepted: [B], int, 0..K. submitted: [B], int, accepted..K; -1 marks a row that is padding and counts nothing.
        """
        real = (submitted >= 0).long()
        self._accepted.index_add_(0, accepted.clamp(0, self.num_drafts).long(), real)
        self._submitted.index_add_(0, submitted.clamp(0, self.num_drafts).long(), real)

    def summary(self) -> Acceptance:
        """Read the counts back and make figures of them."""
        histogram, widths = self._accepted.tolist(), self._submitted.tolist()
        verifications = sum(histogram)
        reached = [sum(histogram[k:]) for k in range(1, self.num_drafts + 1)]
        offered = [sum(widths[k:]) for k in range(1, self.num_drafts + 1)]
        accepted, submitted = sum(reached), sum(offered)
        return Acceptance(
            verifications=verifications,
            submitted=submitted,
            accepted=accepted,
            accept_len=1 + accepted / verifications if verifications else float("nan"),
            accept_rate=accepted / submitted if submitted else float("nan"),
            accept_rate_at=tuple(a / o if o else float("nan") for a, o in zip(reached, offered, strict=True)),
            histogram=tuple(histogram),
        )


def distinct_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of distinct n-grams among all n-grams; 1 is text without repetition, nan for text shorter than n.

    A looping target is easy to draft for: an accept_len is read beside this.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float("nan")
