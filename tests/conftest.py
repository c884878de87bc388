"""Options, skips and the last lines of a run, for every test.

`slow` tests run with --slow, or where -m asks for them. `gpu` and `trtllm` tests are skipped where there is no CUDA device
or no tensorrt_llm. The summary counts skips by reason, so that a run that checked less than it seems to says so.
"""

import importlib.util
import re
from collections import Counter

import pytest
import torch

MAX_THREADS = 1  # small tensors: on a busy machine a second thread mostly waits for the first

WITHOUT_SLOW = "slow: run with --slow"
ASKS_FOR_SLOW = r"(?<!not )\bslow\b"  # in the expression of -m
WITHOUT_GPU = "gpu: no CUDA device here"
WITHOUT_TRTLLM = "trtllm: tensorrt_llm is not installed"


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests marked slow: minutes rather than seconds")


def pytest_configure(config):
    torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))


def pytest_collection_modifyitems(config, items):
    slow = config.getoption("--slow") or re.search(ASKS_FOR_SLOW, config.getoption("-m"))
    reasons = {
        "slow": None if slow else WITHOUT_SLOW,
        "gpu": None if torch.cuda.is_available() else WITHOUT_GPU,
        "trtllm": None if importlib.util.find_spec("tensorrt_llm") else WITHOUT_TRTLLM,
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", ())
    # longrepr of a skip is (file, line, "Skipped: reason")
    reasons = Counter(str(report.longrepr[-1]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        counts = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skips by reason: {counts}")
