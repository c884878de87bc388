"""The tiny pair, loaded once, and a list of every excused divergence at the end of the run."""

import pytest
from engine_pair import Pair, load_pair

from trtllm_dspark.evaluation.lossless import compare_greedy

COMPARED, EXCUSED, ACCEPTANCE = (pytest.StashKey() for _ in range(3))


@pytest.fixture(scope="session")
def pair() -> Pair:
    return load_pair()


@pytest.fixture
def assert_lossless(pair, request):
    """(label, prompts, expected, got) -> None: fails on a divergence that is no tie; ties are kept for the summary."""
    stash = request.config.stash

    def check(label, prompts, expected, got):
        assert len(prompts) == len(expected) == len(got)
        found = [compare_greedy(pair.target, *texts) for texts in zip(prompts, expected, got, strict=True)]
        stash[COMPARED] = stash.get(COMPARED, 0) + sum(map(len, expected))
        said = [f"{label}, prompt {i}: {d}" for i, d in enumerate(found) if d is not None]
        stash.setdefault(EXCUSED, []).extend(said)
        faults = [f"{label}, prompt {i}: {d}" for i, d in enumerate(found) if d is not None and not d.excused]
        assert not faults, "\n".join(faults)

    return check


@pytest.fixture
def say_acceptance(request):
    """(label, accept_len) -> None: one line of the summary. An accept_len stands beside the correctness of its text."""
    lines = request.config.stash.setdefault(ACCEPTANCE, [])
    return lambda label, accept_len: lines.append(f"{label} {accept_len:.2f}")


def pytest_terminal_summary(terminalreporter, config):
    if COMPARED in config.stash:
        excused = [line for line in config.stash.get(EXCUSED, []) if "a fault" not in line]
        terminalreporter.write_line(f"lossless: {config.stash[COMPARED]} tokens compared, {len(excused)} excused divergences")
        for line in excused:
            terminalreporter.write_line(f"  {line}")
    if config.stash.get(ACCEPTANCE, None):
        terminalreporter.write_line(f"accept_len: {'; '.join(config.stash[ACCEPTANCE])}")
