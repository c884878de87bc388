"""`trtllm-dspark inspect`: what a draft checkpoint is, what it costs, and what is wrong with it. Reads headers only."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.attention.policy import BACKENDS, FAMILIES
from trtllm_dspark.checkpoint import DraftCheckpoint
from trtllm_dspark.commands.pair import tiny_pair
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.pool import bytes_per_token
from trtllm_dspark.model.rope import rotary_multiplier, softmax_scale

MIB = 2**20


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 2 where the checkpoint has problems."""
    path = Path(arguments.draft_folder or tiny_pair("draft"))
    report = inspect_draft(path)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _show(Console(highlight=False, soft_wrap=True), report)
    return 2 if report["problems"] else 0


def inspect_draft(path: Path) -> dict[str, Any]:
    """Everything that config.json and the safetensors headers say. `path`: a folder, or a file with config.json beside it."""
    checkpoint = DraftCheckpoint.open(path)
    config = DraftConfig.from_pretrained(path if path.is_dir() else path.parent, require_block_size=False)
    problems = checkpoint.problems(config)
    own_embedding = "embed_tokens.weight" in checkpoint.tensors
    dtype = getattr(torch, config.dtype)
    return {
        "path": str(path),
        "family": config.family,
        "architecture": config.architecture,
        "geometry": config.model_dump(mode="json", exclude={"notes", "family", "architecture"}, exclude_none=True),
        "softmax_scale": softmax_scale(config),
        "rotary_multiplier": rotary_multiplier(config.rope),
        "tensors": len(checkpoint.tensors),
        "parameters": checkpoint.num_parameters,
        "tensor_bytes": checkpoint.nbytes,
        "bytes_per_token": bytes_per_token(config, dtype),
        "shared": {
            "lm_head": "target's",  # also where the file has one: see the notes
            "embed_tokens": "own" if own_embedding else "target's",
        },
        "backends": {
            device: {
                name: BACKENDS[name].reason(config, torch.device(device), DraftShape.of(config)) or "available"
                for name in FAMILIES[config.family].choices
            }
            for device in ("cpu", "cuda")
        },
        "notes": [*config.notes, *checkpoint.notes(config)],
        "problems": problems,
    }


def _show(console: Console, report: dict[str, Any]) -> None:
    geometry = report["geometry"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("draft", report["path"])
    table.add_row("family", f"{report['family']} ({report['architecture']}, {geometry['model_type']})")
    heads = f"{geometry['num_heads']} heads"
    if report["family"] == "mla":
        heads += f", latent {geometry['kv_lora_rank']} + {geometry['qk_rope_head_dim']}"
    else:
        heads += f" over {geometry['num_kv_heads']} of {geometry['head_dim']}"
    table.add_row("geometry", f"{geometry['num_layers']} layers, hidden {geometry['hidden_size']}, {heads}")
    block = geometry.get("block_size")
    table.add_row("block", f"{block} rows" if block else "not in config.json: the server's max_draft_len decides")
    table.add_row("taps", f"{', '.join(map(str, geometry['target_layer_ids']))} ({geometry['aux_stream']} stream)")
    rope = geometry["rope"]
    kind = f"{rope['rope_type']}, theta {rope['theta']:g}, factor {rope['factor']:g}"
    table.add_row("rope", f"{kind}, cos and sin x {report['rotary_multiplier']:.6g}")
    table.add_row("softmax scale", f"{report['softmax_scale']:.7f}")
    table.add_row(
        "heads", f"Markov rank {geometry['markov_rank']}, confidence {'on' if geometry['confidence_head'] else 'off'}"
    )
    table.add_row("tensors", f"{report['tensors']}, {report['parameters']:,} values, {report['tensor_bytes'] / MIB:,.1f} MiB")
    table.add_row("draft KV", f"{report['bytes_per_token']:,} bytes a token ({geometry['dtype']})")
    table.add_row("lm_head", report["shared"]["lm_head"])
    table.add_row("embed_tokens", report["shared"]["embed_tokens"])
    console.print(table)
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False)
    for problem in report["problems"]:
        console.print(f"problem: {problem}", markup=False)
    if not report["problems"]:
        console.print("no problems found")
