"""Public bugs in what a drafter does to the text and to who gets it when, one test each, in the stand-in host.

A test's name begins with the bug's id, as in `tests/regressions/README.md`.
"""

import pytest
import torch
from plugin.host.executor import StandIn
from plugin.hosted import SHORT, hosted


def test_w14_every_draft_is_drawn_by_the_hosts_sampler(host, pair) -> None:
    """Fails if drafts behind a prompt are an argmax of ours where the deployment's own sampler draws the others."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    worker, asked = stand_in.model.spec_worker, []

    def marked(logits, spec_metadata, batch_size, *, num_contexts=0, draft_step=None):
        asked.append((tuple(logits.shape), spec_metadata is stand_in.spec_metadata))
        return torch.full((batch_size - num_contexts, 7), 11, dtype=torch.int)

    worker.sample_draft_tokens = marked
    first = stand_in.add(pair.prompts[0], SHORT)
    assert stand_in.step()["next_draft_tokens"].tolist() == [[11] * 7]
    stand_in.add(pair.prompts[1], SHORT)
    assert stand_in.step()["next_draft_tokens"].tolist() == [[11] * 7] * 2
    assert asked == [((1, 7, 2048), True)] * 3
    while stand_in.requests:
        stand_in.step()
    assert stand_in.done[first].tokens == pair.alone(pair.prompts[0], SHORT).tokens


@pytest.mark.parametrize("num_drafts", [1, 7])
@pytest.mark.parametrize("fill", [torch.nan, 0.0], ids=["nan", "constant"])
def test_w16_text_does_not_depend_on_the_draft(fill, num_drafts, host, pair) -> None:
    """Fails if a draft that proposes nonsense changes one token. The control commits drafts as they come, and does."""
    host("1.3.0rc28")
    expected = [pair.alone(prompt, SHORT).tokens for prompt in pair.prompts[:2]]

    def broken() -> StandIn:
        stand_in = hosted(pair, num_drafts=num_drafts)
        forward = stand_in.model.draft_model.dflash_forward
        stand_in.model.draft_model.dflash_forward = lambda **step: torch.full_like(forward(**step), fill)
        return stand_in

    assert [one.tokens for one in broken().generate(pair.prompts[:2], SHORT)] == expected
    trusting = broken()
    accept = trusting.model.spec_worker.sample_and_accept_draft_tokens

    def trust(logits, attn, spec):
        tokens, counts = accept(logits, attn, spec)
        decoding = slice(attn.num_contexts, None)
        tokens[decoding, :-1], counts[decoding] = spec.draft_tokens.view(-1, num_drafts), num_drafts + 1
        return tokens, counts

    trusting.model.spec_worker.sample_and_accept_draft_tokens = trust
    assert [one.tokens for one in trusting.generate(pair.prompts[:2], SHORT)] != expected


def test_w18_an_adapter_on_the_target_stays_there(host, pair) -> None:
    """Fails if drafts for the unadapted model cost a token, or if an adapter changes a weight of the draft."""
    host("1.3.0rc28")
    without = pair.alone(pair.prompts[0], SHORT).tokens
    stand_in = hosted(pair)
    drafter = stand_in.model.draft_model
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    down, up = (torch.randn(shape, generator=generator) * 0.2 for shape in ((4, 256), (256, 4)))
    layer = pair.target.model.get_submodule("model.layers.2.self_attn.o_proj")
    adapter = layer.register_forward_hook(lambda module, args, out: out + args[0] @ down.T @ up.T)
    try:
        expected = pair.alone(pair.prompts[0], SHORT).tokens
        (done,) = stand_in.generate([pair.prompts[0]], SHORT)
    finally:
        adapter.remove()
    assert done.tokens == expected != without  # the second: the adapter is one
    assert all(torch.equal(parameter, before[name]) for name, parameter in drafter.named_parameters())
    assert not [name for name, _ in drafter.named_modules() if "lora" in name]


def test_w19_no_request_waits_for_another(host, pair) -> None:
    """Fails if one of two requests, of other lengths and begun at other steps, is left without tokens or drafts in a step."""
    host("1.3.0rc28")
    stand_in = hosted(pair)
    prompts = [pair.prompts[0][:20], pair.prompts[1]]
    order = [stand_in.add(prompts[0], SHORT)]
    stand_in.step()
    order.append(stand_in.add(prompts[1], SHORT))
    while len(stand_in.requests) == 2:
        counts = [len(request.tokens) for request in stand_in.requests]
        both = list(stand_in.requests)
        out = stand_in.step()
        assert all(len(request.tokens) > count for request, count in zip(both, counts, strict=True))
        assert all(row.unique().numel() > 1 for row in out["next_draft_tokens"])
    while stand_in.requests:
        stand_in.step()
    assert [stand_in.done[one].tokens for one in order] == [pair.alone(prompt, SHORT).tokens for prompt in prompts]
