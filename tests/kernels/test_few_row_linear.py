"""few_row_linear: the twin by hand, what the wrapper refuses, how work is cut, and the kernel against the twin."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from itertools import product as every
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cute_kernels.few_row_linear as module
from cute_kernels.add_rms_norm import add_rms_norm
from cute_kernels.arch import ARCHES
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.few_row_linear import FewRowLinearConfig, Product, config_for, few_row_linear, few_row_silu_mul
from cute_kernels.few_row_linear.config import COLUMNS, FORMS, SILU_MUL, SPLITS, columns_for, num_clusters, pick_split
from cute_kernels.reference.few_row_linear import few_row_linear as twin
from cute_kernels.reference.few_row_linear import few_row_silu_mul as gated_twin
from cute_kernels.support import toolkit_reason

CPU, BF16, FP16 = torch.device("cpu"), torch.bfloat16, torch.float16
H200 = 132  # multiprocessors
K3 = {  # every product of a step at K3's geometry
    "q_a": Product(1536, 7168),
    "kv_a": Product(576, 7168),
    "q_b": Product(12288, 1536),
    "absorb": Product(512, 128, 64, transposed=True),
    "unabsorb": Product(128, 512, 64),
    "o": Product(7168, 8192),
    "gate_up": Product(14336, 7168, form=SILU_MUL),
    "down": Product(7168, 14336),
    "context_proj": Product(7168, 35840),
    "context_latents": Product(2880, 7168),
    "head": Product(163840, 7168),
}
Case = dict[str, torch.Tensor]
Kernel = Callable[..., torch.Tensor]


def make(
    rows: int, product: Product, dtype: torch.dtype = BF16, device: torch.device = CPU, seed: int = 0, grouped: bool = False
) -> Case:
    """Arguments: x a view into wider rows, weights between rows of NaN; a dim of groups where there are several, or asked."""
    generator = torch.Generator(device).manual_seed(seed)
    lead = (product.groups,) if product.groups > 1 or product.transposed or grouped else ()

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def weight() -> torch.Tensor:
        size = (product.inner, product.outputs) if product.transposed else (product.outputs, product.inner)
        room = torch.full((*lead, size[0] + 16, size[1]), torch.nan, dtype=dtype, device=device)
        room[..., 8:-8, :] = random(*lead, *size) * product.inner**-0.5
        return room[..., 8:-8, :].mT if product.transposed else room[..., 8:-8, :]

    case = {"gate": weight(), "up": weight()} if product.form == SILU_MUL else {"weight": weight()}
    wide = torch.full((rows, *lead, product.inner + 64), torch.nan, dtype=dtype, device=device)
    wide[..., :-64] = random(rows, *lead, product.inner)
    return {"x": wide[..., :-64], **case}


def of(case: Case) -> Kernel:
    """The function that takes these arguments."""
    return few_row_silu_mul if "gate" in case else few_row_linear


def rounded(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(exact in fp64, every product exact and rounded once to the dtype of x)."""
    x, *weights = (value.double() for value in case.values())
    dtype = case["x"].dtype
    if "gate" not in case:
        exact = twin(x, *weights)
        return exact, exact.to(dtype)
    gate, up = (twin(x, weight).to(dtype) for weight in weights)
    return gated_twin(x, *weights), F.silu(gate) * up


def complaint(case: Case, kernel: Kernel | None = None) -> str | None:
    """None where no row errs more than twice as much as exact products, rounded once, and a rounding of fp32."""
    exact, best = rounded(case)
    held = torch.full_like(best, torch.nan)
    del held  # what is allocated next holds NaN
    found = (kernel or of(case))(**case)
    if not bool(found.isfinite().all()):
        return "not finite"
    size = exact.norm(dim=-1)
    error, least = (((value.double() - exact).norm(dim=-1) / size).max().item() for value in (found, best))
    return None if error <= 2 * least + torch.finfo(torch.float32).eps else f"{error:.2e}, rounding {least:.2e}"


def test_the_twin_by_hand() -> None:
    x, weight = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 1.0], [0.0, 5.0], [1.0, 1.0]])
    assert twin(x, weight).tolist() == [[1.0, -10.0, -1.0]]
    by_head = twin(torch.stack((x, 2 * x), 1), torch.stack((weight, -weight)))
    assert by_head.tolist() == [[[1.0, -10.0, -1.0], [-2.0, 20.0, 2.0]]]
    out = torch.full((1, 4), torch.nan)
    assert twin(x, weight, out[:, :3]).data_ptr() == out.data_ptr() and out[0, :3].tolist() == [1.0, -10.0, -1.0]
    assert bool(out[0, 3].isnan())
    gated = gated_twin(x, weight, weight.flip(0))
    assert gated.tolist() == (F.silu(torch.tensor([[1.0, -10.0, -1.0]])) * torch.tensor([[-1.0, -10.0, 1.0]])).tolist()


