"""`trtllm-dspark budget`: how many tokens fit a rank, beside the other kind of draft and a charge at the wrong dtype.

Reads headers only, allocates nothing.
"""

import argparse
import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trtllm_dspark.budget import (
    DTYPES,
    GIB,
    PUBLISHED,
    CacheCost,
    Deployment,
    Fit,
    WrongCharge,
    bytes_of_gib,
    check_charge,
    draft_cost,
    draft_layout,
    dtype_name,
    dtype_of,
    fit,
    fit_host,
    in_bytes,
    wrong_charge,
)
from trtllm_dspark.checkpoint import DraftCheckpoint
from trtllm_dspark.commands.pair import tiny_pair
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError

BAR = 56  # cells of the longest bar
STATE, TARGET, DRAFT, OVER = "▒", "█", "░", "!"
COLOURS = {"state": "#9a9a9a", "target KV": "#2f6f9f", "draft KV": "#e0a030", "over": "#c03030"}


@dataclass(frozen=True)
class Arm:
    """One way to spend the total. fit: None where it does not fit, `problem` says why. wrong: for a wrong charge."""

    name: str
    draft: CacheCost
    fit: Fit | None
    problem: str = ""
    wrong: WrongCharge | None = None

    @property
    def parts(self) -> tuple[int, int, int]:
        """Bytes that its tokens really take: the target's state, the target's KV, the draft's KV."""
        if self.fit is None:
            return 0, 0, 0
        real = self.draft if self.wrong is None else self.wrong.real
        fixed = self.fit.target.bytes_fixed
        return fixed, self.fit.target_bytes - fixed, real.at(self.fit.tokens)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    path = Path(arguments.draft or tiny_pair("draft"))
    picture = None if arguments.plot is None else _picture_path(arguments.plot)
    deployment = Deployment(arguments.tp, arguments.attention_dp, arguments.ranks, arguments.page_size)
    target = CacheCost(arguments.target_bytes_per_token, bytes_of_gib("--target-state-gib", arguments.target_state_gib))
    total = arguments.total_bytes
    if total is None:
        total = bytes_of_gib("--total-gib", arguments.total_gib)
    config = read_draft(path)
    dtype = dtype_of(arguments.draft_dtype or config.dtype)
    arms = compare(config, dtype, deployment, target, total)
    main = arms[0].fit
    assert main is not None
    host = None
    if arguments.host_gib is not None:
        host = fit_host(bytes_of_gib("--host-gib", arguments.host_gib), target, arms[0].draft, page_size=deployment.page_size)
    if picture is not None:
        draw(picture, arms, total)
    if arguments.json:
        print(json.dumps(document(path, config, dtype, deployment, arms, host), indent=2))
    else:
        _show(Console(highlight=False, soft_wrap=True), path, config, dtype, deployment, arms, host)
        if picture is not None:
            print(f"written: {picture}")
    return 0


def read_draft(path: Path) -> DraftConfig:
    """The config of a whole checkpoint. `path`: a folder, or a file with config.json beside it. No tensor is read."""
    checkpoint = DraftCheckpoint.open(path)
    config = DraftConfig.from_pretrained(path if path.is_dir() else path.parent, require_block_size=False)
    checkpoint.check(config)
    return config


def compare(config: DraftConfig, dtype: torch.dtype, deployment: Deployment, target: CacheCost, total: int) -> list[Arm]:
    """This draft; the published draft of the other family at the same dtype; this draft charged at a wrong dtype.

    Raises:
        DSparkError: this draft does not fit. An alternative that does not is an arm that says so.
    """
    page_size = deployment.page_size
    cost = draft_cost(config, dtype, deployment)
    check_charge(cost.bytes_per_token, draft_layout(config, dtype, deployment))
    arms = [Arm(f"{config.family.upper()}, this draft", cost, fit(total, target, cost, page_size=page_size))]

    other = "gqa" if config.family == "mla" else "mla"
    other_cost = draft_cost(PUBLISHED[other], dtype, deployment)
    name = f"{other.upper()}, as published"
    try:
        arms.append(Arm(name, other_cost, fit(total, target, other_cost, page_size=page_size)))
    except DSparkError as error:
        arms.append(Arm(name, other_cost, None, problem=str(error)))

    wrong_dtype = DTYPES["float8_e4m3fn" if dtype.itemsize > 1 else "bfloat16"]
    charged = draft_cost(config, wrong_dtype, deployment)
    name = f"{config.family.upper()} charged {dtype_name(wrong_dtype).split('_')[0]}"
    try:
        wrong = wrong_charge(total, target, cost, charged.bytes_per_token, page_size=page_size)
        arms.append(Arm(name, charged, wrong.promised, wrong=wrong))
    except DSparkError as error:
        arms.append(Arm(name, charged, None, problem=str(error)))
    return arms


