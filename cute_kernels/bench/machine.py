"""What a result was measured on: device, clocks, versions, commit. Plain JSON values, None where a fact cannot be had."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flashinfer-python", "flash_mla")
SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit")
ROOT = Path(__file__).parents[2]


def facts(device: torch.device) -> dict[str, Any]:
    """Everything but the clocks, which are read while the device works."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        **commit(ROOT),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def clocks(device: torch.device) -> dict[str, Any]:
    """Driver, SM clock and its maximum in MHz, power limit in W, as nvidia-smi has them now."""
    said = _run("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits", "-i", smi_name(device))
    values = [value.strip() for value in (said or "").split(",")]
    driver, *numbers = values if len(values) == len(SMI_FIELDS) else [""] * len(SMI_FIELDS)
    sm, sm_max, power = (_number(value) for value in numbers)
    return {"driver": driver or None, "sm_clock_mhz": sm, "sm_clock_max_mhz": sm_max, "power_limit_w": power}


def commit(root: Path) -> dict[str, Any]:
    """In a checkout its commit and whether the tree differs from it."""
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    status, head = (_run("git", "-C", str(root), *what) for what in (("status", "--porcelain"), ("rev-parse", "HEAD")))
    return {"commit": head, "dirty": None if status is None else bool(status)}


def smi_name(device: torch.device) -> str:
    """Of a device as nvidia-smi knows it: its number there may be another one."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
