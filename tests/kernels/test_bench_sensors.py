"""Clock and power while the bench times: read through a double of NVIDIA's management library, and what becomes of them."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from bench_fabricated import ATTENTION, CPU, answer, make_up_times, of

from cute_kernels.bench import sensors
from cute_kernels.bench.run import run_case
from cute_kernels.bench.sensors import Reading, Sensors

OK, ERROR = 0, 3


def library(**changed: Any) -> SimpleNamespace:
    """A device at 1,755 MHz and 650.25 W, kept down by its power cap. It checks what it is asked."""

    def gives(value: Any, *given: Any) -> Any:
        def function(*arguments: Any) -> int:
            *before, result = arguments
            assert [getattr(a, "value", a) for a in before] == list(given)
            result._obj.value = value
            return OK

        return function

    functions = {
        "nvmlInit_v2": lambda: OK,
        "nvmlDeviceGetHandleByUUID": gives(77, b"GPU-0"),
        "nvmlDeviceGetClockInfo": gives(1755, 77, 1),
        "nvmlDeviceGetPowerUsage": gives(650_250, 77),
        "nvmlDeviceGetCurrentClocksThrottleReasons": gives(0x4, 77),
    }
    return SimpleNamespace(**(functions | changed))


def throttled(reasons: int) -> Any:
    def function(handle: ctypes.c_void_p, result: Any) -> int:
        result._obj.value = reasons
        return OK

    return function


def test_a_reading() -> None:
    opened = Sensors.open("GPU-0", library())
    assert opened is not None and opened.read() == Reading(1755, 650.25, True)


@pytest.mark.parametrize(
    ("reasons", "held_back"),
    [(0x0, False), (0x1, False), (0x2, False), (0x100, False), (0x8, True), (0x40, True), (0x81, True)],
)
def test_idle_and_chosen_clocks_do_not_hold_it_back(reasons: int, held_back: bool) -> None:
    opened = Sensors.open("GPU-0", library(nvmlDeviceGetCurrentClocksThrottleReasons=throttled(reasons)))
    assert opened is not None and opened.read() == Reading(1755, 650.25, held_back)


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons"]
)
def test_control_what_the_device_does_not_tell_is_no_reading(name: str) -> None:
    """Fails when an error of the library is taken for zero MHz or watts."""
    opened = Sensors.open("GPU-0", library(**{name: lambda *arguments: ERROR}))
    assert opened is not None and opened.read() is None


def test_without_library_or_device_there_are_no_sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Sensors.open("GPU-0", library(nvmlInit_v2=lambda: ERROR)) is None
    assert Sensors.open("GPU-0", library(nvmlDeviceGetHandleByUUID=lambda *arguments: ERROR)) is None
    for name in sensors.READERS:  # a driver that has dropped one of them
        partial = library()
        delattr(partial, name)
        assert Sensors.open("GPU-0", partial) is None
    monkeypatch.setattr(sensors, "LIBRARY", "libno-such-library.so.1")
    assert Sensors.open("GPU-0") is None


def test_a_case_keeps_what_was_read_while_it_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_times(monkeypatch)
    opened = Sensors.open("GPU-0", library())
    assert run_case(ATTENTION, [of(answer)], 5, CPU, 50, opened).readings == (Reading(1755, 650.25, True),)
    silent = Sensors.open("GPU-0", library(nvmlDeviceGetPowerUsage=lambda *arguments: ERROR))
    for absent in (silent, None):
        result = run_case(ATTENTION, [of(answer)], 5, CPU, 50, absent)
        assert result.passed and result.readings == () and sensors.summary(result.readings) is None
