"""Which drafts are accepted. Whatever the drafter returned, what is committed is the target's own choice."""

from dataclasses import dataclass

import torch


@dataclass
class Verdict:
    """Outcome of one verification.

    Attributes:
        accepted: [B], int64, drafts accepted, 0..K. tokens: [B, K+1], int64: the target's own tokens; the first
            accepted+1 of a row are committed, the last of which is the new anchor.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor


def verify_greedy(target_logits: torch.Tensor, drafts: torch.Tensor) -> Verdict:
    """Accept drafts while each equals the target's argmax.

    The committed tokens are taken from the target's logits and never from the drafts, so a draft that is garbage, out of
    range or -1 (none was proposed here) costs speed and nothing else.

    Args:
        target_logits: [B, K+1, V], of the rows `[anchor, d1 .. dK]`. drafts: [B, K], int.
    """
    own = target_logits.argmax(-1)
    agree = (own[:, :-1] == drafts).long()
    return Verdict(accepted=agree.cumprod(-1).sum(-1), tokens=own)
