"""Every name that TensorRT-LLM's stock DFlash/DSpark worker reads, and that it means what the worker takes it for."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import published
import pytest
import small_drafts
import torch
from torch import nn

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.heads import greedy_chain
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.model.parallel import TensorParallel

RAW = published.tiny("mla")
V, D, W = RAW["vocab_size"], RAW["hidden_size"], RAW["kv_lora_rank"] + RAW["qk_rope_head_dim"]
LAYERS, BLOCK = RAW["num_hidden_layers"], RAW["block_size"]


@pytest.fixture(scope="module")
def model() -> MLADSparkForCausalLM:
    return small_drafts.small_model()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", BLOCK),
        ("mask_token_id", RAW["mask_token_id"]),
        ("dflash_attention_backend", "VANILLA"),
        ("_uses_worker_attention_backend", False),
        ("_paged_ctx_cache", True),
        ("_num_attn_layers", LAYERS),
        ("_num_heads", RAW["num_attention_heads"]),
        ("_num_kv_heads", 1),
        ("_head_dim", W),
        ("_kv_factor", 1),
        ("_runtime_position_ceiling", None),
        ("_dspark_shift_label", True),
        ("has_markov_head", True),
        ("logits_processor", None),
        ("config.vocab_size", V),
        ("config.max_position_embeddings", RAW["max_position_embeddings"]),
        ("config.target_layer_ids", tuple(RAW["target_layer_ids"])),
    ],
)
def test_attribute(name: str, value: object, model: MLADSparkForCausalLM) -> None:
    found = model
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_modules_and_tables(model: MLADSparkForCausalLM) -> None:
    assert model.fc is model.context_proj and model.fc.weight.dtype == torch.float32
    assert model.hidden_norm is model.context_norm
    assert model.model is model and model.draft_model_full.model.embed_tokens is model.embed_tokens
    assert model.embed_tokens(torch.tensor([[3, 127]])).shape == (1, 2, D)
    assert model.markov_w2.shape == (V, RAW["markov_rank"])
    headless = {name: value for name, value in small_drafts.weights(RAW).items() if "_head." not in name}
    off = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    bare = small_drafts.small_model(tensors=headless, **off)
    assert not bare.has_markov_head and bare.markov_w2 is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("project_target_hidden", ["hidden"]),
        ("precompute_context_kv", ["projected_hidden", "positions"]),
        ("_build_fused_kv_buffers", []),
        ("load_weights", ["weights"]),
        ("load_weights_from_target_model", ["target_model"]),
        (
            "dflash_forward",
            ["noise_embedding", "query_positions", "num_ctx_per_req", "ctx_k_cache", "ctx_v_cache", "ctx_cache_batch_idx",
             "ctx_kv_cache", "ctx_page_table"],
        ),
        ("apply_markov_chain_logits", ["base_logits", "first_prev_tokens", "argmax_fn", "vocab_slice"]),
    ],
)  # fmt: skip
def test_method(name: str, parameters: list[str], model: MLADSparkForCausalLM) -> None:
    assert list(inspect.signature(getattr(model, name)).parameters) == parameters


def test_host_may_set_what_it_sets(model: MLADSparkForCausalLM) -> None:
    model = small_drafts.small_model()
    size = sum(p.numel() for p in model.parameters())
    model._runtime_position_ceiling = 1 << 22
    model.logits_processor = lambda hidden, head: hidden
    model._build_fused_kv_buffers()
    assert sum(p.numel() for p in model.parameters()) == size and model._runtime_position_ceiling == 1 << 22


def host_step(drafter, requests: list[str], rows: int = BLOCK):  # type: ignore[no-untyped-def]
    """(arguments of `dflash_forward`, arguments of `draft_hidden`) of one step; the host's table has rows in its own order."""
    model, view = drafter.model, drafter.context.view(requests)
    start = torch.tensor([drafter.context.length(request) for request in requests])
    positions = start[:, None] + torch.arange(rows)
    ids = torch.full((len(requests), rows), model.mask_token_id)
    ids[:, 0] = torch.arange(len(requests)) + 5
    embedded = model.embed_tokens(ids)
    slots = torch.tensor([4, 0, 2])[: len(requests)]
    table = torch.full((6, view.page_table.shape[1]), 10**6, dtype=torch.int32)
    table[slots] = view.page_table
    host_views = [pages[:, None, None] for pages in view.pages]  # [num_pages, 1, 1, P, W]
    host = dict(
        noise_embedding=embedded, query_positions=positions, num_ctx_per_req=view.context_len.long(), ctx_k_cache=None,
        ctx_v_cache=None, ctx_cache_batch_idx=slots, ctx_kv_cache=host_views, ctx_page_table=table,
    )  # fmt: skip
    return host, (embedded, positions, view.pages, view.page_table, view.context_len)


