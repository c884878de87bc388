"""Draft and target embeddings compared by value, and what is said about it."""

import math

import pytest
import torch
from oracle_run import DATA, load_model
from safetensors.torch import load_file

from trtllm_dspark.model.sharing import compare_embeddings


def table(rows: int = 200) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))


def test_a_copy_is_equal() -> None:
    draft = load_model(torch.bfloat16).embed_tokens.weight
    target = load_file(DATA / "mla" / "target_side.safetensors")["embed_tokens.weight"]
    report = compare_embeddings(draft, target, 500)
    assert report.rows == report.equal_rows == 65 and report.mask_row_equal and report.max_abs_diff == 0.0
    assert "65 of 65 sampled rows equal" in str(report) and "mask row equal" in str(report)


def test_a_trained_mask_row_is_noticed() -> None:
    target = table()
    draft = target.clone()
    draft[101] += 0.5
    report = compare_embeddings(draft, target, 101)
    assert not report.mask_row_equal and report.equal_rows == report.rows - 1
    assert report.max_abs_diff == pytest.approx(0.5) and "mask row different" in str(report)


def test_another_table_is_noticed() -> None:
    report = compare_embeddings(table(), table().flip(0), 3)
    assert report.equal_rows == 0 and report.max_abs_diff > 1.0


def test_values_are_compared_in_the_drafts_dtype() -> None:
    report = compare_embeddings(table().bfloat16(), table(), 3)
    assert report.equal_rows == report.rows
    report = compare_embeddings(table(), table().bfloat16(), 3)  # control: the other way they differ
    assert report.equal_rows < report.rows


def test_nan_is_never_equal() -> None:
    draft = table()
    draft[0] = math.nan
    report = compare_embeddings(draft, draft.clone(), 0)
    assert not report.mask_row_equal and math.isnan(report.max_abs_diff)


def test_a_small_table_is_compared_whole() -> None:
    assert compare_embeddings(table(5), table(5), 2, samples=64).rows == 5
