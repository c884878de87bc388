"""`trtllm-dspark doctor`: what this package does to the TensorRT-LLM of this machine, or what is wrong with a serving YAML.

Without `--config` it looks the host up, symbol by symbol, and changes nothing. With it the file alone is checked, and
tensorrt_llm is not imported. Exit code 0: fine. 2: something would fail. 3: no TensorRT-LLM that takes the drafter.
"""

import argparse
import json
import site
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trtllm_dspark.attention.policy import resolve_backend
from trtllm_dspark.config import DraftConfig, RopeConfig
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin import Outcome, autoload, probe, probing, settings
from trtllm_dspark.plugin.hooks import HOOKS, MINIMUM, UPSTREAM
from trtllm_dspark.plugin.lint import Report, lint_file
from trtllm_dspark.plugin.lint.schema import is_too_old, range_of, schema

PTH = "trtllm_dspark.pth"
OUTCOMES = {
    "active": "`decoding_type: DSpark` with an MLA checkpoint constructs this package's drafter.",
    "native": "`decoding_type: DSpark` with an MLA checkpoint constructs TensorRT-LLM's own drafter.",
    "refused": "TensorRT-LLM runs as if this package were not installed.",
    "disabled": "TensorRT-LLM runs as if this package were not installed.",
    "absent": "No serving on this machine; the other commands work.",
}
KIMI_K3 = DraftConfig(  # Inferact/Kimi-K3-DSpark's shape, for AUTO's answer where no draft is at hand
    family="mla",
    architecture="K3DSparkModel",
    model_type="k3_dspark",
    hidden_size=7168,
    intermediate_size=14336,
    num_layers=5,
    num_heads=64,
    num_kv_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=163840,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        rope_type="yarn",
        theta=50000.0,
        factor=32.0,
        original_max_position_embeddings=32768,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    target_layer_ids=(2, 23, 47, 71, 89),
    target_hidden_size=7168,
    target_num_layers=93,
    mask_token_id=163837,
    block_size=7,
    markov_rank=256,
    confidence_head=True,
    confidence_with_markov=True,
    confidence_bias=True,
    aux_stream="attn_res",
)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    report = examine(arguments.config)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _show(Console(highlight=False, soft_wrap=True), report)
    return report["exit_code"]


def examine(config: str | Path | None = None) -> dict[str, Any]:
    """Everything the command says, as plain JSON values. `config`: a serving YAML; None: the host is looked at instead."""
    was_watching = autoload.uninstall()  # looking at the host must not register in it
    try:
        return _examine(config, was_watching)
    finally:
        if was_watching:
            autoload.install()


def _examine(config: str | Path | None, watching: bool) -> dict[str, Any]:
    lint = outcome = None
    host = probing.locate()
    version = host.version if host is not None else None
    if config is not None:
        lint = lint_file(config, version)
    else:
        outcome = probe()
        version = outcome.host_version
    attention = _attention(lint.draft if lint is not None else None)
    report: dict[str, Any] = {
        "host": {"version": version, "minimum": MINIMUM, "place": None if host is None else str(host.root)},
        "outcome": None if outcome is None else {**asdict(outcome), "would_happen": OUTCOMES[outcome.state]},
        "autoload": _autoload(watching),
        "device": _device(),
        "attention": attention,
        "settings": {setting.name: _value(setting) for setting in settings.SETTINGS},
        "config": None if lint is None else {**lint.as_dict(), "host": _lint_host(version)},
    }
    report["exit_code"] = _exit_code(lint, outcome, version, attention["backend"])
    return report


def _exit_code(lint: Report | None, outcome: Outcome | None, version: str | None, backend: str | None) -> int:
    if lint is not None and lint.errors:
        return 2
    if lint is not None and version is not None and is_too_old(version):
        return 3
    if outcome is not None and outcome.state in ("absent", "refused"):
        return 3
    ours = version is not None if outcome is None else outcome.state == "active"
    return 2 if ours and backend is None else 0  # a machine that serves, with no backend for the draft


def _lint_host(version: str | None) -> str:
    """Which record of the keys the file was held against."""
    if version is None:
        labels = [entry["label"] for entry in schema()["ranges"]]
        return f"tensorrt_llm is not installed here: held against every recorded range ({'; '.join(labels)})."
    if is_too_old(version):
        return f"TensorRT-LLM {version} is older than {MINIMUM} and has no standalone DSpark; held against all later ones."
    found = range_of(version)
    against = found["label"] if found is not None else "of every recorded range"
    return f"held against TensorRT-LLM {against}; {version} is installed, and was not imported."


