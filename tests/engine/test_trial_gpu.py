"""Trials on a GPU: a process of its own that passes, that launches a kernel without end, and one whose kernel faults.

Afterwards the CUDA context of this process computes as before. In under a minute, compilations included:

    pytest tests/engine/test_trial_gpu.py
"""

import logging
import re
import time
from collections.abc import Callable

import gpu_drafts
import planted_schedules
import pytest
import torch
from gpu_drafts import CONFIG, GPU

from trtllm_dspark.attention import cutedsl, schedules, self_check, trial_process
from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.attention.policy import Backend, BackendChoice, resolve_backend
from trtllm_dspark.attention.schedules import Schedules
from trtllm_dspark.attention.trial_process import Outcome, attempt
from trtllm_dspark.config import DraftConfig

pytestmark = pytest.mark.gpu

SHAPE = DraftShape(torch.bfloat16, gpu_drafts.PAGE, heads=64, block_rows=8)
SECONDS = 10.0  # for what imports torch and compiles nothing


def planted(schedule: str, trusted: str = "slow") -> Outcome:
    return attempt(planted_schedules.operations, schedule, trusted, CONFIG, SHAPE, GPU, timeout=SECONDS)


def computes() -> bool:
    """Whether this process still launches kernels that come back in time."""
    start = time.perf_counter()
    right = bool((torch.arange(1 << 20, device=GPU).sum() == (1 << 19) * ((1 << 20) - 1)).item())
    return right and time.perf_counter() - start < 5


def attention_alone(
    name: str, make: Callable[[], Operations], config: DraftConfig, shape: DraftShape, device: torch.device
) -> str | None:
    """The self-check without the operations that no schedule changes."""
    with torch.no_grad():
        found = self_check.check_block_attention(make(), config, shape, torch.Generator(device).manual_seed(0))
    return None if found.passed else str(found)


@pytest.fixture(autouse=True)
def unharmed() -> None:
    assert computes()


@pytest.mark.parametrize(("trusted", "other", "taken"), [("portable", "sm90", "sm90"), ("sm90", "portable", "sm90")])
def test_the_schedule_that_is_right_and_faster_attends(trusted: str, other: str, taken: str) -> None:
    """Fails where the untried one is taken whatever its time is, or never. The two cases are each other's control."""
    if torch.cuda.get_device_capability(GPU) != (9, 0):
        pytest.skip("two schedules that are known to be right are required: sm_90a")

    def names(*arguments: object) -> tuple[str, ...]:
        return trusted, other

    def make() -> Operations:
        return cutedsl.scheduled(trusted, CONFIG, SHAPE)

    table = {
        "CUTEDSL": Backend("CUTEDSL", cutedsl.reason, make, schedules=Schedules(names, cutedsl.scheduled)),
        "TRTLLM": Backend("TRTLLM", lambda *arguments: "not asked", None),
    }
    schedules.pick.cache_clear()
    choice = resolve_backend(CONFIG, GPU, shape=SHAPE, backends=table, check=attention_alone)
    print(choice)
    assert scheduled_by(choice) == taken
    assert re.match(
        rf"attends by {taken}, not {'portable' if taken == 'sm90' else 'sm90'}: takes \d+ us where", choice.schedule
    )
    assert computes()


def scheduled_by(choice: BackendChoice) -> str:
    """The schedule for which a plan of a step is made."""
    case = gpu_drafts.attention_case([700, 64, 0], SHAPE.block_rows, SHAPE.heads)
    shared = ("context_len", "context_start", "value_width", "pages", "page_table")
    plan = choice.operations.plan(**{name: case[name] for name in shared}, block_rows=SHAPE.block_rows, heads=SHAPE.heads)
    return str(plan.schedule)  # type: ignore[attr-defined]


def test_a_kernel_that_faults_takes_only_its_own_process(caplog: pytest.LogCaptureFixture) -> None:
    """Fails where the fault reaches this process. Control: a right one passes in the same way."""
    with caplog.at_level(logging.DEBUG, logger=trial_process.__name__):
        outcome = planted("faults")
    print(outcome)
    assert re.match("ended with exit code 1: |was killed by ", str(outcome.reason)) and outcome.microseconds == {}
    assert "checking faults" in caplog.text and "device-side assert" in caplog.text
    assert computes()
    assert planted("right").reason is None


def test_a_kernel_without_end_is_ended_with_its_process() -> None:
    """Fails where it holds up this process, or goes on on the device. Control: a right one passes in the time that this has."""
    start = time.perf_counter()
    outcome = planted("spins")
    print(outcome, f"after {time.perf_counter() - start:.1f} s")
    assert outcome == Outcome(f"did not end within {SECONDS:g} s: checking spins", {})
    assert time.perf_counter() - start < SECONDS + trial_process.REAP_S + 1
    assert computes()
