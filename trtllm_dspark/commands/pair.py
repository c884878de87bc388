"""The target and the draft that a command runs on: the paths given, or the tiny pair of the examples."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.loading import DraftOptions, load_drafter
from trtllm_dspark.engine.target import HuggingFaceTarget
from trtllm_dspark.errors import DSparkError

SMALL = 100_000_000  # parameters of a target below which more CPU threads wait for each other longer than they work
EXAMPLES = Path(__file__).parents[2] / "examples"


def tiny_pair(part: str) -> Path:
    """The folder of the tiny pair's target or draft, which lie in the project's checkout."""
    folder = EXAMPLES / "tiny_pair" / part
    if not folder.is_dir():
        raise DSparkError(
            f"tiny pair: {folder} is required where no --{part} is given, it does not exist. "
            f"Pass --{part} DIR, or run from a clone of the project."
        )
    return folder


@dataclass(frozen=True)
class Pair:
    """Engines over one target. plain: without speculation. spec: with the drafter, None for --no-spec."""

    target: HuggingFaceTarget
    plain: Engine
    spec: Engine | None
    num_drafts: int
    target_path: Path
    draft_path: Path | None
    notes: tuple[str, ...]


def load_pair(arguments: argparse.Namespace, *, speculate: bool = True, max_batch: int = 1) -> Pair:
    """Load what the common arguments name."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    device = _device(arguments.device)
    if arguments.dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else None
    else:
        dtype = getattr(torch, arguments.dtype)
    target_path = Path(arguments.target or tiny_pair("target"))
    target = HuggingFaceTarget.from_pretrained(target_path, device=device, dtype=dtype)
    threads = arguments.threads or (1 if device.type == "cpu" and target.num_parameters < SMALL else None)
    if threads is not None:
        torch.set_num_threads(threads)
    plain = Engine(target, max_batch=max_batch)
    if not speculate:
        return Pair(target, plain, None, 0, target_path, None, ())
    draft_path = Path(arguments.draft or tiny_pair("draft"))
    options = DraftOptions(
        num_drafts=arguments.num_drafts,
        attention_backend=arguments.attention_backend,
        pool_tokens=arguments.pool_tokens,
        page_size=arguments.page_size,
        dtype=None if arguments.draft_dtype is None else getattr(torch, arguments.draft_dtype),
        rope_theta=arguments.rope_theta,
        aux_stream=arguments.aux_stream,
    )
    loaded = load_drafter(draft_path, target, options)
    spec = Engine(target, loaded.drafter, num_drafts=loaded.num_drafts, max_batch=max_batch)
    return Pair(target, plain, spec, loaded.num_drafts, target_path, draft_path, loaded.notes)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise DSparkError(f"--device: a CUDA device is required for {name}, torch sees none. Use --device cpu.")
    return torch.device(name)


def encode(pair: Pair, text: str) -> list[int]:
    """Token ids of a prompt, as the target's tokenizer makes them."""
    if pair.target.tokenizer is None:
        raise DSparkError(f"prompt: a tokenizer is required, {pair.target_path} has none. Add tokenizer.json to the folder.")
    return pair.target.tokenizer(text, verbose=False).input_ids
