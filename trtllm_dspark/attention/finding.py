"""What a check of an operation finds: how far it is off, and how far it may be."""

from dataclasses import dataclass

import torch

ALLOWANCE = 2.0  # times the error of plain torch in the same dtype
FLOOR = 2.0  # roundings of the dtype: what an exact computation may be off by


@dataclass(frozen=True)
class Finding:
    """One operation. error, allowed: of the worst row, relative to its size; inf where NaN stands in other places."""

    operation: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Not so where the error is NaN."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.operation} is off by {self.error:.1e}, allowed is {self.allowed:.1e}"


def finding(operation: str, found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> Finding:
    """NaN stands where nothing may be written, and nowhere else."""
    allowed = ALLOWANCE * distance(plain, exact) + FLOOR * torch.finfo(found.dtype).eps
    return Finding(operation, distance(found, exact), allowed)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the worst row, relative to its size; inf where NaN stands in other places."""
    if not torch.equal(found.isnan(), exact.isnan()):
        return torch.inf
    difference, size = ((found.double() - exact).nan_to_num().norm(dim=-1), exact.nan_to_num().norm(dim=-1))
    return (difference / size.clamp_min(torch.finfo(torch.float32).tiny)).max().item()  # a row of NaN is 0 / tiny


def worst(findings: list[Finding]) -> Finding:
    """The one that is furthest off, measured by what it is allowed; one that did not pass before all that did."""
    return max(findings, key=lambda finding: (not finding.passed, finding.error / finding.allowed))


def poison(*like: torch.Tensor) -> None:
    """The blocks of memory that the allocator hands out next for tensors of these shapes hold NaN."""
    held = [torch.full_like(tensor, torch.nan) for tensor in like]
    del held


def random(generator: torch.Generator, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal, on the generator's device."""
    return torch.randn(size, generator=generator, device=generator.device).to(dtype)
