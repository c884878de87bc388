"""Whether a kernel can run here, said before anything is launched. Imports neither torch's CUDA state nor the compiler."""

from functools import lru_cache
from importlib.util import find_spec

import torch

from cute_kernels.arch import arch_of
from cute_kernels.errors import UnsupportedKernelError

PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


@lru_cache(maxsize=1)
def toolkit_reason() -> str | None:
    """None where the compiler and the launch ABI are installed, else what to install."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    return f"{' and '.join(missing)} not installed: pip install 'trtllm-dspark[cute]'" if missing else None


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
