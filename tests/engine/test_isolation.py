"""Nothing of the draft is reachable from the target's path.

Elsewhere a draft's "attend in both directions" flag reached the target's causal attention through a shared cache spec, and
corrupted its verifications and its short prefills. Here the target's logits with a draft at work are those without one, bit
for bit, and the target is, down to each module's attributes, what it was before.
"""

import copy
import random

import pytest
import torch
from engine_pair import FOLDER, small_drafter
from engine_watch import WatchedEngine

from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.engine.target import HuggingFaceTarget

VERIFY_ROWS = 8
LENGTHS = (1, 5, 17, 33, 64)  # tokens before a verification, mixed
SHORT_PREFILLS = (1, 2, 3, 7, 8)
TAPPED = (0, 2, 4)


@pytest.fixture
def target():
    """One of its own, so that a planted leak stays here."""
    return HuggingFaceTarget.from_pretrained(FOLDER / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def untouched(pair):
    """Logits of a target that never saw a draft."""
    return drive(HuggingFaceTarget.from_pretrained(FOLDER / "target", dtype=torch.float32), pair.prompts)


def drive(target, prompts, between=lambda: None, with_taps=False):
    """name -> logits: causal verifications of 8 rows behind contexts of mixed lengths, and short prefills."""
    found = {}
    for prompt, length in zip(prompts, LENGTHS, strict=False):
        ids, cache = torch.tensor(prompt), target.new_cache()
        between()
        found[f"context of {length}"] = target.forward(ids[:length], cache, length, with_taps=with_taps).logits
        for again in range(2):  # rejected, taken back, and verified again
            between()
            rows = ids[length : length + VERIFY_ROWS] if length < 64 else ids[:VERIFY_ROWS]
            found[f"verification {again} behind {length}"] = target.forward(rows, cache, 8, with_taps=with_taps).logits
            target.take_back(cache, VERIFY_ROWS)
    for prompt, length in zip(prompts, SHORT_PREFILLS, strict=False):
        between()
        found[f"prefill of {length}"] = target.forward(
            torch.tensor(prompt[:length]), target.new_cache(), length, with_taps=with_taps
        ).logits
    return found


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def drafting_engine(pair, target):
    """An engine at work on this target, and a function that takes a step of it."""
    engine = WatchedEngine(target, small_drafter(pair.model, target), num_drafts=pair.block, max_batch=4, reuse="joint")
    prompts = iter(pair.prompts[8:] * 4)

    def step():
        if len(engine._requests) < 3:
            engine.add(next(prompts)[:24], SamplingParams(12, ignore_eos=True))
        engine.step()

    return engine, step


SIMPLE = (int, float, str, bool, type(None), tuple, list, dict, torch.dtype)


def snapshot(target):
    """Everything of a target, of its classes and of the process that its forward pass could depend on."""
    model = target.model
    seen = {
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "process": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.get_float32_matmul_precision(),
        ),
        "the target's own": {k: v for k, v in vars(target).items() if isinstance(v, SIMPLE) and k != "target_layer_ids"},
    }
    for name, module in model.named_modules():
        own = vars(module)
        hooks = {key: len(value) for key, value in own.items() if "hook" in key and hasattr(value, "__len__")}
        plain = {key: value for key, value in own.items() if isinstance(value, SIMPLE) and key not in hooks}
        plain = {key: value for key, value in plain.items() if key not in ("_parameters", "_buffers", "_modules")}
        children = {key: id(child) for key, child in module.named_children()}
        methods = {key: id(vars(type(module)).get(key)) for key in ("forward", "__call__", "_attn")}
        seen[f"module {name}"] = hooks, copy.copy(plain), sorted(own), children, type(module), methods
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        facts = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        seen[f"tensor {name}"] = facts, tensor._version, tensor.double().sum().item()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen["attention functions"] = {key: id(ALL_ATTENTION_FUNCTIONS[key]) for key in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    return seen


def changes(before, after):
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


# --- the promise


@pytest.mark.parametrize("with_taps", [False, True])
def test_logits_with_a_draft_at_work_are_those_without_one(pair, target, untouched, with_taps):
    """In one process and on one target, a step of the drafting engine before every pass."""
    engine, step = drafting_engine(pair, target)
    found = drive(target, pair.prompts, between=step, with_taps=with_taps)
    assert engine.steps > 15 and engine.acceptance.summary().accept_len > 1.5, "a draft was at work"
    assert differing(found, untouched) == []


def test_the_engines_own_passes_are_those_of_a_target_without_a_draft(pair, target, monkeypatch):
    """Every pass of an engine run, prompts in chunks and verifications, repeated on a target that never saw a draft."""
    passes, forward, take_back = [], target.forward, target.take_back
    kept = []  # caches stay alive, so that no two have one id

    def recording_forward(ids, cache, logit_rows, **more):
        output = forward(ids, cache, logit_rows, **more)
        kept.append(cache)
        passes.append((id(cache), ids.clone(), logit_rows, output.logits.clone()))
        return output

    def recording_take_back(cache, rows):
        take_back(cache, rows)
        passes.append((id(cache), rows, None, None))

    engine = Engine(target, small_drafter(pair.model, target), num_drafts=pair.block, max_batch=3, prefill_chunk=20)
    monkeypatch.setattr(target, "forward", recording_forward)
    monkeypatch.setattr(target, "take_back", recording_take_back)
    lengths = (64, 24, 7, 41)
    prompts = [prompt[:length] for prompt, length in zip(pair.prompts, lengths, strict=False)]
    for prompt in prompts:
        engine.add(prompt, SamplingParams(16, ignore_eos=True))
    while engine._requests:
        engine.step()

    clean, caches, verifications = HuggingFaceTarget.from_pretrained(FOLDER / "target", dtype=torch.float32), {}, 0
    for cache, what, logit_rows, logits in passes:
        own = caches.setdefault(cache, clean.new_cache())
        if logits is None:
            clean.take_back(own, what)
        else:
            assert torch.equal(clean.forward(what, own, logit_rows).logits, logits)
            verifications += len(what) == VERIFY_ROWS
    assert verifications > 8 and len(caches) == 4


def test_the_target_is_what_it_was(pair, target):
    """transformers itself installs what returns hidden states at the first pass that asks for them: that one comes before."""
    target.set_taps(TAPPED)
    target.model(torch.tensor([[5]]), output_hidden_states=True)
    before = snapshot(target)
    engine, step = drafting_engine(pair, target)
    for _ in range(12):
        step()
    engine.preempt(next(iter(engine._requests)))
    engine.run_to_end()
    engine.forget_prefixes()
    assert engine.acceptance.summary().verifications > 10
    assert changes(before, snapshot(target)) == []


def test_the_draft_holds_nothing_of_the_target(pair, target):
    """No module and no tensor in common: its output head is asked for, not owned."""
    drafter = small_drafter(pair.model, target)
    theirs = {tensor.data_ptr() for tensor in target.model.state_dict().values()}
    assert not theirs & {tensor.data_ptr() for tensor in drafter.model.state_dict().values()}
    assert not theirs & {view.data_ptr() for view in drafter.context.pool.views}
    assert not {id(module) for module in target.model.modules()} & {id(module) for module in drafter.model.modules()}


# --- leaks that must be noticed


def attention(target, layer=3):
    return target.model.model.layers[layer].self_attn


class BothDirections(torch.nn.Module):
    """A mock of the reported leak: an attention module whose rows also see the rows behind them."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments, attention_mask=None, **more):
        cache = more["cache"] if "cache" in more else more["past_key_values"]  # renamed in transformers 5.2x
        rows = more["hidden_states"].shape[1]
        seen = cache.get_seq_length(self.module.layer_idx) + rows
        return self.module(*arguments, attention_mask=torch.zeros(1, 1, rows, seen), **more)


def leak_non_causal_module(target):
    target.model.model.layers[3].self_attn = BothDirections(attention(target))


def leak_is_causal(target):
    attention(target).is_causal = False


def leak_attention_implementation(target):
    target.model.config._attn_implementation = "eager"


def leak_hook(target):
    attention(target).register_forward_hook(lambda module, given, output: None)


def leak_attribute(target):
    attention(target).non_causal_multi_token_decode = True


def leak_parameter(target):
    with torch.no_grad():
        attention(target).o_proj.weight[0, 0] += 1e-3


def leak_storage(target):
    weight = attention(target).o_proj.weight
    weight.data = weight.data.clone()


def leak_config(target):
    target.model.config.rope_parameters["rope_theta"] = 10001.0


@pytest.mark.parametrize(
    "leak",
    [
        leak_non_causal_module,
        leak_is_causal,
        leak_attention_implementation,
        leak_hook,
        leak_attribute,
        leak_parameter,
        leak_storage,
        leak_config,
    ],
)
def test_a_planted_leak_shows_in_the_snapshot(target, leak):
    before = snapshot(target)
    assert changes(before, snapshot(target)) == []
    leak(target)
    assert changes(before, snapshot(target)) != []


@pytest.mark.parametrize("leak", [leak_non_causal_module, leak_is_causal, leak_parameter])
def test_a_planted_leak_shows_in_the_logits(pair, target, untouched, leak):
    assert differing(drive(target, pair.prompts), untouched) == []
    leak(target)
    wrong = differing(drive(target, pair.prompts), untouched)
    assert wrong, "the leak changed nothing"
    if leak is leak_non_causal_module:
        assert any(name.startswith("verification") for name in wrong) and any(name.startswith("prefill") for name in wrong)


def test_a_leak_that_comes_and_goes_with_the_draft_shows_in_the_logits(pair, target, untouched):
    """Planted: the flag is up while the draft runs, and every third time it is not put back before the target's pass."""
    _, step = drafting_engine(pair, target)
    chance = random.Random(0)

    def leaky_step():
        step()
        attention(target).is_causal = chance.random() > 1 / 3

    assert differing(drive(target, pair.prompts, between=leaky_step), untouched)
