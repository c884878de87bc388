"""The host's metadata of a step, made to prepare our worker too.

`prepare` is the one call that the host makes before every step, graph replays included, and it names the batch's requests.
"""

from functools import cache
from typing import Any, Protocol


class Stepping(Protocol):
    """What is called with the ids of a step's requests before it runs."""

    def begin_step(self, requests: list[int]) -> None: ...


class HostedMetadata:
    """Mixed in before the class of a step's metadata: its `prepare` also prepares our worker."""

    _trtllm_dspark_worker: Stepping
    request_ids: list[int] | None

    def prepare(self) -> None:
        super().prepare()  # type: ignore[misc]
        self._trtllm_dspark_worker.begin_step(list(self.request_ids or []))


@cache
def _hosted_metadata(stock: type) -> type:
    return type(f"Hosted{stock.__name__}", (HostedMetadata, stock), {"__module__": __name__})


def adopt(spec_metadata: Any, worker: Stepping) -> None:
    """Make this metadata object, and the copies that graphs are captured with, prepare our worker before each step."""
    spec_metadata._trtllm_dspark_worker = worker
    if isinstance(spec_metadata, HostedMetadata):
        return
    stock: type = type(spec_metadata)
    spec_metadata.__class__ = _hosted_metadata(stock)
