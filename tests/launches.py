"""What the public functions of the kernels would launch, without a GPU or the compiler; and arguments to call them with.

The functions are given tensors of a CPU and told that they are on an sm_90a. All that they check is checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cute_kernels import context_append, few_row_linear, markov_chain, query_rope, support
from cute_kernels.block_attention import (
    BlockAttentionWorkspace,
    block_attention,
    kernels,
    launch,
    plan_block_attention,
    workspace,
)
from trtllm_dspark.attention import cutedsl, self_check
from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.config import DraftConfig

CPU = torch.device("cpu")
NUM_SMS = 132
STEPS = 3  # of the Markov chain


@dataclass(frozen=True)
class Launch:
    """A kernel, the settings that it would be compiled with, and its operands."""

    kernel: str
    settings: Any
    operands: tuple[Any, ...]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches from now on; nothing is compiled or run."""
    seen: list[Launch] = []

    def compiled(kernel: str, settings: Any, arch: str, build: Callable[[], Any]) -> Callable[..., None]:
        return lambda *operands: seen.append(Launch(kernel, settings, operands))

    modules = (context_append, few_row_linear, markov_chain, query_rope, launch, workspace)
    for module in (context_append, few_row_linear, kernels, markov_chain, query_rope, workspace):
        monkeypatch.setattr(module, "compiled", compiled)
    for module in (*modules, support):
        for name, value in (("arch_name", "sm_90a"), ("device_reason", None), ("toolkit_reason", None)):
            monkeypatch.setattr(module, name, lambda *arguments, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": NUM_SMS}))
    return seen


def attention_case(draft: DraftConfig, shape: DraftShape, lengths: list[int]) -> dict[str, Any]:
    """Arguments of `block_attention`: shuffled pages, NaN wherever no live token lies."""
    return self_check._attention_case(draft, shape, torch.Generator().manual_seed(0), lengths)


def append_case(draft: DraftConfig, shape: DraftShape, tokens: int, device: torch.device = CPU) -> dict[str, Any]:
    """Arguments of `context_append`: zeros into the slots of two pages a layer."""
    c, width, layers = draft.kv_lora_rank, draft.latent_width, draft.num_layers
    assert c is not None
    angles = torch.zeros(tokens, (width - c) // 2, device=device)
    return {
        "z": torch.zeros(tokens, layers, width, dtype=shape.dtype, device=device),
        "norm_weight": torch.ones(layers, c, dtype=shape.dtype, device=device),
        "cos": angles,
        "sin": angles,
        "slots": torch.arange(tokens, device=device) % (2 * shape.page_size),
        "pools": torch.zeros(layers, 2, shape.page_size, width, dtype=shape.dtype, device=device).unbind(0),
        "eps": 1e-5,
    }


def rope_case(draft: DraftConfig, shape: DraftShape, batch: int, device: torch.device = CPU) -> dict[str, Any]:
    """Arguments of `query_rope`, all zero."""
    c, width = draft.kv_lora_rank, draft.latent_width
    assert c is not None
    out = torch.zeros(batch, shape.block_rows, shape.heads, width, dtype=shape.dtype, device=device)
    angles = torch.zeros(batch, shape.block_rows, (width - c) // 2, device=device)
    return {"rotary": out[..., c:].clone(), "cos": angles, "sin": angles, "out": out}


def linear_case(draft: DraftConfig, shape: DraftShape, batch: int, device: torch.device = CPU) -> dict[str, Any]:
    """Arguments of `few_row_linear`, all zero: the product that absorbs the keys, into a part of the queries' buffer."""
    c, nope, heads = draft.kv_lora_rank, draft.qk_nope_head_dim, shape.heads
    assert c is not None and nope is not None
    out = torch.zeros(batch, shape.block_rows, heads, draft.latent_width, dtype=shape.dtype, device=device)
    x = torch.zeros(batch, shape.block_rows, heads, draft.qk_head_dim, dtype=shape.dtype, device=device)
    weight = torch.zeros(heads, nope, c, dtype=shape.dtype, device=device)
    return {"x": x[..., :nope], "weight": weight.mT, "out": out[..., :c]}


def chain_case(draft: DraftConfig, shape: DraftShape, batch: int, device: torch.device = CPU) -> dict[str, Any]:
    """Arguments of `markov_chain`, all zero."""
    table = torch.zeros(draft.vocab_size, draft.markov_rank, dtype=shape.dtype, device=device)
    return {
        "base_logits": torch.zeros(batch, STEPS, draft.vocab_size, dtype=shape.dtype, device=device),
        "anchors": torch.zeros(batch, dtype=torch.int64, device=device),
        "w1": table,
        "w2": table,
        "codes": torch.zeros(batch, STEPS, draft.markov_rank, dtype=shape.dtype, device=device),
    }


def call_all(draft: DraftConfig, shape: DraftShape, lengths: list[int]) -> None:
    """Every kernel of a draft step, each by its public function; products as CUTEDSL gives them. Raises what they raise."""
    case, rows = attention_case(draft, shape, lengths), shape.block_rows
    plan = BlockAttentionWorkspace.allocate(
        max_batch=len(lengths),
        block_rows=rows,
        heads=shape.heads,
        value_width=case["value_width"],
        device=CPU,
        num_sms=NUM_SMS,
    )
    plan_block_attention(case["context_len"], workspace=plan, max_context=1 << 20)  # on a CPU the twin does it
    workspace._launch_plan(case["context_len"], None, plan.requests, plan.boundaries, rows, 1 << 20)
    block_attention(**case, plan=plan)
    context_append.context_append(**append_case(draft, shape, 3 * len(lengths)))
    query_rope.query_rope(**rope_case(draft, shape, len(lengths)))
    cutedsl.operations().linear(**linear_case(draft, shape, len(lengths)))
    markov_chain.markov_chain(**chain_case(draft, shape, len(lengths)))
