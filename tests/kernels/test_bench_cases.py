"""The cases of the bench: their floors, bytes and FLOP by hand, the suite, and the inputs that they draw."""

import pytest
import torch
from bench_fabricated import APPEND, ATTENTION, CPU, H200, RAGGED

from cute_kernels.bench import report
from cute_kernels.bench.cases import BlockAttentionCase, Case, ContextAppendCase, MarkovChainCase, QueryRopeCase
from cute_kernels.bench.contestants import CONTESTANTS
from cute_kernels.bench.suites import BEST_PEER, SUITES, select


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (BlockAttentionCase(1, 1024), "1.5"),
        (BlockAttentionCase(1, 8192), "11.6"),
        (BlockAttentionCase(8, 8192), "92.5"),
        (BlockAttentionCase(64, 1024), "93"),
        (BlockAttentionCase(64, 8192), "740"),
        (BlockAttentionCase(1, 1024, heads=8), "0.3"),
        (BlockAttentionCase(1, 8192, heads=8), "2.2"),
        (BlockAttentionCase(64, 8192, heads=8), "143"),
        (BlockAttentionCase(64, 8192, heads=64, rows=1), "143"),
        (ContextAppendCase(8), "0.02"),
        (ContextAppendCase(512), "1.4"),
        (ContextAppendCase(1024), "2.7"),
        (QueryRopeCase(1), "0.03"),
        (MarkovChainCase(1), "137"),
        (MarkovChainCase(64), "171"),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_floors_are_those_computed_by_hand(case: Case, floor: str) -> None:
    found = report.floor_us(case.flop, case.bytes, H200.copy, H200.matmul)
    decimals = len(floor.partition(".")[2])
    assert f"{found:.{decimals}f}" == floor


def test_bytes_and_flop_by_hand() -> None:
    attention = BlockAttentionCase(3, 1024)
    assert attention.flop == 2176 * 3 * 512 * 1032
    assert attention.bytes == 3 * (1152 * 1032 + 1152 * 512 + 1024 * 512)
    ragged = BlockAttentionCase(3, 4096, shortest=100)
    assert len(ragged.lengths) == len(set(ragged.lengths)) == 3
    assert ragged.flop == 2176 * 512 * (sum(ragged.lengths) + 24)
    assert ragged.bytes == 1152 * (sum(ragged.lengths) + 24) + 3 * 512 * (1152 + 1024)
    assert (ContextAppendCase(7).flop, ContextAppendCase(7).bytes) == (0, 7 * 5 * 2304)
    assert (QueryRopeCase(2).flop, QueryRopeCase(2).bytes) == (0, 16 * (4 * 64 * 64 + 4 * 64))
    assert MarkovChainCase(8).flop == 2 * 8 * 7 * 163_840 * 256
    assert MarkovChainCase(8).bytes == 7 * 163_840 * (256 + 8) * 2


def test_the_suite_holds_the_shapes_it_promises() -> None:
    cases = select("kernels")
    attention = [case for case in cases if isinstance(case, BlockAttentionCase)]
    assert {(c.batch, c.context) for c in attention if c.heads == 64} == {
        (1, 1024),
        (1, 8192),
        (8, 8192),
        (64, 1024),
        (64, 8192),
    }
    assert {(c.batch, c.context) for c in attention if c.heads == 8} == {(1, 8192), (64, 8192)}
    for suite in SUITES:
        cases = select(suite)
        assert all(case.kernel in CONTESTANTS for case in cases)
        assert len({f"{case.kernel} {case.label}" for case in cases}) == len(cases)
    assert [case.label for case in select("kernels", "rope rows=512")] == ["rows=512 H=64"]


