"""The two heads of a DSpark drafter: the low-rank Markov bias over the block, and the acceptance estimate.

Source: arXiv 2607.05147 (DSpark); DeepSpec `deepspec/modeling/dspark` at afdfa7c for the vanilla head and its chain.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from trtllm_dspark.attention.operations import MarkovChain
from trtllm_dspark.model.layers import Embedding, Linear, linear


@dataclass
class Chain:
    """What the sequential part of a draft step gives.

    Attributes:
        tokens: [B, K], int64, in [0, V). codes: [B, K, R], W1 of the token before each; None without a Markov head.
        logits: [B, K, V], fp32, base plus bias; None unless asked for.
    """

    tokens: torch.Tensor
    codes: torch.Tensor | None
    logits: torch.Tensor | None


class MarkovHead(nn.Module):
    """bias[v] = W2[v] . W1[previous token]; tables [V, R] each."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = Embedding(vocab, rank)
        self.markov_w2 = Linear(rank, vocab)

    def code(self, previous: torch.Tensor) -> torch.Tensor:
        """W1[previous], zero where the id is outside [0, V): padded and warm-up rows carry such ids. [...] -> [..., R]."""
        known = (previous >= 0) & (previous < self.markov_w1.weight.shape[0])
        rows = self.markov_w1(torch.where(known, previous, 0))
        return torch.where(known.unsqueeze(-1), rows, torch.zeros_like(rows))

    def forward(self, previous: torch.Tensor) -> torch.Tensor:
        """[...] int -> bias [..., V], fp32 with fp32 accumulation."""
        return linear(self.code(previous).float(), self.markov_w2.weight.float())


class ConfidenceHead(nn.Module):
    """Estimated probability that a draft is accepted, given that all earlier ones were.

    logit_k = w . [final_hidden_k ; W1[token before k]] + b, in fp32; the Markov code only where the config says so.
    """

    def __init__(self, hidden: int, code: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden + code))
        self.bias = nn.Parameter(torch.empty(1)) if bias else None
        self.with_code = code > 0

    def forward(self, hidden: torch.Tensor, codes: torch.Tensor | None) -> torch.Tensor:
        """hidden [..., D], codes [..., R] -> logits [...], fp32. Apply a sigmoid for the probability."""
        x = hidden.float()
        if self.with_code:
            assert codes is not None, "a confidence head over Markov codes was given none"
            x = torch.cat((x, codes.float()), -1)
        logits = linear(x, self.weight.float()).squeeze(-1)
        return logits if self.bias is None else logits + self.bias.float()


def greedy_chain(
    markov: MarkovHead | None,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    *,
    argmax: Callable[[torch.Tensor], torch.Tensor] | None = None,
    vocab: slice = slice(None),
    keep_logits: bool = False,
    kernel: MarkovChain | None = None,
) -> Chain:
    """Draft tokens of a block, one after the other, each biased by the one before it.

    token_k = argmax_v base_k[v] + W2[v] . W1[token_{k-1}], token_{-1} = anchor. On a tie, the smallest id.

    Args:
        markov: the head, or None for no bias. base_logits: [B, K, V]. anchors: [B], int.
        argmax: [B, V] -> [B] token ids, where V is one rank's part of the vocabulary; None: argmax over the last dim.
        vocab: the columns of the vocabulary that base_logits holds. keep_logits: also return the biased logits.
        kernel: does all steps at once where neither argmax nor logits are asked for; sums in another order, so that a near
            tie may fall otherwise.
    """
    if kernel is not None and markov is not None and argmax is None and not keep_logits:
        w1, w2 = markov.markov_w1.weight, markov.markov_w2.weight[vocab]
        written = w1.new_empty(*base_logits.shape[:2], w1.shape[1])
        return Chain(kernel(base_logits, anchors.long(), w1, w2, written), written, None)
    base, previous = base_logits.float(), anchors.long()
    tokens, codes, kept = [], [], []
    wide = None if markov is None else markov.markov_w2.weight[vocab].float()
    for k in range(base.shape[1]):
        logits = base[:, k]
        if markov is not None:
            codes.append(markov.code(previous))
            logits = logits + linear(codes[-1].float(), wide)  # type: ignore[arg-type]
        previous = logits.argmax(-1) if argmax is None else argmax(logits).long()
        tokens.append(previous)
        if keep_logits:
            kept.append(logits)
    return Chain(
        tokens=torch.stack(tokens, 1),
        codes=torch.stack(codes, 1) if codes else None,
        logits=torch.stack(kept, 1) if kept else None,
    )
