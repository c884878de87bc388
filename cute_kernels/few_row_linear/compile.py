"""Compiling the kernel, with tensors that have no memory; needs no GPU."""

from functools import partial
from typing import Any

from cute_kernels.errors import UnsupportedKernelError
from cute_kernels.few_row_linear.config import ARCH, COLUMNS, NAME, SILU_MUL, SPLITS, VECTOR, FewRowLinearConfig


def compile_for(config: FewRowLinearConfig, arch: str, options: str = "") -> Any:
    """Compile for sm_90a; needs no GPU. `options`: more flags of the compiler."""
    why = config.reason()
    if why is None and arch != ARCH:
        why = f"the kernel needs {ARCH}, this is {arch}"
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the twin.")
    import cutlass
    from cutlass import Int32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from cute_kernels.few_row_linear.kernel import FewRowLinear

    dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
    rows, groups, inner, outputs = (cute.sym_int() for _ in range(4))

    def tensor(shape: tuple[Any, ...], contiguous: int = 2) -> Any:
        stride = tuple(1 if mode == contiguous else cute.sym_int64(divisibility=VECTOR) for mode in range(3))
        return make_fake_tensor(dtype, shape, stride=stride, assumed_align=16)

    return cute.compile(
        FewRowLinear(config),
        tensor((rows, groups, inner)),
        tensor((groups, outputs, inner), 1 if config.transposed else 2),
        tensor((groups, outputs, inner)) if config.form == SILU_MUL else None,
        tensor((rows, groups, outputs)),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )


def gate_configs() -> list[tuple[Any, ...]]:
    """What the compile gate checks: (label, compile for an architecture with more options, architectures)."""
    configs = [FewRowLinearConfig(columns, split, 2, "bfloat16") for columns in COLUMNS for split in SPLITS]
    configs += [
        FewRowLinearConfig(8, 8, 1, "float16"),
        FewRowLinearConfig(8, 2, 2, "bfloat16", SILU_MUL),
        FewRowLinearConfig(16, 8, 1, "float16", SILU_MUL),
        FewRowLinearConfig(8, 1, 2, "bfloat16", transposed=True),
        FewRowLinearConfig(16, 2, 1, "float16", transposed=True),
    ]
    return [(f"{NAME} {_label(c)}", partial(compile_for, c), (ARCH,)) for c in configs]


def _label(config: FewRowLinearConfig) -> str:
    transposed = " transposed" if config.transposed else ""
    return f"{config.form} rows={config.columns} split={config.split} depth={config.depth} {config.dtype}{transposed}"
