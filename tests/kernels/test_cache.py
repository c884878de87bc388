"""The cache of compiled kernels: what a key depends on, who is asked in which order, and what happens to a damaged entry."""

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import cache
from cute_kernels.errors import KernelError
from cute_kernels.query_rope import NAME, QueryRopeConfig, compile_for
from cute_kernels.support import toolkit_reason

CONFIG, ARCH = QueryRopeConfig(64, "bfloat16"), "sm_90a"
needs_compiler = pytest.mark.skipif(toolkit_reason() is not None, reason=f"compiler: {toolkit_reason()}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that holds nothing."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUTE_KERNELS_NO_CACHE", "CUTE_KERNELS_AOT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache, "_memory", {})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def built() -> Any:
    return compile_for(CONFIG, ARCH)


@pytest.fixture
def build(built: Any) -> Callable[[], Any]:
    """Stands in for the compiler; `build.calls` counts."""

    def compile() -> Any:
        compile.calls += 1  # type: ignore[attr-defined]
        return built

    compile.calls = 0  # type: ignore[attr-defined]
    return compile


def get(build: Callable[[], Any]) -> Callable[..., Any]:
    return cache.compiled(NAME, CONFIG, ARCH, build)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def works(function: Callable[..., Any]) -> bool:
    """Whether it is the kernel: it names its arguments when it refuses those of a CPU."""
    q, angle = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 32)
    with pytest.raises(ValueError, match=r"mCos: Tensor.*expected device_type=cuda"):
        function(q, angle, angle, q)
    return True


# ------------------------------------------------------------------------------------------------------------------- key
def test_a_key_depends_on_all_that_the_object_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [cache.key_of(NAME, CONFIG, ARCH), cache.key_of("other", CONFIG, ARCH), cache.key_of(NAME, CONFIG, "sm_80")]
    keys += [cache.key_of(NAME, replace(CONFIG, rotary=128), ARCH), cache.key_of(NAME, None, ARCH)]
    now = cache.versions()
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "python"):
        with monkeypatch.context() as changed:
            changed.setattr(cache, "versions", lambda package=package: {**now, package: "0"})
            keys.append(cache.key_of(NAME, CONFIG, ARCH))
    with monkeypatch.context() as changed:
        changed.setattr(cache, "source_digest", lambda: "0")
        keys.append(cache.key_of(NAME, CONFIG, ARCH))
    assert len(set(keys)) == len(keys)
    assert cache.key_of(NAME, QueryRopeConfig(64, "bfloat16"), ARCH) == keys[0]
    assert keys[0].startswith("query_rope-sm_90a-")


def test_the_source_is_every_file_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "package" / "deeper").mkdir(parents=True)
    for name in ("a.py", "deeper/b.py"):
        (tmp_path / "package" / name).write_text("x = 1\n")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "package" / "cache.py"))

    def digest() -> str:
        cache.source_digest.cache_clear()
        return cache.source_digest()

    try:
        seen = [digest()]
        (tmp_path / "package" / "deeper" / "b.py").write_text("x = 2\n")
        seen.append(digest())
        (tmp_path / "package" / "a.py").rename(tmp_path / "package" / "c.py")
        seen.append(digest())
        (tmp_path / "package" / "notes.md").write_text("no source")
        assert len(set(seen)) == 3 and digest() == seen[-1]
    finally:
        cache.source_digest.cache_clear()


# ----------------------------------------------------------------------------------------------------------------- order
@needs_compiler
def test_n10_compiled_once_then_memory_then_disk(build: Any, folder: Path) -> None:
    """Fails where a compiled kernel is not kept for the process, or not for the next one."""
    first = get(build)
    assert get(build) is first and build.calls == 1
    assert [name.rsplit(".", 1)[1] for name in entries(folder)] == ["json", "o"]
    cache.forget_memory()
    assert works(get(build)) and build.calls == 1 and works(first)
    facts = json.loads(next(folder.glob("*.json")).read_text())
    assert facts["kernel"] == NAME and facts["arch"] == ARCH and "rotary=64" in facts["config"] and facts["nvidia-cutlass-dsl"]


@needs_compiler
def test_another_configuration_is_another_entry(build: Any, folder: Path) -> None:
    get(build)
    cache.compiled(NAME, replace(CONFIG, dtype="float16"), ARCH, build)
    cache.compiled(NAME, CONFIG, "sm_80", build)
    assert build.calls == 3 and len(list(folder.glob("*.o"))) == 3