def document(
    path: Path, config: DraftConfig, dtype: torch.dtype, deployment: Deployment, arms: list[Arm], host: Fit | None
) -> dict[str, Any]:
    """What --json prints. Bytes and tokens are of one rank, but for `all_ranks`."""
    main = arms[0].fit
    assert main is not None
    return {
        "path": str(path),
        "family": config.family,
        "checkpoint_dtype": config.dtype,
        "draft_dtype": dtype_name(dtype),
        "total_bytes": main.total_bytes,
        "target_bytes_per_token": main.target.bytes_per_token,
        "target_state_bytes": main.target.bytes_fixed,
        **_figures(arms[0], deployment),
        "tp": deployment.tp_size,
        "attention_dp": deployment.attention_dp,
        "page_size": deployment.page_size,
        "host": None
        if host is None
        else {
            "tokens": host.tokens,
            "target_quota_bytes": host.target_quota,
            "draft_quota_bytes": host.draft_quota,
            "total_bytes": host.total_bytes,
        },
        "alternatives": [{"name": arm.name, **_figures(arm, deployment)} for arm in arms[1:]],
    }


def _figures(arm: Arm, deployment: Deployment) -> dict[str, Any]:
    common = {"draft_bytes_per_token": arm.draft.bytes_per_token, "ranks": deployment.num_ranks}
    if arm.fit is None:
        return {"tokens": 0, "target_bytes": 0, "draft_bytes": 0, **common, "problem": arm.problem}
    paged = arm.fit.whole_pages
    figures: dict[str, Any] = {
        "tokens": arm.fit.tokens,
        "target_bytes": arm.fit.target_bytes,
        "draft_bytes": arm.fit.draft_bytes,
        **common,
        "bytes_per_token": arm.fit.target.bytes_per_token + arm.draft.bytes_per_token,
        "target_gib": round(arm.fit.target_bytes / GIB, 6),
        "draft_gib": round(arm.fit.draft_bytes / GIB, 6),
        "unused_bytes": arm.fit.unused_bytes,
        "whole_pages": {
            "pages": paged.num_pages,
            "tokens": paged.tokens,
            "target_bytes": paged.target_bytes,
            "draft_bytes": paged.draft_bytes,
        },
        "all_ranks": {
            "tokens": arm.fit.tokens * deployment.num_token_sets,
            "target_bytes": arm.fit.target_bytes * deployment.num_ranks,
            "draft_bytes": arm.fit.draft_bytes * deployment.num_ranks,
        },
    }
    if arm.wrong is not None:
        figures["real_draft_bytes_per_token"] = arm.wrong.real.bytes_per_token
        figures["overcommit_bytes"] = arm.wrong.overcommit_bytes
        figures["draft_pool_tokens"] = arm.wrong.draft_pool_tokens
    return figures


def _show(
    console: Console,
    path: Path,
    config: DraftConfig,
    dtype: torch.dtype,
    deployment: Deployment,
    arms: list[Arm],
    host: Fit | None,
) -> None:
    main = arms[0].fit
    assert main is not None
    paged, ranks = main.whole_pages, deployment.num_ranks
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    stored = "" if config.dtype == dtype_name(dtype) else f", checkpoint in {config.dtype}"
    facts.add_row("draft", f"{path} ({config.family}, pool in {dtype_name(dtype)}{stored})")
    attention = ", attention-DP" if deployment.attention_dp else ""
    facts.add_row("deployment", f"{ranks} rank{'s' if ranks > 1 else ''}, tensor parallelism {deployment.tp_size}{attention}")
    facts.add_row("a rank's total", in_bytes(main.total_bytes))
    facts.add_row("tokens", f"{main.tokens:,} ({paged.tokens:,} in {paged.num_pages:,} whole pages of {main.page_size:,})")
    facts.add_row("target pool", in_bytes(main.target_bytes))
    if main.target.bytes_fixed:
        facts.add_row("  of it state", in_bytes(main.target.bytes_fixed))
    facts.add_row("draft pool", in_bytes(main.draft_bytes))
    facts.add_row("unused", f"{main.unused_bytes:,} bytes")
    if ranks > 1:
        facts.add_row(f"all {ranks} ranks", f"{main.tokens * deployment.num_token_sets:,} tokens")
        facts.add_row("  target pools", in_bytes(main.target_bytes * ranks))
        facts.add_row("  draft pools", in_bytes(main.draft_bytes * ranks))
    if host is not None:
        facts.add_row("host tier", f"{host.tokens:,} tokens")
        facts.add_row("  target's share", in_bytes(host.target_quota))
        facts.add_row("  draft's share", in_bytes(host.draft_quota))
    console.print(facts)
    console.print()
    console.print(_table(arms))
    console.print()
    for line in bars(arms, main.total_bytes):
        console.print(line, markup=False)
    for arm in arms:
        if arm.problem:
            console.print(f"{arm.name}: {arm.problem}", markup=False)
        if arm.wrong is not None and arm.fit is not None:
            console.print(f"{arm.name}: {_consequence(arm.wrong, main.tokens)}", markup=False)


