"""FlashMLA's dense decode on Hopper as a peer of `block_attention`.

Its scheduler's metadata is its plan: one small launch that reads the lengths on the device, as ours does. A step makes it once
for all layers. Pages of 64 tokens, value width 512, rotary part 64.
Source of the interface: deepseek-ai/FlashMLA, flash_mla/flash_mla_interface.py at 9241ae3.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from cute_kernels.bench import paged
from cute_kernels.bench.cases import BlockAttentionCase, Inputs

PAGE, VALUE_WIDTH, ROTARY = 64, 512, 64


def uncovered(case: BlockAttentionCase) -> str | None:
    """None where its kernel covers the case, else what it needs."""
    if (case.page_size, case.value_width, case.rotary) == (PAGE, VALUE_WIDTH, ROTARY):
        return None
    return f"needs pages of {PAGE} tokens and latents of {VALUE_WIDTH} + {ROTARY}"


def prepare(case: BlockAttentionCase, sets: list[Inputs], *, plan_each_call: bool) -> list[Callable[[], torch.Tensor]]:
    """One call a set: attention and combine; the metadata in each call, or once for all."""
    library = import_module("flash_mla")
    lengths = paged.lengths(case, sets[0])

    def metadata() -> tuple[object, object]:
        """Nothing is launched yet by the source above; releases before it launch here, and use the arguments."""
        return library.get_mla_metadata(lengths, case.rows * case.heads, 1)

    shared = None if plan_each_call else metadata()

    def call(inputs: Inputs, pages: torch.Tensor) -> torch.Tensor:
        scheduled, num_splits = shared or metadata()
        result, _ = library.flash_mla_with_kvcache(
            inputs["q"],
            pages,
            inputs["page_table"],
            lengths,
            case.value_width,
            scheduled,
            num_splits,
            softmax_scale=case.scale,
            causal=False,
        )
        return result

    filled = [paged.with_block(case, inputs).unsqueeze(2) for inputs in sets]
    calls: list[Callable[[], torch.Tensor]] = [partial(call, *given) for given in zip(sets, filled, strict=True)]
    if shared is not None:
        calls[0]()  # the source above launches it here
    return calls
