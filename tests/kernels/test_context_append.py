"""context_append: the twin by hand, what the wrapper refuses, and the kernel against the twin: every byte of the pool."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import context_append as module
from cute_kernels.context_append import ContextAppendConfig, context_append
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.reference.context_append import context_append as twin

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5
Args = dict[str, Any]


def make(
    tokens: int = 9, layers: int = 3, latent: int = 512, rotary: int = 64, page_size: int = 16, dtype: torch.dtype = BF16,
    device: torch.device = CPU, seed: int = 0, allocation: str = "one", exact: bool = False,
) -> Args:  # fmt: skip
    """Every third token without a slot, the others in shuffled ones; pools that are NaN all over, as the model lays them out.

    allocation: of the pools; one, each, or odd (one allocation, uneven gaps). exact: numbers whose result needs no rounding.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    width, num_pages = latent + rotary, -(-tokens // page_size) + 2
    z, weight, angles = random(tokens, layers, width), 1 + random(layers, latent) / 4, random(tokens, rotary // 2) * 100
    if exact:  # powers of two with one magnitude a row, quarter turns
        z = torch.where(z > 0, 1.0, -1.0) * 2.0 ** random(tokens, layers, 1).round()
        weight, angles = 2.0 ** random(layers, latent).round(), angles.round() * (torch.pi / 2)
    cos, sin = (turn.round() if exact else turn for turn in (angles.cos(), angles.sin()))
    slots = torch.randperm(num_pages * page_size, generator=torch.Generator().manual_seed(seed))[:tokens]
    slots[::3] = -1
    if allocation == "one":
        pools = list(torch.full((layers, num_pages, page_size, width), torch.nan, dtype=dtype, device=device))
    elif allocation == "each":
        pools = [torch.full((num_pages, page_size, width), torch.nan, dtype=dtype, device=device) for _ in range(layers)]
    else:
        pool = torch.full((layers**2, num_pages, page_size, width), torch.nan, dtype=dtype, device=device)
        pools = [pool[layer**2] for layer in range(layers)]
    return {
        "z": z.to(dtype),
        "norm_weight": weight.to(dtype),
        "cos": cos,
        "sin": sin,
        "slots": slots.to(device),
        "pools": pools,
        "eps": 0.0 if exact else EPS,
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def complaint(case: Args, kernel: Callable[..., None]) -> str | None:
    """None where the rows with a slot are right to twice plain torch's error plus rounding, and no other byte changed."""
    before = [pool.clone() for pool in case["pools"]]
    plain = {**case, "pools": [pool.clone() for pool in before]}
    wide = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in case.items()}
    wide["pools"] = [pool.double() for pool in before]
    twin(**plain)
    twin(**wide)
    kernel(**case)
    slots = case["slots"][case["slots"] >= 0]
    for layer, pool in enumerate(case["pools"]):
        width = pool.shape[-1]
        found, old = pool.reshape(-1, width), before[layer].reshape(-1, width)
        others = torch.ones(len(found), dtype=torch.bool, device=pool.device)
        others[slots] = False
        if not torch.equal(bits(found[others]), bits(old[others])):
            return f"layer {layer}: a row without a token changed"
        if not len(slots):
            continue
        truth, base = (found_in["pools"][layer].reshape(-1, width)[slots].double() for found_in in (wide, plain))
        error, baseline = (found[slots].double() - truth).abs(), (base - truth).abs()
        rounding = torch.finfo(pool.dtype).eps / 2 * float(truth.abs().max())
        if not bool(error.isfinite().all()) or float(error.max()) > 2 * float(baseline.max()) + rounding:
            return f"layer {layer}: error {float(error.max()):.2e}, plain torch {float(baseline.max()):.2e}"
    return None


def test_the_twin_by_hand() -> None:
    case = make(2, 1, latent=8, rotary=8, page_size=4, dtype=torch.float32)
    twin(**case)
    slot, z, cos, sin = int(case["slots"][1]), case["z"][1, 0], case["cos"][1], case["sin"][1]
    scale = float(z[:8].square().mean() + EPS) ** -0.5
    expected = [float(z[i] * case["norm_weight"][0, i]) * scale for i in range(8)]
    for i in range(4):
        even, odd = z[8 + 2 * i], z[9 + 2 * i]
        expected += [float(even * cos[i] - odd * sin[i]), float(even * sin[i] + odd * cos[i])]
    rows = case["pools"][0].reshape(-1, 16)
    torch.testing.assert_close(rows[slot], torch.tensor(expected))
    assert int((~rows.isnan()).any(1).sum()) == 1  # token 0 has no slot


def norm_over_the_whole_row(z: torch.Tensor, norm_weight: torch.Tensor, **others: Any) -> None:
    scale = z[..., : norm_weight.shape[-1]].float().square().mean(-1) / z.float().square().mean(-1)
    twin((z.float() * scale.sqrt().unsqueeze(-1)).to(z.dtype), norm_weight, **others)


def one_slot_late(slots: torch.Tensor, **others: Any) -> None:
    twin(slots=slots.roll(1), **others)


def slot_minus_one_written(slots: torch.Tensor, pools: list[torch.Tensor], **others: Any) -> None:
    free = sorted(set(range(pools[0].shape[0] * pools[0].shape[1])) - set(slots.tolist()))
    twin(slots=torch.where(slots < 0, free[-1], slots), pools=pools, **others)


def weight_of_layer_0(norm_weight: torch.Tensor, **others: Any) -> None:
    twin(norm_weight=norm_weight[:1].expand_as(norm_weight), **others)


def other_pairing(z: torch.Tensor, norm_weight: torch.Tensor, **others: Any) -> None:
    rotary = z[..., norm_weight.shape[1] :]
    paired = rotary.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    twin(z=torch.cat((z[..., : norm_weight.shape[1]], paired), -1), norm_weight=norm_weight, **others)


@pytest.mark.parametrize(
    "wrong", [norm_over_the_whole_row, one_slot_late, slot_minus_one_written, weight_of_layer_0, other_pairing]
)
def test_control_the_comparison_sees_a_wrong_kernel(wrong: Callable[..., None]) -> None:
    assert complaint(make(), wrong) is not None
    assert complaint(make(), twin) is None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("z", lambda x: x[0], "z must be"),
        ("z", lambda x: torch.cat((x, x), -1)[..., 4:580], "rows of z must be .*16-byte aligned"),
        ("z", lambda x: x.repeat_interleave(2, -1)[..., ::2], "rows of z must be contiguous"),
        ("norm_weight", lambda x: x.float(), "norm_weight must be"),
        ("norm_weight", lambda x: torch.cat((x, x), -1)[:, 3:515], "rows of norm_weight must be"),
        ("cos", lambda x: x.double(), "cos must be"),
        ("sin", lambda x: x[:, ::2], "sin must be"),
        ("slots", lambda x: x.int(), "slots must be .* of torch.int64"),
        ("slots", lambda x: x.repeat(2)[::2], "slots must be contiguous"),
        ("pools", lambda x: x[:2], "2 pools"),
        ("pools", lambda x: [], "0 pools"),
        ("pools", lambda x: [*x[:2], x[2][:1]], "the pool of layer 2 must be"),
        ("pools", lambda x: [x[0], x[1].view(torch.float16), x[2]], "the pool of layer 1 must be"),
        ("pools", lambda x: [y.transpose(0, 1).contiguous().transpose(0, 1) for y in x], "a page must be contiguous"),
        ("pools", lambda x: [y.flatten(0, 1) for y in x], "pools must be"),
    ],
)
def test_n16_bad_arguments_are_named_before_anything_is_launched(name: str, change: Callable[[Any], Any], message: str) -> None:
    """Fails where an operand of another shape, dtype or alignment than the compiler was promised reaches a launch."""
    case = make()
    with pytest.raises(KernelError, match=f"context_append: .*{message}"):
        context_append(**{**case, name: change(case[name])})


