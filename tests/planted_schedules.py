"""Schedules for trials: right ones, and one for each way in which a kernel that nobody has run may go wrong.

A trial's process imports this by name. Without a GPU it has no events to time with: there the host's clock does.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark.attention import self_check, trial, vanilla
from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.config import DraftConfig

GRANDCHILD = "PLANTED_GRANDCHILD"  # environment variable: the file for the id of the process that `hangs` starts
PAUSE = 0.05  # seconds of a slow schedule

Attend = Callable[..., torch.Tensor]


def operations(schedule: str, config: DraftConfig, shape: DraftShape) -> Operations:
    """Plain torch with the attention that is planted under this name."""
    return Operations(PLANTED[schedule])


def slow(*arguments: Any, **options: Any) -> torch.Tensor:
    """Right, and PAUSE later than `right`."""
    time.sleep(PAUSE)
    return vanilla.block_attention(*arguments, **options)


def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
    """One row of one head."""
    out = vanilla.block_attention(*arguments, **options)
    out[-1, -1, -1] = 0
    return out


def hangs(*arguments: Any, **options: Any) -> torch.Tensor:
    """And so does what it started, where somebody wants to know of it."""
    if GRANDCHILD in os.environ:
        Path(os.environ[GRANDCHILD]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    time.sleep(1000)
    raise AssertionError("it was to be killed")


def crashes(*arguments: Any, **options: Any) -> torch.Tensor:
    """By a signal."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("it was to die")


def crashes_later(*arguments: Any, **options: Any) -> torch.Tensor:
    """Right, and dies when all is said and done: as a process does whose context was ruined meanwhile."""
    atexit.register(os.kill, os.getpid(), signal.SIGABRT)
    return vanilla.block_attention(*arguments, **options)


def leaves(*arguments: Any, **options: Any) -> torch.Tensor:
    """Without a word of Python's."""
    sys.stderr.flush()
    os._exit(3)


def raises(*arguments: Any, **options: Any) -> torch.Tensor:
    """As a launch does whose kernel faulted; the line that says so is followed by others."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`.")


def babbles(*arguments: Any, **options: Any) -> torch.Tensor:
    """Writes much, some of it no text, and goes with exit code 0 but without a result."""
    sys.stdout.buffer.write(b'{"finding": "fine"}\n' * 10_000 + b"\xff\x00\x1b[31mlast words\x1b[0m\n\n")
    sys.stdout.flush()
    os._exit(0)


def spins(*arguments: Any, **options: Any) -> torch.Tensor:
    """A kernel that does not end, on a GPU."""
    torch.cuda._sleep(1 << 62)
    return vanilla.block_attention(*arguments, **options)


def faults(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """A kernel that stops at an assertion, on a GPU: no other can be launched from that process."""
    torch.zeros(1, device=q.device)[torch.full((1,), 1 << 20, device=q.device)]
    torch.cuda.synchronize()
    raise AssertionError("the synchronisation was to fail")


PLANTED: dict[str, Attend] = {
    "right": vanilla.block_attention,
    "slow": slow,
    "wrong": wrong,
    "hangs": hangs,
    "crashes": crashes,
    "crashes later": crashes_later,
    "leaves": leaves,
    "raises": raises,
    "babbles": babbles,
    "spins": spins,
    "faults": faults,
}


def on_the_hosts_clock(attend: Operations, config: DraftConfig, shape: DraftShape, device: torch.device) -> float:
    """`self_check.measure_block_attention` without a GPU; shorter, too."""
    case = self_check._attention_case(config, shape, torch.Generator(device).manual_seed(0), [64] * 2)
    start = time.perf_counter()
    self_check._run(attend, case)
    return 1e6 * (time.perf_counter() - start)


if getattr(sys.modules["__main__"], "__spec__", None) and sys.modules["__main__"].__spec__.name == trial.__name__:
    torch.set_num_threads(1)  # as in conftest.py
    if not torch.cuda.is_available():
        self_check.measure_block_attention = on_the_hosts_clock
