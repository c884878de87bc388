"""Greedy draft tokens of a block, each biased by the one before it."""

import torch

from cute_kernels.reference.rotation import accumulation_dtype


def markov_chain(
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    codes: torch.Tensor | None = None,
) -> torch.Tensor:
    """token_k = argmax over v of base_k[v] + W2[v] . W1[token_{k-1}], token_{-1} = anchor.

    On a tie the smallest id; a NaN is larger than every number, and the first NaN wins, as in torch.argmax.

    Args:
        base_logits: [B, K, V]. anchors: [B], int64. w1: [V1, R]. w2: [V, R].
        codes: [B, K, R] or None; receives W1 of the token before each. Zero where that id is outside [0, V1): padded and
            warm-up rows carry such ids, and get no bias.
    Returns:
        [B, K], int64, in [0, V).
    """
    wide = accumulation_dtype(base_logits.dtype)
    previous, tokens = anchors, []
    for k in range(base_logits.shape[1]):
        known = (previous >= 0) & (previous < w1.shape[0])
        code = torch.where(known[:, None], w1[torch.where(known, previous, 0)], 0)
        if codes is not None:
            codes[:, k] = code
        logits = base_logits[:, k].to(wide) + code.to(wide) @ w2.to(wide).T
        previous = logits.argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1) if tokens else anchors.new_empty((len(anchors), 0))