def chunk_missed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return twin(x[..., :-64], weight[..., :-64])


def neighbours_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return twin(x, weight.roll(1, 0))


def outputs_unwritten(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = twin(x, weight)
    found[..., -8:] = torch.nan
    return found


def one_row_for_another(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return twin(x, weight).roll(1, 0)


def rounded_at_every_step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = [twin(a, b) for a, b in zip(x.chunk(32, -1), weight.chunk(32, -1), strict=True)]
    return sum(parts[1:], parts[0])


@pytest.mark.parametrize(
    "wrong", [chunk_missed, neighbours_weight, outputs_unwritten, one_row_for_another, rounded_at_every_step]
)
@pytest.mark.parametrize("groups", [1, 3])
def test_control_the_comparison_sees_a_wrong_kernel(wrong: Kernel, groups: int) -> None:
    case = make(5, Product(72, 512, groups))
    assert complaint(case, wrong) is not None
    assert complaint(case, twin) is None


def test_control_the_comparison_sees_gate_and_up_swapped() -> None:
    case = make(5, Product(72, 512, form=SILU_MUL))
    assert complaint(case, lambda x, gate, up: gated_twin(x, up, gate)) is not None
    assert complaint(case, gated_twin) is None


# --------------------------------------------------------------------------------------------------------- how work is cut
CONFIGS = [FewRowLinearConfig(*key[:3], "bfloat16", key[3]) for key in every(COLUMNS, SPLITS, (1, 2), FORMS)]


def test_two_blocks_fit_a_multiprocessor_with_a_ring_worth_its_name() -> None:
    """Fails where the block of the next launch finds no room beside this one, and cannot fetch its weights early."""
    whole = ARCHES["sm_90a"].shared_bytes + 1024  # of a multiprocessor
    for config in CONFIGS:
        ring = config.stages * (config.weight_bytes + config.x_bytes)
        block = 1024 + 1024 + ring + 4 * config.partial_floats + 1024  # reserved, header, sums, alignment
        assert 2 * block <= whole and config.stages >= 5, config
        assert config.stages * config.weight_bytes >= 80 * 1024, config
        assert config.own_columns * config.split == config.columns


@pytest.mark.parametrize("multiprocessors", [132, 114, 78, 1])
def test_every_tile_has_a_cluster_and_every_part_of_k_the_same_size(multiprocessors: int) -> None:
    products = [*K3.values(), Product(8, 64), Product(72, 192), Product(1000, 640, 3), Product(40, 128, form=SILU_MUL)]
    for rows, product in every((1, 8, 9, 16), products):
        config = config_for(rows, product, "bfloat16", multiprocessors)
        assert config.reason() is None and product.inner % (64 * config.split * config.depth) == 0
        clusters = num_clusters(config, product, multiprocessors)
        assert 1 <= clusters and clusters * config.split <= max(multiprocessors, config.split)
        assert clusters <= product.groups * -(-product.outputs // config.outputs)


@pytest.mark.parametrize("name", K3)
def test_the_busiest_block_reads_little_more_than_its_share(name: str) -> None:
    """Fails where K is split so that multiprocessors wait for one of them. The two small ones have too few tiles for more."""
    product, worst = K3[name], {"q_a": 1.4, "kv_a": 1.9, "context_latents": 1.2, "o": 1.2, "down": 1.2}
    split = pick_split(product, H200)
    tiles = product.groups * -(-product.outputs // (32 if product.form == SILU_MUL else 64))
    chunks = product.inner // 64
    busiest = -(-tiles // (H200 // split)) * chunks / split
    assert busiest <= worst.get(name, 1.05) * tiles * chunks / H200


def test_the_split_does_not_depend_on_the_rows() -> None:
    """Fails where a row is summed in another order in other company."""
    for product in K3.values():
        assert len({config_for(rows, product, "bfloat16", H200).split for rows in range(1, 17)}) == 1
    assert [columns_for(rows) for rows in (1, 8, 9, 16)] == [8, 8, 16, 16]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float32"}, "dtype must be bfloat16 or float16, it is float32"),
        ({"form": "gelu"}, "form must be one of linear, silu_mul"),
        ({"columns": 24}, "columns must be among .*24"),
        ({"split": 3}, "split among .*3"),
        ({"depth": 4}, "depth must be 1 or 2, it is 4"),
        ({"form": SILU_MUL, "transposed": True}, "contiguous along K"),
    ],
)
def test_an_unbuilt_configuration_says_why(change: dict[str, Any], words: str) -> None:
    fine = {"columns": 8, "split": 1, "depth": 1, "dtype": "bfloat16"}
    assert FewRowLinearConfig(**fine).reason() is None
    with pytest.raises(UnsupportedKernelError, match=words):
        module.compile_for(FewRowLinearConfig(**{**fine, **change}), "sm_90a")
    with pytest.raises(UnsupportedKernelError, match="needs sm_90a, this is sm_80"):
        module.compile_for(FewRowLinearConfig(**fine), "sm_80")


# ------------------------------------------------------------------------------------------------------------ the wrapper
Seen = list[tuple[FewRowLinearConfig, tuple[Any, ...]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What would be launched on an H200, by a wrapper that is given tensors of a CPU."""
    seen: Seen = []
    monkeypatch.setattr(module, "compiled", lambda name, config, arch, build: lambda *given: seen.append((config, given)))
    for name, value in (("arch_name", "sm_90a"), ("device_reason", None), ("toolkit_reason", None)):
        monkeypatch.setattr(module, name, lambda *arguments, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": H200}))
    return seen


def test_leading_dims_and_heads_reach_the_kernel_as_they_lie(launched: Seen) -> None:
    """Fails where a view is copied, or heads are taken for rows."""
    q, out = torch.zeros(2, 3, 4, 192, dtype=BF16), torch.zeros(2, 3, 4, 576, dtype=BF16)
    stored = torch.zeros(4, 256, 512, dtype=BF16)
    few_row_linear(q[..., :128], stored[:, :128].mT, out[..., :512])
    [(config, (x, weight, up, result, clusters))] = launched
    assert (config.columns, config.transposed, config.split, up, clusters) == (8, True, 2, None, 32)
    assert x.shape == (6, 4, 128) and x.stride() == (768, 192, 1) and x.data_ptr() == q.data_ptr()
    assert weight.shape == (4, 512, 128) and weight.stride() == (256 * 512, 1, 512)
    assert result.shape == (6, 4, 512) and result.stride() == (4 * 576, 576, 1) and result.data_ptr() == out.data_ptr()
    found = few_row_linear(out[..., :512], stored[:, 128:])
    assert found.shape == (2, 3, 4, 128) and launched[-1][0].transposed is False


@pytest.mark.parametrize("rows", [0, 1, 9, 16])
def test_an_empty_call_launches_nothing_and_others_once(launched: Seen, rows: int) -> None:
    case = make(rows, Product(24, 64, form=SILU_MUL))
    assert few_row_silu_mul(**case).shape == (rows, 24) and len(launched) == (rows > 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": lambda x: x[..., :64]}, r"they are \[5, 64\] and \[24, 128\]"),
        ({"x": lambda x: x.half()}, "weight must be .* of torch.float16"),
        ({"weight": lambda w: w[None].repeat(2, 1, 1)}, r"or \[..., G, K\] with \[G, N, K\]"),
        ({"weight": lambda w: w[0]}, r"weight \[N, K\]"),
        ({"weight": lambda w: w.T.contiguous().T}, "rows of weight must be contiguous"),
        ({"x": lambda x: torch.cat((x, x), -1).flatten()[4 : 4 + x.numel()].view(x.shape)}, "x must be .*16-byte aligned"),
        ({"out": lambda x: torch.zeros(5, 32, dtype=BF16)}, r"out must be \[5, 24\]"),
        ({"out": lambda x: torch.zeros(5, 28, dtype=BF16)[:, 2:26]}, "rows of out must be"),
        ({"split": lambda x: 3}, "split must be among"),
        ({"split": lambda x: 4}, "divide K / 64 = 2, it is 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named_before_anything_is_launched(launched: Seen, change: dict[str, Any], words: str) -> None:
    case = make(5, Product(24, 128))
    few_row_linear(**case)
    with pytest.raises(KernelError, match=f"few_row_linear: .*{words}"):
        few_row_linear(**{**case, **{name: made(case.get(name)) for name, made in change.items()}})
    assert len(launched) == 1


def test_a_second_weight_must_be_like_the_first_and_rows_evenly_spaced(launched: Seen) -> None:
    case = make(5, Product(24, 128, form=SILU_MUL))
    with pytest.raises(KernelError, match=r"up must be \[24, 128\]"):
        few_row_silu_mul(case["x"], case["gate"], case["up"][:16])
    with pytest.raises(KernelError, match=r"gate must be \[N, K\]"):
        few_row_silu_mul(case["x"], case["gate"][None], case["up"][None])
    spread = torch.zeros(4, 5, 128, dtype=BF16)[:, :3]
    with pytest.raises(KernelError, match="leading dims of x must be evenly spaced"):
        few_row_linear(spread, case["gate"])
    assert not launched


def test_a_legal_call_that_no_kernel_covers_says_why(launched: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the reason and the call disagree."""
    weight = torch.zeros(24, 128, dtype=BF16)
    calls = {
        "at most 16 rows, it has 17": (torch.zeros(17, 128, dtype=BF16), weight),
        "dtype must be": (torch.zeros(5, 128), weight.float()),
        "K must be a multiple of 64 and N of 8, they are 96 and 24": (torch.zeros(5, 96, dtype=BF16), weight[:, :96]),
        "they are 128 and 20": (torch.zeros(5, 128, dtype=BF16), weight[:20]),
    }
    for words, (x, taken) in calls.items():
        assert words in str(module.reason(x, taken))
        with pytest.raises(UnsupportedKernelError, match=f"few_row_linear: .*{words}.*Use cute_kernels.reference"):
            few_row_linear(x, taken)
    monkeypatch.setattr(module, "arch_name", lambda device: "sm_100a")
    with pytest.raises(UnsupportedKernelError, match="needs sm_90a, this is sm_100a"):
        few_row_linear(torch.zeros(5, 128, dtype=BF16), weight)
    assert not launched


@pytest.fixture
def cpu_op() -> Iterator[None]:
    """The op with the twin as its CPU implementation, for as long as a test lasts."""
    library = torch.library.Library("trtllm_dspark", "IMPL")

    def on_cpu(x, weight, up, out):  # type: ignore[no-untyped-def]
        out.copy_(twin(x, weight) if up is None else gated_twin(x, weight, up))

    library.impl("few_row_linear", on_cpu, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("cpu_op")
@pytest.mark.parametrize("product", [Product(24, 128), Product(24, 128, 3, transposed=True), Product(24, 128, form=SILU_MUL)])
def test_the_op_is_registered_as_torch_wants_it(product: Product) -> None:
    x, weight, *up = make(5, product).values()
    out = x.new_empty(*x.shape[:-1], 24)
    torch.library.opcheck(torch.ops.trtllm_dspark.few_row_linear.default, (x, weight, up[0] if up else None, out))


# ------------------------------------------------------------------------------------------------------------------- gpu
DEVICE = torch.device("cuda", 0)


def on_device(rows: int, product: Product, dtype: torch.dtype = BF16, seed: int = 0, grouped: bool = False) -> Case:
    """`make` on the GPU, complete: weights are constants of a call."""
    case = make(rows, product, dtype, DEVICE, seed, grouped)
    torch.cuda.synchronize()
    return case


@pytest.mark.skipif(toolkit_reason() is not None, reason=f"compiler: {toolkit_reason()}")
def test_it_lets_the_next_launch_start_and_waits_for_the_one_before(tmp_path: Path) -> None:
    """Fails where a chain of launches would not overlap, or where x is read before it is there."""
    module.compile_for(FewRowLinearConfig(8, 2, 2, "bfloat16"), "sm_90a", f"--keep-ptx --dump-dir {tmp_path}")
    (source,) = tmp_path.rglob("*.ptx")
    text = source.read_text()
    assert text.count("griddepcontrol.launch_dependents") == 1
    assert text.count("griddepcontrol.wait") >= 1
    assert text.rindex("griddepcontrol.wait") < text.index("st.global")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 13, 16])
@pytest.mark.parametrize("name", K3)
def test_every_product_of_k3(name: str, rows: int) -> None:
    product = K3[name] if name != "head" else Product(32768, 7168)  # fp64 takes four times the memory
    assert complaint(on_device(rows, product)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_split_and_tail(split: int, dtype: torch.dtype) -> None:
    """Fails where the end of N, K or the rows is missed, or a ring or a cluster loses its place after a turn."""
    for rows, outputs, chunks, form in every((1, 7, 9, 16), (8, 72, 1000), (1, 2, 3, 7, 20), FORMS):
        case = on_device(rows, Product(outputs, 64 * split * chunks, form=form), dtype, seed=rows)
        assert complaint(case, partial(of(case), split=split)) is None, (rows, outputs, chunks, form)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["along-k", "along-n"])
@pytest.mark.parametrize("groups", [1, 3, 64])
def test_groups(groups: int, transposed: bool) -> None:
    for rows, outputs, inner in every((1, 8, 13, 16), (8, 72, 520), (64, 192, 512)):
        case = on_device(rows, Product(outputs, inner, groups, transposed=transposed), grouped=True)
        assert complaint(case) is None, (rows, outputs, inner)


@pytest.mark.gpu
def test_what_is_beside_the_output_is_not_touched() -> None:
    for product, rows in every((Product(72, 512), Product(72, 128, 3, transposed=True)), (1, 8, 13, 16)):
        case = on_device(rows, product)
        x, weight = case.values()
        wide = torch.full((rows + 1, *x.shape[1:-1], 88), torch.nan, dtype=BF16, device=DEVICE)
        few_row_linear(x, weight, wide[:rows, ..., 8:-8])
        assert complaint(case, lambda wide=wide, rows=rows, **_: wide[:rows, ..., 8:-8]) is None
        assert bool(wide[..., :8].isnan().all() and wide[..., -8:].isnan().all() and wide[rows].isnan().all())


@pytest.mark.gpu
def test_a_row_is_the_same_in_any_company() -> None:
    """Fails where a sum's order depends on how many rows there are."""
    for product in (K3["q_a"], K3["down"], K3["absorb"], Product(520, 1024, form=SILU_MUL)):
        case = on_device(16, product)
        ours = of(case)
        all_rows = ours(**case)
        for first, last in ((0, 1), (3, 11), (2, 15), (15, 16)):
            assert torch.equal(ours(**{**case, "x": case["x"][first:last]}), all_rows[first:last]), (product, first)
        assert all(torch.equal(ours(**case), all_rows) for _ in range(5))


@pytest.mark.gpu
def test_silu_of_large_and_small_gates() -> None:
    """Fails where exp overflows into NaN, or a zero loses its place."""
    case = on_device(8, Product(64, 64, form=SILU_MUL))
    case["x"].copy_(torch.eye(64, device=DEVICE)[:8])
    values = torch.tensor([-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 1e30], device=DEVICE).to(BF16)
    case["gate"][:, :8], case["up"][:] = values, 1.0
    torch.cuda.synchronize()
    torch.testing.assert_close(few_row_silu_mul(**case), gated_twin(**case), rtol=2**-7, atol=0)


@pytest.mark.gpu
def test_under_a_graph_with_changed_inputs() -> None:
    """Fails where a replay reads x of the replay before."""
    for product in (K3["q_a"], K3["unabsorb"], Product(512, 1024, form=SILU_MUL)):
        case = on_device(8, product)
        ours = of(case)
        ours(**case)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = ours(**case)

        def replayed(graph: torch.cuda.CUDAGraph = graph, result: torch.Tensor = result, **_: torch.Tensor) -> torch.Tensor:
            result.fill_(torch.nan)
            graph.replay()
            return result

        for seed in (1, 2):
            for name, value in on_device(8, product, seed=seed).items():
                case[name].copy_(value)
            torch.cuda.synchronize()
            assert complaint(case, replayed) is None


@pytest.mark.gpu
def test_activations_written_just_before_and_overwritten_just_after() -> None:
    """Fails where x is read before the kernel that writes it has ended, or after this one has."""
    case = on_device(8, K3["q_a"])
    right, expected = case["x"].clone(), few_row_linear(**case)
    assert complaint(case) is None
    for _ in range(10):
        case["x"].fill_(100.0)
        case["x"].copy_(right)
        found = few_row_linear(**case)
        case["x"].fill_(100.0)
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 16])
def test_a_chain_of_dependent_launches_is_the_same_as_one_at_a_time(rows: int) -> None:
    """Fails where a launch reads what one before it has not written yet, or overwrites what one before it still reads."""
    hidden, wide = 1024, 4096
    weights = [on_device(rows, Product(hidden, hidden), seed=seed)["weight"] for seed in range(4)]
    mlp = on_device(rows, Product(wide, hidden, form=SILU_MUL))
    down, norm = on_device(rows, Product(hidden, wide))["weight"], torch.ones(hidden, dtype=BF16, device=DEVICE)
    start = on_device(rows, Product(8, hidden), seed=9)["x"].contiguous()

    def run(between: Callable[[], None]) -> torch.Tensor:
        x, buffers = (
            start,
            cycle([torch.empty_like(start) for _ in range(3)]),
        )  # one is overwritten two launches after it is read
        for _ in range(6):
            for weight in weights:
                x = few_row_linear(x, weight, next(buffers))
                between()
            inner = few_row_silu_mul(x, mlp["gate"], mlp["up"])
            between()
            x, _ = add_rms_norm(few_row_linear(inner, down), norm, 1e-6, x)
            between()
        return x.clone()

    expected = run(torch.cuda.synchronize)
    assert bool(expected.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(lambda: None)
    for _ in range(20):
        assert torch.equal(run(lambda: None), expected)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)
