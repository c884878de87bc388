"""Which kernels a schedule launches, for a launch and for what is compiled ahead of it. Imports no compiler."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cute_kernels.block_attention import combine, plan, portable, sm90, sm90_combine, sm100
from cute_kernels.block_attention.config import NAME, SCHEDULES, SM90, SM100, BlockAttentionConfig, may_join
from cute_kernels.cache import compiled


@dataclass(frozen=True)
class Kernel:
    """name, config: as the cache looks it up. compile: (config, architecture) -> the compiler's object."""

    name: str
    config: Any
    compile: Callable[..., Any]

    def load(self, arch: str) -> Any:
        """From the cache, compiled where it is not there yet."""
        return compiled(self.name, self.config, arch, partial(self.compile, self.config, arch))


def attention(config: BlockAttentionConfig, schedule: str, batch: int, parts: int) -> Kernel:
    """For so many requests, cut into so many parts."""
    if schedule == SM90.name:
        return _sm90(config, bool(may_join(batch, parts)))
    if schedule == SM100.name:
        return Kernel(f"{NAME}_{schedule}", config, sm100.compile_for)
    return Kernel(NAME, config, portable.compile_for)


def merge(config: BlockAttentionConfig, schedule: str, batch: int, parts: int, units: int) -> Kernel:
    """For what `attention` leaves in pieces; `units`: second dim of the workspace's `partial_out`."""
    if schedule == SM90.name:
        chosen = sm90_combine.config_for(config.value_width, config.dtype, batch, parts, units)
        return Kernel(sm90_combine.COMBINE, chosen, sm90_combine.compile_for)
    return _plain_merge(config)


def every(config: BlockAttentionConfig, schedule: str) -> list[Kernel]:
    """All that a schedule may launch, whatever the batch: plan, attention, merge."""
    found = [Kernel(plan.PLAN, SCHEDULES[schedule], plan.compile_for)]
    if schedule == SM90.name:
        found += [_sm90(config, joins) for joins in (False, True)]
        merges = sm90_combine.configs(config.value_width, config.dtype)
        return found + [Kernel(sm90_combine.COMBINE, merge, sm90_combine.compile_for) for merge in merges]
    return [*found, attention(config, schedule, 1, 1), _plain_merge(config)]


def _sm90(config: BlockAttentionConfig, joins: bool) -> Kernel:
    name = f"{NAME}_{SM90.name}{'_joins' if joins else ''}"
    return Kernel(name, config, partial(sm90.compile_for, joins=joins))


def _plain_merge(config: BlockAttentionConfig) -> Kernel:
    return Kernel(combine.COMBINE, combine.CombineConfig(config.value_width, config.dtype), combine.compile_for)