def test_forward_over_host_views_equals_draft_hidden(model: MLADSparkForCausalLM) -> None:
    drafter = small_drafts.small_drafter(model)
    for request, length in (("a", 9), ("b", 0), ("c", 8)):
        small_drafts.feed(drafter, request, small_drafts.taps(model, length, seed=length))
    host, ours = host_step(drafter, ["a", "b", "c"])
    assert host["ctx_kv_cache"][0].shape == (16, 1, 1, 4, W)
    expected = model.draft_hidden(*ours)
    found = model.dflash_forward(**host)
    assert found.shape == (3 * BLOCK, D) and torch.equal(found, expected.flatten(0, 1))
    host["ctx_cache_batch_idx"] = torch.tensor([4, 0, 4])  # control: a request that reads the row of another
    assert not torch.equal(model.dflash_forward(**host), expected.flatten(0, 1))


def test_the_forward_pass_does_not_write_the_pool(model: MLADSparkForCausalLM) -> None:
    drafter = small_drafts.small_drafter(model)
    small_drafts.feed(drafter, "a", small_drafts.taps(model, 9))
    before = [view.clone() for view in drafter.context.pool.views]
    model.dflash_forward(**host_step(drafter, ["a"])[0])
    for view, was in zip(drafter.context.pool.views, before, strict=True):
        assert torch.equal(view.nan_to_num(7.0), was.nan_to_num(7.0))


