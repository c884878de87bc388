"""The draft KV pool is charged at the dtype it is allocated at, also where the target's KV cache is fp8.

The host stamps the target's `kv_cache_quant_algo` on the draft's config. Its pool of an external drafter is allocated at the
draft's own dtype, but charged at fp8: 2,880 bytes a token for 5,760, so that it holds half the tokens. A copy of the config
without the stamp, given to both, ends that; the shared one is not touched, nor is any other kind of draft.

Source: NVIDIA/TensorRT-LLM `_torch/pyexecutor/_util.py`; the host's own remedy came with pull request 19040.
"""

import copy
import functools
import importlib
import inspect
from typing import Any

from trtllm_dspark.plugin.hooks import UTIL
from trtllm_dspark.plugin.probing import PACKAGE, locate

METHOD = "_get_effective_draft_config"
OWN_REMEDY = "_get_draft_kv_model_config"
SPECULATION = "_speculative_config"  # of a KvCacheCreator: tells our drafts from others
CACHED = ("quant_mode", "layer_quant_mode")


def ensure() -> str | None:
    """Make the charge right on this host; why it cannot be, None where it is. Idempotent."""
    try:
        creator = importlib.import_module(f"{PACKAGE}._torch.pyexecutor._util").KvCacheCreator
    except (ImportError, AttributeError) as error:
        return f"_torch.pyexecutor._util:KvCacheCreator cannot be had ({error})"
    if hasattr(creator, OWN_REMEDY):
        return None
    method = creator.__dict__.get(METHOD)
    if method is None:
        return f"KvCacheCreator has neither {OWN_REMEDY} nor {METHOD}"
    if getattr(method, "_trtllm_dspark", False):
        return None
    if list(inspect.signature(method).parameters) != ["self"]:
        return f"KvCacheCreator.{METHOD} takes other parameters than self: {inspect.signature(method)}"
    host = locate()
    source = host.find(f"{UTIL}:KvCacheCreator") if host else None
    if source is None or SPECULATION not in source.names:
        return f"KvCacheCreator has no {SPECULATION}"

    @functools.wraps(method)
    def without_stamp(self: Any) -> Any:
        config = method(self)
        return uncharged(config) if _is_ours(getattr(self, SPECULATION), config) else config

    without_stamp._trtllm_dspark = True  # type: ignore[attr-defined]
    setattr(creator, METHOD, without_stamp)
    return None


def is_quantised(draft_config: Any) -> bool:
    """Whether the target's KV cache is quantised: its stamp is on the draft's config."""
    return getattr(getattr(draft_config, "quant_config", None), "kv_cache_quant_algo", None) is not None


def uncharged(model_config: Any) -> Any:
    """A copy of a model config whose KV cache is of the model's own dtype."""
    quant = copy.copy(model_config.quant_config)
    for name in CACHED:
        quant.__dict__.pop(name, None)
    quant.kv_cache_quant_algo = None
    plain = copy.copy(model_config)
    object.__setattr__(plain, "quant_config", quant)  # the host freezes its configs
    return plain


def _is_ours(spec_config: Any, draft_config: Any) -> bool:
    from trtllm_dspark.plugin.builder import is_standalone_mla

    return spec_config.spec_dec_mode.is_dspark() and is_standalone_mla(spec_config, draft_config)
