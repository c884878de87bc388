"""Which attention backend a deployment asks for, in words of ours.

Hosts before their own MLA drafter cannot say AUTO: their key takes VANILLA or TRTLLM and defaults to VANILLA. There
VANILLA stands for AUTO. TRTLLMs are asked for by name and stay what they are.
"""

import logging
from typing import Any, get_args

from trtllm_dspark.plugin import settings

log = logging.getLogger("trtllm_dspark.plugin")


def asked(spec_config: Any) -> str:
    """The host's own word: what its stock worker compares with the drafter's."""
    return str(getattr(spec_config, "attention_backend", None) or "AUTO")


def requested(spec_config: Any) -> str:
    """AUTO or a backend's name: TRTLLM_DSPARK_ATTENTION_BACKEND, else the serving YAML's, read as above."""
    word, override = asked(spec_config), settings.read(settings.ATTENTION_BACKEND)
    if override:
        log.info("attention backend %s, from %s", override, settings.ATTENTION_BACKEND.name)
        return override
    if word == "VANILLA" and "AUTO" not in offered(type(spec_config)):
        log.info(
            "attention_backend VANILLA is this host's default and stands for AUTO; %s asks for one",
            settings.ATTENTION_BACKEND.name,
        )
        return "AUTO"
    return word


def offered(config_class: type) -> tuple[str, ...]:
    """The words that the host's config class takes; () where it does not say."""
    field = getattr(config_class, "model_fields", {}).get("attention_backend")
    return tuple(word for word in get_args(getattr(field, "annotation", None)) if isinstance(word, str))
