"""Microseconds a call: CUDA-graph replays of all contestants in turn, from cold L2, at a steady clock.

A graph holds one call on each of its sets, so that the cost of launching it is shared and no call finds its inputs in L2:
the sets together are larger than twice L2. Where that would take more than MAX_SETS of them, it is what is read before each
replay that cools L2. It is only read: written lines would have to leave while the clock runs.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cute_kernels.bench.cases import DTYPE

MIN_SETS, MAX_SETS = 2, 64
COLD = 2  # times the size of L2
BLOCK_US = 50_000.0  # of replays between two looks at the clock
STEADY = 0.01  # change from one block to the next
MAX_WARM_UP_S = 1.0
TIMED_S, MIN_ROUNDS = 1.0, 11  # rounds of a case end with this time, but not before there are so many
LOOK_S = 0.02  # between two looks at the device
COPY_BYTES, MATMUL = 1 << 30, 8192
CEILING_CALLS = 4


def num_sets(case_bytes: int, l2_bytes: int) -> int:
    """Sets of inputs, and with them calls of a graph."""
    return max(MIN_SETS, min(MAX_SETS, -(-COLD * l2_bytes // case_bytes)))


class Replay:
    """Calls that are run together: a CUDA graph of them; where there are no graphs, a loop.

    Attributes:
        results: what each call gave, overwritten by every run.
    """

    def __init__(self, calls: Sequence[Callable[[], torch.Tensor]], device: torch.device) -> None:
        self.calls, self.graph = calls, None
        if device.type != "cuda":
            self.results = [call() for call in calls]
            return
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # compiles, loads and allocates: none of it may happen under capture
            for call in calls:
                call()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]

    def run(self) -> None:
        if self.graph is None:
            self.results = [call() for call in self.calls]
        else:
            self.graph.replay()


def measure(
    replays: Sequence[Replay], rounds: int, device: torch.device, look: Callable[[], object] | None = None
) -> list[list[float]]:
    """Microseconds a call, for each replay and round, after a warm-up.

    Args:
        rounds: at most; see `affordable`. look: called again and again while the device works.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.zeros(COLD * l2_bytes // 4, dtype=torch.float32, device=device)
    round_s = warm_up(lambda count: interleave(replays, count, other.sum))
    return interleave(replays, affordable(rounds, round_s), other.sum, look)


def affordable(rounds: int, round_s: float) -> int:
    """So many of the rounds as TIMED_S takes, of `round_s` seconds each, or MIN_ROUNDS."""
    return min(rounds, max(MIN_ROUNDS, int(TIMED_S / round_s)))


def interleave(
    replays: Sequence[Replay], rounds: int, cool: Callable[[], object], look: Callable[[], object] | None = None
) -> list[list[float]]:
    """All replays in turn, so often; each round begins with another one. Nothing waits before the end: the host keeps ahead.

    Args:
        cool: fills L2 with something else, outside the clock. look: called while the device works through what it was given.
    """
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in replays]
    for turn in range(rounds):
        for offset in range(len(replays)):
            index = (turn + offset) % len(replays)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cool()
            start.record()
            replays[index].run()
            end.record()
            marks[index].append((start, end))
    while look is not None and not end.query():
        look()
        time.sleep(LOOK_S)
    torch.cuda.synchronize()
    return [
        [1e3 * start.elapsed_time(end) / len(replay.results) for start, end in pairs]
        for replay, pairs in zip(replays, marks, strict=True)
    ]


def warm_up(run: Callable[[int], list[list[float]]], clock: Callable[[], float] = time.perf_counter) -> float:
    """Run until two blocks one after the other take the same time, at most MAX_WARM_UP_S.

    Args:
        run: so many rounds; gives microseconds a call for each replay and round.
    Returns:
        Seconds a round, in the last block.
    """
    begin = clock()
    round_s, _ = _timed(run, 1, clock)
    count = max(1, round(BLOCK_US / max(1.0, 1e6 * round_s)))
    previous = 0.0
    while clock() - begin < MAX_WARM_UP_S:
        block_s, calls_us = _timed(run, count, clock)
        round_s = block_s / count
        if abs(calls_us - previous) <= STEADY * previous:
            break
        previous = calls_us
    return round_s


def _timed(run: Callable[[int], list[list[float]]], count: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds that so many rounds take, and the sum over replays of the median time of a call."""
    begin = clock()
    times = run(count)
    return clock() - begin, sum(map(statistics.median, times))


@dataclass(frozen=True)
class Ceilings:
    """What this machine does at most, in bytes and FLOP a second.

    Attributes:
        copy: of `copy_`. elementwise: of a kernel that reads and writes as much; on some machines it is the faster copy.
        matmul: an 8192^3 product in bf16.
    """

    copy: float
    elementwise: float
    matmul: float


def ceilings(rounds: int, device: torch.device, busy: Callable[[], None] | None = None) -> Ceilings:
    """Measured by the method of every case.

    Args:
        busy: called while the device multiplies.
    """
    source = torch.randn(COPY_BYTES // 2, dtype=DTYPE, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(MATMUL, MATMUL, dtype=DTYPE, device=device) for _ in range(2))
    product = torch.empty_like(left)
    calls: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
        lambda: torch.mm(left, right, out=product),
    )
    replays = [Replay([call] * CEILING_CALLS, device) for call in calls]
    copy, elementwise, matmul = (statistics.median(times) for times in measure(replays, rounds, device))
    if busy is not None:
        for _ in range(round(1e6 / (CEILING_CALLS * matmul))):  # a second of it
            replays[2].run()
        busy()
        torch.cuda.synchronize()
    moved = 2 * COPY_BYTES
    return Ceilings(1e6 * moved / copy, 1e6 * moved / elementwise, 1e6 * 2 * MATMUL**3 / matmul)
