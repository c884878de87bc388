"""What every schedule of block_attention must hold on its own GPU; `attend` takes a case and gives (out, lse)."""

from collections.abc import Callable
from typing import Any

import torch
from kernels.test_block_attention import complaint

from cute_kernels.block_attention import BlockAttentionWorkspace, block_attention, plan_block_attention

Case = dict[str, Any]
Attend = Callable[[Case], tuple[torch.Tensor, torch.Tensor]]


def poisoned_workspace(case: Case, schedule: str, **more: Any) -> BlockAttentionWorkspace:
    """A plan in buffers that held poison."""
    batch, rows, heads, _ = case["q"].shape
    plan = BlockAttentionWorkspace.allocate(
        max_batch=batch + 3,
        block_rows=rows,
        heads=heads,
        value_width=case["value_width"],
        device=case["q"].device,
        schedule=schedule,
        **more,
    )
    for buffer in (plan.requests, plan.boundaries):
        buffer.fill_(1 << 30)
    for buffer in (plan.partial_out, plan.partial_lse):
        buffer.fill_(torch.nan)
    return plan_block_attention(case["context_len"], case["context_start"], workspace=plan, max_context=1 << 20)


def check_poison_that_is_not_read(attend: Attend, case: Case) -> None:
    clean = {**case, "pages": case["pages"].nan_to_num(0.0)}
    clean["page_table"] = case["page_table"].clamp(0, case["pages"].shape[0] - 1)
    before = {name: case[name].clone() for name in ("q", "block_latents", "pages", "page_table")}
    for found, expected in zip(attend(case), attend(clean), strict=True):
        assert torch.equal(found, expected)
    for name, tensor in before.items():
        assert torch.equal(case[name].view(torch.uint8), tensor.view(torch.uint8)), name


def check_a_live_page_that_does_not_exist(attend: Attend, case: Case) -> None:
    """It reads as zeros: the second page of the first request."""
    zeroed = case["pages"].clone()
    zeroed[case["page_table"][0, 1].long()] = 0.0
    for page in (-1, -(2**31), case["pages"].shape[0], 2**31 - 1):
        table = case["page_table"].clone()
        table[0, 1] = page
        assert torch.equal(attend({**case, "page_table": table})[0], attend({**case, "pages": zeroed})[0])


def check_a_graph_that_follows_lengths(case: Case, plan: BlockAttentionWorkspace) -> None:
    """A case of contexts of at least 4,000, 0, 65 and 1 tokens, with starts."""
    batch, rows, heads, _ = case["q"].shape
    out = torch.empty(batch, rows, heads, case["value_width"], dtype=case["q"].dtype, device=case["q"].device)
    lse = torch.empty(batch, rows, heads, device=case["q"].device)

    def step() -> None:
        plan_block_attention(case["context_len"], case["context_start"], workspace=plan, max_context=1 << 20)
        block_attention(**case, plan=plan, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths, starts in (([4000, 0, 65, 1], [0] * 4), ([0, 0, 0, 0], [0] * 4), ([3900, 0, 64, 1], [3000, 0, 63, 0])):
        case["context_len"].copy_(torch.tensor(lengths))
        case["context_start"].copy_(torch.tensor(starts))
        for tensor in (out, lse, plan.partial_out, plan.partial_lse):
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert complaint(case, out, lse) is None, lengths


def check_runs_agree_to_the_bit(attend: Attend, case: Case) -> None:
    first = attend(case)
    for _ in range(20):
        for found, expected in zip(attend(case), first, strict=True):
            assert torch.equal(found, expected)
