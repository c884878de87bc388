"""Greedy draft tokens of a block, each biased by the one before it, without writing the bias to memory.

    token_k = argmax over v of  base_k[v] + W2[v] . W1[token_{k-1}],  token_{-1} = anchor

One launch a step and one at the end, no host work between them; W2 is read once a step for many requests. Products on the
tensor cores, fp32 sums. The winner of a request is the largest of 64-bit keys (value above, smaller id above larger) under an
atomic maximum: independent of order, so the same in every run.

    config.py    schedules and configuration                   portable.py  mma.sync, sm_80 and later
    compile.py   compilation without a GPU, the gate's list    sm90.py      TMA and wgmma, Hopper, with sm90_kernel, sm90_roles

Moves K * V * (2 * R + B * itemsize) bytes; the twin is `cute_kernels.reference.markov_chain`.
"""

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.cache import compiled
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.markov_chain import portable, sm90
from cute_kernels.markov_chain.compile import compile_for, gate_configs
from cute_kernels.markov_chain.config import (
    BASES,
    GROUPS,
    ID_BITS,
    NAME,
    PORTABLE,
    SM90,
    SM90_ARCH,
    SM90_BATCHES,
    SM90_GROUPS,
    MarkovChainConfig,
    groups_for,
    sm90_config,
)
from cute_kernels.support import arch_name, check_rows, check_tensor, device_reason, toolkit_reason

__all__ = [
    "BASES",
    "GROUPS",
    "NAME",
    "SM90_ARCH",
    "SM90_BATCHES",
    "SM90_GROUPS",
    "MarkovChainConfig",
    "compile_for",
    "gate_configs",
    "groups_for",
    "launcher",
    "markov_chain",
    "reason",
    "sm90_config",
    "sm90_reason",
]


def reason(base_logits: torch.Tensor, w2: torch.Tensor) -> str | None:
    """None where a kernel takes these arguments here, else why not. Launches nothing."""
    return toolkit_reason() or device_reason(base_logits.device) or _portable(base_logits, w2, None).reason()


def sm90_reason(base_logits: torch.Tensor, w2: torch.Tensor, arch: str) -> str | None:
    """None where the sm90 schedule takes arguments that the portable one takes, on a compile target; else why not."""
    if arch != SM90_ARCH:
        return f"the sm90 schedule needs {SM90_ARCH}, this is {arch}"
    if _sm90(base_logits, w2, None) is None:
        return MarkovChainConfig(w2.shape[1], SM90_GROUPS[0], _name(base_logits), _name(w2), schedule=SM90).reason()
    steps, size = base_logits.stride()[:2], base_logits.element_size()
    if any(step <= 0 or step * size % 16 for step in steps) or base_logits.data_ptr() % 16:
        return (
            "the sm90 schedule needs rows of base_logits that start at multiples of 16 bytes and do not overlap; strides are "
            f"{base_logits.stride()} elements of {size} bytes, it starts {base_logits.data_ptr() % 16} bytes past one"
        )
    return None


def launcher(config: MarkovChainConfig, device: torch.device) -> Callable[..., Any]:
    """The function for a device, compiled where no cache has it."""
    arch = arch_name(device)
    return compiled(NAME, config, arch, lambda: compile_for(config, arch))


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _portable(base_logits: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None) -> MarkovChainConfig:
    groups = groups_for(base_logits.shape[0])
    return MarkovChainConfig(w2.shape[1], groups, _name(base_logits), _name(w2), codes is not None)


def _sm90(base_logits: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None) -> MarkovChainConfig | None:
    return sm90_config(w2.shape[1], base_logits.shape[0], _name(base_logits), _name(w2), codes is not None)


