"""Errors that a caller can cause. Their text reads `who: what is required, what came. What to do.`"""

import re


class KernelError(ValueError):
    """An argument that breaks a kernel's contract. Nothing was launched."""


class UnsupportedKernelError(KernelError):
    """A legal call that no kernel covers: a part, a toolkit or a shape. `support.reason` says so beforehand."""


def one_line(error: BaseException) -> str:
    """The line of a compiler's message that says what is wrong; its messages are coloured and many lines long."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)