def test_a_legal_call_that_no_kernel_covers_says_why() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"context_append: .*(needs a CUDA|not installed).*Use cute_kernels.ref"):
        context_append(**make())
    for config, message in (
        (ContextAppendConfig(12, 64, 16, "bfloat16"), "latent"),
        (ContextAppendConfig(512, 0, 16, "bfloat16"), "rotary"),
        (ContextAppendConfig(512, 264, 16, "bfloat16"), "rotary"),
        (ContextAppendConfig(512, 64, 0, "bfloat16"), "page_size"),
        (ContextAppendConfig(512, 64, 16, "float8_e4m3fn"), "dtype"),
    ):
        assert message in str(config.reason())


def test_pools_are_stacked_only_where_they_lie_evenly_in_one_allocation() -> None:
    one = make(allocation="one")["pools"]
    (stacked,) = module._stacked(one)
    assert stacked.shape == (3, *one[0].shape) and all(torch.equal(bits(a), bits(b)) for a, b in zip(stacked, one, strict=True))
    assert stacked.data_ptr() == one[0].data_ptr() and stacked[2].data_ptr() == one[2].data_ptr()
    others = [make(layers=layers, allocation=allocation)["pools"] for layers in (2, 3) for allocation in ("each", "odd")]
    for pools in [one[::-1], *others[:1], *others[2:]]:  # two layers are always evenly spaced in one allocation
        parts = module._stacked(pools)
        assert [part.data_ptr() for part in parts] == [pool.data_ptr() for pool in pools]
        assert all(part.shape == (1, *pools[0].shape) for part in parts)
    assert len(module._stacked(others[1])) == 1


