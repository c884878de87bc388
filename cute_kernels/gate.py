"""The compile gate: every kernel and configuration, for every architecture, without a GPU.

Reads the object code that would run: registers, stack (a spill lives there), static shared memory from the cubin; dynamic
shared memory from the launch; what the assembler says (spills, serialised wgmma) where the compiler passes it on.

    python -m cute_kernels.gate              check, print the table
    python -m cute_kernels.gate --write      also put the table into cute_kernels/README.md
"""

import argparse
import importlib
import os
import pkgutil
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cute_kernels
from cute_kernels.arch import ARCHES
from cute_kernels.errors import one_line
from cute_kernels.processes import in_processes

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- registers: begin (python -m cute_kernels.gate --write) -->", "<!-- registers: end -->"
FRAME = {
    "arch",
    "bench",
    "cache",
    "errors",
    "gate",
    "prebuild",
    "processes",
    "reference",
    "support",
}  # modules that hold no kernel
Compile = Callable[[str, str], Any]
"""(architecture, more options of the compiler) -> the compiler's object."""

REGISTERS, FRAME_SIZE, MIN_STACK_SIZE = 0x2F, 0x11, 0x12  # attributes in the .nv.info section of a cubin
ELF_WIDE_FORMAT = 4  # an attribute with a two-byte size and a value; the others carry two bytes


@dataclass(frozen=True)
class Entry:
    """One kernel of a compiled object. Sizes in bytes; `shared` is what the object code declares itself."""

    name: str
    registers: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Report:
    """What one configuration became on one architecture.

    Attributes:
        label: the configuration. arch: as in `arch.ARCHES`. entries: its kernels.
        dynamic: largest dynamic shared memory of its launches, bytes; None where it could not be read.
        assembler: what ptxas said; None where nothing could be made to say it.
        wgmma: whether it issues warpgroup matrix products. error: why it did not compile. seconds: to compile.
    """

    label: str
    arch: str
    entries: tuple[Entry, ...] = ()
    dynamic: int | None = None
    assembler: str | None = None
    wgmma: bool = False
    error: str | None = None
    seconds: float = field(default=0.0, compare=False)

    def registers(self) -> int:
        """Of the kernel that takes most."""
        return max(entry.registers for entry in self.entries)

    def shared(self) -> int | None:
        """Of the kernel that takes most, static and dynamic, bytes."""
        return None if self.dynamic is None else max(entry.shared for entry in self.entries) + self.dynamic

    def problems(self) -> list[str]:
        """Everything that fails the gate, a sentence each."""
        where = f"{self.label} on {self.arch}"
        if self.error is not None:
            return [f"{where}: does not compile: {self.error}"]
        if not self.entries:
            return [f"{where}: the object code holds no kernel"]
        found = [
            f"{where}: {entry.name[:40]} keeps {entry.stack} bytes of its registers in local memory"
            for entry in self.entries
            if entry.stack
        ]
        limit, shared = ARCHES[self.arch].shared_bytes, self.shared()
        if shared is None:
            found.append(f"{where}: its dynamic shared memory cannot be read from the launch")
        elif shared > limit:
            found.append(f"{where}: asks for {shared} bytes of shared memory, the part has {limit}")
        return found + [f"{where}: {line}" for line in complaints(self.assembler or "")]


def complaints(assembler: str) -> list[str]:
    """What ptxas said that must not be: spills, serialised wgmma (C7510, or C7512 where registers are too few)."""
    spills = [
        f"{stores} bytes of spill stores, {loads} of spill loads"
        for stores, loads in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembler)
        if int(stores) or int(loads)
    ]
    return spills + [line.strip() for line in assembler.splitlines() if "instructions are serialized" in line]


