"""What a check says of one place in a file."""

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One sentence about one place.

    Attributes:
        severity: error: the server would refuse the file, or fail or draft wrongly with it. warning: it would start, and
            cost something. note: what cannot be seen from the file, or what happens with it.
        line: in the file, from 1. key: the place, dotted.
        message: what is required and what came, or the fact. fix: what to do; empty for a plain fact.
    """

    severity: Severity
    line: int
    key: str
    message: str
    fix: str = ""

    def as_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return asdict(self)
