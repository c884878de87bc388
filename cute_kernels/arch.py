"""The parts that kernels are compiled for, and what each of them gives a kernel. Imports nothing heavy.

Source of the limits: CUDA C++ programming guide, compute capabilities; shared memory a block may ask for, in bytes.
"""

from dataclasses import dataclass

from cute_kernels.errors import UnsupportedKernelError


@dataclass(frozen=True)
class Arch:
    """One compile target.

    Attributes:
        name: as the compiler spells it. capability: (major, minor) of the devices that run it.
        shared_bytes: most shared memory of one block, the 1,024 bytes that sm_90 and later reserve included.
    """

    name: str
    capability: tuple[int, int]
    shared_bytes: int


ARCHES = {
    arch.name: arch
    for arch in (
        Arch("sm_80", (8, 0), 166_912),
        Arch("sm_86", (8, 6), 101_376),
        Arch("sm_89", (8, 9), 101_376),
        Arch("sm_90a", (9, 0), 232_448),
        Arch("sm_100a", (10, 0), 232_448),
        Arch("sm_120a", (12, 0), 101_376),
    )
}


def arch_of(capability: tuple[int, int]) -> Arch:
    """The target of a device. sm_103 runs no sm_100a code: `a` targets are exact.

    Raises:
        UnsupportedKernelError: a capability that no target covers.
    """
    for arch in ARCHES.values():
        if arch.capability == capability:
            return arch
    known = ", ".join(ARCHES)
    raise UnsupportedKernelError(
        f"cute_kernels: a device of {known} is required, this one is sm_{capability[0]}{capability[1]}. Use plain torch."
    )


def is_dependent_launch(arch: str) -> bool:
    """Whether a launch may start while the kernel before it ends (programmatic dependent launch): from sm_90 on."""
    return ARCHES[arch].capability >= (9, 0)
