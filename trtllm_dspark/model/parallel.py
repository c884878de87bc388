"""The tensor-parallel seam: which slice of a weight a rank holds, and the one collective that joins the slices."""

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dspark.errors import DSparkError


@dataclass(frozen=True)
class TensorParallel:
    """Heads and MLP columns are split over `size` ranks; latents, norms, embeddings and heads are whole on each.

    Attributes:
        rank, size: of this process. group: a torch.distributed process group; None is the default one.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise DSparkError(
                f"TensorParallel: 0 <= rank < size is required, rank is {self.rank}, size is {self.size}. "
                "Pass the rank within the tensor-parallel group."
            )

    def share(self, count: int, what: str) -> int:
        """This rank's part of `count` things, which must divide evenly."""
        if count % self.size:
            raise DSparkError(
                f"TensorParallel: {what} must be a multiple of the tensor-parallel size; {count} over {self.size} ranks. "
                "Choose a size that divides it."
            )
        return count // self.size

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place. Free of any collective where size is 1."""
        if self.size > 1:
            torch.distributed.all_reduce(partial, group=self.group)
        return partial


SINGLE = TensorParallel()
