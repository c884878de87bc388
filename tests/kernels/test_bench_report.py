"""The report of the bench, from made-up times: the document by hand, and the tables."""

import json
from dataclasses import replace

import pytest
from bench_fabricated import H200, MACHINE

from cute_kernels.bench import report
from cute_kernels.bench.cases import BlockAttentionCase, ContextAppendCase
from cute_kernels.bench.correctness import Verdict
from cute_kernels.bench.run import ABSENT, RIGHT, WRONG, CaseResult, Outcome
from cute_kernels.bench.sensors import Reading
from cute_kernels.bench.suites import FLOOR, Suite, Target
from cute_kernels.bench.timing import Ceilings

FINE = Verdict(None, 1.7e-3, 3.0e-3, 9.9e-3, "request 0 of 1")
OFF = Verdict("error 1.00e-01, at most 9.90e-03 is allowed (plain torch: 3.00e-03)", 0.1, 3.0e-3, 9.9e-3, "request 0 of 1")
BLIND = Verdict("64 of 128 elements are not written or not finite", None, 3.0e-3, 9.9e-3, "request 0 of 1")


SUITE = Suite(
    (),
    (
        Target(BlockAttentionCase(1, 1024), 1.6),
        Target(BlockAttentionCase(64, 8192), 0.4),
        Target(BlockAttentionCase(64, 8192), 0.1, FLOOR),
        Target(BlockAttentionCase(64, 8192), 0.01, BlockAttentionCase(1, 1024)),
        Target(BlockAttentionCase(8, 8192), 1.0),
        Target(BlockAttentionCase(8, 65536), 1.0),  # not in this run
    ),
    frozenset({("block_attention", "ours, portable")}),
)


def timed(name: str, ours: bool, *times: float, note: str = "", planned: str | None = None) -> Outcome:
    return Outcome(name, ours, note, RIGHT, None, FINE, planned, times)


def made_up() -> list[CaseResult]:
    fast = (
        timed("ours", True, 18.0, 20.0, 22.0, note="Plan each call."),
        timed("ours, planned once", True, 15.0, 16.0, 17.0),
        timed("torch", False, 100.0, 100.0, 100.0, note="A note."),
        timed("flashinfer fa3", False, 30.0, 30.0, 30.0, note="A note."),
    )
    slow = (
        timed("ours", True, 4000.0, 4000.0, 4000.0),
        timed("ours, planned once", True, 4000.0, 4000.0, 4000.0),
        timed("torch", False, 2000.0, 2000.0, 2000.0),
        Outcome("flashinfer fa3", False, "A note.", WRONG, OFF.complaint, OFF),
    )
    wrong = (
        Outcome("ours", True, "", WRONG, BLIND.complaint, BLIND),
        Outcome("torch", False, "", RIGHT, None, FINE),
        Outcome("flashinfer fa3", False, "", ABSENT, "flashinfer is not installed"),
    )
    return [
        CaseResult(BlockAttentionCase(1, 1024), 44, fast, readings=(Reading(1755, 600.0, False), Reading(1655, 690.5, True))),
        CaseResult(BlockAttentionCase(64, 8192), 2, slow),
        CaseResult(BlockAttentionCase(8, 8192), 2, wrong, f"ours: wrong: {BLIND.complaint}"),
        CaseResult(ContextAppendCase(8), 64, (), "out of memory"),
    ]


def made_up_document(end: Ceilings | None = None) -> report.Document:
    start = replace(H200, copy=4.0e12, matmul=700e12)
    return report.document("kernels", SUITE, MACHINE, start, end, 3, made_up())


