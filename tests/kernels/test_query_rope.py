"""query_rope: the twin by hand, what the wrapper refuses, and the kernel against the twin, canaries included."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.query_rope import QueryRopeConfig, query_rope
from cute_kernels.reference.query_rope import query_rope as twin
from cute_kernels.reference.rotation import rotate_adjacent, rotate_half_split

CPU = torch.device("cpu")
Args = dict[str, torch.Tensor]


def make(
    batch: int = 2, rows: int = 3, heads: int = 5, rotary: int = 64, nope: int = 128, latent: int = 512,
    dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU, seed: int = 0,
) -> Args:  # fmt: skip
    """Views as the model makes them: queries inside q_b_proj's output, and a buffer that is NaN all over."""
    generator = torch.Generator(device).manual_seed(seed)
    q = torch.full((batch, rows, heads, nope + rotary), torch.nan, dtype=dtype, device=device)
    q[..., nope:] = torch.randn(batch, rows, heads, rotary, generator=generator, device=device)
    angles = torch.randn(batch, rows, rotary // 2, generator=generator, device=device) * 100
    out = torch.full((batch, rows, heads, latent + rotary), torch.nan, dtype=dtype, device=device)
    return {"rotary": q[..., nope:], "cos": angles.cos(), "sin": angles.sin(), "out": out}


def wide(case: Args) -> Args:
    return {name: tensor.double() for name, tensor in case.items()}


def complaint(case: Args, kernel: Callable[..., None]) -> str | None:
    """None where only the last r columns changed, and their error is at most twice plain torch's plus rounding."""
    width, before = case["rotary"].shape[-1], case["out"].clone()

    def untouched(out: torch.Tensor) -> torch.Tensor:
        return out[..., :-width].contiguous().view(torch.int16)

    truth, plain = wide(case), {**case, "out": before.clone()}
    twin(**truth)
    twin(**plain)
    kernel(**case)
    if not torch.equal(untouched(case["out"]), untouched(before)):
        return "a column before the rotated ones changed"
    found, expected = case["out"][..., -width:].double(), truth["out"][..., -width:]
    if not bool(found.isfinite().all()):
        return "not finite"
    error, baseline = (float((x - expected).abs().max()) for x in (found, plain["out"][..., -width:].double()))
    rounding = torch.finfo(case["out"].dtype).eps / 2 * float(expected.abs().max()) if expected.numel() else 0.0
    return None if error <= 2 * baseline + rounding else f"error {error:.2e}, plain torch {baseline:.2e}"


def test_the_twin_by_hand() -> None:
    case = make(1, 1, 1, rotary=8, nope=8, latent=8, dtype=torch.float32)
    x, cos, sin = (case[name].flatten().tolist() for name in ("rotary", "cos", "sin"))
    twin(**case)
    expected = []
    for i in range(4):
        expected += [x[2 * i] * cos[i] - x[2 * i + 1] * sin[i], x[2 * i] * sin[i] + x[2 * i + 1] * cos[i]]
    torch.testing.assert_close(case["out"].flatten()[8:], torch.tensor(expected))
    assert bool(case["out"].flatten()[:8].isnan().all())


def test_the_twin_leaves_what_is_beside_it_alone() -> None:
    case = make()
    absorbed = torch.randn(2, 3, 5, 512).bfloat16()
    case["out"][..., :512] = absorbed
    twin(**case)
    rotated = rotate_adjacent(case["rotary"], case["cos"].unsqueeze(-2), case["sin"].unsqueeze(-2))
    assert torch.equal(case["out"], torch.cat((absorbed, rotated), -1))


def half_split(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    out[..., -rotary.shape[-1] :] = rotate_half_split(rotary, cos.unsqueeze(-2), sin.unsqueeze(-2))


def one_row_late(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    twin(rotary, cos.roll(1, 1), sin.roll(1, 1), out)


def one_column_wide(rotary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    twin(rotary, cos, sin, out)
    out[..., -rotary.shape[-1] - 1] = 0


@pytest.mark.parametrize("wrong", [half_split, one_row_late, one_column_wide])
def test_control_the_comparison_sees_a_wrong_kernel(wrong: Callable[..., None]) -> None:
    assert complaint(make(), wrong) is not None
    assert complaint(make(), twin) is None


def test_n20_the_dtype_of_out_is_never_guessed() -> None:
    """Fails where rotated queries are written into a buffer of another dtype."""
    case = make()
    with pytest.raises(TypeError, match="must have the queries' dtype"):
        twin(**{**case, "out": case["out"].float()})
    with pytest.raises(KernelError, match="out must be"):
        query_rope(**{**case, "out": case["out"].float()})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rotary", lambda x: x[0], "rotary must be"),
        ("rotary", lambda x: torch.cat((x, x), -1)[..., 4:68], "16-byte aligned"),
        ("rotary", lambda x: x.repeat_interleave(2, -1)[..., ::2], "contiguous"),
        ("cos", lambda x: x.bfloat16(), "cos must be .* of torch.float32"),
        ("sin", lambda x: x[:, :2], "sin must be"),
        ("sin", lambda x: torch.cat((x, x), -1)[..., 1:33], "16-byte aligned"),
        ("out", lambda x: x[..., :60], "W >= r"),
        ("out", lambda x: x[:, :, :4], "out must be"),
        ("out", lambda x: x.new_zeros(2, 3, 5, 580)[..., :576], "16-byte aligned"),
    ],
)
def test_n16_bad_arguments_are_named_before_anything_is_launched(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """Fails where an operand of another shape, dtype or alignment than the compiler was promised reaches a launch."""
    case = make()
    with pytest.raises(KernelError, match=f"query_rope: .*{message}"):
        query_rope(**{**case, name: change(case[name])})


def test_a_legal_call_that_no_kernel_covers_says_why() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"query_rope: .*(needs a CUDA|not installed).*Use cute_kernels.ref"):
        query_rope(**make())
    assert "multiple of 8" in str(QueryRopeConfig(12, "bfloat16").reason())
    assert "float64" in str(QueryRopeConfig(64, "float64").reason())
    assert QueryRopeConfig(48, "float16").reason() is None


@pytest.fixture
def cpu_op() -> Iterator[None]:
    """The op with the twin as its CPU implementation, for as long as a test lasts."""
    library = torch.library.Library("trtllm_dspark", "IMPL")
    library.impl("query_rope", twin, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("cpu_op")
def test_the_op_is_registered_as_torch_wants_it() -> None:
    torch.library.opcheck(torch.ops.trtllm_dspark.query_rope.default, tuple(make(heads=2).values()))


def test_the_fake_needs_no_device() -> None:
    with FakeTensorMode():
        case = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in make(dtype=torch.bfloat16).values()]
        assert torch.ops.trtllm_dspark.query_rope(*case) is None


# ------------------------------------------------------------------------------------------------------------------- gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads", [1, 3, 4, 12, 64, 96, 128])
def test_n13_kernel_equals_twin_at_every_size(heads: int, dtype: torch.dtype) -> None:
    """Fails where batch, rows or heads arrive in the kernel as another number: one compiled function for all of them."""
    for batch, rows in ((1, 1), (1, 8), (7, 5), (64, 7)):
        assert complaint(make(batch, rows, heads, dtype=dtype, device=DEVICE, seed=rows), query_rope) is None, (batch, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [8, 16, 48, 64, 128])
def test_n18_no_neighbour_is_touched_at_any_width(rotary: int) -> None:
    """Fails where a rotary width that is no power of two is rounded up and columns beside it are written."""
    for nope, latent in ((0, 0), (128, 512), (8, 72)):
        assert complaint(make(3, 5, 7, rotary=rotary, nope=nope, latent=latent, device=DEVICE), query_rope) is None


@pytest.mark.gpu
def test_n19_rotation_without_norm_and_weight_on_a_split_row() -> None:
    """Fails where a query is normalised or weighted on its way, or more than the tail columns of its row is rotated."""
    case = make(2, 3, 4, device=DEVICE)
    case["rotary"].mul_(1000)  # a norm would take this factor away
    assert complaint(case, query_rope) is None


@pytest.mark.gpu
def test_strided_buffers() -> None:
    case = make(4, 6, 8, device=DEVICE)
    whole = torch.full((5, 6, 3, 8, 640), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    before = whole.clone()
    query_rope(**{**case, "out": whole[1:, :, 1, :, 32:608]})
    twin(**case)
    before[1:, :, 1, :, 32:608] = case["out"]
    torch.testing.assert_close(whole, before, equal_nan=True)


@pytest.mark.gpu
def test_an_empty_batch_launches_nothing() -> None:
    query_rope(**make(0, 3, 4, device=DEVICE))


@pytest.mark.gpu
def test_under_a_graph_with_changed_inputs() -> None:
    case = make(4, 7, 8, device=DEVICE)
    query_rope(**case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query_rope(**case)
    for seed in (1, 2):
        for name, tensor in make(4, 7, 8, device=DEVICE, seed=seed).items():
            case[name].copy_(tensor)
        assert complaint(case, lambda **_: graph.replay()) is None


@pytest.mark.gpu
def test_n13_the_current_stream_is_followed() -> None:
    """Fails where the launch goes to another stream than torch's current one: it would overtake the copies before it."""
    case, stream = make(4, 7, 8, device=DEVICE), torch.cuda.Stream()
    query_rope(**case)
    late = make(4, 7, 8, device=DEVICE, seed=1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would run before these copies
        for name in ("rotary", "cos", "sin"):
            case[name].copy_(late[name])
        query_rope(**case)
    stream.synchronize()
    query_rope(**late)
    assert torch.equal(case["out"][..., 512:], late["out"][..., 512:])