def _check(
    base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None
) -> None:
    if base_logits.ndim != 3 or w1.ndim != 2 or w2.ndim != 2:
        raise KernelError(
            f"{NAME}: base_logits must be [B, K, V], w1 [V1, R], w2 [V, R]; they are {list(base_logits.shape)}, "
            f"{list(w1.shape)}, {list(w2.shape)}. Reshape them."
        )
    (batch, steps, vocab), rank, device = base_logits.shape, w2.shape[1], base_logits.device
    if not 0 < vocab < 1 << ID_BITS:
        raise KernelError(f"{NAME}: the vocabulary must hold 1 to 2^{ID_BITS} - 1 ids, it holds {vocab}.")
    if base_logits.stride(2) != 1:
        raise KernelError(f"{NAME}: rows of base_logits must be contiguous, strides are {base_logits.stride()}. Copy them.")
    check_tensor(NAME, "anchors", anchors, (batch,), torch.int64, device)
    if not anchors.is_contiguous():
        raise KernelError(f"{NAME}: anchors must be contiguous, the stride is {anchors.stride(0)}. Copy them.")
    check_tensor(NAME, "w1", w1, (w1.shape[0], rank), w2.dtype, device)
    check_tensor(NAME, "w2", w2, (vocab, rank), w2.dtype, device)
    check_rows(NAME, "w1", w1)
    check_rows(NAME, "w2", w2)
    if codes is not None:
        check_tensor(NAME, "codes", codes, (batch, steps, rank), w2.dtype, device)
        check_rows(NAME, "codes", codes)


@torch.library.custom_op("trtllm_dspark::markov_chain", mutates_args=("codes",), device_types="cuda")
def _op(
    base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None
) -> torch.Tensor:
    return _launch(base_logits, anchors, w1, w2, codes, None)


@_op.register_fake
def _(
    base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: torch.Tensor | None
) -> torch.Tensor:
    return anchors.new_empty(base_logits.shape[:2])


def markov_chain(
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    codes: torch.Tensor | None = None,
    *,
    schedule: str | None = None,
) -> torch.Tensor:
    """Greedy tokens of K draft steps, [B, K] int64 in [0, V), each step biased by W2 . W1[the token before].

    On a tie the smallest id; a NaN is larger than every number, and the first NaN wins, as in torch.argmax.

    Args:
        base_logits: [B, K, V], bf16, fp16 or fp32, last dim contiguous. anchors: [B], int64: the tokens before the first.
        w1: [V1, R], w2: [V, R], bf16 or fp16, R a multiple of 8 up to 512, rows contiguous and 16-byte aligned.
        codes: [B, K, R] or None; receives W1 of the token before each. Zero where that id is outside [0, V1): padded and
            warm-up rows carry such ids, and get no bias.
        schedule: which kernel, portable or sm90 (Hopper; `sm90_reason` says what it needs). None, and under torch.compile:
            the faster of those that take the arguments.
    Raises:
        KernelError: a shape, dtype, stride or device breaks the above. UnsupportedKernelError: no kernel for them here.
    Numerics: bf16 or fp16 products, fp32 sums; the order of the sum is the tensor cores', so a near tie may fall otherwise
        than in the twin.
    """
    if torch.compiler.is_compiling():
        return _op(base_logits, anchors, w1, w2, codes)
    return _launch(base_logits, anchors, w1, w2, codes, schedule)


def _launch(
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    codes: torch.Tensor | None,
    schedule: str | None,
) -> torch.Tensor:
    _check(base_logits, anchors, w1, w2, codes)
    if schedule not in (None, PORTABLE, SM90):
        raise KernelError(f"{NAME}: schedule must be {PORTABLE}, {SM90} or None, it is {schedule!r}.")
    why = reason(base_logits, w2)
    if why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use cute_kernels.reference.markov_chain.")
    (batch, steps, vocab), device = base_logits.shape, base_logits.device
    why = sm90_reason(base_logits, w2, arch_name(device)) if batch * steps else None
    if schedule == SM90 and why is not None:
        raise UnsupportedKernelError(f"{NAME}: {why}. Use the portable schedule.")
    if schedule is None:
        schedule = SM90 if why is None else PORTABLE
    if not batch * steps:
        return anchors.new_empty((batch, steps))
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    hopper = _sm90(base_logits, w2, codes) if schedule == SM90 else None
    if hopper is not None:
        tokens = anchors.new_empty((batch, steps))
        blocks = sm90.num_blocks(vocab, batch, hopper.groups, multiprocessors)
        launcher(hopper, device)(base_logits, anchors, w1, w2, tokens, codes, blocks)
    else:
        tokens = anchors.new_zeros((batch, steps))  # keys less than all keys
        blocks = portable.num_blocks(vocab, multiprocessors)
        launcher(_portable(base_logits, w2, codes), device)(base_logits, anchors, w1, w2, tokens, codes, blocks)
    return tokens
