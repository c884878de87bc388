"""The trial of a schedule that nobody has run on a device: the program of the process in which it happens.

    python -m trtllm_dspark.attention.trial FOLDER

reads FOLDER/request.json, compares the schedule with its twin by the self-check's own case, times it beside the trusted one
where it is right, and writes FOLDER/result.json. Whoever asked starts it, ends it where it hangs, and judges;
see `trial_process`.

It needs memory of the device beside what a server holds: a CUDA context with the kernels of torch that the twin calls, which
no figure here stands for, and tensors. The largest of these, by their shapes, for 96 heads of 512 + 64 in bf16 on 148
multiprocessors: 57 MB of workspaces for portable and sm100 together, and 38 MB of pages to time them on. Of the host it needs
what torch and a compilation take. Where there is not enough, the trial fails and says so; the asking process goes on.
"""

import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from statistics import median

import torch

from cute_kernels.errors import one_line
from trtllm_dspark.attention import self_check
from trtllm_dspark.attention.finding import Finding
from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError

log = logging.getLogger(__name__)

WHO = "trial"
REQUEST, RESULT = "request.json", "result.json"
TURNS = 3  # in which each of the two is timed

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

Make = Callable[[str, DraftConfig, DraftShape], Operations]
"""(schedule, config, shape) -> operations that attend by it. A module's own function: another process finds it by name."""


@dataclass(frozen=True)
class Request:
    """What is tried.

    Attributes:
        make: `name_of` what makes the operations. schedule: the one that is tried. trusted: the one to beat.
        device: with its index. identity: `identity_of` it where the request is made.
        seconds: after which the process ends by itself, should nobody be there any more to end it.
    """

    make: str
    schedule: str
    trusted: str
    config: DraftConfig
    shape: DraftShape
    device: str
    identity: str | None
    seconds: int

    def to_json(self) -> str:
        """For `from_json` of another process."""
        values = {field.name: getattr(self.shape, field.name) for field in fields(self.shape)}
        shape = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in values.items()}
        return json.dumps({**vars(self), "config": self.config.model_dump_json(), "shape": shape})

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """What `to_json` wrote."""
        read = json.loads(text)
        shape = {name: _DTYPES.get(value, value) for name, value in read["shape"].items()}
        return cls(**{**read, "config": DraftConfig.model_validate_json(read["config"]), "shape": DraftShape(**shape)})


@dataclass(frozen=True)
class Result:
    """What the trial found. microseconds: of each schedule, the median of its turns; empty where the tried one is wrong."""

    finding: Finding
    microseconds: dict[str, float]

    def to_json(self) -> str:
        """For `from_json` of another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Result":
        """What `to_json` wrote. Raises ValueError, TypeError, KeyError or AttributeError where it is not that."""
        read = json.loads(text)
        return cls(Finding(**read["finding"]), {name: float(us) for name, us in read["microseconds"].items()})


def name_of(make: Make) -> str:
    """`module:function`, by which another process finds it."""
    return f"{make.__module__}:{make.__qualname__}"


def identity_of(device: torch.device) -> str | None:
    """What tells a CUDA device from the others of its host, whatever index a process knows it by. None of a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def try_schedule(request: Request) -> Result:
    """Check the schedule; where it is right, time it and the trusted one in turns, so that a drift of clocks meets both.

    Raises:
        DSparkError: the index names another device here than where the request was made. Besides, whatever a kernel raises.
    """
    device, config, shape = torch.device(request.device), request.config, request.shape
    here = identity_of(device)
    if here != request.identity:
        raise DSparkError(f"{WHO}: {device} must be {request.identity}, here it is {here}. Set CUDA_VISIBLE_DEVICES earlier.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    module, _, function = request.make.partition(":")
    make: Make = getattr(import_module(module), function)
    made = {name: make(name, config, shape) for name in (request.trusted, request.schedule)}
    log.info("checking %s", request.schedule)
    with torch.no_grad():
        generator = torch.Generator(device).manual_seed(0)
        finding = self_check.check_block_attention(made[request.schedule], config, shape, generator)
    times: dict[str, list[float]] = {name: [] for name in made}
    if finding.passed:
        log.info("timing %s and %s", *made)
        for _ in range(TURNS):
            for name, operations in made.items():
                times[name].append(self_check.measure_block_attention(operations, config, shape, device))
    return Result(finding, {name: median(turns) for name, turns in times.items() if turns})


def main(folder: Path) -> int:
    """Exit code: 0 with a result in the folder, 1 without; the last line of stderr then says why."""
    request = Request.from_json((folder / REQUEST).read_text())
    signal.alarm(request.seconds)  # its default action needs no Python: it ends a process that waits for a kernel, too
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        result = try_schedule(request)
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return 1
    (folder / RESULT).write_text(result.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
