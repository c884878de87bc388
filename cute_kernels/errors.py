"""Errors that a caller can cause. Their text reads `who: what is required, what came. What to do.`"""


class KernelError(ValueError):
    """An argument that breaks a kernel's contract. Nothing was launched."""


class UnsupportedKernelError(KernelError):
    """A legal call that no kernel covers: a part, a toolkit or a shape. `support.reason` says so beforehand."""
