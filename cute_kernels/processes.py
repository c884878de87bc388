"""Compilations side by side: the compiler knows no threads, so each is a process of its own."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

MAX_JOBS = 8  # each takes about 1 GB

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(function: Callable[[Item], Result], items: Sequence[Item], jobs: int | None) -> list[Result]:
    """function of each item, in order; a module's own function, since it is sent to others. jobs None: one a core."""
    jobs = min(jobs or os.cpu_count() or 1, MAX_JOBS, len(items))
    if jobs < 2:
        return [function(item) for item in items]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(function, items))