def test_the_document_by_hand() -> None:
    document = made_up_document(end=H200)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["ceilings"]["copy_gb_per_s"] == 4300 and document["ceilings"]["matmul_tflop_per_s"] == 790
    assert document["ceilings"]["measured"]["start"]["matmul_tflop_per_s"] == 700
    assert document["passed"] is False
    fast, slow, wrong, failed = document["cases"]
    assert fast["floor_us"] == pytest.approx(1.455, abs=1e-3)
    assert (fast["best_peer"], fast["numerics_passed"], fast["passed"], fast["reason"]) == ("flashinfer fa3", True, True, None)
    ours, once, torch_, fa3 = fast["contestants"]
    assert (ours["p10_us"], ours["median_us"], ours["p90_us"]) == (18.4, 20.0, 21.6)
    assert (ours["ratio"], once["ratio"], torch_["ratio"], fa3["ratio"]) == (1.5, 1.875, 5.0, 1.5)
    assert ours["tflop_per_s"] == pytest.approx(1_149_763_584 / 20e-6 / 1e12, rel=1e-5)
    assert ours["gb_per_s"] == pytest.approx(2_302_976 / 20e-6 / 1e9, rel=1e-5)
    assert ours["share_of_floor"] == pytest.approx(ours["share_of_matmul"]) == pytest.approx(0.0728, abs=1e-4)
    assert ours["share_of_copy"] == pytest.approx(2_302_976 / 20e-6 / 4.3e12, rel=1e-5)
    assert (ours["error"], ours["error_of_plain_torch"], ours["error_allowed"]) == (1.7e-3, 3e-3, 9.9e-3)
    assert slow["best_peer"] == "torch" and slow["contestants"][0]["ratio"] == 0.5
    assert slow["contestants"][3]["numerics_passed"] is False and slow["contestants"][3]["median_us"] is None
    assert slow["numerics_passed"] is True and slow["passed"] is False
    assert wrong["numerics_passed"] is False and wrong["best_peer"] is None
    assert not any(entry.get("gb_per_s") or entry["median_us"] for entry in wrong["contestants"])
    assert (wrong["contestants"][0]["error"], wrong["contestants"][2]["numerics_passed"]) == (None, None)
    assert (fast["shape"]["batch"], fast["shape"]["context"], fast["rounds"], document["dtype"]) == (1, 1024, 3, "bfloat16")
    assert fast["sensors"] == {
        "readings": 2,
        "sm_clock_mhz": {"min": 1655, "median": 1705, "max": 1755},
        "power_w": {"min": 600.0, "median": 645.25, "max": 690.5},
        "held_back": 0.5,
    }
    assert slow["sensors"] is None and wrong["rounds"] == failed["rounds"] == 0
    assert failed["contestants"] == [] and failed["numerics_passed"] is False and failed["reason"] == "out of memory"


def test_ceilings_of_the_start_serve_where_there_are_none_at_the_end() -> None:
    document = made_up_document()
    assert document["ceilings"]["copy_gb_per_s"] == 4200  # the elementwise kernel was the faster copy
    assert document["ceilings"]["measured"]["end"] is None
    report.markdown(document)


def test_the_markdown_keeps_slower_wrong_and_failed_cases() -> None:
    text = report.markdown(made_up_document(end=H200))
    assert text.startswith(
        "NVIDIA H200 (sm_90, 132 SMs), SM clock 1,755 MHz under the matmul, 1,980 at most, 700 W, driver 580.1"
    )
    assert "torch 2.11.0" in text and "flashinfer-python" not in text and "commit 0123456789ab with changes" in text
    assert "at the start copy_ 4,000" in text and "at the end copy_ 4,300" in text
    lines = text.splitlines()
    (fast,) = [line for line in lines if line.startswith("| B=1 ")]
    (slow,) = [line for line in lines if line.startswith("| B=64 ")]
    (wrong,) = [line for line in lines if line.startswith("| B=8 ")]
    assert "| 20 (18.4 to 21.6) | 7% |" in fast and "| 16 | 100 (5.00x) | 30 (1.50x) | flashinfer fa3, 1.50x |" in fast
    assert fast.endswith("| 1,705, 645, held back 50% |")
    assert "| 4,000 (4,000 to 4,000) |" in slow and "| 2,000 (0.50x) | wrong | torch, 0.50x |  |" in slow
    assert "| wrong |" in wrong and "right, not timed" in wrong and wrong.endswith("| absent | none |  |")
    assert (
        "3 rounds a case, all contestants in turn in each. Not timed in this suite: ours, portable of block_attention." in lines
    )
    assert "- torch, flashinfer fa3: A note." in lines and "- flashinfer fa3: absent: flashinfer is not installed." in lines
    assert f"- B=64 context=8192 H=64 S=8, flashinfer fa3: wrong: {OFF.complaint}" in lines
    assert f"- B=8 context=8192 H=64 S=8: not timed: ours: wrong: {BLIND.complaint}" in lines
    assert text.count(str(BLIND.complaint)) == 1
    assert "## context_append" in lines and "- tokens=8 layers=5: not timed: out of memory" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables if line.startswith("| B=")} == {tables[0].count("|")}