def test_the_hopper_suite_asks_what_it_promises_and_holds_all_it_asks() -> None:
    suite = SUITES["hopper"]
    cases = {case.label for case in suite.cases if isinstance(case, BlockAttentionCase)}
    asked = {target.case.label: target.at_least for target in suite.targets if target.beside == BEST_PEER}
    assert asked["B=8 context=65536 H=64 S=8"] == 1.0 and asked["B=1 context=1024 H=64 S=8"] == 1.6
    assert asked["B=64 context=8192 H=64 S=1"] == asked["B=64 context=8192 H=4 S=8"] == 1.03
    assert asked["B=64 context=256..65536 H=64 S=8"] == 1.1
    assert len([label for label in asked if label.startswith("B=") and "V=" not in label]) == 17
    for target in suite.targets:
        assert target.case in suite.cases and (isinstance(target.beside, str) or target.beside in suite.cases)
    assert {f"B={batch} context={1024 << step} H=64 S=8" for batch in (1, 8) for step in range(8)} <= cases
    assert {f"B=64 context=8192 H={heads} S=8" for heads in (4, 8, 12, 16)} <= cases
    assert {f"B=64 context=8192 H=64 S=8 P={page_size}" for page_size in (32, 128)} <= cases
    entered = {(kernel, contestant.name) for kernel, group in CONTESTANTS.items() for contestant in group}
    assert suite.left_out < entered and not any(name.startswith("flashmla") or name == "ours" for _, name in suite.left_out)


def test_ragged_lengths_are_log_uniform_and_the_same_in_every_run() -> None:
    """Fails when lengths are drawn uniformly: the median would lie near 33,000, and hardly one below 1,024."""
    case = BlockAttentionCase(1000, 65536, shortest=256)
    assert case.lengths == BlockAttentionCase(1000, 65536, shortest=256).lengths
    assert 256 <= min(case.lengths) and max(case.lengths) <= 65536
    for below, share in ((1024, 0.25), (4096, 0.5), (16384, 0.75)):
        assert sum(length < below for length in case.lengths) / 1000 == pytest.approx(share, abs=0.05)
    assert BlockAttentionCase(3, 70).lengths == (70, 70, 70)


def test_a_ragged_set_holds_its_lengths_and_nothing_else() -> None:
    (inputs,) = RAGGED.sets(1, CPU)
    assert tuple(inputs["context_len"].tolist()) == RAGGED.lengths and len(set(RAGGED.lengths)) > 1
    table, written = inputs["page_table"].long(), ~inputs["pages"].isnan().any(-1)
    assert int(written.sum()) == sum(RAGGED.lengths)
    for row, length, live in zip(table, RAGGED.lengths, RAGGED.pages_of_requests, strict=True):
        flat = written[row].flatten()
        assert flat[:length].all() and not flat[length:].any()
        assert (live - 1) * 16 < length + RAGGED.rows <= live * 16
    pages = [page for row, live in zip(table.tolist(), RAGGED.pages_of_requests, strict=True) for page in row[:live]]
    assert len(set(pages)) == len(pages)
    assert not set(table.flatten().tolist()) - set(range(len(inputs["pages"])))


def test_sets_differ_and_share_what_a_step_shares() -> None:
    first, second = ATTENTION.sets(2, CPU)
    assert first["page_table"] is second["page_table"] and first["context_len"] is second["context_len"]
    assert not torch.equal(first["q"], second["q"])
    again = ATTENTION.sets(1, CPU)[0]
    assert all(torch.equal(first[name].nan_to_num(-9.0), again[name].nan_to_num(-9.0)) for name in first)
    live = torch.zeros(first["pages"].shape[:2], dtype=torch.bool)
    for row in first["page_table"].tolist():
        for position in range(ATTENTION.context):
            assert not live[row[position // 16], position % 16]  # nobody shares
            live[row[position // 16], position % 16] = True
    assert torch.equal(~first["pages"].isnan().any(-1), live) and torch.equal(first["pages"].isnan().all(-1), ~live)
    slots = APPEND.sets(1, CPU)[0]["slots"]
    assert len(slots.unique()) == APPEND.tokens


def test_sums_of_the_chain_are_exact_in_bf16() -> None:
    """Otherwise tokens could not be compared exactly: fails when the integers are drawn too large."""
    inputs = MarkovChainCase(8, vocabulary=20_000, steps=1).sets(1, CPU)[0]
    bias = inputs["w1"][inputs["anchors"]].float() @ inputs["w2"].float().T
    for exact in (bias, bias + inputs["base_logits"][:, 0]):
        assert torch.equal(exact.bfloat16().float(), exact)
