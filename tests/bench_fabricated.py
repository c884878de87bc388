"""What the tests of the bench run it on without a GPU: small cases, the twins and mistakes as contestants, times, a machine.

All of it is made up but the twins, and small enough for a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cute_kernels.bench import timing
from cute_kernels.bench.cases import (
    BlockAttentionCase,
    Case,
    ContextAppendCase,
    FewRowLinearCase,
    Inputs,
    MarkovChainCase,
    QueryRopeCase,
)
from cute_kernels.bench.contestants import Contestant
from cute_kernels.bench.run import CaseResult, run_case
from cute_kernels.bench.timing import Ceilings
from cute_kernels.few_row_linear.config import SILU_MUL
from cute_kernels.reference.block_attention import block_attention
from cute_kernels.reference.context_append import context_append
from cute_kernels.reference.few_row_linear import few_row_linear, few_row_silu_mul
from cute_kernels.reference.markov_chain import markov_chain
from cute_kernels.reference.query_rope import query_rope
from cute_kernels.reference.rotation import rotate_half_split

CPU = torch.device("cpu")
L2 = 50_000_000
H200 = Ceilings(copy=4.3e12, elementwise=4.2e12, matmul=790e12)  # as in the tables of floors

ATTENTION = BlockAttentionCase(5, 70, heads=3, rows=4, page_size=16, value_width=64, rotary=16)
RAGGED = replace(ATTENTION, context=90, shortest=9)
APPEND = ContextAppendCase(21, layers=3, page_size=8, latent=32, rotary=16)
ROPE = QueryRopeCase(3, rows=4, heads=5, rotary=16, nope=8, latent=32)
CHAIN = MarkovChainCase(5, vocabulary=211, rank=16, steps=4)
BY_HEAD = FewRowLinearCase("absorb", 192, 128, rows=3, groups=4, transposed=True)
FLAT = FewRowLinearCase("down", 72, 256, rows=5)
GATED = FewRowLinearCase("gate_up", 128, 256, rows=5, form=SILU_MUL)
SMALL = {case.kernel: case for case in (ATTENTION, APPEND, ROPE, CHAIN, BY_HEAD)}

MACHINE = {
    "device": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "memory_bytes": 150 * 10**9, "l2_bytes": L2,
    "cuda": "13.0", "python": "3.12.0", "versions": {"torch": "2.11.0", "flashinfer-python": None},
    "commit": "0123456789abcdef", "dirty": True, "date": "2026-11-29T12:00:00+00:00",
    "driver": "580.1", "sm_clock_mhz": 1755.0, "sm_clock_max_mhz": 1980.0, "power_limit_w": 700.0,
}  # fmt: skip

Answer = Callable[[Any, Inputs], torch.Tensor]


def answer(case: Any, inputs: Inputs) -> torch.Tensor:
    """The twin, into the set's own buffers."""
    if isinstance(case, BlockAttentionCase):
        names = ("q", "block_latents", "pages", "page_table", "context_len", "out")
        given = {name: inputs[name] for name in names}
        block_attention(**given, scale=case.scale, value_width=case.value_width)
        return inputs["out"]
    if case is APPEND:
        context_append(*(inputs[name] for name in ("z", "norm_weight", "cos", "sin", "slots", "pools", "eps")))
        return inputs["pool"]
    if case is ROPE:
        query_rope(*(inputs[name] for name in ("rotary", "cos", "sin", "out")))
        return inputs["out"]
    if isinstance(case, FewRowLinearCase):
        return few_row_silu_mul(**inputs) if case.form == SILU_MUL else few_row_linear(**inputs)
    return markov_chain(**inputs)


def of(answer: Answer, name: str = "ours", ours: bool = True) -> Contestant:
    return Contestant(name, lambda case, sets: [partial(answer, case, inputs) for inputs in sets], ours=ours)


def run_case_untimed(case: Case, *entered: Contestant) -> CaseResult:
    """Without a device there are no times; everything before them is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "measure", lambda replays, rounds, device, look: [[1.0] * rounds for _ in replays])
        return run_case(case, entered, 3, CPU, L2 // 10**6)


def make_up_times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Times of 10, 20, ... us in the order of entry. The list grows by how many contestants each measurement was given."""
    seen: list[int] = []

    def measure(
        replays: Sequence[timing.Replay], rounds: int, device: torch.device, look: Callable[[], object] | None = None
    ) -> list[list[float]]:
        if look is not None:
            look()
        seen.append(len(replays))
        return [[10.0 * (i + 1) + r for r in range(rounds)] for i in range(len(replays))]

    monkeypatch.setattr(timing, "measure", measure)
    return seen


