"""A linear layer of few rows, as fast as its weights can be read.

    y[m, g, n] = sum over k of  x[m, g, k] * W[g, n, k]          at most 16 rows m; fp32 sums, rounded once
    y[m, n] = silu(x[m] . gate[n]) * (x[m] . up[n])              each of the three rounded, as plain torch rounds them

The weights are the rows of the tensor cores' product and x its columns, so that only the weights are padded to 64. Both arrive
by TMA, the blocks of a cluster share K, and a launch fetches its first weights while the kernel before it ends.

    config.py   the configuration, how many blocks share K     kernel.py  how it works, the launch and the kernel
    compile.py  compilation without a GPU, the gate's list     roles.py   what its warps do

Moves G * N * K * itemsize bytes, twice for two weights; the twin is `cute_kernels.reference.few_row_linear`.

Precondition: the weights are constants. They are read before the kernel launched before this one has ended, so that kernel,
and any that it overlaps with, must not write them. A launch that is not a dependent one (every launch of torch's) between a
write and its use is enough, so is a synchronisation.
"""

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.cache import compiled
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.few_row_linear.compile import compile_for, gate_configs
from cute_kernels.few_row_linear.config import (
    ARCH,
    CHUNK,
    LINEAR,
    MAX_ROWS,
    NAME,
    SILU_MUL,
    SPLITS,
    FewRowLinearConfig,
    Product,
    config_for,
    num_clusters,
)
from cute_kernels.support import arch_name, check_rows, check_tensor, device_reason, toolkit_reason

__all__ = [
    "ARCH",
    "MAX_ROWS",
    "NAME",
    "FewRowLinearConfig",
    "Product",
    "compile_for",
    "config_for",
    "few_row_linear",
    "few_row_silu_mul",
    "gate_configs",
    "launcher",
    "reason",
]


