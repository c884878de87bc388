"""The draft step on a GPU: CUTEDSL against VANILLA, captured in a CUDA graph, without a look at the host, launches counted."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.draft_context import DraftContext
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter
from trtllm_dspark.step import CapturedStep, StepBuffers, draft_block, extend_rows

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
PAGE, PAGES, K = 64, 96, 7
K3_LIKE = {  # the published drafter's attention, with a smaller body
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 512,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 65536,
    "num_hidden_layers": 5,
    "intermediate_size": 1024,
    "rms_norm_eps": 1e-6,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "rope_theta": 10000.0,
    "num_target_layers": 2,
    "target_layer_ids": [0, 2],
    "target_hidden_size": 512,
    "target_num_hidden_layers": 4,
    "block_size": 8,
    "mask_token_id": 3,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def drafter(backend: str) -> Drafter:
    config = DraftConfig.from_dict(K3_LIKE)
    model = MLADSparkForCausalLM.empty(config, device=GPU, dtype=torch.bfloat16, attention_backend=backend)
    generator = torch.Generator(GPU).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            value = torch.randn(parameter.shape, generator=generator, device=GPU)
            parameter.copy_(1 + 0.1 * value if parameter.dim() == 1 else value * parameter.shape[-1] ** -0.5)
    model.requires_grad_(False).eval()
    head = torch.randn(config.vocab_size, config.hidden_size, generator=generator, device=GPU).bfloat16() / 16
    pool = ContextPool.allocate(PoolLayout.of(config, page_size=PAGE, dtype=torch.bfloat16), PAGES, GPU)
    context = DraftContext(pool, model.backend.operations.context_append)
    return Drafter(model, context, lambda hidden: F.linear(hidden, head))


def fill(buffers: StepBuffers, lengths: list[int], seed: int) -> None:
    """Anchors, shuffled pages, and the last K+1 tokens of each context as rows to be written; one row of each rejected."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(PAGES, generator=generator).int()
    taken = 0
    table = torch.full(tuple(buffers.page_table.shape), -1, dtype=torch.int32)
    positions, slots = [], []
    for b, length in enumerate(lengths):
        live = -(-length // PAGE)
        table[b, :live] = ids[taken : taken + live]
        taken += live
        for position in range(length - K - 1, length):
            positions.append(max(position, 0))
            rejected = position < 0 or position == length - K - 1
            slots.append(-1 if rejected else int(table[b, position // PAGE]) * PAGE + position % PAGE)
    batch = len(lengths)
    buffers.anchors.copy_(torch.randint(0, 4096, (batch,), generator=generator))
    buffers.positions.copy_(torch.tensor(lengths))
    buffers.page_table.copy_(table)
    buffers.context_len.copy_(torch.tensor(lengths))
    buffers.context_start.copy_(torch.tensor([length // 5 if b % 2 else 0 for b, length in enumerate(lengths)]))
    buffers.taps.copy_(torch.randn(buffers.taps.shape, generator=generator))
    buffers.tap_positions.copy_(torch.tensor(positions))
    buffers.slots.copy_(torch.tensor(slots))


def write_pages(made: Drafter, seed: int) -> None:
    """Every page holds numbers; the same for the same seed."""
    generator = torch.Generator(GPU).manual_seed(seed)
    for view in made.context.pool.views:
        view.copy_(torch.randn(view.shape, generator=generator, device=GPU))


def eager(made: Drafter, buffers: StepBuffers):  # type: ignore[no-untyped-def]
    with torch.no_grad():
        views = made.context.pool.views
        extend_rows(made.model, views, buffers.taps, buffers.tap_positions, buffers.slots)
        view = buffers.view(views)
        return draft_block(made.model, made.lm_head, view, buffers.anchors, buffers.positions, K, 8)


CASES = [[700, 64, 0, 1333, 65], [1, 63, 2000, 128, 5], [9, 9, 9, 9, 9]]


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


def test_auto_takes_cutedsl_and_says_why_not_the_others() -> None:
    config = DraftConfig.from_dict(K3_LIKE)
    choice = MLADSparkForCausalLM.resolve_backend(config, GPU, "AUTO", DraftShape.of(config))
    assert choice.name == "CUTEDSL" and [name for name, _ in choice.passed_over] == ["TRTLLM"]
    print(choice)


NEAR = 2e-2  # of the hidden states after five layers in bf16, relative
CLEAR = 0.1  # a gap between the two best logits that bf16 hidden states do not turn


@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_the_kernels_step_is_the_plain_one(lengths: list[int]) -> None:
    """Hidden states near VANILLA's, pages of one rounding, first tokens where the gap is clear. Control: another table."""
    found = {}
    for name in ("CUTEDSL", "VANILLA", "control"):
        made = drafter("CUTEDSL" if name == "control" else name)
        write_pages(made, 1)
        buffers = StepBuffers.allocate(made.model, len(lengths), 40, rows=len(lengths) * (K + 1))
        fill(buffers, lengths, seed=2)
        if name == "control":
            buffers.page_table.copy_(torch.where(buffers.page_table >= 0, (buffers.page_table + 1) % PAGES, -1))
        found[name] = eager(made, buffers), torch.stack(list(made.context.pool.views)), made
    (mine, my_pages, _), (plain, pages, made) = found["CUTEDSL"], found["VANILLA"]
    assert distance(mine.hidden, plain.hidden) < NEAR < distance(found["control"][0].hidden, plain.hidden)
    assert distance(my_pages, pages) < 1e-4 and (my_pages != pages).float().mean().item() < 1e-3
    best = (made.lm_head(plain.hidden[:, 0]).float() + made.model.markov_head(buffers.anchors)).topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    assert bool(clear.any()) and torch.equal(mine.tokens[clear, 0], plain.tokens[clear, 0])
    torch.testing.assert_close(mine.confidence[:, 0], plain.confidence[:, 0], atol=2e-2, rtol=0)


def test_a_captured_step_follows_lengths_tables_and_anchors() -> None:
    """Fails where a length, a table or an anchor of the capture is kept. The eager step of the same kernels is the truth."""
    made = drafter("CUTEDSL")
    buffers = StepBuffers.allocate(made.model, 5, 40, rows=5 * (K + 1))
    step = CapturedStep(made.model, made.lm_head, made.context.pool.views, buffers, K)
    seen = []
    for seed, lengths in enumerate(CASES):
        fill(buffers, lengths, seed)
        write_pages(made, seed)
        step.proposal.tokens.fill_(-7)
        step.proposal.hidden.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            proposal = step.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tokens, hidden = proposal.tokens.clone(), proposal.hidden.clone()
        written = torch.stack(list(made.context.pool.views))
        write_pages(made, seed)
        expected = eager(made, buffers)
        assert torch.equal(tokens, expected.tokens) and torch.equal(hidden, expected.hidden)
        assert torch.equal(torch.stack(list(made.context.pool.views)), written)
        seen.append(tokens)
    assert not torch.equal(seen[0], seen[1])


def test_a_step_reads_nothing_on_the_host_and_its_launches_are_counted() -> None:
    """Fails on any synchronisation inside the eager step. Control: VANILLA, which reads lengths, is caught."""
    made = drafter("CUTEDSL")
    buffers = StepBuffers.allocate(made.model, 5, 40, rows=5 * (K + 1))
    fill(buffers, CASES[0], 0)
    write_pages(made, 0)
    eager(made, buffers)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager(made, buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        eager(made, buffers)
        torch.cuda.synchronize()
    names = Counter(event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA)
    launches = sum(names.values())
    print(f"launches of a draft step at L=5, K=7: {launches}")
    if "DSPARK_LAUNCHES" in os.environ:
        listed = {"launches": launches, "by_name": names.most_common()}
        Path(os.environ["DSPARK_LAUNCHES"]).write_text(json.dumps(listed, indent=1))
    assert 0 < launches < 400
    plain = drafter("VANILLA")
    write_pages(plain, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            eager(plain, buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_of_the_host_cannot_be_captured() -> None:
    made = drafter("VANILLA")
    buffers = StepBuffers.allocate(made.model, 2, 8)
    with pytest.raises(ValueError, match="reads nothing on the host are required, this is VANILLA"):
        CapturedStep(made.model, made.lm_head, made.context.pool.views, buffers, K)


def test_a_drafter_replays_what_it_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """propose() through graphs of several sizes equals propose() without. Fails where the graph that fits is not replayed."""
    replays: list[int] = []
    replay = CapturedStep.replay

    def counted(step: CapturedStep):  # type: ignore[no-untyped-def]
        replays.append(step.buffers.anchors.numel())
        return replay(step)

    monkeypatch.setattr(CapturedStep, "replay", counted)
    found = []
    for captured in (False, True):
        made = drafter("CUTEDSL")
        write_pages(made, 3)
        for request, tokens in enumerate((700, 64, 1, 1333)):
            made.context.admit(request, tokens)
            made.context.skip_to(request, 0)
            made.context.requests[request].advance(tokens)
        if captured:
            made.capture(4, K, 2000)
        anchors = torch.tensor([5, 6, 7, 8], device=GPU)
        found.append([made.propose(list(range(n)), anchors[:n], K) for n in (1, 4, 3, 2)])
    assert replays == [1, 4, 4, 2]
    for without, replayed in zip(*found, strict=True):
        assert replayed.tokens.shape == without.tokens.shape
        assert distance(replayed.hidden, without.hidden) < 1e-2
        agree = (replayed.tokens == without.tokens).float().mean().item()
        assert agree > 0.9, agree
