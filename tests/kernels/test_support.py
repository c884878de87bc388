"""What runs where, and that asking costs nothing: no compiler, no driver, no launch."""

import subprocess
import sys

import pytest
import torch

from cute_kernels import support
from cute_kernels.arch import ARCHES, arch_of
from cute_kernels.errors import KernelError, UnsupportedKernelError, one_line


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")],
)
def test_every_part_has_its_target(capability: tuple[int, int], name: str) -> None:
    assert arch_of(capability).name == name and set(ARCHES) >= {name}


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (10, 3), (12, 1), (13, 0)])
def test_n14_a_part_without_a_target_is_refused_by_name(capability: tuple[int, int]) -> None:
    """Fails where a part is taken for its neighbour: sm_103 and sm_121 run no code of sm_100a and sm_120a."""
    with pytest.raises(UnsupportedKernelError, match=f"this one is sm_{capability[0]}{capability[1]}"):
        arch_of(capability)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> object:
    """Says which capability torch reports."""

    def report(capability: tuple[int, int]) -> torch.device:
        support.device_reason.cache_clear()
        support.arch_name.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda", 0)

    yield report
    support.device_reason.cache_clear()
    support.arch_name.cache_clear()


def test_n14_support_says_why_not(part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a part that no kernel is compiled for, or no GPU, is an error at launch and not a reason before it."""
    assert support.device_reason(part((9, 0))) is None and support.arch_name(torch.device("cuda", 0)) == "sm_90a"
    assert "sm_103" in str(support.device_reason(part((10, 3))))
    assert "needs a CUDA device" in str(support.device_reason(torch.device("cpu")))
    support.device_reason.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in str(support.device_reason(torch.device("cuda", 0)))


@pytest.mark.parametrize("missing", [("cutlass",), ("tvm_ffi",), ("cutlass", "tvm_ffi"), ()])
def test_a_missing_toolkit_is_named_with_what_to_install(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_spec", lambda module: None if module in missing else object())
    support.toolkit_reason.cache_clear()
    try:
        reason = support.toolkit_reason()
    finally:
        support.toolkit_reason.cache_clear()
    if missing:
        assert all(support.PACKAGES[module] in str(reason) for module in missing) and "pip install" in str(reason)
    else:
        assert reason is None


def test_n15_importing_the_kernels_imports_no_compiler() -> None:
    """Fails where an import pulls the compiler in: a broken install of it would break everything else."""
    code = (
        "import sys, cute_kernels.context_append, cute_kernels.query_rope, cute_kernels.markov_chain, cute_kernels.gate\n"
        "print(sorted(m for m in ('cutlass', 'tvm_ffi', 'trtllm_dspark') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(4, 16).bfloat16(), None),
        (lambda: torch.zeros(4, 24).bfloat16()[:, 8:], None),
        (lambda: torch.zeros(1, 16).bfloat16().expand(4, 16), None),
        (lambda: torch.zeros(65).bfloat16()[1:].view(4, 16), "starts 2 bytes past"),
        (lambda: torch.zeros(4, 20).bfloat16()[:, :16], "strides are"),
        (lambda: torch.zeros(16, 4).bfloat16().T, "contiguous"),
    ],
)
def test_n16_alignment_is_checked_and_not_assumed(make, message: str | None) -> None:
    """Fails where a view that starts between two multiples of 16 bytes, or whose rows do, passes."""
    if message is None:
        support.check_rows("kernel", "x", make())
    else:
        with pytest.raises(KernelError, match=f"kernel: rows of x must be .*{message}"):
            support.check_rows("kernel", "x", make())


def test_shape_dtype_and_device_are_checked() -> None:
    x, cpu = torch.zeros(2, 3), torch.device("cpu")
    support.check_tensor("kernel", "x", x, (2, 3), torch.float32, cpu)
    for shape, dtype, device in (
        ((3, 2), torch.float32, cpu), ((2, 3), torch.float16, cpu), ((2, 3), torch.float32, torch.device("meta")),
    ):  # fmt: skip
        with pytest.raises(KernelError, match=r"kernel: x must be \["):
            support.check_tensor("kernel", "x", x, shape, dtype, device)


def test_one_line_of_a_compilers_message() -> None:
    assert one_line(RuntimeError("\nsomewhere\n\x1b[91m\x1b[1merror[A]:\x1b[0m bad\nmore error")) == "error[A]: bad"
    assert one_line(RuntimeError("plain\nmore")) == "plain" and one_line(RuntimeError("")) == "RuntimeError"
