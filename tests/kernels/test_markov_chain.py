"""markov_chain: the twin against the model's chain, what the wrapper refuses, and the kernel against the twin, token by token.

Small integers: every sum is exact in fp32, so that tokens are compared exactly.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels.markov_chain as package
from cute_kernels.errors import KernelError, UnsupportedKernelError
from cute_kernels.markov_chain import (
    GROUPS,
    SM90_GROUPS,
    MarkovChainConfig,
    groups_for,
    markov_chain,
    portable,
    sm90,
    sm90_config,
    sm90_reason,
)
from cute_kernels.reference.markov_chain import markov_chain as twin
from trtllm_dspark.model.heads import MarkovHead, greedy_chain

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Args = dict[str, Any]


def make(
    batch: int = 3, steps: int = 5, vocab: int = 1009, rank: int = 8, base: torch.dtype = BF16, dtype: torch.dtype = BF16,
    device: torch.device = CPU, seed: int = 0, codes: bool = False, pitch: int = 1,
) -> Args:  # fmt: skip
    """Integers small enough that bias and logits are exact in fp32 and, for R up to 512, ties are common.

    pitch: rows of the base logits begin at multiples of so many elements; between them lie NaNs.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def integers(largest: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator, device=device).to(dtype)

    logits = torch.full((batch, steps, -(-vocab // pitch) * pitch), torch.nan, dtype=base, device=device)[..., :vocab]
    return {
        "base_logits": logits.copy_(integers(4, (batch, steps, vocab), base)),
        "anchors": torch.randint(0, vocab, (batch,), generator=generator, device=device),
        "w1": integers(1, (vocab, rank), dtype),
        "w2": integers(1, (vocab, rank), dtype),
        "codes": torch.full((batch, steps, rank), torch.nan, dtype=dtype, device=device) if codes else None,
    }


def same(case: Args, kernel: Callable[..., torch.Tensor], **changed: Any) -> bool:
    """Whether a kernel gives the twin's tokens and codes; `changed`: arguments that the twin is given instead."""
    expected_codes = None if case["codes"] is None else torch.full_like(case["codes"], torch.nan)
    expected = twin(**{**case, "codes": expected_codes, **changed})
    found = kernel(**case)
    assert found.dtype == torch.int64 and found.shape == expected.shape
    return torch.equal(found, expected) and (expected_codes is None or torch.equal(case["codes"], expected_codes))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_twin_is_the_models_chain(dtype: torch.dtype) -> None:
    case = make(dtype=dtype, base=dtype, codes=True)
    case["anchors"][1] = -1
    head = MarkovHead(1009, 8).requires_grad_(False)
    head.markov_w1.weight.data, head.markov_w2.weight.data = case["w1"], case["w2"]
    chain = greedy_chain(head, case["base_logits"], case["anchors"])
    assert torch.equal(twin(**case), chain.tokens) and torch.equal(case["codes"], chain.codes)


def test_the_twin_on_what_has_no_order() -> None:
    case = make(batch=1, steps=1, vocab=16)
    case["w1"].zero_()
    for values, winner in (
        ([0.0, 2.0, 2.0], 1), ([-0.0, 0.0, -0.0], 0), ([torch.nan, 5.0, torch.nan], 0), ([9.0, torch.nan, torch.nan], 1),
        ([-torch.inf] * 16, 0), ([1.0, torch.inf, torch.inf], 1),
    ):  # fmt: skip
        logits = torch.full((1, 1, 16), -torch.inf)
        logits[0, 0, : len(values)] = torch.tensor(values)
        assert twin(**{**case, "base_logits": logits}).tolist() == [[winner]], values


def biased_by_the_anchor(base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: Any):
    steps = range(base_logits.shape[1])
    return torch.cat([twin(base_logits[:, k : k + 1], anchors, w1, w2) for k in steps], 1)


def without_bias(base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: Any):
    return base_logits.argmax(-1)


def largest_id_on_a_tie(base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, codes: Any):
    return w2.shape[0] - 1 - twin(base_logits.flip(-1), w2.shape[0] - 1 - anchors, w1.flip(0), w2.flip(0))


@pytest.mark.parametrize("wrong", [biased_by_the_anchor, without_bias, largest_id_on_a_tie])
def test_control_the_comparison_sees_a_wrong_kernel(wrong: Callable[..., torch.Tensor]) -> None:
    assert not same(make(), wrong)
    assert same(make(), twin)
    assert not same(make(), twin, anchors=make()["anchors"] + 1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("base_logits", lambda x: x[0], "must be \\[B, K, V\\]"),
        ("base_logits", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "rows of base_logits must be contiguous"),
        ("base_logits", lambda x: x[..., :0], "must hold 1 to"),
        ("anchors", lambda x: x.int(), "anchors must be .* of torch.int64"),
        ("anchors", lambda x: x[:2], "anchors must be"),
        ("anchors", lambda x: x.repeat(2)[::2], "anchors must be contiguous"),
        ("w1", lambda x: x.half(), "w1 must be"),
        ("w1", lambda x: torch.cat((x, x), 1)[:, :12], "w1 must be"),
        ("w2", lambda x: x[1:], "w2 must be"),
        ("w2", lambda x: torch.cat((x, x), 1)[:, 4:12], "16-byte aligned"),
        ("codes", lambda x: x.float(), "codes must be"),
        ("codes", lambda x: x[:, 1:], "codes must be"),
    ],
)
def test_n16_bad_arguments_are_named_before_anything_is_launched(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """Fails where an operand of another shape, dtype or alignment than the compiler was promised reaches a launch."""
    case = make(codes=True)
    with pytest.raises(KernelError, match=f"markov_chain: .*{message}"):
        markov_chain(**{**case, name: change(case[name])})


def test_a_legal_call_that_no_kernel_covers_says_why() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"markov_chain: .*(needs a CUDA|not installed).*Use cute_kernels.ref"):
        markov_chain(**make())
    for config, message in (
        (MarkovChainConfig(12, 1, "bfloat16", "bfloat16"), "multiple of 8"),
        (MarkovChainConfig(520, 1, "bfloat16", "bfloat16"), "up to 512"),
        (MarkovChainConfig(8, 1, "float64", "bfloat16"), "base logits"),
        (MarkovChainConfig(8, 1, "float32", "float32"), "W1 and W2"),
        (MarkovChainConfig(8, 3, "float32", "bfloat16"), "groups"),
    ):
        assert message in str(config.reason())
    assert all(MarkovChainConfig(r, g, "float32", "float16").reason() is None for r in (8, 256, 512) for g in GROUPS)


def test_a_batch_gets_the_fewest_groups_that_hold_it() -> None:
    assert [groups_for(batch) for batch in (1, 8, 9, 32, 33, 64, 65, 256)] == [1, 1, 4, 4, 8, 8, 8, 8]


def config_of(monkeypatch: pytest.MonkeyPatch, case: Args, arch: str = "sm_90a", **options: Any) -> MarkovChainConfig:
    """What a call would launch on a part with 132 multiprocessors."""
    asked = []

    def launcher(config: MarkovChainConfig, device: torch.device) -> Callable[..., None]:
        asked.append(config)
        return lambda *arguments: None

    monkeypatch.setattr(package, "launcher", launcher)
    monkeypatch.setattr(package, "toolkit_reason", lambda: None)
    monkeypatch.setattr(package, "device_reason", lambda device: None)
    monkeypatch.setattr(package, "arch_name", lambda device: arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": 132}))
    markov_chain(**case, **options)
    (config,) = asked
    return config


def test_the_schedule_that_a_call_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a call that TMA cannot read, or another part, is given the sm90 schedule, or a large batch is not."""
    for batch, groups in ((1, 1), (64, 1), (65, 2), (129, 4), (600, 4)):
        case = make(batch, 2, 40, 64, codes=True, pitch=8)
        assert config_of(monkeypatch, case) == MarkovChainConfig(64, groups, "bfloat16", "bfloat16", True, "sm90")
        assert config_of(monkeypatch, case, "sm_100a").schedule == "portable"
        assert config_of(monkeypatch, case, schedule="portable").schedule == "portable"
    for case in (make(20, 2, 41, 64), make(20, 2, 40, 32), make(20, 2, 42, 64, base=FP32)):
        assert config_of(monkeypatch, case).schedule == "portable"
    shifted = make(20, 2, 40, 64, pitch=16)
    shifted["base_logits"] = torch.zeros(20, 2, 48, dtype=BF16)[..., 4:44]
    repeated = make(20, 2, 40, 64)
    repeated["base_logits"] = repeated["base_logits"][:1].expand(20, -1, -1)
    for case in (shifted, repeated):
        assert config_of(monkeypatch, case).schedule == "portable"
        with pytest.raises(UnsupportedKernelError, match=r"start at multiples of 16 bytes.*Use the portable schedule"):
            config_of(monkeypatch, case, schedule="sm90")
    with pytest.raises(KernelError, match="schedule must be portable, sm90 or None, it is 'fast'"):
        config_of(monkeypatch, repeated, schedule="fast")


def test_why_the_sm90_schedule_does_not_take_a_call() -> None:
    case = make(20, 2, 40, 64)
    logits, w2 = case["base_logits"], case["w2"]
    assert sm90_reason(logits, w2, "sm_90a") is None
    assert "needs sm_90a, this is sm_89" in str(sm90_reason(logits, w2, "sm_89"))
    assert "rank that 64 divides, it is 32" in str(sm90_reason(logits, w2[:, :32], "sm_90a"))
    assert "no room for 128 codes of rank 512" in str(MarkovChainConfig(512, 2, "bfloat16", "bfloat16", False, "sm90").reason())
    assert "groups must be one of (1, 2, 4)" in str(MarkovChainConfig(64, 8, "bfloat16", "bfloat16", False, "sm90").reason())
    assert "schedule must be" in str(MarkovChainConfig(64, 1, "bfloat16", "bfloat16", False, "sm80").reason())


def test_buffers_of_the_sm90_schedule_by_hand() -> None:
    """(tiles, slots) of 231,424 - 2,048 bytes; a tile and 64 codes take 128 * R each, a slot 8 or 16 KB."""
    for (rank, groups, base), expected in (
        ((256, 1, "bfloat16"), (4, 4)), ((256, 2, "bfloat16"), (3, 6)), ((256, 4, "bfloat16"), (2, 4)),
        ((256, 4, "float32"), (2, 2)), ((512, 1, "float16"), (2, 2)), ((64, 1, "bfloat16"), (6, 6)),
        ((64, 4, "float32"), (2, 8)),
    ):  # fmt: skip
        assert MarkovChainConfig(rank, groups, base, "bfloat16", False, "sm90").stages() == expected, (rank, groups, base)
    for rank in range(64, 513, 64):
        for base, size in (("bfloat16", 2), ("float32", 4)):
            found = sm90_config(rank, 256, base, "bfloat16", False)
            assert found is not None and found.groups == {64: 4, 128: 4, 192: 4, 256: 4, 320: 2, 384: 2}.get(rank, 1), rank
            for groups in SM90_GROUPS:
                config = MarkovChainConfig(rank, groups, base, "bfloat16", False, "sm90")
                tiles, slots = config.stages()
                if config.reason() is None:
                    assert 128 * rank * (tiles + groups) + 4096 * size * slots <= 231_424 - 2_048


def test_blocks_fill_the_part_once_or_are_as_many_as_there_are_tiles() -> None:
    assert [portable.num_blocks(vocab, 132) for vocab in (1, 128, 129, 163_840)] == [1, 1, 2, 264]
    assert [sm90.num_blocks(vocab, 64, 1, 132) for vocab in (1, 64, 65, 163_840)] == [1, 1, 2, 132]
    assert [sm90.num_blocks(163_840, batch, 4, 132) for batch in (256, 257, 600, 256 * 140)] == [132, 66, 44, 1]


@pytest.fixture
def cpu_op() -> Iterator[None]:
    """The op with the twin as its CPU implementation, for as long as a test lasts."""
    library = torch.library.Library("trtllm_dspark", "IMPL")
    library.impl("markov_chain", twin, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("cpu_op")
@pytest.mark.parametrize("codes", [False, True])
def test_the_op_is_registered_as_torch_wants_it(codes: bool) -> None:
    torch.library.opcheck(torch.ops.trtllm_dspark.markov_chain.default, tuple(make(vocab=40, codes=codes).values()))


def test_the_fake_needs_no_device() -> None:
    with FakeTensorMode():
        case = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in make(codes=True).values()]
        found = torch.ops.trtllm_dspark.markov_chain(*case)
        assert found.shape == (3, 5) and found.dtype == torch.int64 and found.device.type == "cuda"


# ------------------------------------------------------------------------------------------------------------------- gpu
DEVICE = torch.device("cuda", 0)
SCHEDULES = ("portable", "sm90")
BATCHES = {"portable": (1, 7, 8, 9, 32, 33, 64, 65, 200), "sm90": (1, 7, 33, 64, 65, 128, 129, 200, 256, 257, 600)}
RANKS = {"portable": (8, 24, 32, 40, 64, 128, 200, 256, 320, 512), "sm90": (64, 128, 192, 256, 320, 384, 512)}


def of_each(values: dict[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    """Each schedule with each of its values."""
    return [(schedule, value) for schedule in SCHEDULES for value in values[schedule]]


def on_device(schedule: str, batch: int, steps: int, vocab: int = 1009, rank: int | None = None, **options: Any) -> Args:
    """A case that a schedule takes, on the device; skips the test where the device does not take the schedule."""
    if schedule == "sm90" and torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("sm90: no Hopper device here")
    pitch = 8 if schedule == "sm90" else 1
    return make(batch, steps, vocab, rank or RANKS[schedule][0], device=DEVICE, pitch=pitch, **options)


def kernel_of(schedule: str) -> Callable[..., torch.Tensor]:
    return partial(markov_chain, schedule=schedule)


each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "batch"), of_each(BATCHES))
def test_n13_tokens_are_the_twins_at_every_batch_and_length(schedule: str, batch: int) -> None:
    """Fails where a batch or a number of steps arrives in the kernel as another one."""
    for steps in (1, 2, 7, 8):
        case = on_device(schedule, batch, steps, codes=batch % 2 == 0, seed=steps)
        assert same(case, kernel_of(schedule)), steps


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "rank"), of_each(RANKS))
def test_tokens_are_the_twins_at_every_rank(schedule: str, rank: int) -> None:
    for batch, vocab in ((2, 1009), (20, 1009), (64, 4099), (150, 20_011)):
        assert same(on_device(schedule, batch, 4, vocab, rank, codes=True), kernel_of(schedule)), (batch, vocab)


@pytest.mark.gpu
@each_schedule
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1008, 8448, 8449, 32_768])
def test_tokens_are_the_twins_at_every_vocabulary(schedule: str, vocab: int) -> None:
    for batch in (1, 12, 64, 70, 130):
        assert same(on_device(schedule, batch, 3, vocab), kernel_of(schedule)), batch


@pytest.mark.gpu
@each_schedule
@pytest.mark.parametrize("batch", [1, 8, 32, 64, 128, 256])
def test_tokens_are_the_twins_at_the_real_size(schedule: str, batch: int) -> None:
    assert same(on_device(schedule, batch, 7, 163_840, 256, codes=True), kernel_of(schedule))


@pytest.mark.gpu
@each_schedule
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["tables-bf16", "tables-fp16"])
@pytest.mark.parametrize("base", [BF16, FP16, FP32], ids=["base-bf16", "base-fp16", "base-fp32"])
def test_tokens_are_the_twins_in_every_dtype(schedule: str, base: torch.dtype, dtype: torch.dtype) -> None:
    for batch in (3, 40, 200):
        case = on_device(schedule, batch, 4, rank=256, base=base, dtype=dtype, codes=True)
        assert same(case, kernel_of(schedule)), batch


@pytest.mark.gpu
@each_schedule
def test_a_tie_goes_to_the_smallest_id(schedule: str) -> None:
    case = on_device(schedule, 40, 3, 5003)
    for ids in ([5002], [17, 18, 5002], [8, 24], [63, 64], [4095, 4096], [0, 5002]):
        case["base_logits"].zero_()
        case["base_logits"][..., ids] = 200.0
        case["w1"].zero_()
        assert kernel_of(schedule)(**case).tolist() == [[ids[0]] * 3] * 40
    case["base_logits"].zero_()
    assert kernel_of(schedule)(**case).tolist() == [[0] * 3] * 40


@pytest.mark.gpu
@each_schedule
def test_what_has_no_order_falls_as_in_torch(schedule: str) -> None:
    case = on_device(schedule, 6, 2, base=FP32)
    logits = case["base_logits"]
    logits[0, 0, [700, 400, 900]] = torch.nan
    logits[1] = -torch.inf
    logits[2, :, 5:] = torch.inf
    logits[3], logits[3, :, 100:] = -0.0, 0.0
    logits[4, 1].view(torch.int32)[300] = -1  # a NaN with its sign set
    case["w1"][case["anchors"][3]] = 0
    case["w2"][12] = torch.nan  # a row of W2: NaN for whoever has a bias
    case["anchors"][5] = -1
    assert same(case, kernel_of(schedule))
    case["w2"][12] = 0
    assert same(case, kernel_of(schedule))


@pytest.mark.gpu
@each_schedule
def test_an_unknown_previous_id_gets_no_bias(schedule: str) -> None:
    case = on_device(schedule, 8, 3, rank=64, codes=True)
    case["w1"][0], case["w1"][-1] = torch.nan, torch.nan  # rows that might stand in
    case["anchors"][:6] = torch.tensor([-1, 1009, 10**6, -(2**31), 2**31, -(2**63)], device=DEVICE)
    case["base_logits"][..., [0, 1008]] = -(2.0**20)  # never chosen
    assert same(case, kernel_of(schedule))
    short = {**case, "w1": case["w1"][:500].contiguous()}  # fewer rows than the vocabulary
    assert same(short, kernel_of(schedule))


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "shift"), [(None, 7), ("portable", 7), ("sm90", 8)])
def test_strided_logits_and_tables(schedule: str | None, shift: int) -> None:
    """Fails where None gives logits that begin anywhere to TMA."""
    case = on_device(schedule or "portable", 20, 4, 1009, 64)
    logits = torch.full((20, 6, 2024 if schedule == "sm90" else 2021), torch.nan, dtype=BF16, device=DEVICE)
    tables = torch.full((1009, 2, 80), torch.nan, dtype=BF16, device=DEVICE)
    views = {"base_logits": logits[:, 1:5, shift : shift + 1009], "w1": tables[:, 0, 8:72], "w2": tables[:, 1, 16:]}
    for name, view in views.items():
        view.copy_(case[name])
    assert torch.equal(markov_chain(**{**case, **views}, schedule=schedule), twin(**case))


@pytest.mark.gpu
def test_empty_calls_launch_nothing() -> None:
    assert markov_chain(**make(0, 3, device=DEVICE)).shape == (0, 3)
    assert markov_chain(**make(2, 0, device=DEVICE)).shape == (2, 0)


@pytest.mark.gpu
@each_schedule
def test_real_numbers_fall_as_in_the_twin_or_nearly_tie(schedule: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    case = on_device(schedule, 16, 7, 32_768, 256)
    for name in ("base_logits", "w1", "w2"):
        case[name] = torch.randn(case[name].shape, generator=generator, device=DEVICE).to(BF16)
    found, previous = kernel_of(schedule)(**case), case["anchors"]
    for k in range(7):  # each step judged on its own, from the token that the kernel had before it
        exact = case["base_logits"][:, k].double() + case["w1"][previous].double() @ case["w2"].double().T
        previous = found[:, k]
        gap = exact.max(-1).values - exact.gather(1, previous[:, None])[:, 0]
        assert float(gap.max()) <= 1e-4 * float(exact.abs().max()), k


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "batch"), of_each({"portable": (1, 40), "sm90": (1, 40, 200)}))
def test_under_a_graph_with_changed_inputs(schedule: str, batch: int) -> None:
    """Fails where a step of a replay reads tokens of the replay before, or keys are not zeroed again."""
    case = on_device(schedule, batch, 7, 4099, 64, codes=True)
    kernel_of(schedule)(**case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = kernel_of(schedule)(**case)

    def replay(**_: Any) -> torch.Tensor:
        graph.replay()
        return tokens

    for seed in (1, 2, 2):
        for name, tensor in on_device(schedule, batch, 7, 4099, 64, codes=True, seed=seed).items():
            case[name].copy_(tensor)
        assert same(case, replay), seed


@pytest.mark.gpu
@each_schedule
def test_inputs_written_just_before_and_overwritten_just_after(schedule: str) -> None:
    """Fails where overlapping launches read base logits too early or too late: nothing waits between the three."""
    case = on_device(schedule, 64, 7, 32_768, 256)
    right, wrong = case["base_logits"].clone(), torch.full_like(case["base_logits"], 1000.0)
    expected = twin(**case)
    kernel_of(schedule)(**case)
    for _ in range(10):
        case["base_logits"].copy_(wrong)
        case["base_logits"].copy_(right)
        found = kernel_of(schedule)(**case)
        case["base_logits"].copy_(wrong)
        assert torch.equal(found, expected)


@pytest.mark.gpu
@each_schedule
def test_the_same_call_gives_the_same_tokens(schedule: str) -> None:
    case = on_device(schedule, 64, 7, 32_768, 256)
    case["base_logits"] = torch.randn(64, 7, 32_768, device=DEVICE).to(BF16)
    first = kernel_of(schedule)(**case)
    assert all(torch.equal(kernel_of(schedule)(**case), first) for _ in range(5))


@pytest.mark.gpu
def test_both_schedules_give_the_same_tokens() -> None:
    for batch in (9, 64, 200):
        case = on_device("sm90", batch, 7, 163_840, 256, seed=batch)
        assert torch.equal(kernel_of("sm90")(**case), kernel_of("portable")(**case)), batch
