"""How far a result may lie from the conformance data in `data/oracle`, and the one comparison that applies it.

A limit is absolute + relative * max|expected|, on the largest error of a tensor. fp32: a little over what the projects that
made the data differ among each other. bf16: twice what their own bf16 runs differ from their fp32 ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Profile:
    """Limits at one dtype.

    Attributes:
        limits: (part of the key, absolute, relative), the first that matches counts; "" matches all.
        ambiguous: a greedy token may differ where the expected top-two gap is below this; what follows is not compared.
    """

    dtype: torch.dtype
    limits: tuple[tuple[str, float, float], ...]
    ambiguous: float

    def limit(self, key: str, expected: torch.Tensor) -> float:
        absolute, relative = next((a, r) for part, a, r in self.limits if part in key)
        return absolute + relative * float(expected.abs().max())


PROFILES = {
    "fp32": Profile(torch.float32, (("ctx_latent", 2e-5, 5e-6), ("probs", 2e-6, 2e-5), ("", 5e-5, 1e-5)), ambiguous=1e-3),
    "bf16": Profile(
        torch.bfloat16,
        (
            ("context_feature", 1e-2, 0.012),
            ("ctx_latent", 2e-2, 0.015),
            ("confidence_logits", 0.12, 0.0),
            ("confidence", 0.03, 0.0),
            ("probs", 0.08, 0.0),
            ("", 3e-2, 0.05),
        ),
        ambiguous=0.6,
    ),
}
AFTER_CHAIN = ("out.corrected_logits", "out.confidence_logits", "out.confidence")  # each step depends on the token before


def errors_over_limits(
    profile: Profile, expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Error over limit of each key of `got`: at most 1 passes. A wrong token, shape or a value that is not finite is inf."""
    steps, ratios = _comparable_steps(profile, expected, got), {}
    for key, value in got.items():
        reference = expected[key]
        if value.shape != reference.shape:
            ratios[key] = math.inf
        elif key.endswith("out.chain_tokens"):
            first = steps[_prefix(key)]
            ratios[key] = 0.0 if torch.equal(value[:first], reference[:first]) else math.inf
        elif reference.numel() == 0:
            ratios[key] = 0.0
        else:
            if key[len(_prefix(key)) :] in AFTER_CHAIN:  # token k is made from logits k: those are still comparable
                upto = steps.get(_prefix(key), len(reference)) + 1
                value, reference = value[:upto], reference[:upto]
            error = float((value.double() - reference.double()).abs().max())
            ratios[key] = error / profile.limit(key, reference) if math.isfinite(error) else math.inf
    return ratios


def _prefix(key: str) -> str:
    return key[: key.index("out.")]


def _comparable_steps(
    profile: Profile, expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Prefix -> how many tokens of its chain must be equal: up to the first difference at an ambiguous step."""
    found = {}
    for key in (key for key in got if key.endswith("out.chain_tokens")):
        prefix, differs = _prefix(key), (got[key] != expected[key]).nonzero().flatten().tolist()
        at = differs[0] if differs else len(expected[key])
        ambiguous = bool(differs) and float(expected[prefix + "out.margin"][at]) < profile.ambiguous
        found[prefix] = at if ambiguous else len(expected[key])
    return found