@pytest.fixture
def cpu_op() -> Iterator[None]:
    """The op with the twin as its CPU implementation, for as long as a test lasts."""
    library = torch.library.Library("trtllm_dspark", "IMPL")
    library.impl("context_append", twin, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("cpu_op")
def test_the_op_is_registered_as_torch_wants_it() -> None:
    case = make(allocation="each")
    case["pools"] = [torch.zeros_like(pool) for pool in case["pools"]]
    torch.library.opcheck(torch.ops.trtllm_dspark.context_append.default, tuple(case.values()))


def test_the_fake_needs_no_device() -> None:
    case = make()
    with FakeTensorMode():
        z, weight, cos, sin, slots = (
            torch.empty(case[name].shape, dtype=case[name].dtype, device="cuda")
            for name in ("z", "norm_weight", "cos", "sin", "slots")
        )
        pools = [torch.empty(pool.shape, dtype=pool.dtype, device="cuda") for pool in case["pools"]]
        assert torch.ops.trtllm_dspark.context_append(z, weight, cos, sin, slots, pools, EPS) is None


# ------------------------------------------------------------------------------------------------------------------- gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_n13_kernel_equals_twin_at_every_size(page_size: int, dtype: torch.dtype) -> None:
    """Fails where a number of tokens arrives in the kernel as another one: one compiled function for all of them."""
    for tokens in (1, 2, 7, 8, 9, 64, 1000):
        assert complaint(make(tokens, 5, page_size=page_size, dtype=dtype, device=DEVICE), context_append) is None, tokens


@pytest.mark.gpu
@pytest.mark.parametrize("allocation", ["one", "each", "odd"])
def test_page_writes_are_bit_exact_where_no_rounding_is_needed(allocation: str) -> None:
    case = make(100, 5, device=DEVICE, allocation=allocation, exact=True)
    expected = {**case, "pools": [pool.clone() for pool in case["pools"]]}
    twin(**expected)
    context_append(**case)
    for found, pool in zip(case["pools"], expected["pools"], strict=True):
        assert torch.equal(bits(found), bits(pool))


@pytest.mark.gpu
@pytest.mark.parametrize("allocation", ["one", "each", "odd"])
def test_pools_of_any_allocation(allocation: str) -> None:
    for layers in (1, 2, 5):
        assert complaint(make(40, layers, device=DEVICE, allocation=allocation), context_append) is None, layers


@pytest.mark.gpu
@pytest.mark.parametrize(("latent", "rotary"), [(8, 8), (64, 16), (256, 48), (512, 64), (520, 128), (1024, 256)])
def test_n18_other_widths(latent: int, rotary: int) -> None:
    """Fails where a width that is no power of two is rounded up and the neighbour's columns are written."""
    assert complaint(make(33, 3, latent, rotary, device=DEVICE), context_append) is None


@pytest.mark.gpu
def test_no_slot_no_write() -> None:
    case = make(20, device=DEVICE)
    case["slots"].fill_(-1)
    assert complaint(case, context_append) is None
    num_slots = case["pools"][0].shape[0] * case["pools"][0].shape[1]
    before = [pool.clone() for pool in case["pools"]]
    for slot in (-2, -(2**63), num_slots, 2**31, 2**40):  # and neither does one that no page holds
        case["slots"].fill_(slot)
        context_append(**case)
        torch.cuda.synchronize()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(case["pools"], before, strict=True)), slot


