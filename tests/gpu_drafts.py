"""Drafters and attention calls for GPU tests: the published draft's attention around a small body, and a yardstick."""

from typing import Any

import published
import torch
import torch.nn.functional as F

from cute_kernels.reference.block_attention import block_attention as twin
from trtllm_dspark.attention import self_check
from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.draft_context import DraftContext
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter

GPU = torch.device("cuda", 0)
PAGE = 64
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "q_lora_rank": 128,
    "vocab_size": 4096,
    "draft_vocab_size": 4096,
    "num_target_layers": 2,
    "target_hidden_size": 256,
    "target_num_hidden_layers": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 3,
    "block_size": 8,
}
CONFIG = DraftConfig.from_dict(published.INFERACT | SMALL)


def drafter(num_pages: int) -> Drafter:
    """In bf16 on CUTEDSL, over a pool that starts as NaN. The weights are the same in every one."""
    model = MLADSparkForCausalLM.empty(CONFIG, device=GPU, dtype=torch.bfloat16, attention_backend="CUTEDSL")
    generator = torch.Generator(GPU).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            value = torch.randn(parameter.shape, generator=generator, device=GPU)
            parameter.copy_(1 + 0.1 * value if parameter.dim() == 1 else value * parameter.shape[-1] ** -0.5)
    model.requires_grad_(False).eval()
    head = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator, device=GPU).bfloat16() / 16
    context = DraftContext(pool(num_pages), model.backend.operations.context_append)
    return Drafter(model, context, lambda hidden: F.linear(hidden, head))


def pool(num_pages: int, *, seed: int | None = None) -> ContextPool:
    """Pages full of NaN, or of numbers that a seed decides."""
    made = ContextPool.allocate(PoolLayout.of(CONFIG, page_size=PAGE, dtype=torch.bfloat16), num_pages, GPU)
    if seed is not None:
        generator = torch.Generator(GPU).manual_seed(seed)
        for view in made.views:
            view.copy_(torch.randn(view.shape, generator=generator, device=GPU))
    return made


def bits(context_pool: ContextPool) -> torch.Tensor:
    """[L, num_pages, P, W], a copy."""
    return torch.stack(context_pool.views).view(torch.int16)


def attention_case(lengths: list[int], rows: int, heads: int, *, loud: float = 1.0) -> dict[str, Any]:
    """Arguments of one layer's attention: shuffled pages, NaN wherever no live token lies.

    loud: how much larger the block's latents are than a token's, so that a row that does not see one of them differs.
    """
    shape = DraftShape(torch.bfloat16, PAGE, heads, rows)
    case = self_check._attention_case(CONFIG, shape, torch.Generator(GPU).manual_seed(rows * heads), lengths)
    case["block_latents"] *= loud
    return case


def complaint(case: dict[str, Any], out: torch.Tensor) -> str | None:
    """None where the largest error is at most twice that of plain torch in the same dtype, plus rounding."""
    truth = twin(**self_check._wider(case))
    assert isinstance(truth, torch.Tensor)
    if not bool(out.isfinite().all()):
        return f"{int((~out.isfinite()).sum())} elements are not finite"
    error, plain = (float((x.float() - truth).abs().max()) for x in (out, self_check._in_own_dtype(case)))
    rounding = torch.finfo(out.dtype).eps / 2 * float(truth.abs().max())
    return None if error <= 2 * plain + rounding else f"error {error:.2e}, plain torch {plain:.2e}"


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference, relative. NaN where one of them has any."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())
