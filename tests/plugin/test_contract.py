"""The recorded contract, one symbol at a time: whatever is missing or changed is named, and nothing is half applied."""

import pytest
from plugin.host.build import VERSIONS, Row, at, contract

from trtllm_dspark.plugin import builder, probe, register
from trtllm_dspark.plugin.hooks import HOOKS, Hook

ROWS = [row for row in contract() if at("1.3.0rc28", row)]
LATER = [row for row in contract() if at("1.3.0rc29", row) and row not in ROWS]
CASES = [("1.3.0rc28", row) for row in ROWS] + [("1.3.0rc29", row) for row in LATER]


def short(case: tuple[str, Row]) -> str:
    return f"{case[0]}-{case[1]['symbol'].rpartition('.')[2] if '.' in case[1]['symbol'] else case[1]['symbol']}"


def hook_of(symbol: str) -> Hook | None:
    return next((hook for hook in HOOKS if any(place.split("(")[0] == symbol for place in hook.places)), None)


def applied_in_host() -> tuple[bool, bool, bool]:
    """Our builder is registered, the config class too, and the KV charge is wrapped."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        from tensorrt_llm._torch.models.modeling_utils import DRAFT_MODEL_BUILDER_MAPPING as table
    except ImportError:
        table = {}
    from tensorrt_llm._torch.pyexecutor import _util

    wrapped = hasattr(getattr(_util.KvCacheCreator, "_get_effective_draft_config", None), "_trtllm_dspark")
    return builder.build_draft in table.values(), "k3_dspark" in CONFIG_MAPPING, wrapped


@pytest.mark.parametrize(("version", "row"), CASES, ids=map(short, CASES))
def test_without_this_symbol(version, row, host) -> None:
    host(version, drop=row["symbol"])
    found = register()
    hook, symbol = hook_of(row["symbol"]), row["symbol"].split(":")[1]
    text = found.reason + " ".join(verdict.symbol + verdict.detail for verdict in found.hooks)
    assert symbol in text, found
    if found.state == "absent":  # the stand-in itself needs the symbol to be imported
        assert "cannot import name" in found.reason
        return
    needed = hook is not None and hook.required
    assert found.state == ("refused" if needed else "active")
    assert applied_in_host() == ((False, False, False) if needed else (True, True, False))
    if hook is not None and hook.places[0].split("(")[0] == row["symbol"] and len(hook.places) == 1:
        (verdict,) = (v for v in found.hooks if v.name == hook.name)
        assert verdict.verdict == "not found" and verdict.detail.endswith(".") and verdict.detail.count(". ") >= 1


CHANGED = [case for case in CASES if case[1]["parameters"]]


@pytest.mark.parametrize(("version", "row"), CHANGED, ids=map(short, CHANGED))
def test_with_a_parameter_renamed(version, row, host) -> None:
    host(version, rename=row["symbol"])
    found = register()
    hook, parameter = hook_of(row["symbol"]), row["parameters"][-1]
    relied_on = hook is not None and parameter in hook.parameters
    verdicts = [v for v in found.hooks if row["symbol"] in v.symbol]
    assert verdicts, f"{row['symbol']} is in no verdict"
    if relied_on:
        assert verdicts[0].verdict == "changed" and parameter in verdicts[0].detail
    refused = relied_on and hook.required
    assert found.state == ("refused" if refused else "active")
    assert applied_in_host() == ((False, False, False) if refused else (True, True, False))


def test_every_hook_is_in_the_recorded_contract() -> None:
    recorded = {row["symbol"] for row in contract()}
    for hook in HOOKS:
        assert any(place.split("(")[0] in recorded for place in hook.places), hook.name
        assert hook.doing and hook.why and hook.reference
        for row in (row for row in contract() if row["symbol"] in hook.places):
            assert set(hook.parameters) <= set(row["parameters"]), (hook.name, row)


@pytest.mark.parametrize("version", ["1.3.0rc26", "1.3.0rc28", "1.3.0rc29"])
def test_the_stock_worker_reads_nothing_that_our_drafter_lacks(version, host, monkeypatch) -> None:
    """Parsed from the source, as the doctor does with an installed host; the control drops one attribute."""
    from trtllm_dspark.plugin import contract as drafter_contract
    from trtllm_dspark.plugin.drafter import HostedMLADSpark
    from trtllm_dspark.plugin.probing import HostSource

    source = HostSource(host(version) / "tensorrt_llm")
    asked = drafter_contract.asked(source, drafter_contract.replaced_methods())
    assert {"logits_processor", "lm_head", "dflash_forward", "markov_w2", "apply_markov_chain_logits"} <= set(asked)
    assert drafter_contract.lacking(source) == {}
    everything = drafter_contract.asked(source, frozenset())
    assert len(everything) > len(asked) and set(everything) <= set(dir(HostedMLADSpark)) | drafter_contract.INSTANCE_ATTRIBUTES
    monkeypatch.setattr(drafter_contract, "INSTANCE_ATTRIBUTES", drafter_contract.INSTANCE_ATTRIBUTES - {"lm_head"})
    assert set(drafter_contract.lacking(source)) == {"lm_head"}
    assert "lm_head" in probe().hooks[-1].detail and probe().hooks[-1].verdict == "changed"


def test_instance_attributes_are_set_when_a_drafter_is_built(pair) -> None:
    from trtllm_dspark.plugin.contract import INSTANCE_ATTRIBUTES

    assert all(hasattr(pair.model, name) for name in INSTANCE_ATTRIBUTES)


def test_versions_are_ordered_and_each_row_has_its_source() -> None:
    for row in contract():
        assert row["since"] in (None, *VERSIONS) and row["until"] in (None, *VERSIONS)
        assert row["path"].startswith("tensorrt_llm/") and row["path"].endswith(".py")