def test_what_was_asked_stands_beside_what_was_found() -> None:
    document = made_up_document(end=H200)
    assert [(asked["label"], asked["beside"]) for asked in document["targets"]] == [
        ("B=1 context=1024 H=64 S=8", "the best peer"),
        ("B=64 context=8192 H=64 S=8", "the best peer"),
        ("B=64 context=8192 H=64 S=8", "the floor"),
        ("B=64 context=8192 H=64 S=8", "B=1 context=1024 H=64 S=8"),
        ("B=8 context=8192 H=64 S=8", "the best peer"),
    ]
    small, large, _, other, wrong = (asked["found"]["ours"] for asked in document["targets"])
    assert (small["ratio"], small["peer"], large["ratio"], other["ratio"]) == (1.5, "flashinfer fa3", 0.5, 0.005)
    assert wrong["ratio"] is None
    lines = report.markdown(document).splitlines()
    rows = lines[lines.index("| case | asked | ours | ours, planned once |") + 2 :]
    fa3, large_case = "flashinfer fa3", "| block_attention B=64 context=8192 H=64 S=8 |"
    assert rows == [
        "| block_attention B=1 context=1024 H=64 S=8 | 1.6x the best peer "
        f"| 1.500x {fa3}: missed by 6.2% | 1.875x {fa3}: met by 17.2% |",
        f"{large_case} 0.4x the best peer | 0.500x torch: met by 25.0% | 0.500x torch: met by 25.0% |",
        f"{large_case} 0.1x the floor | 0.185x: met by 85.0% | 0.185x: met by 85.0% |",
        f"{large_case} 0.01x B=1 context=1024 H=64 S=8 | 0.005x: missed by 50.0% | 0.004x: missed by 60.0% |",
        "| block_attention B=8 context=8192 H=64 S=8 | 1x the best peer | nothing to hold it against |  |",
    ]


def test_who_plans_in_each_call_is_held_against_those_who_do() -> None:
    """Fails when ours with its plan in the clock is held against a peer whose plan is outside, or the other way round."""
    outcomes = (
        timed("ours", True, 20.0, planned="each call"),
        timed("ours, planned once", True, 16.0, planned="once"),
        timed("flashmla", False, 26.0, planned="each call"),
        timed("flashmla, planned once", False, 18.0, planned="once"),
        timed("flashinfer fa3", False, 24.0),
    )
    results = [CaseResult(BlockAttentionCase(1, 1024), 44, outcomes)]
    document = report.document("hopper", Suite(()), MACHINE, H200, H200, 30, results)
    (case,) = document["cases"]
    entries = {entry["name"]: (entry["beside"], entry["ratio"]) for entry in case["contestants"]}
    assert entries == {
        "ours": ("flashinfer fa3", 1.2),
        "ours, planned once": ("flashmla, planned once", 1.125),
        "flashmla": ("ours", 1.3),
        "flashmla, planned once": ("ours, planned once", 1.125),
        "flashinfer fa3": ("ours", 1.2),
    }
    text = report.markdown(document)
    assert "| flashmla: us (x ours) | flashmla, planned once: us (x ours, planned once) | flashinfer fa3: us (x ours) |" in text
    assert "| 16 (flashmla, planned once, 1.12x) | 26 (1.30x) | 18 (1.12x) | 24 (1.20x) | flashinfer fa3, 1.20x |" in text
    assert (
        "30 rounds a case, all contestants in turn in each. Fewer, but at least 11, where they would take more than 1 s: "
        in text
    )
    assert "B=1 context=1024 H=64 S=8 1." in text and "Asked" not in text


def test_nothing_that_json_does_not_have_gets_into_a_document() -> None:
    assert report.figure(float("nan")) is None and report.figure(float("inf")) is None
    assert report.figure(1234567.8) == 1234570.0