def reason(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """None where a kernel takes these arguments here, else why not. Launches nothing.

    Args:
        x, weight: as in `few_row_linear`; of two weights either.
    """
    why = toolkit_reason() or device_reason(x.device)
    if why is None and arch_name(x.device) != ARCH:
        why = f"needs {ARCH}, this is {arch_name(x.device)}"
    return why or _shape_reason(x, weight)


def _product(weight: torch.Tensor, form: str) -> Product:
    groups = weight.shape[0] if weight.ndim == 3 else 1
    return Product(weight.shape[-2], weight.shape[-1], groups, form, not _is_row_major(weight))


def _shape_reason(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """None where the shapes and dtypes of legal arguments are built, else which is not."""
    rows = x.shape[: 1 - weight.ndim].numel()
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be bfloat16 or float16, it is {x.dtype}"
    if rows > MAX_ROWS:
        return f"x must have at most {MAX_ROWS} rows, it has {rows}"
    return _product(weight, LINEAR).reason()


def launcher(config: FewRowLinearConfig, device: torch.device) -> Callable[..., Any]:
    """The function for a device, compiled where no cache has it."""
    arch = arch_name(device)
    return compiled(NAME, config, arch, lambda: compile_for(config, arch))


def _collapsed(name: str, tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """[..., (G,) size] as [M, G, size], no copy."""
    try:
        return tensor.view(-1, groups, tensor.shape[-1])
    except RuntimeError as error:
        raise KernelError(
            f"{NAME}: leading dims of {name} must be evenly spaced, strides of {list(tensor.shape)} are {tensor.stride()}. "
            "Copy it."
        ) from error


def _check(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None, out: torch.Tensor | None) -> None:
    grouped = weight.ndim == 3
    if (
        weight.ndim not in (2, 3)
        or x.ndim < weight.ndim - 1
        or x.shape[-1] != weight.shape[-1]
        or (grouped and x.shape[-2] != weight.shape[0])
    ):
        raise KernelError(
            f"{NAME}: x must be [..., K] with a weight [N, K], or [..., G, K] with [G, N, K]; they are {list(x.shape)} and "
            f"{list(weight.shape)}. Reshape them."
        )
    check_tensor(NAME, "weight", weight, tuple(weight.shape), x.dtype, x.device)
    if up is not None:
        check_tensor(NAME, "up", up, tuple(weight.shape), x.dtype, x.device)
    if out is not None:
        check_tensor(NAME, "out", out, (*x.shape[:-1], weight.shape[-2]), x.dtype, x.device)
    if torch.compiler.is_compiling():
        return
    for name, tensor in (("x", x), ("weight", weight if _is_row_major(weight) else weight.mT), ("up", up), ("out", out)):
        if tensor is not None:
            check_rows(NAME, name, tensor)


def _is_row_major(weight: torch.Tensor) -> bool:
    """Whether it is contiguous along K; a weight of several groups may be so along N."""
    return weight.ndim == 2 or weight.stride(-1) == 1


@torch.library.custom_op("trtllm_dspark::few_row_linear", mutates_args=("out",), device_types="cuda")
def _op(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None, out: torch.Tensor) -> None:
    _check(x, weight, up, out)
    _launch(x, weight, up, out, None)


@_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None, out: torch.Tensor) -> None:
    return None


def few_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    split: int | None = None,
) -> torch.Tensor:
    """x times weight, transposed; with a weight for each group where there are three dims.

    A row's result does not depend on the rows beside it, as long as there are at most 16.

    Args:
        x: [..., K], or [..., G, K]; bf16 or fp16; at most 16 rows (of each group); leading dims evenly spaced.
        weight: [N, K], or [G, N, K]; K a multiple of 64, N of 8. Contiguous along K; one with groups may be along N. A
            constant, see this module.
        out: [..., N], or [..., G, N]: where it is written, strided like x; None allocates it.
        split: blocks that share K; None picks it. `torch.compile` takes None only.
    Every row starts at a multiple of 16 bytes.
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for them here.
    """
    return _call(x, weight, None, out, split)


def few_row_silu_mul(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, split: int | None = None) -> torch.Tensor:
    """silu(x gate^T) * (x up^T): the inside of a gated MLP in one launch. [..., K] -> [..., N].

    Args:
        x, split: see `few_row_linear`. gate, up: [N, K] each, as its weight.
    Raises:
        KernelError, UnsupportedKernelError: as `few_row_linear`.
    Numerics: both products, the SiLU and the result are rounded to x's dtype, as plain torch does.
    """
    if gate.ndim != 2:
        raise KernelError(f"{NAME}: gate must be [N, K], it is {list(gate.shape)}. Pass one layer's.")
    return _call(x, gate, up, None, split)


def _call(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    out: torch.Tensor | None,
    split: int | None,
) -> torch.Tensor:
    _check(x, weight, up, out)
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight.shape[-2])
    if torch.compiler.is_compiling():
        _op(x, weight, up, out)
    else:
        _launch(x, weight, up, out, split)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    out: torch.Tensor,
    split: int | None,
) -> None:
    why = reason(x, weight)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use cute_kernels.reference.few_row_linear.")
    product = _product(weight, LINEAR if up is None else SILU_MUL)
    rows, results = _collapsed("x", x, product.groups), _collapsed("out", out, product.groups)
    chunks = product.inner // CHUNK
    if split is not None and (split not in SPLITS or chunks % split):
        raise KernelError(f"{NAME}: split must be among {SPLITS} and divide K / {CHUNK} = {chunks}, it is {split}.")
    if not rows.shape[0]:
        return
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    config = config_for(rows.shape[0], product, str(x.dtype).removeprefix("torch."), multiprocessors, split)
    weights = weight if weight.ndim == 3 else weight.unsqueeze(0)
    clusters = num_clusters(config, product, multiprocessors)
    launcher(config, x.device)(rows, weights, None if up is None else up.unsqueeze(0), results, clusters)