def _table(arms: list[Arm]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("a rank")
    for column in ("tokens", "B/token", "target + draft", "target GiB", "draft GiB"):
        table.add_column(column, justify="right")
    for arm in arms:
        if arm.fit is None:
            table.add_row(arm.name, "does not fit")
            continue
        slope = arm.fit.target.bytes_per_token
        table.add_row(
            arm.name,
            f"{arm.fit.tokens:,}",
            f"{slope + arm.draft.bytes_per_token:,}",
            f"{slope:,} + {arm.draft.bytes_per_token:,}",
            f"{arm.fit.target_bytes / GIB:,.2f}",
            f"{arm.fit.draft_bytes / GIB:,.2f}",
        )
    return table


def _consequence(wrong: WrongCharge, tokens: int) -> str:
    promised = wrong.promised.tokens
    if wrong.overcommit_bytes:
        return (
            f"promises {promised:,} tokens, which take {in_bytes(wrong.overcommit_bytes)} more than there is; held to its "
            f"charge, the draft's pool is full at {wrong.draft_pool_tokens:,} tokens, {wrong.draft_pool_tokens / promised:.0%}"
        )
    return f"promises {promised:,} tokens, {tokens - promised:,} fewer than fit"


def bars(arms: list[Arm], total: int) -> list[str]:
    """One bar an arm, its memory to one scale: what it really takes, with whatever is past the total marked."""
    scale = max(total, *(sum(arm.parts) for arm in arms))
    limit = round(total * BAR / scale)
    width = max(len(arm.name) for arm in arms)
    lines = []
    for arm in arms:
        cells, at = "", 0
        for sign, part in zip((STATE, TARGET, DRAFT), arm.parts, strict=True):
            at += part
            cells += sign * (round(at * BAR / scale) - len(cells))
        if sum(arm.parts) > total:
            cells = cells[:limit] + OVER * max(1, len(cells) - limit)
        lines.append(f"{arm.name:<{width}}  {cells}".rstrip())
    over = f"   {OVER} past the total" if any(sum(arm.parts) > total for arm in arms) else ""
    return [*lines, f"{'':<{width}}  {STATE} state   {TARGET} target KV   {DRAFT} draft KV{over}"]


def _picture_path(name: str) -> Path:
    path = Path(name)
    if path.suffix.lower() != ".png" or not path.resolve().parent.is_dir():
        raise DSparkError(f"budget: --plot must be a .png file in a folder that exists, came {name}. Give such a path.")
    return path


def draw(path: Path, arms: list[Arm], total: int) -> None:
    """The same bars as a PNG. Raises `ImportError` with the pip line where matplotlib is not installed."""
    try:
        figure_module = import_module("matplotlib.figure")
    except ImportError:
        raise ImportError("budget: --plot needs matplotlib. Install it: pip install 'trtllm-dspark[plot]'.") from None
    figure = figure_module.Figure(figsize=(9, 0.9 + 0.7 * len(arms)), layout="constrained")
    axes = figure.subplots()
    for row, arm in enumerate(arms):
        left = 0.0
        for part, label in zip(arm.parts, ("state", "target KV", "draft KV"), strict=True):
            axes.barh(row, part / GIB, left=left, color=COLOURS[label], label=label if row == 0 else None)
            left += part / GIB
        tokens = "does not fit" if arm.fit is None else f"{arm.fit.tokens:,} tokens"
        axes.text(left, row, f" {tokens}", va="center", fontsize=9)
    axes.axvline(total / GIB, color=COLOURS["over"], linewidth=1.2, label=f"given: {total / GIB:.2f} GiB")
    axes.set_yticks(range(len(arms)), [f"{arm.name}\n{arm.draft.bytes_per_token:,} B a token" for arm in arms])
    axes.set_xlim(0, 1.25 * max(total, *(sum(arm.parts) for arm in arms)) / GIB)
    axes.set_xlabel("GiB of one rank that the tokens really take")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