@pytest.mark.parametrize("missing", ["ctx_kv_cache", "ctx_page_table"])
def test_a_dense_arena_is_refused_with_the_remedy(missing: str, model: MLADSparkForCausalLM) -> None:
    drafter = small_drafts.small_drafter(model)
    small_drafts.feed(drafter, "a", small_drafts.taps(model, 4))
    with pytest.raises(DSparkError, match=r"must be paged.*draft KV cache manager"):
        model.dflash_forward(**host_step(drafter, ["a"])[0] | {missing: None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precomputed_context_is_what_append_writes(dtype: torch.dtype) -> None:
    model = small_drafts.small_model(dtype=dtype)
    drafter, features = small_drafts.small_drafter(model), small_drafts.taps(model, 11)
    small_drafts.feed(drafter, "a", features)
    projected = model.project_target_hidden(features.to(dtype))
    keys, values = model.precompute_context_kv(projected, torch.arange(11))
    assert keys.shape == (11, LAYERS, 1, W) and keys.dtype == dtype and values is None
    assert torch.equal(keys[:, :, 0].transpose(0, 1), small_drafts.rows_of(drafter, "a"))
    moved, _ = model.precompute_context_kv(projected, torch.arange(1, 12))
    latent = model.config.kv_lora_rank
    assert torch.equal(moved[..., :latent], keys[..., :latent]) and not torch.equal(moved[..., latent:], keys[..., latent:])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_from_a_dict_equal_those_from_the_folder(prefix: str, tmp_path: Path) -> None:
    tensors = small_drafts.weights(RAW, dtype=torch.bfloat16)
    stored = MLADSparkForCausalLM.from_pretrained(published.write_tiny(tmp_path, RAW, tensors))
    passed = {prefix + name: value for name, value in tensors.items()} | {"lm_head.weight": torch.zeros(V, D)}
    given = small_drafts.small_model(dtype=torch.bfloat16, tensors=passed)
    assert stored.state_dict().keys() == given.state_dict().keys()
    for name, value in stored.state_dict().items():
        assert torch.equal(value, given.state_dict()[name]), name


def test_a_rank_slices_the_whole_tensors_it_is_given() -> None:
    whole = small_drafts.small_model()
    half = MLADSparkForCausalLM.empty(whole.config, tp=TensorParallel(1, 2))
    half.load_weights(small_drafts.weights(RAW))
    for ours, all_of_it, dim in (("q_b_proj", 96, 0), ("o_proj", 64, 1)):
        part, full = (getattr(m.layers[1].self_attn, ours).weight for m in (half, whole))
        assert torch.equal(part, full.chunk(2, dim)[1]) and full.shape[dim] == all_of_it
    sliced = small_drafts.weights(RAW)
    sliced["layers.0.self_attn.q_b_proj.weight"] = sliced["layers.0.self_attn.q_b_proj.weight"][:48]
    with pytest.raises(DSparkError, match=r"q_b_proj.weight must have shape \(96, 48\), it has \(48, 48\)"):
        half.load_weights(sliced)


@pytest.mark.parametrize("name", sorted(published.layout(RAW)))
def test_a_missing_tensor_is_named(name: str) -> None:
    tensors = small_drafts.weights(RAW)
    del tensors[name]
    with pytest.raises(DSparkError, match=f"{name} is required"):
        small_drafts.small_model(tensors=tensors)


def test_unknown_doubled_and_damaged_tensors_are_named() -> None:
    good = small_drafts.weights(RAW)
    gate = "layers.1.self_attn.g_proj.weight"
    with pytest.raises(DSparkError, match=f"these have none: {gate}"):
        small_drafts.small_model(tensors=good | {gate: torch.zeros(64, 64)})
    with pytest.raises(DSparkError, match=r"context_proj.weight and model.fc.weight are the same tensor"):
        small_drafts.small_model(tensors=good | {"model.fc.weight": good["context_proj.weight"]})
    nan = good["final_norm.weight"].clone().index_fill_(0, torch.tensor([63]), torch.nan)
    with pytest.raises(DSparkError, match=r"final_norm\.weight must be finite"):
        small_drafts.small_model(tensors=good | {"final_norm.weight": nan})


def test_the_targets_head_is_shared_and_out_of_reach() -> None:
    model, target = small_drafts.small_model(), SimpleNamespace(lm_head=nn.Linear(D, V, bias=False))
    names = set(model.state_dict())
    model.load_weights_from_target_model(target)
    assert model.lm_head is target.lm_head
    model.to(torch.bfloat16)
    assert target.lm_head.weight.dtype == torch.float32  # casting the draft casts nothing of the target
    assert set(model.state_dict()) == names and model.context_proj.weight.dtype == torch.bfloat16


def test_chain_logits_equal_the_chain(model: MLADSparkForCausalLM) -> None:
    base = torch.randn(3, BLOCK, V, generator=torch.Generator().manual_seed(5))
    anchors = torch.tensor([3, -1, 90])
    found = model.apply_markov_chain_logits(base, anchors)
    assert torch.equal(found, greedy_chain(model.markov_head, base, anchors, keep_logits=True).logits)
    assert not torch.equal(found, base)
    columns = slice(32, 64)
    picked = found.argmax(-1)
    step = iter(range(BLOCK))
    local = model.apply_markov_chain_logits(
        base[..., columns], anchors, argmax_fn=lambda logits: picked[:, next(step)], vocab_slice=columns
    )
    torch.testing.assert_close(local, found[..., columns], rtol=1e-6, atol=1e-6)


def test_the_chain_goes_on_from_the_token_that_the_host_reads_off_the_logits() -> None:
    """Rounding to bf16 makes ties: the next step must build on the token that wins in the logits as returned."""
    model = small_drafts.small_model(dtype=torch.bfloat16)
    base = (8 * torch.randn(64, BLOCK, V, generator=torch.Generator().manual_seed(6))).bfloat16()
    anchors = torch.arange(64)
    found = model.apply_markov_chain_logits(base, anchors)
    assert found.dtype == torch.bfloat16
    previous = torch.cat((anchors[:, None], found.argmax(-1)[:, :-1]), 1)
    assert torch.equal(found, (base.float() + model.markov_head(previous)).bfloat16())
    exact = greedy_chain(model.markov_head, base, anchors).tokens
    assert not torch.equal(exact, found.argmax(-1))  # control: the unrounded chain does part from it here