@pytest.mark.gpu
def test_a_token_without_a_slot_may_hold_anything() -> None:
    case = make(30, device=DEVICE)
    case["z"][::3] = torch.nan
    case["cos"][::3] = torch.inf
    clean = make(30, device=DEVICE)
    context_append(**case)
    context_append(**clean)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(case["pools"], clean["pools"], strict=True))


@pytest.mark.gpu
def test_strided_operands() -> None:
    case = make(33, 3, device=DEVICE)
    z = torch.full((33, 4, 640), torch.nan, dtype=BF16, device=DEVICE)[:, 1:, 32:608]
    weight = torch.full((3, 528), torch.nan, dtype=BF16, device=DEVICE)[:, 16:]
    cos = torch.full((33, 2, 40), torch.nan, device=DEVICE)[:, 1, 4:36]
    for view, name in ((z, "z"), (weight, "norm_weight"), (cos, "cos")):
        view.copy_(case[name])
    assert complaint({**case, "z": z, "norm_weight": weight, "cos": cos}, context_append) is None


@pytest.mark.gpu
def test_no_tokens_launch_nothing() -> None:
    assert complaint(make(0, device=DEVICE), context_append) is None


@pytest.mark.gpu
def test_far_slots_of_a_large_pool() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    case = make(3, 2, device=DEVICE)
    pool = torch.zeros(2, 70_000, 64, 576, dtype=BF16, device=DEVICE)  # element offsets past 2^32
    far = [69_999 * 64 + 63, 4_000_000, 5]
    case["slots"], case["pools"] = torch.tensor(far, device=DEVICE), list(pool)
    context_append(**case)
    few = torch.zeros(2, 1, 64, 576, dtype=BF16, device=DEVICE)
    small = {**case, "slots": torch.arange(3, device=DEVICE), "pools": list(few)}
    context_append(**small)
    for layer in range(2):
        assert torch.equal(pool[layer].view(-1, 576)[far], small["pools"][layer].view(-1, 576)[:3])
    assert int(pool.view(-1, 576).any(1).sum()) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("allocation", ["one", "each"])
def test_under_a_graph_with_changed_inputs(allocation: str) -> None:
    case = make(24, 5, device=DEVICE, allocation=allocation)
    context_append(**case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context_append(**case)
    for seed in (1, 2):
        fresh = make(24, 5, device=DEVICE, seed=seed)
        fresh["slots"][seed * 4 :] = -1  # another number of tokens
        for name in ("z", "norm_weight", "cos", "sin", "slots"):
            case[name].copy_(fresh[name])
        for pool in case["pools"]:
            pool.fill_(torch.nan)
        assert complaint(case, lambda **_: graph.replay()) is None, seed
