"""Block reuse: the host may match a prompt's prefix and skip it, and then no draft context of it is ever computed."""

import logging
from typing import Any

from trtllm_dspark.plugin.manager import DraftPages

log = logging.getLogger("trtllm_dspark.plugin")

# accept_len, teacher-forced multi-turn at temperature 0, measured in NVIDIA/TensorRT-LLM pull request 19040
COST = "2.21 instead of 2.87 over 522 turns of conversations"


def warn(pages: DraftPages, attn_metadata: Any) -> None:
    """Say it where matched prefixes come without their draft pages. Output does not change; drafts get worse."""
    target = getattr(attn_metadata, "kv_cache_manager", None)
    if getattr(target, "enable_block_reuse", False) and not pages.joint_reuse:
        log.warning(
            "block reuse is on and this host cannot include the drafter's pages in it: drafts behind a reused prefix do not "
            "see it (accept_len %s). Set kv_cache_config.enable_block_reuse: false, or upgrade tensorrt_llm.",
            COST,
        )
