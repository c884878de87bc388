"""Public bugs on the border of target and draft, on a tiny random target of transformers. Ids: see README.md."""

from itertools import pairwise
from typing import Any

import published
import pytest
import small_drafts
import torch

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.engine.target import HuggingFaceTarget
from trtllm_dspark.errors import DSparkError

transformers = pytest.importorskip("transformers", reason="needs the extra trtllm-dspark[hf]")
DEPTH, HIDDEN, VOCAB = 4, 64, 128


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=DEPTH, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=256, mlp_bias=True, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def counting_llama() -> Any:
    """A real target whose layer i adds 10^i to every lane, and whose tokens are all zero vectors."""
    model = llama()
    for parameter in model.model.parameters():
        parameter.zero_()
    model.model.norm.weight.fill_(1.0)
    for i, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.bias.fill_(10.0**i)
    return model


def tapped(model: Any, ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    target = HuggingFaceTarget(model, target_layer_ids=taps)
    found = target.forward(torch.tensor(ids), target.new_cache(), 1, with_taps=True).taps
    assert found is not None
    return found


@pytest.mark.parametrize(("taps", "sums"), [((0, 2), (1.0, 111.0)), ((1, 2), (11.0, 111.0)), ((0,), (1.0,)), ((2,), (111.0,))])
def test_c09_a_tap_is_the_stream_after_its_layer(taps: tuple[int, ...], sums: tuple[float, ...]) -> None:
    """Fails where a tap is the stream that enters the layer (0 and 11 for taps 0, 2), or that of the next one."""
    found = tapped(counting_llama(), [3, 5, 7], taps)
    assert torch.equal(found, torch.tensor(sums).repeat_interleave(HIDDEN).expand(3, -1))


def test_c09_taps_are_what_the_layers_return() -> None:
    """Fails where a tap is not the very output of its layer, for every layer of a random target."""
    model, outputs = llama(), {}
    handles = [
        layer.register_forward_hook(
            lambda module, args, output, i=i: outputs.__setitem__(i, output[0] if isinstance(output, tuple) else output)
        )
        for i, layer in enumerate(model.model.layers)
    ]
    found = tapped(model, [3, 5, 7, 9], (0, 1, 2, 3))
    for handle in handles:
        handle.remove()
    expected = [outputs[i].view(4, HIDDEN) for i in range(DEPTH)]
    assert torch.equal(found, torch.cat(expected, -1))
    assert not any(torch.equal(a, b) for a, b in pairwise(expected))  # control


def test_c10_the_last_layer_is_tapped_before_the_final_norm() -> None:
    """Fails where the last tap is `hidden_states[-1]`, which is already normalised (1.0 here), or an IndexError."""
    model = counting_llama()
    found = tapped(model, [3, 5], (0, 3))
    assert torch.equal(found, torch.tensor([1.0, 1111.0]).repeat_interleave(HIDDEN).expand(2, -1))
    normalised = model(input_ids=torch.tensor([[3, 5]]), output_hidden_states=True).hidden_states[-1]
    assert float(normalised.max()) == pytest.approx(1.0)  # control: what the wrong tap would give
    assert not model.model.norm._forward_pre_hooks  # nothing is left behind on the target


@pytest.mark.parametrize("taps", [(0, 4), (-1,), (0, 2, 100)], ids=str)
def test_c10_taps_outside_the_target_are_refused_with_the_valid_range(taps: tuple[int, ...]) -> None:
    """Fails where the layer count itself, or -1, is taken for a layer."""
    with pytest.raises(DSparkError, match=r"0\.\.3 \(the target has 4 layers\)"):
        HuggingFaceTarget(llama(), target_layer_ids=taps)


@pytest.mark.parametrize("taps", [[0, 4], [-1, 2], [2, 2], [2, 0]], ids=str)
def test_c10_taps_are_checked_before_any_weight_is_read(taps: list[int]) -> None:
    """Fails where a config with a tap out of range, twice or out of order gets as far as its tensors."""
    with pytest.raises(DSparkError, match=r"valid ids are 0\.\.3"):
        DraftConfig.from_dict(published.tiny("mla", target_layer_ids=taps))


def verify(target: HuggingFaceTarget, prompt: list[int], rows: list[int], *, with_taps: bool) -> torch.Tensor:
    """Logits of a verification of `rows` behind `prompt`."""
    cache = target.new_cache()
    target.forward(torch.tensor(prompt), cache, 1, with_taps=with_taps)
    return target.forward(torch.tensor(rows), cache, len(rows), with_taps=with_taps).logits


def traces(module: torch.nn.Module) -> tuple[Any, ...]:
    """What could be left behind on a module: attributes, hooks, dtype."""
    dtypes = [parameter.dtype for parameter in module.parameters(recurse=False)]
    return set(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks), dtypes


def test_n01_verification_is_bit_equal_with_and_without_a_draft() -> None:
    """Fails where anything of the draft (non-causal rows, taps, hooks, a cast) reaches the target."""
    model, rows = llama(), [7, 11, 13, 17, 19, 23, 29, 31]
    prompts = [[3], [5, 9, 2], list(range(1, 40))]
    bare = HuggingFaceTarget(model)
    alone = [verify(bare, prompt, rows, with_taps=False) for prompt in prompts]
    model(input_ids=torch.tensor([[3]]), output_hidden_states=True)  # transformers sets its own capture up on first use
    config, state = model.config.to_dict(), [traces(module) for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    target = HuggingFaceTarget(model, target_layer_ids=(0, 3))
    draft = small_drafts.small_model(target_layer_ids=[0, 3])
    draft.load_weights_from_target_model(model)
    draft.to(torch.bfloat16).to(torch.float32)
    drafter = small_drafts.small_drafter(draft)
    drafter.lm_head = target.lm_head
    beside = []
    for index, prompt in enumerate(prompts):
        taps = target.forward(torch.tensor(prompt), target.new_cache(), 1, with_taps=True).taps
        small_drafts.feed(drafter, index, taps, tokens=len(taps) + 8)
        drafter.propose([index], torch.tensor([3]), 4)
        beside.append(verify(target, prompt, rows, with_taps=True))
        drafter.context.release(index)

    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    assert model.config.to_dict() == config and [traces(module) for module in model.modules()] == state
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_n01_the_target_verifies_causally() -> None:
    """Fails where a row of a verification sees a later one, as rows of a draft block do."""
    model, target = llama(), HuggingFaceTarget(llama(), target_layer_ids=(0, 2))
    base = verify(target, [5, 9, 2], [7, 11, 13, 17], with_taps=True)
    changed = verify(target, [5, 9, 2], [7, 11, 13, 99], with_taps=True)
    assert torch.equal(base[:3], changed[:3]) and not torch.equal(base[3], changed[3])
    ids, open_mask = torch.tensor([[5, 9, 2, 7, 11, 13, 17]]), torch.zeros(1, 1, 7, 7)
    seeing_all = model(input_ids=ids, attention_mask=open_mask).logits[0, 3:]  # control: a leaked non-causal flag
    assert float((seeing_all[0] - base[0]).abs().max()) > 1e-3
