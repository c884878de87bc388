"""Compiled kernels, kept in memory and on disk, so that none is ever compiled twice or inside a serving step.

A key is the SHA-256 of every source file of this package, the versions of the compiler and of the launch ABI, the
architecture and the kernel's configuration. A disk entry is an object file beside a small JSON that names it; one that
cannot be loaded is moved aside and compiled again. Processes that want the same entry wait for one of them.

    CUTE_KERNELS_CACHE_DIR   where entries lie; default ~/.cache/cute_kernels
    CUTE_KERNELS_NO_CACHE=1  neither read nor write the disk
    CUTE_KERNELS_AOT_DIR     a folder of prebuilt entries, looked at first
"""

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cute_kernels.errors import KernelError, one_line

log = logging.getLogger(__name__)
FUNCTION = "kernel"  # the symbol in every object file

_memory: dict[tuple[str, Any, str], Callable[..., Any]] = {}  # what a key adds cannot change within a process


def cache_dir() -> Path:
    """Where disk entries lie."""
    given = os.environ.get("CUTE_KERNELS_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cache" / "cute_kernels"


def disk_is_used() -> bool:
    """False where CUTE_KERNELS_NO_CACHE is set to anything but 0."""
    return os.environ.get("CUTE_KERNELS_NO_CACHE", "0") in ("", "0")


@lru_cache(maxsize=1)
def source_digest() -> str:
    """SHA-256 over every source file of this package but those that only measure, names included."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(set(root.rglob("*.py")) - set((root / "bench").rglob("*.py"))):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str | None]:
    """Of everything that an object file depends on; Python is not among it."""
    found: dict[str, str | None] = {}
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def key_of(kernel: str, config: Any, arch: str) -> str:
    """Name of an entry: the kernel, then a digest of all that it depends on.

    Args:
        kernel: its name. config: a frozen dataclass, or None. arch: as in `arch.ARCHES`.
    """
    settings = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    facts = {"kernel": kernel, "config": settings, "arch": arch, "source": source_digest(), "versions": versions()}
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{kernel}-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def compiled(kernel: str, config: Any, arch: str, build: Callable[[], Any]) -> Callable[..., Any]:
    """The launchable function of a kernel, from memory, disk, or the compiler, in this order.

    Args:
        kernel, config, arch: see `key_of`. build: compiles it; returns the compiler's object, launchable and exportable.
    Raises:
        KernelError: the compiler fails; names the kernel, its configuration and the architecture.
    """
    held = (kernel, config, arch)
    if held not in _memory:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"cute_kernels: {kernel} must be compiled before a CUDA graph is captured, it is met first inside a capture. "
                "Call it once beforehand with the same configuration."
            )
        _memory[held] = _find_or_build(kernel, config, arch, build)
    return _memory[held]


def _find_or_build(kernel: str, config: Any, arch: str, build: Callable[[], Any]) -> Callable[..., Any]:
    key, folder = key_of(kernel, config, arch), cache_dir()
    for readable in _readable_folders():
        loaded = _load(readable, key)
        if loaded is not None:
            return loaded
    if not disk_is_used():
        return _build(kernel, config, arch, build)
    fresh = None
    try:
        with _locked(folder, key):
            loaded = _load(folder, key)  # somebody else may have built it meanwhile
            if loaded is None:
                fresh = _build(kernel, config, arch, build)
                store(folder, key, fresh, {"kernel": kernel, "config": str(config), "arch": arch, **versions()})
                loaded = _load(folder, key)
    except OSError as error:
        log.warning("kernel cache: %s cannot be used (%s); %s stays in memory", folder, error, key)
        loaded = None
    if loaded is not None:
        return loaded
    return _build(kernel, config, arch, build) if fresh is None else fresh


def build_into(folder: Path, kernel: str, config: Any, arch: str, build: Callable[[], Any]) -> Path:
    """Compile into a folder of prebuilt entries, unless it holds this one already. Returns the object file."""
    key = key_of(kernel, config, arch)
    with _locked(folder, key):
        if _load(folder, key) is None:
            built = _build(kernel, config, arch, build)
            store(folder, key, built, {"kernel": kernel, "config": str(config), "arch": arch, **versions()})
    return folder / f"{key}.o"


def store(folder: Path, key: str, built: Any, facts: dict[str, Any]) -> None:
    """Write an entry: object file and JSON, each complete or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{key}.{os.getpid()}.o"
    built.export_to_c(str(part), function_name=FUNCTION)
    facts = {**facts, "sha256": hashlib.sha256(part.read_bytes()).hexdigest(), "built": int(time.time())}
    os.replace(part, folder / f"{key}.o")
    text = folder / f".{key}.{os.getpid()}.json"
    text.write_text(json.dumps(facts, indent=1))
    os.replace(text, folder / f"{key}.json")


def forget_memory() -> None:
    """Drop what this process holds; the disk keeps its entries."""
    _memory.clear()
    source_digest.cache_clear()


def _readable_folders() -> list[Path]:
    prebuilt = os.environ.get("CUTE_KERNELS_AOT_DIR")
    folders = [Path(prebuilt)] if prebuilt else []
    return [*folders, cache_dir()] if disk_is_used() else folders


def _build(kernel: str, config: Any, arch: str, build: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    try:
        built = build()
    except Exception as error:
        raise KernelError(
            f"cute_kernels: {kernel} must compile for {arch}, with {config} it does not: {one_line(error)} "
            "Report this with the versions of nvidia-cutlass-dsl and apache-tvm-ffi."
        ) from error
    log.info("compiled %s for %s in %.1f s", kernel, arch, time.perf_counter() - start)
    return built


def _load(folder: Path, key: str) -> Callable[..., Any] | None:
    """An entry's function, or None; an entry that is damaged is moved aside and said."""
    binary, facts = folder / f"{key}.o", folder / f"{key}.json"
    if not (binary.is_file() and facts.is_file()):
        return None
    try:
        expected = json.loads(facts.read_text())["sha256"]
        if hashlib.sha256(binary.read_bytes()).hexdigest() != expected:
            raise ValueError("its digest differs from the one it was stored with")
        from cutlass.cute.runtime import load_module

        return load_module(str(binary), enable_tvm_ffi=True)[FUNCTION]
    except FileNotFoundError:  # another process moved it aside meanwhile
        return None
    except Exception as error:
        log.warning("kernel cache: %s cannot be used (%s); moved to %s/quarantine and compiled again", key, error, folder)
        _move_aside(folder, (binary, facts))
        return None


def _move_aside(folder: Path, paths: tuple[Path, ...]) -> None:
    try:
        (folder / "quarantine").mkdir(exist_ok=True)
        for path in paths:
            if path.exists():
                os.replace(path, folder / "quarantine" / f"{path.name}.{time.time_ns()}")
    except OSError as error:
        log.warning("kernel cache: a damaged entry stays in %s (%s)", folder, error)


@contextmanager
def _locked(folder: Path, key: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{key}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
