"""Whether a kernel can run here, said before anything is launched. Imports neither torch's CUDA state nor the compiler."""

import csv
import logging
import re
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cute_kernels.arch import arch_of
from cute_kernels.errors import KernelError, UnsupportedKernelError

log = logging.getLogger(__name__)
COMPILER = "nvidia-cutlass-dsl"
PACKAGES = {"cutlass": COMPILER, "tvm_ffi": "apache-tvm-ffi"}


@lru_cache(maxsize=1)
def toolkit_reason() -> str | None:
    """None where the compiler and the launch ABI are installed, and the compiler whole; else what to install.

    Logs the compiler's wheels once.
    """
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install 'trtllm-dspark[cute]'"
    wheels = _compiler_wheels()
    why = _version_reason(wheels) or _overwritten_reason(wheels)
    if why is not None:
        return f"{why}: pip uninstall -y {' '.join(wheels)}, then pip install 'trtllm-dspark[cute]'"
    log.info("compiler: %s", ", ".join(f"{name} {wheel.version}" for name, wheel in wheels.items()) or "not from a wheel")
    return None


def _compiler_wheels() -> dict[str, Distribution]:
    """By name: what is installed of the wheels that the compiler consists of, those of its extras too."""
    found: dict[str, Distribution] = {}
    names = [COMPILER]
    for name in names:
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # of an extra that nobody asked for
            continue
        names += [other for other, _ in _pins(found[name]) if other not in names]
    return found


def _pins(wheel: Distribution) -> list[tuple[str, str]]:
    """(name, version) of each further wheel of the compiler that this one asks for."""
    return re.findall(rf"^({COMPILER}-[\w-]+) ?\(?==([\w.+]+)", "\n".join(wheel.requires or ()), re.MULTILINE)


def _version_reason(wheels: Mapping[str, Distribution]) -> str | None:
    """None where each wheel is of the version that the others ask for, else which is not."""
    for name, wheel in wheels.items():
        for other, version in _pins(wheel):
            if other in wheels and wheels[other].version != version:
                return f"{name} {wheel.version} needs {other} {version}, {wheels[other].version} is installed"
    return None


def _overwritten_reason(wheels: Mapping[str, Distribution]) -> str | None:
    """None where files that several wheels bring, with different contents, are all on disk as one of these wheels has them."""
    brought: dict[str, dict[str, str]] = {}  # file -> wheel -> SHA-256, as the wheel's RECORD has it
    for name, wheel in wheels.items():
        root = wheel.locate_file("")
        for row in csv.reader((wheel.read_text("RECORD") or "").splitlines()):
            if len(row) == 3 and row[1]:  # what an installer made itself has no digest
                brought.setdefault(f"{root}/{row[0]}", {})[name] = row[1]
    contested = {file: digests for file, digests in brought.items() if len(set(digests.values())) > 1}
    found = {file: _recorded_digest(Path(file)) for file in contested}
    losers = {name for file, digests in contested.items() for name, digest in digests.items() if digest != found[file]}
    mixed = [file for file, digests in contested.items() if all(d != found[file] or n in losers for n, d in digests.items())]
    if not mixed:
        return None
    writers = " and ".join(contested[mixed[0]])
    return f"{writers} bring {len(contested)} files under the same names and none of them is whole on disk (look at {mixed[0]})"


def _recorded_digest(file: Path) -> str | None:
    """As a RECORD spells it; None where the file is gone."""
    if not file.is_file():
        return None
    return "sha256=" + urlsafe_b64encode(sha256(file.read_bytes()).digest()).rstrip(b"=").decode()


@lru_cache(maxsize=64)
def device_reason(device: torch.device) -> str | None:
    """None where kernels are compiled for this device, else why not."""
    if device.type != "cuda":
        return f"needs a CUDA device, this one is {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        arch_of(torch.cuda.get_device_capability(device))
    except UnsupportedKernelError as error:
        return str(error)
    return None


@lru_cache(maxsize=64)
def arch_name(device: torch.device) -> str:
    """The compile target of a CUDA device that `device_reason` passed."""
    return arch_of(torch.cuda.get_device_capability(device)).name


def check_tensor(
    kernel: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise KernelError unless the tensor has this shape, dtype and device."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise KernelError(
            f"{kernel}: {name} must be {list(shape)} of {dtype} on {device}, it is {list(tensor.shape)} of {tensor.dtype} "
            f"on {tensor.device}. Pass one that is."
        )


def check_rows(kernel: str, name: str, tensor: torch.Tensor) -> None:
    """Raise KernelError unless every row of the last dim is contiguous and starts at a multiple of 16 bytes.

    The compiler is promised this and does not check it: a view that starts elsewhere reads other bytes or faults.
    """
    size = tensor.element_size()
    if tensor.stride(-1) != 1 or any(stride * size % 16 for stride in tensor.stride()[:-1]) or tensor.data_ptr() % 16:
        raise KernelError(
            f"{kernel}: rows of {name} must be contiguous and 16-byte aligned; strides are {tensor.stride()} elements of "
            f"{size} bytes, it starts {tensor.data_ptr() % 16} bytes past a multiple of 16. Copy it."
        )


def smem_allocator() -> Any:
    """Inside a kernel: the allocator of its shared memory, at the place where this compiler keeps it."""
    import cutlass

    return getattr(cutlass, "memory", cutlass.utils).SmemAllocator()
