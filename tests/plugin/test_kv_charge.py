"""What a draft token is charged, and what its pool costs, where the target's KV cache is fp8."""

from types import SimpleNamespace

import pytest
import torch

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin import kv_charge, register

K3 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 5, "torch_dtype": torch.bfloat16}
SIZES = {"num_blocks": 4, "max_batch_size": 2, "max_seq_len": 256, "filler": 0}


def creator(mode: str = "DSPARK", *, algo: str | None = "FP8", embedded: bool = False):
    from tensorrt_llm._torch.model_config import ModelConfig, QuantConfig
    from tensorrt_llm._torch.pyexecutor._util import KvCacheCreator
    from tensorrt_llm.mapping import Mapping

    draft = ModelConfig(SimpleNamespace(**K3), Mapping(), quant_config=QuantConfig(algo))
    spec_dec_mode = SimpleNamespace(name=mode, is_dspark=lambda: mode == "DSPARK")
    spec = SimpleNamespace(spec_dec_mode=spec_dec_mode, draft_is_embedded_in_target=embedded)
    return KvCacheCreator(None, draft, spec, Mapping())


def bytes_of(manager) -> int:
    return manager.storage.numel() * manager.storage.element_size() // (SIZES["num_blocks"] * 64)


@pytest.mark.parametrize("version", ["1.3.0rc26", "1.3.0rc28", "1.3.0rc29"])
def test_the_slope_is_what_the_pool_costs(version, host) -> None:
    """5,760 bytes a token; 2,880 without the fix, the control, where the host has none of its own."""
    host(version)
    register()
    made = creator()
    allocated = bytes_of(made._create_one_model_draft_kv_cache_manager(**SIZES))
    assert allocated == 5760
    assert made.draft_cost().slope == (5760 if version == "1.3.0rc29" else 2880)
    assert kv_charge.ensure() is None
    assert made.draft_cost().slope == 5760 == bytes_of(made._create_one_model_draft_kv_cache_manager(**SIZES))
    assert kv_charge.ensure() is None and made.draft_cost().slope == 5760  # once more changes nothing


def test_the_shared_config_is_not_touched(host) -> None:
    host("1.3.0rc28")
    register()
    kv_charge.ensure()
    made = creator()
    shared, quant = made._draft_config, made._draft_config.quant_config
    assert quant.quant_mode.has_fp8_kv_cache()
    given = made._get_effective_draft_config()
    assert given is not shared and not given.quant_config.quant_mode.has_fp8_kv_cache()
    assert made._draft_config is shared and shared.quant_config is quant
    assert quant.kv_cache_quant_algo == "FP8" and quant.quant_mode.has_fp8_kv_cache()


@pytest.mark.parametrize(("mode", "embedded"), [("PARD", False), ("DRAFT_TARGET_ONE_MODEL", False), ("DSPARK", True)])
def test_other_drafts_are_not_touched(mode, embedded, host) -> None:
    host("1.3.0rc28")
    register()
    kv_charge.ensure()
    made = creator(mode, embedded=embedded)
    assert made._get_effective_draft_config() is made._draft_config and made.draft_cost().slope == 2880


def test_without_quantisation_nothing_changes(host) -> None:
    host("1.3.0rc28")
    register()
    kv_charge.ensure()
    assert creator(algo=None).draft_cost().slope == 5760


@pytest.mark.parametrize("change", ["drop", "rename"])
def test_where_it_cannot_be_applied_an_fp8_draft_is_not_built(change, host, pair) -> None:
    """And one under the target's own dtype is."""
    from engine_pair import FOLDER
    from plugin.host.build import HERE  # noqa: F401
    from plugin.host.executor import StandIn

    host("1.3.0rc28", **{change: "_torch.pyexecutor._util:KvCacheCreator._get_effective_draft_config"})
    register()
    assert StandIn(pair.target, FOLDER / "draft").model.draft_model.config.family == "mla"
    with pytest.raises(DSparkError, match=r"_get_effective_draft_config.*kv_cache_config.dtype: auto"):
        StandIn(pair.target, FOLDER / "draft", quant="FP8")


def test_an_fp8_target_gives_a_draft_in_its_own_dtype(host, pair) -> None:
    from engine_pair import FOLDER
    from plugin.host.executor import StandIn

    host("1.3.0rc28")
    register()
    stand_in = StandIn(pair.target, FOLDER / "draft", quant="FP8")
    from tensorrt_llm._torch.pyexecutor._util import KvCacheCreator

    made = KvCacheCreator(None, stand_in.model.draft_config, stand_in.spec_config, None)
    assert made.draft_cost().slope == 2 * 80 * 4 and stand_in.model.draft_model.fc.weight.dtype == torch.float32
