"""A trial in a process of its own: how it is started, when it is ended, and what is said of one that did not come back.

A kernel that nobody has run on a device may be wrong, may never end, or may fault, and a fault ruins the CUDA context of the
process that launched it. Here that process is a fresh interpreter with a context of its own, on the same device. It shares
nothing with this one but the disk and the device, on which it stands beside what a server holds: see `trial` for how much
memory it needs. A fault in it shows in the driver's log as any other does.
"""

import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dspark.attention import trial
from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.attention.self_check import NOISE
from trtllm_dspark.attention.trial import Make, Request, Result, identity_of, name_of
from trtllm_dspark.config import DraftConfig

log = logging.getLogger(__name__)

TIMEOUT_S = 180.0  # an import of torch, compilations of up to a minute on a busy host, milliseconds of kernels
REAP_S = 5.0  # that the system has to clear up what was killed before this process goes on without it
OUTPUT = "output.txt"
TAIL = 16384  # bytes of the output that are looked at
LINE = 300  # characters of its last line that are passed on

# What tells a process that it is a rank: it would take the asking rank's place in the job. Those that TensorRT-LLM clears
# for its own proxy process, as far as they name a launcher (tensorrt_llm/llmapi/mpi_session.py at cc4777e9).
RANK_VARIABLES = ("MPI_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "I_MPI_", "HYDRA_", "MPICH_", "MV2_", "CRAY_")


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. reason: why the schedule may not be used; None where it is right and faster.

    microseconds: of each schedule; empty where the trial did not get so far.
    """

    reason: str | None
    microseconds: dict[str, float]


def attempt(
    make: Make,
    schedule: str,
    trusted: str,
    config: DraftConfig,
    shape: DraftShape,
    device: torch.device,
    *,
    timeout: float = TIMEOUT_S,
) -> Outcome:
    """Try a schedule beside the trusted one in a process of its own. Never raises.

    Args:
        make: makes the operations of either. schedule, trusted: its first argument.
        config, shape, device: of the deployment; the device with its index.
        timeout: seconds for all of it; with REAP_S more, the longest that this takes.
    """
    try:
        seconds = math.ceil(timeout + 2 * REAP_S)
        names = (name_of(make), schedule, trusted)
        request = Request(*names, config, shape, str(device), identity_of(device), seconds)
        with tempfile.TemporaryDirectory(prefix="dspark-trial-", ignore_cleanup_errors=True) as folder:
            return _judged(request, Path(folder), timeout)
    except Exception as error:  # a server starts with the trusted one then
        return Outcome(f"could not be tried: {type(error).__name__}: {error}", {})


def _judged(request: Request, folder: Path, timeout: float) -> Outcome:
    (folder / trial.REQUEST).write_text(request.to_json())
    command = [sys.executable, "-m", trial.__name__, str(folder)]
    code = _run(command, environment(folder), folder / OUTPUT, timeout)
    said = _last_line(folder / OUTPUT)
    if code is None:
        return Outcome(f"did not end within {timeout:g} s{said}", {})
    if code:
        how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        return Outcome(how + said, {})
    try:
        result = Result.from_json((folder / trial.RESULT).read_text())
        mine, theirs = (result.microseconds.get(name, math.nan) for name in (request.schedule, request.trusted))
        passed, finding = result.finding.passed, str(result.finding)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Outcome(f"ended without a result{said}", {})
    if not passed:
        return Outcome(finding, result.microseconds)
    if not NOISE * mine < theirs:  # nor where one of them is NaN
        return Outcome(f"takes {mine:.0f} us where {request.trusted} takes {theirs:.0f}", result.microseconds)
    return Outcome(None, result.microseconds)


def environment(folder: Path) -> dict[str, str]:
    """This process's variables, for one that finds the same modules and is neither a rank nor a host of the drafter.

    Args:
        folder: one in which no MPS daemon listens.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)}
    kept.pop("PYTHONINSPECT", None)  # it would wait for input at the end
    return kept | {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path if isinstance(entry, str)),
        "PYTHONSAFEPATH": "1",  # from 3.11 on; before, -m looks into the current folder first
        "TRTLLM_DSPARK_DISABLE": "1",  # the .pth hook stays away: tensorrt_llm is no part of a trial
        # A fault ends every client of an MPS server. The driver that finds no daemon here runs without one (man page of
        # nvidia-cuda-mps-control); where it must not, in exclusive mode, the trial fails.
        "CUDA_MPS_PIPE_DIRECTORY": str(folder),
    }


def _run(command: list[str], variables: dict[str, str], output: Path, timeout: float) -> int | None:
    """Exit code, below 0 that of a signal; None where it had to be ended: as it is whatever happens here meanwhile."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all that it starts can be ended with it
        )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(REAP_S)
    except subprocess.TimeoutExpired:  # held in the driver; a thread takes its exit code, and no zombie stays
        threading.Thread(target=process.wait, daemon=True).start()


def _last_line(output: Path) -> str:
    """`: ` and the last line that a process wrote, without what a log cannot show; nothing where it wrote nothing."""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    log.debug("output of a trial:\n%s", text)
    lines = ["".join(filter(str.isprintable, line)).strip() for line in text.splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f": {last[:LINE]}" if last else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
