"""The tiny pair, loaded once, and a list of every excused divergence at the end of the run, also of a parallel one."""

from collections import Counter

import pytest
from engine_pair import Pair, load_pair

from trtllm_dspark.evaluation.lossless import compare_greedy

COMPARED, EXCUSED, ACCEPTANCE = "lossless: tokens compared", "lossless: excused", "lossless: accept_len"


@pytest.fixture(scope="session")
def pair() -> Pair:
    return load_pair()


@pytest.fixture
def assert_lossless(pair, record_property):
    """(label, prompts, expected, got) -> None: fails on a divergence that is no tie; ties are kept for the summary."""

    def check(label, prompts, expected, got):
        assert len(prompts) == len(expected) == len(got)
        found = [compare_greedy(pair.target, *texts) for texts in zip(prompts, expected, got, strict=True)]
        record_property(COMPARED, sum(map(len, expected)))
        for i, divergence in enumerate(found):
            if divergence is not None and divergence.excused:
                record_property(EXCUSED, f"{label}, prompt {i}: {divergence}")
        faults = [f"{label}, prompt {i}: {d}" for i, d in enumerate(found) if d is not None and not d.excused]
        assert not faults, "\n".join(faults)

    return check


@pytest.fixture
def say_acceptance(record_property):
    """(label, accept_len) -> None: one line of the summary. An accept_len stands beside the correctness of its text."""
    return lambda label, accept_len: record_property(ACCEPTANCE, f"{label} {accept_len:.2f}")


def pytest_terminal_summary(terminalreporter):
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, []) if r.when == "call"]
    said = [(key, value) for report in reports for key, value in report.user_properties]
    kinds = Counter(key for key, _ in said)
    if kinds[COMPARED]:
        compared = sum(value for key, value in said if key == COMPARED)
        terminalreporter.write_line(f"lossless: {compared} tokens compared, {kinds[EXCUSED]} excused divergences")
    for key, value in said:
        if key == EXCUSED:
            terminalreporter.write_line(f"  {value}")
    if kinds[ACCEPTANCE]:
        terminalreporter.write_line(f"accept_len: {'; '.join(value for key, value in said if key == ACCEPTANCE)}")
