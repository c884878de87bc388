"""add_rms_norm: the twin by hand, what the wrapper refuses, and the kernel against the twin."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels.add_rms_norm import AddRMSNormConfig, add_rms_norm
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.reference.add_rms_norm import add_rms_norm as twin

CPU, EPS = torch.device("cpu"), 1e-6
Norm = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def make(
    *shape: int, residual: bool = True, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU, seed: int = 0
) -> dict[str, object]:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    x, other = random(*shape), random(*shape)
    return {"x": x, "weight": 1 + random(shape[-1]) / 4, "eps": EPS, "residual": other if residual else None}


def wide(case: dict[str, object]) -> dict[str, object]:
    return {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in case.items()}


def complaint(case: dict[str, object], kernel: Norm) -> str | None:
    """None where the total is the twin's to the bit, and the normalised rows err at most twice as plain torch does."""
    plain, total = twin(**case)  # type: ignore[arg-type]
    exact, _ = twin(**wide(case))  # type: ignore[arg-type]
    found, summed = kernel(**case)
    if not torch.equal(summed, total):
        return "another total"
    if not bool(found.isfinite().all()):
        return "not finite"
    error, baseline = (float((value.double() - exact).norm(dim=-1).max()) for value in (found, plain))
    size = float(exact.norm(dim=-1).max())
    return None if error <= 2 * baseline + torch.finfo(found.dtype).eps / 2 * size else f"{error:.2e}, plain {baseline:.2e}"


def test_the_twin_by_hand() -> None:
    x, residual = torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, -1.0]])
    found, total = twin(x, torch.tensor([2.0, 1.0]), 0.0, residual)
    assert total.tolist() == [[3.0, -4.0]]
    torch.testing.assert_close(found, torch.tensor([[3.0 * 2, -4.0]]) / 12.5**0.5)
    found, total = twin(x, torch.ones(2), 0.0)
    assert total is x
    torch.testing.assert_close(found, x / 5.0**0.5)


def total_in_fp32(x, weight, eps, residual=None):  # type: ignore[no-untyped-def]
    total = x.float() if residual is None else x.float() + residual.float()
    return twin(x, weight, eps, residual)[0], total


def last_vector_missed(x, weight, eps, residual=None):  # type: ignore[no-untyped-def]
    _, total = twin(x, weight, eps, residual)
    short = total.clone()
    short[..., -8:] = 0
    return twin(short, weight, eps)[0], total


def residual_forgotten(x, weight, eps, residual=None):  # type: ignore[no-untyped-def]
    return twin(x, weight, eps)[0], twin(x, weight, eps, residual)[1]


def unwritten(x, weight, eps, residual=None):  # type: ignore[no-untyped-def]
    found, total = twin(x, weight, eps, residual)
    found[-1, -1] = torch.nan
    return found, total


@pytest.mark.parametrize("wrong", [total_in_fp32, last_vector_missed, residual_forgotten, unwritten])
def test_control_the_comparison_sees_a_wrong_kernel(wrong: Norm) -> None:
    assert complaint(make(5, 512), wrong) is not None
    assert complaint(make(5, 512), twin) is None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight", lambda x: x[:8], "weight must be"),
        ("weight", lambda x: x.float(), "weight must be .* of torch.bfloat16"),
        ("residual", lambda x: x[:2], "residual must be"),
        ("residual", lambda x: x.half(), "residual must be .* of torch.bfloat16"),
        ("x", lambda x: x.T.contiguous().T, "x must be contiguous"),
        ("x", lambda x: torch.cat((x, x)).flatten()[4 : 4 + x.numel()].view(x.shape), "16-byte aligned"),
    ],
)
def test_n16_bad_arguments_are_named_before_anything_is_launched(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """Fails where a promise to the compiler is not checked."""
    case = make(5, 64)
    with pytest.raises(KernelError, match=f"add_rms_norm: .*{message}"):
        add_rms_norm(**{**case, name: change(case[name])})  # type: ignore[arg-type]


def test_a_legal_call_that_no_kernel_covers_says_why() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"add_rms_norm: .*(needs a CUDA|not installed).*Use cute_kernels.ref"):
        add_rms_norm(**make(5, 64))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedKernelError, match=r"multiple of 8 .* it has 12\. Use"):
        add_rms_norm(**make(5, 12))  # type: ignore[arg-type]
    assert "multiple of 8" in str(AddRMSNormConfig(12, "bfloat16", True).reason())
    assert "up to 16384" in str(AddRMSNormConfig(16392, "bfloat16", True).reason())
    assert "float32" in str(AddRMSNormConfig(64, "float32", True).reason())


@pytest.mark.parametrize("size", [8, 64, 256, 264, 1536, 7168, 16384])
def test_a_block_holds_its_row_once(size: int) -> None:
    config = AddRMSNormConfig(size, "bfloat16", False)
    held = config.warps * 32 * config.rounds * 8
    assert size <= held < 2 * max(size, 256) and config.warps <= 16


@pytest.fixture
def cpu_op() -> Iterator[None]:
    """The op with the twin as its CPU implementation, for as long as a test lasts."""
    library = torch.library.Library("trtllm_dspark", "IMPL")

    def on_cpu(x, weight, eps, residual):  # type: ignore[no-untyped-def]
        found, total = twin(x, weight, eps, residual)
        return found, total.clone()

    library.impl("add_rms_norm", on_cpu, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("cpu_op")
@pytest.mark.parametrize("residual", [True, False])
def test_the_op_is_registered_as_torch_wants_it(residual: bool) -> None:
    case = make(5, 64, residual=residual)
    torch.library.opcheck(torch.ops.trtllm_dspark.add_rms_norm.default, tuple(case.values()))


def test_the_fake_needs_no_device() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(5, 64, device="cuda"), torch.empty(64, device="cuda")
        found, total = torch.ops.trtllm_dspark.add_rms_norm(x, weight, EPS, x)
        assert found.shape == total.shape == x.shape


# ------------------------------------------------------------------------------------------------------------------- gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("size", [8, 64, 264, 1536, 7168, 16384])
def test_n13_kernel_equals_twin_at_every_size(size: int, residual: bool) -> None:
    """Fails where a size or a shape of the first call is kept, or the end of a row is missed."""
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (1, 7, 512):
            case = make(rows, size, residual=residual, dtype=dtype, device=DEVICE, seed=rows)
            assert complaint(case, add_rms_norm) is None, (rows, dtype)


@pytest.mark.gpu
def test_more_dims_and_an_empty_batch() -> None:
    assert complaint(make(3, 5, 7168, device=DEVICE), add_rms_norm) is None
    found, total = add_rms_norm(**make(0, 5, 64, device=DEVICE))  # type: ignore[arg-type]
    assert found.shape == total.shape == (0, 5, 64)


@pytest.mark.gpu
def test_under_a_graph_with_changed_inputs() -> None:
    case = make(7, 7168, device=DEVICE)
    add_rms_norm(**case)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = add_rms_norm(**case)  # type: ignore[arg-type]

    def replayed(**_: object) -> tuple[torch.Tensor, torch.Tensor]:
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        return results

    for seed in (1, 2):
        for name, value in make(7, 7168, device=DEVICE, seed=seed).items():
            if isinstance(value, torch.Tensor):
                case[name].copy_(value)  # type: ignore[attr-defined]
        assert complaint(case, replayed) is None
