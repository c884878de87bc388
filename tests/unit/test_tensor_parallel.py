"""Two real processes over gloo give what one gives, and each reads only its part of the checkpoint."""

from pathlib import Path
from typing import Any

import published
import pytest
import small_drafts
import tensor_parallel_worker
import torch

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.model.parallel import SINGLE, TensorParallel

SPLIT = {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}


def split_dim(name: str) -> int | None:
    return next((dim for part, dim in SPLIT.items() if f".{part}." in name), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_drafts.write_small(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(tensor_parallel_worker.run, args=(2, folder, out), nprocs=2)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Any]:
    return tensor_parallel_worker.drafts_of(folder)


@pytest.mark.parametrize("group", ["right", "own group"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_drafts_what_one_process_drafts(
    rank: int, group: str, ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    found = ranks[rank][group]
    assert torch.equal(found["tokens"], single["tokens"])
    for key in ("hidden", "confidence", "context"):
        torch.testing.assert_close(found[key], single[key], rtol=1e-5, atol=1e-5)
    assert torch.equal(ranks[0][group]["hidden"], ranks[1][group]["hidden"])


@pytest.mark.parametrize("rank", [0, 1])
def test_control_without_the_all_reduce_it_is_something_else(
    rank: int, ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    assert float((ranks[rank]["without the sum"]["hidden"] - single["hidden"]).abs().max()) > 0.1


@pytest.mark.parametrize("rank", [0, 1])
def test_the_sum_stays_within_its_group(rank: int, ranks: list[dict[str, Any]]) -> None:
    assert torch.equal(ranks[rank]["group of one"]["hidden"], ranks[rank]["without the sum"]["hidden"])


def test_each_rank_reads_its_own_share(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    stored = published.layout(published.tiny("mla"))
    assert single["shapes"] == {name: tuple(shape) for name, shape in stored.items()}
    for rank in range(2):
        for name, shape in stored.items():
            share = list(shape)
            if (dim := split_dim(name)) is not None:
                share[dim] //= 2
            assert ranks[rank]["right"]["shapes"][name] == tuple(share), name
        assert ranks[rank]["right"]["heads"] == (2, 2 * 24) and single["heads"] == (4, 4 * 24)


def test_a_rank_holds_the_slice_of_its_number_and_never_touches_the_other(tmp_path: Path) -> None:
    raw, tensors = published.tiny("mla"), small_drafts.weights(published.tiny("mla"))
    damaged = {name: value.clone() for name, value in tensors.items()}
    for name, value in damaged.items():
        if (dim := split_dim(name)) is not None:
            value.narrow(dim, value.shape[dim] // 2, value.shape[dim] // 2).fill_(torch.nan)
    published.write_tiny(tmp_path, raw, damaged)  # the NaN halves are rank 1's
    model = MLADSparkForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, tp=TensorParallel(0, 2))
    for name, binding in model.bindings().items():
        dim = split_dim(name)
        expected = tensors[name] if dim is None else tensors[name].narrow(dim, 0, tensors[name].shape[dim] // 2)
        assert torch.equal(binding.tensor, expected), name
    with pytest.raises(DSparkError, match="finite"):
        MLADSparkForCausalLM.from_pretrained(tmp_path, tp=TensorParallel(1, 2))


@pytest.mark.parametrize(
    ("size", "changes", "what"),
    [(3, {}, "num_attention_heads"), (8, {}, "num_attention_heads"), (4, {"intermediate_size": 98}, "intermediate_size")],
)
def test_sizes_that_do_not_divide_are_refused(size: int, changes: dict[str, int], what: str, tmp_path: Path) -> None:
    folder = small_drafts.write_small(tmp_path, **changes)
    with pytest.raises(DSparkError, match=f"{what} must be a multiple.*over {size} ranks"):
        MLADSparkForCausalLM.from_pretrained(folder, tp=TensorParallel(0, size))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(DSparkError, match=f"rank is {rank}, size is {size}"):
        TensorParallel(rank, size)


def test_one_rank_needs_no_process_group() -> None:
    value = torch.ones(3)
    assert SINGLE.sum(value) is value and not torch.distributed.is_initialized()