def swaps_two_heads(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[:, :, [0, 1]] = found[:, :, [1, 0]]
    return found


def leaves_a_row(case: Any, inputs: Inputs) -> torch.Tensor:
    """A row of a request that is not compared with the truth: only the poison tells."""
    found = answer(case, inputs)
    found[1, -1, -1] = torch.nan
    return found


def loses_a_token(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {**inputs, "context_len": inputs["context_len"] - 1})


def reads_past_the_context(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {**inputs, "context_len": inputs["context_len"] + 1})


def swaps_two_requests(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {**inputs, "page_table": inputs["page_table"].flip(0)})


def writes_a_slot_too_far(case: Any, inputs: Inputs) -> torch.Tensor:
    slots = inputs["slots"].clone()
    slots[3] = next(slot for slot in range(10**6) if slot not in slots.tolist())
    return answer(case, {**inputs, "slots": slots})


def swaps_two_slots(case: Any, inputs: Inputs) -> torch.Tensor:
    slots = inputs["slots"].clone()
    slots[[0, 1]] = slots[[1, 0]]
    return answer(case, {**inputs, "slots": slots})


def writes_a_spare_row_too(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    rows = found.flatten(1, 2)
    rows[0, next(slot for slot in range(10**6) if slot not in inputs["slots"].tolist())] = 0.0
    return found


def forgets_the_norm_of_a_layer(case: Any, inputs: Inputs) -> torch.Tensor:
    weight = inputs["norm_weight"].clone()
    weight[-1] = 1.0
    return answer(case, {**inputs, "norm_weight": weight})


def pairs_halves(case: Any, inputs: Inputs) -> torch.Tensor:
    turned = rotate_half_split(inputs["rotary"], inputs["cos"].unsqueeze(-2), inputs["sin"].unsqueeze(-2))
    inputs["out"][..., case.latent :] = turned
    return inputs["out"]


def touches_the_absorbed_part(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[0, 0, 0, case.latent - 1] = 0.0
    return found


def biased_by_the_anchor(case: Any, inputs: Inputs) -> torch.Tensor:
    steps = [markov_chain(**{**inputs, "base_logits": inputs["base_logits"][:, k : k + 1]}) for k in range(case.steps)]
    return torch.cat(steps, 1)


def leaves_a_token(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[-1, -1] = -1
    return found


def one_token_off(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[-1, -1] = (found[-1, -1] + 1) % case.vocabulary
    return found


def leaves_rows_of_the_pool(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found.flatten(1, 2)[-1, inputs["slots"][5]] = torch.nan
    return found


def misses_a_chunk(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {name: operand[..., :-64] for name, operand in inputs.items()})


def takes_the_neighbours_weight(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {**inputs, "weight": inputs["weight"].roll(1, 0)})


def gives_a_row_to_another(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, inputs).roll(1, 0)


def leaves_outputs(case: Any, inputs: Inputs) -> torch.Tensor:
    found = answer(case, inputs)
    found[-1, ..., -8:] = torch.nan
    return found


def swaps_gate_and_up(case: Any, inputs: Inputs) -> torch.Tensor:
    return answer(case, {**inputs, "gate": inputs["up"], "up": inputs["gate"]})


def forgets_the_silu(case: Any, inputs: Inputs) -> torch.Tensor:
    return few_row_linear(inputs["x"], inputs["gate"]) * few_row_linear(inputs["x"], inputs["up"])


MISTAKES = [
    (ATTENTION, swaps_two_heads, "error"),
    (ATTENTION, leaves_a_row, "64 of 3840 elements are not written"),
    (ATTENTION, loses_a_token, "error"),
    (ATTENTION, reads_past_the_context, "not written or not finite"),
    (ATTENTION, swaps_two_requests, "error"),
    (RAGGED, loses_a_token, "error"),
    (RAGGED, reads_past_the_context, "not written or not finite"),
    (APPEND, writes_a_slot_too_far, "not written"),
    (APPEND, swaps_two_slots, "error"),
    (APPEND, writes_a_spare_row_too, "changed that belong to others"),
    (APPEND, forgets_the_norm_of_a_layer, "error"),
    (APPEND, leaves_rows_of_the_pool, "48 of 3024 elements are not written"),
    (ROPE, swaps_two_heads, "error"),
    (ROPE, leaves_a_row, "16 of 960 elements are not written"),
    (ROPE, pairs_halves, "error"),
    (ROPE, touches_the_absorbed_part, "changed that belong to others"),
    (CHAIN, biased_by_the_anchor, "of the tokens are wrong"),
    (CHAIN, leaves_a_token, "1 of 20 elements are not written"),
    (CHAIN, one_token_off, "5.0% of the tokens are wrong"),
    (BY_HEAD, misses_a_chunk, "error"),
    (BY_HEAD, takes_the_neighbours_weight, "error"),
    (BY_HEAD, gives_a_row_to_another, "error"),
    (BY_HEAD, leaves_outputs, "32 of 2304 elements are not written"),
    (FLAT, misses_a_chunk, "error"),
    (FLAT, leaves_outputs, "8 of 360 elements are not written"),
    (GATED, misses_a_chunk, "error"),
    (GATED, swaps_gate_and_up, "error"),
    (GATED, forgets_the_silu, "error"),
]
