"""What one rank of `test_tensor_parallel` does, in a process of its own."""

from pathlib import Path
from typing import Any

import small_drafts
import torch

from trtllm_dspark.checkpoint import DraftCheckpoint
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.model.parallel import SINGLE, TensorParallel

LENGTHS = (0, 5, 9)


class WithoutTheSum(TensorParallel):
    """A mistake: every rank goes on with its own part."""

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial


def drafts_of(folder: Path, tp: TensorParallel = SINGLE) -> dict[str, Any]:
    """Hidden states, tokens, confidences and context rows of a ragged batch, and the shapes that were read from disk."""
    shapes: dict[str, tuple[int, ...]] = {}
    read = DraftCheckpoint.read

    def recording(self: DraftCheckpoint, name: str, **where: Any) -> torch.Tensor:
        value = read(self, name, **where)
        shapes[name] = tuple(value.shape)
        return value

    DraftCheckpoint.read = recording  # type: ignore[method-assign]
    try:
        model = MLADSparkForCausalLM.from_pretrained(folder, dtype=torch.float32, tp=tp)
    finally:
        DraftCheckpoint.read = read  # type: ignore[method-assign]
    drafter = small_drafts.small_drafter(model)
    for length in LENGTHS:
        small_drafts.feed(drafter, length, small_drafts.taps(model, length, seed=length))
    proposal = drafter.propose(LENGTHS, torch.tensor([3, 60, 100]), 4)
    return {
        "hidden": proposal.hidden,
        "tokens": proposal.tokens,
        "confidence": proposal.confidence,
        "context": small_drafts.rows_of(drafter, 9),
        "shapes": shapes,
        "heads": (model._num_heads, model.layers[0].self_attn.q_b_proj.weight.shape[0]),
    }


def run(rank: int, size: int, folder: Path, out: Path) -> None:
    """Rank `rank` of `size`, joined over gloo: the right result and the one without the all-reduce."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=size)
    try:
        alone = [torch.distributed.new_group([member]) for member in range(size)][rank]
        results = {
            "right": drafts_of(folder, TensorParallel(rank, size)),
            "own group": drafts_of(folder, TensorParallel(rank, size, torch.distributed.new_group(list(range(size))))),
            "group of one": drafts_of(folder, TensorParallel(rank, size, alone)),
            "without the sum": drafts_of(folder, WithoutTheSum(rank, size)),
        }
        torch.save(results, out / f"rank{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
