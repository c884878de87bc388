"""Kernels compiled ahead of time, for architectures that need not be here: a folder that CUTE_KERNELS_AOT_DIR may name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels import add_rms_norm, cache, context_append, few_row_linear, markov_chain, query_rope
from cute_kernels.arch import ARCHES
from cute_kernels.block_attention.config import BlockAttentionConfig, candidates
from cute_kernels.block_attention.kernels import every
from cute_kernels.errors import KernelError
from cute_kernels.few_row_linear.config import COLUMNS, HOPPER_MULTIPROCESSORS, Product
from cute_kernels.processes import in_processes
from cute_kernels.support import toolkit_reason

SCRATCH_PAGE = 16  # of the rows that a drafter appends to no pool: its block's own


@dataclass(frozen=True)
class Deployment:
    """What decides which kernels a drafter calls.

    Attributes:
        latent: c. rotary: r. norms: (width, whether a residual is added) of every norm but the latents' own.
        products: what few rows are multiplied by. page_sizes: P, each that may be served. dtype: bfloat16 or float16.
        markov_rank: R, 0 for none. base: dtypes of the logits that the chain may be given.
    """

    latent: int
    rotary: int
    norms: tuple[tuple[int, bool], ...]
    products: tuple[Product, ...]
    page_sizes: tuple[int, ...]
    dtype: str
    markov_rank: int
    base: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One compilation: the kernel's name and settings as its launch looks them up, and what compiles it."""

    kernel: str
    config: Any
    compile: Callable[..., Any]

    def build(self, arch: str) -> Any:
        """The compiler's object."""
        return self.compile(self.config, arch)


def tasks(deployment: Deployment, arch: str) -> list[Task]:
    """Everything that a drafter of this deployment may launch on an architecture."""
    c, r, dtype, rank = deployment.latent, deployment.rotary, deployment.dtype, deployment.markov_rank
    found = [
        Task(query_rope.NAME, query_rope.QueryRopeConfig(r, dtype), query_rope.compile_for),
    ]
    for size, residual in deployment.norms:
        norm = add_rms_norm.AddRMSNormConfig(size, dtype, residual)
        found.append(Task(add_rms_norm.NAME, norm, add_rms_norm.compile_for))
    if arch == few_row_linear.ARCH:
        linears = (
            few_row_linear.config_for(columns, product, dtype, multiprocessors)
            for product in deployment.products
            if product.reason() is None
            for multiprocessors in HOPPER_MULTIPROCESSORS
            for columns in COLUMNS
        )
        found += [Task(few_row_linear.NAME, linear, few_row_linear.compile_for) for linear in dict.fromkeys(linears)]
    attentions = [BlockAttentionConfig(c, r, page_size, dtype) for page_size in deployment.page_sizes]
    launched = [kernel for a in attentions for schedule in candidates(a, arch) for kernel in every(a, schedule)]
    found += {(k.name, k.config): Task(k.name, k.config, k.compile) for k in launched}.values()
    for page_size in sorted({*deployment.page_sizes, SCRATCH_PAGE}):
        append = context_append.ContextAppendConfig(c, r, page_size, dtype)
        found.append(Task(context_append.NAME, append, context_append.compile_for))
    for base in deployment.base if rank else ():
        chains = [markov_chain.MarkovChainConfig(rank, n, base, dtype, codes=True) for n in markov_chain.GROUPS]
        if arch == markov_chain.SM90_ARCH:
            hopper = (markov_chain.sm90_config(rank, batch, base, dtype, True) for batch in markov_chain.SM90_BATCHES)
            chains += dict.fromkeys(chain for chain in hopper if chain is not None)
        found += [Task(markov_chain.NAME, chain, markov_chain.compile_for) for chain in chains]
    return found


def build(deployment: Deployment, arches: Iterable[str], folder: Path, jobs: int | None = None) -> list[Path]:
    """Compile all of a deployment's kernels into a folder; those that it holds already are left as they are.

    Args:
        arches: of `arch.ARCHES`. folder: made where there is none. jobs: processes; None is one a core, at most 8.
    Returns:
        the object files, in order.
    Raises:
        KernelError: an unknown architecture, a missing toolkit, or a kernel that does not compile, named.
    """
    arches = list(arches)
    unknown = [arch for arch in arches if arch not in ARCHES]
    if unknown or not arches:
        came = f"{', '.join(unknown)} came" if unknown else "none came"
        raise KernelError(f"cute_kernels: architectures must be among {', '.join(ARCHES)}; {came}. Choose from these.")
    why = toolkit_reason()
    if why is not None:
        raise KernelError(f"cute_kernels: the compiler is required to build kernels; {why}.")
    for task in (task for arch in arches for task in tasks(deployment, arch)):
        why = task.config.reason() if hasattr(task.config, "reason") else None
        if why is not None:
            raise KernelError(f"cute_kernels: {task.kernel} cannot be built; {why}. Change the deployment.")
    folder.mkdir(parents=True, exist_ok=True)
    work = [(task, arch, folder) for arch in arches for task in tasks(deployment, arch)]
    return in_processes(_build_one, work, jobs)


def _build_one(item: tuple[Task, str, Path]) -> Path:
    task, arch, folder = item
    return cache.build_into(folder, task.kernel, task.config, arch, lambda: task.build(arch))
