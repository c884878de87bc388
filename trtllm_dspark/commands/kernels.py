"""`trtllm-dspark kernels build`: compile a drafter's kernels ahead of time, for parts that need not be here."""

import argparse
import time
from pathlib import Path

from rich.console import Console

from cute_kernels import prebuild
from cute_kernels.errors import KernelError
from cute_kernels.few_row_linear import Product
from cute_kernels.prebuild import Deployment
from trtllm_dspark.attention.operations import normalised
from trtllm_dspark.attention.products import multiplied
from trtllm_dspark.commands.pair import tiny_pair
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError, UnsupportedError

TP_SIZES = (1, 2, 4, 8, 16)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    console, start = Console(highlight=False), time.perf_counter()
    config = DraftConfig.from_pretrained(Path(arguments.draft or tiny_pair("draft")), require_block_size=False)
    if config.kv_lora_rank is None or config.qk_rope_head_dim is None:
        raise UnsupportedError(f"kernels build: an MLA draft is required, {config.architecture} is {config.family}.")
    dtype = arguments.dtype or config.dtype
    deployment = Deployment(
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        normalised(config),
        _products(config),
        _page_sizes(arguments.page_size),
        dtype,
        config.markov_rank,
        base=(dtype, "float32"),
    )
    arches = [name.strip() for name in arguments.arch.split(",") if name.strip()]
    try:
        objects = prebuild.build(deployment, arches, Path(arguments.out), arguments.jobs)
    except KernelError as error:
        raise DSparkError(str(error)) from error
    size = sum(path.stat().st_size for path in objects) / 2**20
    console.print(f"{len(objects)} kernels for {', '.join(arches)} in {arguments.out}, {size:.1f} MiB")
    console.print(f"[dim]{time.perf_counter() - start:.0f} s. To use them: CUTE_KERNELS_AOT_DIR={arguments.out}[/dim]")
    return 0


def _products(config: DraftConfig) -> tuple[Product, ...]:
    """Of a rank, for every tensor-parallel size that divides heads and MLP."""
    sizes = [size for size in TP_SIZES if config.num_heads % size == 0 and config.intermediate_size % size == 0]
    return tuple(dict.fromkeys(product for size in sizes for product in multiplied(config, config.num_heads // size)))


def _page_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise DSparkError(f"kernels build: --page-size must be numbers such as 32,64, it is {text!r}.") from error