def _autoload(watching: bool) -> dict[str, Any]:
    """Will every process of this environment register by itself?"""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    pth = next((str(path) for folder in folders if (path := Path(folder) / PTH).is_file()), None)
    if watching:
        says = "every Python of this environment registers when it imports TensorRT-LLM"
    elif pth is not None and _value(settings.DISABLE) == "1":
        says = f"installed, and off by {settings.DISABLE.name}"
    elif pth is not None:
        says = "installed, and was not run by this interpreter: was it started with -S?"
    else:
        says = (
            "not installed: an editable install, --target and PYTHONPATH have no .pth. Install the wheel, or import "
            "trtllm_dspark.plugin and call register() in every process"
        )
    return {"watching": watching, "pth": pth, "says": says}


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "cpu", "capability": None, "count": 0}
    major, minor = torch.cuda.get_device_capability()
    return {"name": torch.cuda.get_device_name(), "capability": f"sm_{major}{minor}", "count": torch.cuda.device_count()}


def _attention(draft: DraftConfig | None) -> dict[str, Any]:
    """What AUTO, or the backend asked for by the environment, comes to on this device."""
    requested = _value(settings.ATTENTION_BACKEND) or "AUTO"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {
        "requested": requested,
        "draft": "the file's draft" if draft else "a draft of Kimi-K3's published shape",
    }
    try:
        choice = resolve_backend(draft or KIMI_K3, device, requested, owner="doctor")
    except DSparkError as error:
        return {**found, "backend": None, "passed_over": [], "reason": str(error)}
    return {
        **found,
        "backend": choice.name,
        "passed_over": [list(pair) for pair in choice.passed_over],
        "reason": str(choice).removeprefix("attention backend "),
    }


def _value(setting: settings.Setting) -> str:
    try:
        return settings.read(setting)
    except DSparkError as error:
        return str(error)


def _show(console: Console, report: dict[str, Any]) -> None:
    if report["config"] is None:
        _show_host(console, report)
    else:
        _show_config(console, report["config"], report["exit_code"])
    table = _plain_table()
    device, attention = report["device"], report["attention"]
    table.add_row(
        "device", device["name"] + (f", {device['capability']}, {device['count']} seen" if device["capability"] else "")
    )
    table.add_row("attention", f"{attention['reason']}, for {attention['draft']}, {attention['requested']} asked")
    table.add_row(".pth hook", report["autoload"]["says"] + ".")
    for name, value in report["settings"].items():
        table.add_row(name, value or "not set")
    console.print(table)
    if report["config"] is None:
        console.print(f"{report['outcome']['state']}: {report['outcome']['would_happen']}", markup=False)


def _show_host(console: Console, report: dict[str, Any]) -> None:
    outcome = report["outcome"]
    table = _plain_table()
    table.add_row("TensorRT-LLM", f"{outcome['host_version'] or 'none'} {report['host']['place'] or ''}".strip())
    table.add_row("state", outcome["state"])
    table.add_row("reason", outcome["reason"])
    if outcome["remedy"]:
        table.add_row("remedy", outcome["remedy"])
    console.print(table)
    if not outcome["hooks"]:
        return
    for hook in outcome["hooks"]:
        console.print(f"{hook['verdict']:<12}  {hook['name']}  ({hook['symbol']})", markup=False)
        console.print(f"{'':<12}  {hook['detail']}", style="dim", markup=False)
    names = {hook["name"] for hook in outcome["hooks"]}
    read = sorted({hook.reference for hook in HOOKS if hook.name in names})
    console.print(f"recorded from {UPSTREAM}: {'; '.join(read)}", style="dim", markup=False)


def _show_config(console: Console, config: dict[str, Any], exit_code: int) -> None:
    for finding in config["findings"]:
        where = f"{config['file']}:{finding['line']}"
        text = " ".join(part for part in (finding["message"], finding["fix"]) if part)
        console.print(f"{where}: {finding['severity']}: {finding['key']}: {text}".replace(": : ", ": "), markup=False)
    counts = {name: sum(f["severity"] == name for f in config["findings"]) for name in ("error", "warning", "note")}
    said = ", ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in counts.items())
    roles = ", ".join(config["roles"]) or "no server"
    console.print(f"{config['file']}: {roles}; {said}", style="bold red" if exit_code else "bold green", markup=False)
    console.print(config["host"], style="dim", markup=False)


def _plain_table() -> Table:
    return Table(show_header=False, box=None, padding=(0, 2, 0, 0))