def read_cubin(data: bytes) -> tuple[Entry, ...]:
    """The kernels of a cubin, from its ELF sections."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]

    def text(offset: int) -> str:
        return data[offset : data.index(b"\0", offset)].decode()

    by_name = {text(sections[names][4] + section[0]): section for section in sections}
    symbols, strings = by_name[".symtab"], by_name[".strtab"]
    facts: dict[int, dict[int, int]] = {}  # symbol -> attribute -> value
    start, end = by_name[".nv.info"][4], by_name[".nv.info"][4] + by_name[".nv.info"][5]
    while start < end:
        layout, attribute, length = struct.unpack_from("<BBH", data, start)
        if layout != ELF_WIDE_FORMAT:
            start += 4
            continue
        if length == 8:
            symbol, value = struct.unpack_from("<II", data, start + 4)
            facts.setdefault(symbol, {})[attribute] = value
        start += 4 + length
    found = []
    for symbol, values in facts.items():
        if REGISTERS in values:
            name = text(strings[4] + struct.unpack_from("<I", data, symbols[4] + 24 * symbol)[0])
            shared = by_name.get(f".nv.shared.{name}")
            stack = max(values.get(FRAME_SIZE, 0), values.get(MIN_STACK_SIZE, 0))
            found.append(Entry(name, values[REGISTERS], stack, shared[5] if shared else 0))
    return tuple(sorted(found, key=lambda entry: entry.name))


def read_dynamic_shared(module: str) -> int | None:
    """Largest dynamic shared memory among the launches of a lowered host module, bytes.

    The third field of a launch's configuration. None where there is no launch, or where one stores no constant.
    """
    largest: int | None = None
    for function in module.split("llvm.func "):
        constants = {name: int(value) for name, value in re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", function)}
        fields = re.findall(
            r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
            r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>",
            function,
        )
        for name in fields:
            stored = re.search(rf"llvm\.store (%\w+), {name} : i64", function)
            if stored is None:
                continue  # a read of the field
            if stored[1] not in constants:
                return None
            largest = max(largest or 0, constants[stored[1]])
    return largest


def kernels() -> Iterator[tuple[str, Compile, tuple[str, ...]]]:
    """(label, compile, architectures) of every configuration, from the `gate_configs()` of every kernel's module.

    A module gives (label, compile), or (label, compile, architectures) where it is not for all of them.
    """
    for module in sorted(info.name for info in pkgutil.iter_modules(cute_kernels.__path__)):
        if module in FRAME:
            continue
        listed = getattr(importlib.import_module(f"cute_kernels.{module}"), "gate_configs", None)
        for label, compile, *arches in listed() if listed else ():
            yield label, compile, tuple(arches[0]) if arches else tuple(ARCHES)


def inspect(label: str, compile: Compile, arch: str) -> Report:
    """Compile one configuration for one architecture and read what came out."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options, remarks = f"--keep-ptx --keep-cubin --dump-dir {folder}", Path(folder, "remarks")
        if _remarks_are_known():
            options += f" --remark-filter ptxas --remark-output {remarks}"
        try:
            built = compile(arch, options)
        except Exception as error:
            return Report(label, arch, error=one_line(error))
        entries = [entry for cubin in Path(folder).rglob("*.cubin") for entry in read_cubin(cubin.read_bytes())]
        sources = list(Path(folder).rglob("*.ptx"))
        assembler = remarks.read_text() if remarks.exists() else _ptxas(sources, arch)
        return Report(
            label,
            arch,
            entries=tuple(entries),
            dynamic=read_dynamic_shared(str(built.ir_module)),
            assembler=assembler,
            wgmma=any("wgmma" in source.read_text() for source in sources),
            seconds=time.perf_counter() - start,
        )


def run(arches: Iterable[str] | None = None, only: str = "", jobs: int | None = None) -> list[Report]:
    """Compile everything.

    Args:
        arches: of `arch.ARCHES`, None for all. only: part of a label. jobs: processes; the compiler knows no threads.
    """
    wanted = set(ARCHES if arches is None else arches)
    tasks = [(label, arch) for label, _, covered in kernels() if only in label for arch in covered if arch in wanted]
    return in_processes(_inspect_named, tasks, jobs)


def _inspect_named(task: tuple[str, str]) -> Report:
    compile = next(compile for label, compile, _ in kernels() if label == task[0])
    return inspect(task[0], compile, task[1])


def table(reports: Iterable[Report]) -> str:
    """Registers, and shared memory in KB, of every configuration on every architecture, as Markdown."""
    rows: dict[str, dict[str, str]] = {}
    for report in reports:
        rows.setdefault(report.label, {})[report.arch] = (
            f"{report.registers()} / {(report.shared() or 0) / 1024:.1f}" if report.entries else "fails"
        )
    lines = [
        f"Registers a thread / KB of shared memory a block; nvidia-cutlass-dsl {compiler_version()}, no spill, no stack.",
        "",
        f"| kernel and configuration | {' | '.join(ARCHES)} |",
        f"|--|{'--|' * len(ARCHES)}",
    ]
    lines += [f"| {label} | {' | '.join(cells.get(arch, '') for arch in ARCHES)} |" for label, cells in rows.items()]
    return "\n".join(lines)


def compiler_version() -> str | None:
    """Of nvidia-cutlass-dsl, None where it is not installed."""
    try:
        return version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        return None


def table_in_readme() -> str:
    """What README.md holds between the two marks."""
    text = README.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def write_readme(reports: Iterable[Report]) -> None:
    """Put the table of these reports between the two marks of README.md."""
    text = README.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text(f"{head}\n{table(reports)}\n{tail}")


def _remarks_are_known() -> bool:
    """Whether this compiler can write the assembler's words to a file."""
    from cutlass.base_dsl import compiler

    return getattr(getattr(compiler, "RemarkOutput", None), "_cli_flag", None) == "remark-output"


def _ptxas(sources: list[Path], arch: str) -> str | None:
    """What a ptxas on the PATH says about kept PTX; another version than the one inside the compiler."""
    tool = shutil.which("ptxas")
    if tool is None:
        return None
    command = [tool, "-v", f"-arch={arch}", "-o", os.devnull]
    return "".join(subprocess.run([*command, str(source)], capture_output=True, text=True).stderr for source in sources)


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 where the gate fails."""
    parser = argparse.ArgumentParser(prog="python -m cute_kernels.gate", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    parser.add_argument("--arch", action="append", choices=list(ARCHES), help="only this one; may come again")
    parser.add_argument("--only", default="", help="configurations whose label contains this")
    chosen = parser.parse_args(arguments)
    if chosen.write and (chosen.arch or chosen.only):
        parser.error("--write needs the whole table: leave out --arch and --only")
    start = time.perf_counter()
    reports = run(chosen.arch, chosen.only)
    problems = [problem for report in reports for problem in report.problems()]
    print(table(reports))
    unheard = sum(report.assembler is None and report.wgmma for report in reports)
    print(f"\n{len(reports)} compiled in {time.perf_counter() - start:.0f} s, {len(problems)} problems", end="")
    print(f"; serialised wgmma could not be seen in {unheard}: put ptxas on the PATH" if unheard else "")
    for problem in problems:
        print(problem)
    if chosen.write and not problems:
        write_readme(reports)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
