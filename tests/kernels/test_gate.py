"""The compile gate: every kernel for every architecture without a GPU, the table in the README, and faults that it must see."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import planted
import pytest

from cute_kernels import gate
from cute_kernels.arch import ARCHES
from cute_kernels.support import toolkit_reason

needs_compiler = pytest.mark.skipif(toolkit_reason() is not None, reason=f"compiler: {toolkit_reason()}")


@pytest.fixture(scope="module")
def reports() -> list[gate.Report]:
    return gate.run()


@needs_compiler
def test_every_kernel_compiles_for_every_architecture(reports: list[gate.Report]) -> None:
    problems = [problem for report in reports for problem in report.problems()]
    assert not problems, "\n".join(problems)


@needs_compiler
def test_nothing_is_left_out(reports: list[gate.Report]) -> None:
    seen = {(report.label.split()[0], report.arch) for report in reports}
    assert seen >= {(kernel, arch) for kernel in ("context_append", "query_rope", "markov_chain") for arch in ARCHES}
    assert len({(report.label, report.arch) for report in reports}) == len(reports)  # a label finds its configuration
    assert all(report.entries and report.registers() > 8 and report.shared() is not None for report in reports)
    unheard = [report.label for report in reports if report.wgmma and report.assembler is None]
    assert not unheard, f"serialised wgmma cannot be seen in {unheard}: put ptxas on the PATH"


@needs_compiler
def test_the_readme_has_the_current_table(reports: list[gate.Report]) -> None:
    written = gate.table_in_readme()
    version = re.search(r"nvidia-cutlass-dsl ([\d.]+)", written)
    assert version
    if version[1] != gate.compiler_version():
        pytest.skip(f"compiler: the table is of nvidia-cutlass-dsl {version[1]}, this is {gate.compiler_version()}")
    assert written == gate.table(reports), "python -m cute_kernels.gate --write"


@needs_compiler
@pytest.mark.parametrize(
    ("fault", "arch", "message"),
    [
        (planted.too_much_shared_memory, "sm_90a", r"asks for 24\d{4} bytes of shared memory, the part has 232448"),
        (planted.too_much_shared_memory, "sm_80", r"asks for 240000 bytes of shared memory, the part has 166912"),
        (planted.as_much_as_the_part_has, "sm_86", r"asks for 160000 bytes of shared memory, the part has 101376"),
        (planted.spilling, "sm_90a", r"keeps \d+ bytes of its registers in local memory"),
        (planted.spilling, "sm_80", r"keeps \d+ bytes of its registers in local memory"),
        (planted.serialised, "sm_90a", r"\(C7512\) .*instructions are serialized due to insufficient register resources"),
        (planted.wrong, "sm_90a", r"does not compile: .*no_such_thing"),
    ],
)
def test_control_a_planted_fault_is_seen(fault: Callable[[str, str], Any], arch: str, message: str) -> None:
    problems = gate.inspect("planted", fault, arch).problems()
    assert problems and all(problem.startswith(f"planted on {arch}: ") for problem in problems)
    assert any(re.search(message, problem) for problem in problems), problems


@needs_compiler
def test_control_a_kernel_that_fits_passes() -> None:
    report = gate.inspect("planted", planted.as_much_as_the_part_has, "sm_80")
    assert report.problems() == [] and report.shared() == 160_000


@needs_compiler
def test_control_the_command_fails_on_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gate, "kernels", lambda: iter([("planted", planted.spilling, ("sm_90a",))]))
    monkeypatch.setattr(gate, "write_readme", lambda reports: pytest.fail("a failing table was written"))
    assert gate.main(["--write"]) == 1 and "local memory" in capsys.readouterr().out


def test_a_spill_and_a_serialised_wgmma_are_heard() -> None:
    quiet = "ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 168 registers"
    assert gate.complaints(quiet) == []
    spill = quiet.replace("0 bytes spill loads", "24 bytes spill loads")
    assert gate.complaints(spill) == ["0 bytes of spill stores, 24 of spill loads"]
    serialised = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    assert gate.complaints(f"{quiet}\n{serialised}") == [serialised]
    crowded = serialised.replace("C7510", "C7512").replace("...", "insufficient register resources for the function 'x'")
    assert gate.complaints(f"{quiet}\n{crowded}") == [crowded]
    injected = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 4 by compiler to allow use of registers"
    assert gate.complaints(f"{quiet}\n{injected}") == []


def test_a_report_without_what_it_should_hold_fails() -> None:
    sound = gate.Report("x", "sm_90a", entries=(gate.Entry("kernel", 32, 0, 1024),), dynamic=231_424)
    assert sound.problems() == [] and sound.shared() == 232_448
    assert "asks for 232449 bytes" in replace(sound, dynamic=231_425).problems()[0]
    assert "cannot be read" in replace(sound, dynamic=None).problems()[0]
    assert "holds no kernel" in replace(sound, entries=()).problems()[0]
    assert "8 bytes of its registers" in replace(sound, entries=(gate.Entry("kernel", 32, 8, 0),)).problems()[0]


def test_shared_memory_that_is_no_constant_is_not_taken_for_none() -> None:
    struct = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    launch = (
        "llvm.func @a() {{\n %1 = llvm.mlir.constant(5000 : i64) : i64\n"
        f" %16 = llvm.getelementptr %10[0, 2] : (!llvm.ptr) -> !llvm.ptr, {struct}\n"
        " llvm.store {}, %16 : i64, !llvm.ptr\n}}"
    )
    assert gate.read_dynamic_shared(launch.format("%1")) == 5000
    assert gate.read_dynamic_shared(launch.format("%1") + launch.format("%1").replace("5000", "6000")) == 6000
    assert gate.read_dynamic_shared(launch.format("%arg0")) is None
    assert gate.read_dynamic_shared("llvm.func @a() {}") is None


def test_a_kernel_says_which_architectures_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("module", (), {"gate_configs": staticmethod(lambda: [("all", print), ("one", print, ("sm_90a",))])})
    monkeypatch.setattr(gate.importlib, "import_module", lambda name: module if name.endswith("query_rope") else None)
    assert [(label, arches) for label, _, arches in gate.kernels()] == [("all", tuple(ARCHES)), ("one", ("sm_90a",))]