@needs_compiler
def test_the_disk_can_be_left_alone(build: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(build)
    before = entries(folder)
    cache.forget_memory()
    monkeypatch.setenv("CUTE_KERNELS_NO_CACHE", "1")
    get(build)
    cache.compiled(NAME, CONFIG, "sm_80", build)
    assert build.calls == 3 and entries(folder) == before
    assert get(build) is get(build) and build.calls == 3  # memory is not the disk


@needs_compiler
def test_prebuilt_entries_come_first(build: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt = tmp_path / "prebuilt"
    cache.store(prebuilt, cache.key_of(NAME, CONFIG, ARCH), build(), {"kernel": NAME})
    monkeypatch.setenv("CUTE_KERNELS_AOT_DIR", str(prebuilt))
    assert works(get(build)) and build.calls == 1 and not folder.exists()
    cache.forget_memory()
    monkeypatch.setenv("CUTE_KERNELS_NO_CACHE", "1")  # they are no cache
    assert works(get(build)) and build.calls == 1
    cache.compiled(NAME, CONFIG, "sm_80", build)  # what is not among them is compiled
    assert build.calls == 2


@needs_compiler
def test_a_folder_that_cannot_be_written_is_said_and_survived(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        assert get(build) is get(build)
    assert build.calls == 1 and "stays in memory" in caplog.text


# --------------------------------------------------------------------------------------------------------------- damage
@needs_compiler
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "facts", "no object file"])
def test_a_damaged_entry_is_moved_aside_and_built_again(
    damage: str, build: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    get(build)
    binary, facts = next(folder.glob("*.o")), next(folder.glob("*.json"))
    data = binary.read_bytes()
    if damage == "facts":
        facts.write_text("{")
    elif damage == "no object file":  # and a digest that agrees
        binary.write_bytes(b"nothing to load")
        facts.write_text(json.dumps({"sha256": hashlib.sha256(b"nothing to load").hexdigest()}))
    else:
        changed = {"flipped": data[:500] + bytes([data[500] ^ 1]) + data[501:], "truncated": data[:-9], "empty": b""}
        binary.write_bytes(changed[damage])
    cache.forget_memory()
    with caplog.at_level(logging.WARNING):
        assert works(get(build))
    assert build.calls == 2 and "compiled again" in caplog.text
    assert len(list((folder / "quarantine").iterdir())) == 2
    cache.forget_memory()
    assert works(get(build)) and build.calls == 2


@needs_compiler
def test_half_an_entry_is_none(build: Any, folder: Path) -> None:
    get(build)
    next(folder.glob("*.json")).unlink()
    cache.forget_memory()
    assert works(get(build)) and build.calls == 2 and not (folder / "quarantine").exists()


# ------------------------------------------------------------------------------------------------------------- processes
RACE = """
import os, sys, time
from pathlib import Path
from cute_kernels import cache
from cute_kernels.query_rope import NAME, QueryRopeConfig, compile_for
log, config = Path(sys.argv[1]), QueryRopeConfig(64, "bfloat16")
def build():
    with log.open("a") as file:
        file.write("built\\n")
    made = compile_for(config, "sm_90a")
    time.sleep(0.5)
    return made
import cutlass.cute
log.with_suffix(f".{os.getpid()}").touch()
deadline = time.time() + 60
while len(list(log.parent.glob("log.*"))) < 3 and time.time() < deadline:
    time.sleep(0.01)
print(type(cache.compiled(NAME, config, "sm_90a", build)).__name__)
"""


@needs_compiler
def test_n17_processes_that_want_the_same_build_it_once(folder: Path, tmp_path: Path) -> None:
    """Fails where processes that start together compile the same kernel twice, or one of them reads half of a file."""
    log = tmp_path / "race" / "log"
    log.parent.mkdir()
    log.with_suffix(".here").touch()
    root = str(Path(cache.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-c", RACE, str(log)]
    racers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [racer.communicate(timeout=120)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0] and outputs == ["Function"] * 2
    assert log.read_text() == "built\n"
    assert len(entries(folder)) == 2


# ---------------------------------------------------------------------------------------------------------------- errors
def test_a_failing_compile_names_kernel_configuration_and_architecture(folder: Path) -> None:
    def fail() -> Any:
        raise RuntimeError("\n\x1b[91merror[X]:\x1b[0m out of registers\nmore")

    with pytest.raises(KernelError, match=r"query_rope must compile for sm_90a, with .*rotary=64.*: error\[X\]: out of reg"):
        get(fail)
    assert not cache._memory and not list(folder.glob("*.o"))


def test_n09_a_kernel_first_met_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Fails where a kernel is compiled, or loaded for the first time, while a CUDA graph is being captured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match=r"query_rope must be compiled before a CUDA graph is captured"):
        get(lambda: pytest.fail("compiled inside a capture"))
    assert not folder.exists()
    cache._memory[NAME, CONFIG, ARCH] = works  # met before: no question
    assert get(lambda: None) is works
