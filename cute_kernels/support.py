"""Whether a kernel can run here, said before anything is launched. Imports neither torch's CUDA state nor the compiler."""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from cute_kernels.arch import arch_of
from cute_kernels.errors import KernelError, UnsupportedKernelError

PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


@lru_cache(maxsize=1)
def toolkit_reason() -> str | None:
    """None where the compiler and the launch ABI are installed, else what to install."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    return f"{' and '.join(missing)} not installed: pip install 'trtllm-dspark[cute]'" if missing else None


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
