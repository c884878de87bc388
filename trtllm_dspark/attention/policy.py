"""Which attention backend a drafter runs on. Resolved once, said once, with the reason for each one passed over.

| family | AUTO on CUDA               | AUTO on a CPU | may degrade                     |
|--------|----------------------------|---------------|---------------------------------|
| mla    | CUTEDSL, else TRTLLM       | VANILLA       | no: an error naming every reason |
| gqa    | TRTLLM, else VANILLA       | VANILLA       | yes, with one line               |

VANILLA is plain torch, there to be right. It runs on any device, but on a GPU the MLA family takes it only when asked by
name: an order of magnitude lost in silence is worse than a refusal.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_dspark.attention import vanilla
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.version import __version__

log = logging.getLogger(__name__)

Reason = Callable[[DraftConfig, torch.device], str | None]
"""Why a backend cannot run this draft on this device; None where it can."""


class BlockAttention(Protocol):
    """The one signature; see `vanilla.block_attention` for shapes."""

    def __call__(
        self,
        q: torch.Tensor,
        block_latents: torch.Tensor,
        pages: torch.Tensor,
        page_table: torch.Tensor,
        context_len: torch.Tensor,
        *,
        scale: float,
        value_width: int,
        layer: int = 0,
        context_start: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Backend:
    """A backend as the policy sees it. block_attention is None where this version has none."""

    name: str
    reason: Reason
    block_attention: BlockAttention | None


@dataclass(frozen=True)
class FamilyPolicy:
    """choices: every name a user may give. on_cuda, on_cpu: AUTO's candidates in order."""

    choices: tuple[str, ...]
    on_cuda: tuple[str, ...]
    on_cpu: tuple[str, ...]


FAMILIES: Mapping[str, FamilyPolicy] = {
    "mla": FamilyPolicy(("CUTEDSL", "TRTLLM", "VANILLA"), on_cuda=("CUTEDSL", "TRTLLM"), on_cpu=("VANILLA",)),
    "gqa": FamilyPolicy(("TRTLLM", "VANILLA"), on_cuda=("TRTLLM", "VANILLA"), on_cpu=("VANILLA",)),
}


def _kernel_backend(name: str) -> Backend:
    def reason(config: DraftConfig, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"needs a CUDA device, this one is {device.type}"
        return f"trtllm-dspark {__version__} has no {name} kernel"

    return Backend(name, reason, None)


BACKENDS: Mapping[str, Backend] = {
    "CUTEDSL": _kernel_backend("CUTEDSL"),
    "TRTLLM": _kernel_backend("TRTLLM"),
    "VANILLA": Backend("VANILLA", vanilla.reason, vanilla.block_attention),
}


@dataclass(frozen=True)
class BackendChoice:
    """A resolved backend.

    Attributes:
        name: concrete, never AUTO. passed_over: (name, reason) of AUTO's earlier candidates.
        block_attention: the function to call.
    """

    name: str
    passed_over: tuple[tuple[str, str], ...]
    block_attention: BlockAttention

    def __str__(self) -> str:
        over = "; ".join(f"{name}: {why}" for name, why in self.passed_over)
        return f"attention backend {self.name}" + (f" (passed over: {over})" if over else "")


def resolve_backend(
    config: DraftConfig,
    device: torch.device,
    requested: str = "AUTO",
    *,
    owner: str = "drafter",
    backends: Mapping[str, Backend] = BACKENDS,
) -> BackendChoice:
    """Pick the attention backend of a drafter.

    Args:
        config: of the draft. device: where it will run. requested: AUTO, or one of the family's choices.
        owner: who the errors speak for. backends: every known backend by name.
    Raises:
        DSparkError: an unknown name (lists the choices), an explicit one that is unavailable (its reason), or AUTO with
            no candidate left (every reason).
    """
    policy = FAMILIES[config.family]
    where = _device_name(device)
    if requested != "AUTO":
        if requested not in policy.choices:
            raise DSparkError(
                f"{owner}: attention_backend must be AUTO or one of {', '.join(policy.choices)} for the {config.family} "
                f"family, it is {requested!r}. Choose one of these."
            )
        why = backends[requested].reason(config, device)
        if why is not None:
            raise DSparkError(
                f"{owner}: attention_backend {requested} was asked for and must be available on {where}; {why}. "
                "Choose AUTO or another backend."
            )
        return _choice(backends[requested], ())
    passed: list[tuple[str, str]] = []
    for name in policy.on_cuda if device.type == "cuda" else policy.on_cpu:
        why = backends[name].reason(config, device)
        if why is None:
            choice = _choice(backends[name], tuple(passed))
            log.info("%s on %s: %s", owner, where, choice)
            return choice
        passed.append((name, why))
    reasons = "; ".join(f"{name}: {why}" for name, why in passed)
    raise DSparkError(
        f"{owner}: a usable attention backend is required on {where} and the {config.family} family does not degrade; "
        f"{reasons}. Ask for VANILLA by name to run it in plain torch, slowly."
    )


def _choice(backend: Backend, passed: tuple[tuple[str, str], ...]) -> BackendChoice:
    assert backend.block_attention is not None, f"{backend.name} gave no reason and has no function"
    return BackendChoice(backend.name, passed, backend.block_attention)


def _device_name(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device.type} (sm_{major}{minor})"
