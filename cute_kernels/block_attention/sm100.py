"""draft"""

from typing import Any

from cute_kernels.block_attention.config import NAME, BlockAttentionConfig
from cute_kernels.block_attention.operands import fake_operands
from cute_kernels.errors import UnsupportedKernelError


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    from cute_kernels.block_attention.sm100_kernel import BlockAttentionSm100

    return BlockAttentionSm100


def compile_for(config: BlockAttentionConfig, arch: str, options: str = "") -> Any:
    """Compile for sm_100a; needs no GPU. `options`: more flags of the compiler."""
    why = config.sm100_reason(arch)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the portable schedule.")
    from cutlass import cute

    options = f"--gpu-arch {arch} --enable-tvm-ffi {options}"
    return cute.compile(kernel_class()(config), *fake_operands(config, config.value_width), options=options)
