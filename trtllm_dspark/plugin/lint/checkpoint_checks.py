"""Checks of a file against the checkpoints that it names, where they are folders on this machine.

TensorRT-LLM fills the draft's facts from `<speculative_model>/config.json` while it validates the file, and wants
`block_size` to equal `max_draft_len` (tensorrt_llm/llmapi/llm_args.py at 0004396). It does not look at the tensors.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint import DraftCheckpoint
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin.lint.deployment import Deployment
from trtllm_dspark.plugin.lint.finding import Finding

LATER = "its config against max_draft_len, every tensor against its config, and its taps against the target's depth"


def draft_is_at_hand(server: Deployment) -> Iterator[Finding]:
    """Says what was not checked, and when it will be."""
    if not server.dspark or server.draft is not None:
        return
    path, line, key = server.draft_path, server.line(*server.draft_key), ".".join(map(str, server.draft_key))
    if path is None:
        yield Finding(
            "warning",
            line,
            key,
            "no speculative_model: TensorRT-LLM looks for a draft inside the target's checkpoint, which this package leaves "
            "to it. Kimi-K3 has none there.",
            "Set speculative_model to the folder of the draft.",
        )
    elif Path(path).exists():
        yield Finding("error", line, key, f"a folder is required, {path} is a file.", "Give the folder that holds it.")
    elif _is_hub_id(path):
        yield Finding(
            "warning",
            line,
            key,
            f"{path} is no folder on this machine: taken as a Hugging Face id, which appears only at run time. Nothing of "
            f"the draft was checked. At start-up the plugin checks {LATER}. TensorRT-LLM itself fills taps, mask id and block "
            "size from a local folder only.",
            "Download it and give the folder; `trtllm-dspark doctor --config` then checks it before the start.",
        )
    else:
        yield Finding(
            "note",
            line,
            key,
            f"{path} is not on this machine, so nothing of the draft was checked. At start-up the plugin checks {LATER}.",
            "Run this where the folder is mounted to check it before the start.",
        )


def draft_is_readable(server: Deployment) -> Iterator[Finding]:
    """config.json says what the draft is, and the tensors are all there."""
    line, key = server.line(*server.draft_key), ".".join(map(str, server.draft_key))
    if server.dspark and isinstance(server.draft, DSparkError):
        yield Finding("error", line, key, str(server.draft), "Correct the checkpoint, or name another.")
    if not isinstance(server.draft, DraftConfig) or not server.dspark:
        return
    if server.draft.family != "mla":
        yield Finding(
            "note", line, key, f"a {server.draft.family} draft: TensorRT-LLM's own drafter serves it, not this package."
        )
        return
    assert server.draft_path is not None
    try:
        problems = DraftCheckpoint.open(server.draft_path).problems(server.draft)
    except DSparkError as error:
        problems = [str(error)]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        fix = f"`trtllm-dspark inspect {server.draft_path}` lists them all."
        yield Finding("error", line, key, f"the checkpoint is not whole: {problems[0].rstrip('.')}{more}.", fix)


def draft_length_is_the_blocks(server: Deployment) -> Iterator[Finding]:
    """K against the block that the checkpoint was trained with."""
    draft, drafts = server.draft, server.num_drafts
    if not server.dspark or not isinstance(draft, DraftConfig) or drafts is None:
        return
    line, key = server.line("speculative_config", "max_draft_len"), "speculative_config.max_draft_len"
    if draft.block_size is None:
        yield Finding("note", line, key, f"the checkpoint names no block_size: max_draft_len {drafts} is taken as its block.")
        return
    try:
        draft.check_num_drafts(drafts)
    except DSparkError as error:
        yield Finding("error", line, key, str(error))
        return
    if drafts != draft.block_size:
        yield Finding(
            "error",
            line,
            key,
            f"TensorRT-LLM requires max_draft_len to equal the checkpoint's block_size {draft.block_size}, {drafts} came.",
            f"Set it to {draft.block_size}.",
        )


def overrides_agree(server: Deployment) -> Iterator[Finding]:
    """Facts of the checkpoint that the file repeats."""
    if not server.dspark or not isinstance(server.draft, DraftConfig):
        return
    for key in ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "block_size"):
        came = server.get("speculative_config", key)
        is_there = getattr(server.draft, key)
        is_there = list(is_there) if isinstance(is_there, tuple) else is_there
        if came is not None and is_there is not None and came != is_there:
            yield Finding(
                "error",
                server.line("speculative_config", key),
                f"speculative_config.{key}",
                f"the checkpoint says {is_there}, {came} came.",
                "Remove it: TensorRT-LLM reads it from the checkpoint.",
            )


def decoding_type_is_the_drafts(server: Deployment) -> Iterator[Finding]:
    """An MLA DSpark draft under another decoding_type dies late, or runs without its heads."""
    kind = server.get("speculative_config", "decoding_type")
    if not server.dspark and isinstance(server.draft, DraftConfig) and server.draft.family == "mla":
        yield Finding(
            "error",
            server.line("speculative_config", "decoding_type"),
            "speculative_config.decoding_type",
            f"DSpark is required for {server.draft_path} ({server.draft.architecture}), {kind} came.",
            "Set decoding_type to DSpark.",
        )


def taps_are_in_the_target(server: Deployment) -> Iterator[Finding]:
    """Hidden size, vocabulary and the tapped layers against the target's own config."""
    model = server.get("model")
    if not server.dspark or not isinstance(server.draft, DraftConfig) or not isinstance(model, str):
        return
    config = _target_config(Path(model))
    if config is None:
        return
    try:
        server.draft.check_target(
            hidden_size=config["hidden_size"], vocab_size=config["vocab_size"], num_layers=config["num_hidden_layers"]
        )
    except DSparkError as error:
        yield Finding("error", server.line("model"), "model", str(error))


def _target_config(folder: Path) -> Mapping[str, Any] | None:
    """The language model's part of a target's config.json; None where it is not here or lacks what is compared."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        known = all(type(config[key]) is int for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return config if known else None


def _is_hub_id(path: str) -> bool:
    """owner/name, as the Hugging Face hub spells it."""
    parts = path.split("/")
    return len(parts) == 2 and all(parts) and not path.startswith((".", "~"))


CHECKPOINT_CHECKS: tuple[Callable[[Deployment], Iterator[Finding]], ...] = (
    draft_is_at_hand,
    draft_is_readable,
    draft_length_is_the_blocks,
    overrides_agree,
    decoding_type_is_the_drafts,
    taps_are_in_the_target,
)
