"""SM clock and power of the device while it is timed: both move a speed, and a limit on power differs from machine to machine.

Read from NVIDIA's management library, which every driver brings. Source of names and numbers: pynvml.py of nvidia-ml-py
13.615.71. The power is what nvmlDeviceGetPowerUsage gives: on Hopper a mean over the last second, so that what came before
counts too.
"""

import ctypes
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
READERS = ("nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons")
CLOCK_SM = 1
HELD_BACK = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # power cap; slowdown by hardware, by heat (two), by the power brake


@dataclass(frozen=True)
class Reading:
    """One look at the device.

    Attributes:
        sm_clock_mhz: now. power_w: see above. held_back: whether power or heat keeps the clock down.
    """

    sm_clock_mhz: int
    power_w: float
    held_back: bool


class Sensors:
    """Of one device. readers: the library's functions that READERS names."""

    def __init__(self, readers: Sequence[Any], handle: ctypes.c_void_p) -> None:
        self.clock, self.power, self.reasons = readers
        self.handle = handle

    @classmethod
    def open(cls, name: str, library: Any = None) -> "Sensors | None":
        """None where the library, one of its functions or the device cannot be had.

        Args:
            name: of the device, as nvidia-smi has it: GPU- and its UUID. library: loaded already.
        """
        try:
            library = ctypes.CDLL(LIBRARY) if library is None else library
            handle, readers = ctypes.c_void_p(), [getattr(library, reader) for reader in READERS]
            if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
                return None
        except (OSError, AttributeError):
            return None
        return cls(readers, handle)

    def read(self) -> Reading | None:
        """None where the device does not tell."""
        clock, milliwatt, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        failed = (
            self.clock(self.handle, CLOCK_SM, ctypes.byref(clock))
            or self.power(self.handle, ctypes.byref(milliwatt))
            or self.reasons(self.handle, ctypes.byref(reasons))
        )
        return None if failed else Reading(clock.value, milliwatt.value / 1e3, bool(reasons.value & HELD_BACK))


def summary(readings: Sequence[Reading]) -> dict[str, Any] | None:
    """What a result file holds of them: least, median and largest of both, and how often the clock was held back."""
    if not readings:
        return None

    def spread(values: Sequence[float]) -> dict[str, float]:
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    return {
        "readings": len(readings),
        "sm_clock_mhz": spread([reading.sm_clock_mhz for reading in readings]),
        "power_w": spread([reading.power_w for reading in readings]),
        "held_back": sum(reading.held_back for reading in readings) / len(readings),
    }
