"""The two errors that a user can cause. Their text reads `who: what is required, what came. What to do.`"""


class DSparkError(ValueError):
    """Bad input: a file, a setting or a request that cannot be right. Nothing was changed or lost."""


class UnsupportedError(DSparkError):
    """Legal input that this version does not implement, refused by name."""
