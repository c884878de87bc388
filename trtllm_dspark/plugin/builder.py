"""The builder that TensorRT-LLM calls for decoding_type DSpark: ours for a standalone MLA draft, the host's for all else."""

import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_dspark.errors import DSparkError, UnsupportedError
from trtllm_dspark.plugin.hooks import INTERFACE
from trtllm_dspark.plugin.probing import PACKAGE, locate

if TYPE_CHECKING:
    import torch

    from trtllm_dspark.config import DraftConfig

log = logging.getLogger("trtllm_dspark.plugin")

WHO = "DSpark builder"
HOST_MODULE = f"{PACKAGE}._torch.models.modeling_dspark"
AUX_STREAM = "KIMI_K3_AUX_ATTN_RES_STREAM"  # read by the host's Kimi-K3 target; 1, its default: the attention residual

_earlier: Callable[..., Any] | None = None


def remember(builder: Callable[..., Any] | None) -> None:
    """Another extension's builder that ours takes the place of: it still gets every draft that is not ours."""
    global _earlier
    outside = builder is not None and not getattr(builder, "__module__", "").startswith(f"{PACKAGE}.")
    _earlier = builder if outside and builder is not build_draft else _earlier


def build_draft(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
    """The draft model of a target. Registered for SpeculativeDecodingMode.DSPARK; the host's arguments and order.

    Args:
        model_config: of the target, with its spec_config. draft_config: of the draft, None where it is in the target's
            checkpoint. lm_head, model: the target's; for other builders.
    Raises:
        DSparkError: whatever is wrong with the checkpoint or cannot be served on this host.
    """
    spec_config = model_config.spec_config
    if is_standalone_mla(spec_config, draft_config):
        return _ours(model_config, draft_config)
    return (_earlier or host_builder())(model_config, draft_config, lm_head, model)


def is_standalone_mla(spec_config: Any, draft_config: Any) -> bool:
    """Whether a draft has its own checkpoint and latent attention, as the host itself tells."""
    if draft_config is None or getattr(spec_config, "draft_is_embedded_in_target", False):
        return False
    return bool(getattr(draft_config.pretrained_config, "kv_lora_rank", None))


def host_builder() -> Callable[..., Any]:
    """The host's own builder for DSPARK. Its module is imported here: at registration that would close a circle."""
    mode = importlib.import_module(f"{PACKAGE}.{INTERFACE}").SpeculativeDecodingMode.DSPARK
    module = importlib.import_module(HOST_MODULE)
    for value in vars(module).values():
        if callable(value) and mode in getattr(value, "_registered_spec_modes", ()):
            return value
    raise DSparkError(
        f"{WHO}: {HOST_MODULE} must have a builder registered for DSPARK, it has none; this draft is not a standalone MLA one "
        "and is the host's to build. Set TRTLLM_DSPARK_DISABLE=1 and report it."
    )


def _ours(model_config: Any, draft_config: Any) -> Any:
    from trtllm_dspark.config import DraftConfig
    from trtllm_dspark.plugin import backend_choice, kv_charge
    from trtllm_dspark.plugin.drafter import HostedMLADSpark, HostTensorParallel, host_device
    from trtllm_dspark.plugin.faults import diagnose

    spec_config, mapping = model_config.spec_config, model_config.mapping
    config = DraftConfig.from_pretrained(_folder(spec_config, draft_config), max_draft_len=spec_config.max_draft_len)
    config.check_num_drafts(spec_config.max_draft_len)
    _check_target(config, model_config)
    _check_parallel(mapping)
    if kv_charge.is_quantised(draft_config) and (why := kv_charge.ensure()) is not None:
        raise DSparkError(
            f"{WHO}: with a quantised target KV cache the draft pool must be charged at the draft's dtype, and {why}. "
            "Set kv_cache_config.dtype: auto, or upgrade tensorrt_llm."
        )
    host = locate()
    assert host is not None, "a builder that the host calls has a host"
    drafter = HostedMLADSpark.empty(
        config,
        device=host_device(),
        dtype=_dtype(draft_config, config),
        attention_backend=backend_choice.requested(spec_config),
        tp=HostTensorParallel.of(mapping),
    )
    drafter.eval().requires_grad_(False)
    drafter.asked_backend = backend_choice.asked(spec_config)
    drafter.fixes = frozenset(d.fix.name for d in diagnose(host) if d.present)
    _say(drafter, spec_config)
    return drafter


def _folder(spec_config: Any, draft_config: Any) -> Path:
    named = (spec_config.speculative_model, getattr(draft_config.pretrained_config, "_name_or_path", None))
    found = next((Path(path) for path in named if path and Path(path).is_dir()), None)
    if found is None:
        raise DSparkError(
            f"{WHO}: a draft checkpoint folder on this machine is required, speculative_model is {named[0]!r}. "
            "Download it and give its folder, on every rank."
        )
    return found


def _check_target(config: "DraftConfig", model_config: Any) -> None:
    target = model_config.pretrained_config
    target = getattr(target, "text_config", None) or target
    config.check_target(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_hidden_layers)
    wanted = getattr(model_config.spec_config, "target_layer_ids", None)
    if wanted is not None and tuple(sorted(wanted)) != config.target_layer_ids:
        raise DSparkError(
            f"{WHO}: target_layer_ids must be the checkpoint's {list(config.target_layer_ids)}, came {list(wanted)}. "
            "Remove the key from speculative_config."
        )
    stream = "attn_res" if os.environ.get(AUX_STREAM, "1") == "1" else "prefix"
    if stream != config.aux_stream and getattr(target, "model_type", "").startswith("kimi"):
        log.warning(
            "the draft was trained on the %s stream of the target and is given %s: set %s=%d before the first import",
            config.aux_stream,
            stream,
            AUX_STREAM,
            config.aux_stream == "attn_res",
        )


def _check_parallel(mapping: Any) -> None:
    for name, what in (("cp_size", "context parallelism"), ("pp_size", "pipeline parallelism")):
        size = int(getattr(mapping, name, 1) or 1)
        if size > 1:
            raise UnsupportedError(f"{WHO}: {what} of 1 is required with this draft, {name} is {size}. Use tensor parallelism.")


def _dtype(draft_config: Any, config: "DraftConfig") -> "torch.dtype":
    """What the host allocates the draft's pool at: its own reading of the draft's dtype."""
    import torch

    pretrained = draft_config.pretrained_config
    found = getattr(pretrained, "torch_dtype", None) or getattr(pretrained, "dtype", None) or config.dtype
    return found if isinstance(found, torch.dtype) else getattr(torch, str(found))


def _say(drafter: Any, spec_config: Any) -> None:
    """One line with every setting that two deployments may differ in."""
    from trtllm_dspark.context.pool import bytes_per_token

    config, dtype = drafter.config, drafter.fc.weight.dtype
    settings = {
        "draft": config.architecture,
        "layout": "anchor-first" if config.sample_from_anchor else "fill-in",
        "block": config.block_size,
        "max_draft_len": spec_config.max_draft_len,
        "taps": ",".join(map(str, config.target_layer_ids)),
        "rope": f"{config.rope.rope_type}:{config.rope.theta:g}:{config.rope.factor:g}",
        "markov_rank": config.markov_rank,
        "aux_stream": config.aux_stream,
        "backend": drafter.backend.name,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes_per_token": bytes_per_token(config, dtype),
        "tp": drafter.tp.size,
        "fixes": len(drafter.fixes),
    }
    log.info("DSpark draft: %s", " ".join(f"{name}={value}" for name, value in settings.items()))
    for line in (str(drafter.backend), *config.notes):
        log.info("%s", line)
