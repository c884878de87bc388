"""Compiling the schedules, with tensors that have no memory; needs no GPU."""

from functools import partial
from typing import Any

from cute_kernels.errors import UnsupportedKernelError
from cute_kernels.markov_chain import portable, sm90
from cute_kernels.markov_chain.config import BASES, GROUPS, NAME, SM90, SM90_ARCH, SM90_GROUPS, VECTOR, MarkovChainConfig


def compile_for(config: MarkovChainConfig, arch: str, options: str = "") -> Any:
    """Compile for an architecture; needs no GPU. `options`: more flags of the compiler."""
    why = config.reason()
    if why is None and config.schedule == SM90 and arch != SM90_ARCH:
        why = f"the sm90 schedule needs {SM90_ARCH}, this is {arch}"
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the twin.")
    import cutlass
    from cutlass import Int32, Int64, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    types = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
    base, dtype, rank = types[config.base], types[config.dtype], config.rank
    batch, steps, vocab, known = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int()
    size = BASES[config.base]
    align = 16 if config.schedule == SM90 else size  # bytes at which rows of base logits begin

    def stride(divisibility: int) -> Any:
        return cute.sym_int64(divisibility=divisibility)

    codes = (
        make_fake_tensor(dtype, (batch, steps, rank), stride=(stride(VECTOR), stride(VECTOR), 1), assumed_align=16)
        if config.codes
        else None
    )
    schedule = sm90 if config.schedule == SM90 else portable
    return cute.compile(
        schedule.kernel_class()(config),
        make_fake_tensor(
            base, (batch, steps, vocab), stride=(stride(align // size), stride(align // size), 1), assumed_align=align
        ),
        make_fake_tensor(Int64, (batch,), stride=(1,), assumed_align=8),
        make_fake_tensor(dtype, (known, rank), stride=(stride(VECTOR), 1), assumed_align=16),
        make_fake_tensor(dtype, (vocab, rank), stride=(stride(VECTOR), 1), assumed_align=16),
        make_fake_tensor(Int64, (batch, steps), stride=(stride(1), 1), assumed_align=8),
        codes,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )


def gate_configs() -> list[tuple[Any, ...]]:
    """What the compile gate checks: (label, compile for an architecture with more options, architectures if not all)."""
    configs = [MarkovChainConfig(256, groups, "bfloat16", "bfloat16") for groups in GROUPS]
    configs += [MarkovChainConfig(512, 8, "float32", "float16", codes=True), MarkovChainConfig(8, 1, "float16", "bfloat16")]
    hopper = [MarkovChainConfig(256, groups, "bfloat16", "bfloat16", True, SM90) for groups in SM90_GROUPS]
    hopper += [MarkovChainConfig(512, 1, "float32", "float16", False, SM90)]
    return [
        *((f"{NAME} {_label(c)}", partial(compile_for, c)) for c in configs),
        *((f"{NAME} {SM90} {_label(c)}", partial(compile_for, c), (SM90_ARCH,)) for c in hopper),
    ]


def _label(config: MarkovChainConfig) -> str:
    codes = " codes" if config.codes else ""
    return f"R={config.rank} groups={config.groups} base={config.base} tables={config.dtype}{codes}"
