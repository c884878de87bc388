"""AUTO: who is picked, who is passed over and why, and what a refusal says. `cuda` here is a name; no GPU is touched."""

import logging
from functools import partial

import published
import pytest
import torch

from trtllm_dspark.attention import policy, vanilla
from trtllm_dspark.attention.operations import DraftShape, Operations
from trtllm_dspark.attention.policy import BACKENDS, FAMILIES, Backend
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ALL = ("CUTEDSL", "TRTLLM", "VANILLA")


def config(family: str) -> DraftConfig:
    return DraftConfig.from_dict(published.tiny(family))


def backends(*available: str) -> dict[str, Backend]:
    """Every backend; those not named give `no <name> here` as their reason."""

    def attend(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("resolving runs nothing")

    def made(name: str) -> Backend:
        operations = Operations(attend)
        reason = None if name in available else f"no {name} here"
        return Backend(name, lambda c, d, s: reason, lambda: operations, checked=name != "VANILLA")

    return {name: made(name) for name in ALL}


def no_fault(*arguments: object) -> None:
    """A self-check that finds nothing."""


resolve_backend = partial(policy.resolve_backend, check=no_fault, measure=lambda *arguments: 1.0)


@pytest.mark.parametrize(
    ("family", "device", "available", "picked", "passed_over"),
    [
        ("mla", CUDA, ("CUTEDSL", "VANILLA"), "CUTEDSL", ["TRTLLM"]),
        ("mla", CUDA, ("TRTLLM", "VANILLA"), "TRTLLM", ["CUTEDSL"]),
        ("mla", CPU, ALL, "VANILLA", []),
        ("mla", CPU, ("VANILLA",), "VANILLA", []),
        ("gqa", CUDA, ALL, "TRTLLM", []),
        ("gqa", CUDA, ("CUTEDSL", "VANILLA"), "VANILLA", ["TRTLLM"]),
        ("gqa", CPU, ALL, "VANILLA", []),
    ],
)
def test_auto(
    family: str,
    device: torch.device,
    available: tuple[str, ...],
    picked: str,
    passed_over: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = backends(*available)
    with caplog.at_level(logging.INFO, logger=policy.__name__):
        choice = resolve_backend(config(family), device, owner="the draft", backends=table)
    assert choice.name == picked and choice.operations is table[picked].operations()
    assert choice.passed_over == tuple((name, f"no {name} here") for name in passed_over)
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.INFO
    line = caplog.records[0].getMessage()
    assert "the draft" in line and f"attention backend {picked}" in line and device.type in line
    assert all(f"{name}: no {name} here" in line for name in passed_over)


@pytest.mark.parametrize("available", [(), ("VANILLA",)], ids=["none", "vanilla-only"])
def test_mla_on_cuda_refuses_rather_than_degrade(available: tuple[str, ...]) -> None:
    with pytest.raises(DSparkError) as error:
        resolve_backend(config("mla"), CUDA, owner="the draft", backends=backends(*available))
    assert isinstance(error.value, ValueError)
    for part in ("the draft:", "mla", "does not degrade", "CUTEDSL: no CUTEDSL here", "TRTLLM: no TRTLLM here", "cuda"):
        assert part in str(error.value)
    assert "VANILLA by name" in str(error.value)


def test_gqa_without_any_backend_is_an_error_too() -> None:
    with pytest.raises(DSparkError, match="TRTLLM: no TRTLLM here; VANILLA: no VANILLA here"):
        resolve_backend(config("gqa"), CUDA, backends=backends())


def test_a_refusal_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(DSparkError):
        resolve_backend(config("mla"), CUDA, backends=backends())
    assert not caplog.records


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
@pytest.mark.parametrize(("family", "name"), [(f, n) for f, p in FAMILIES.items() for n in p.choices])
def test_an_explicit_available_choice_is_taken(family: str, name: str, device: torch.device) -> None:
    choice = resolve_backend(config(family), device, name, backends=backends(*ALL))
    assert (choice.name, choice.passed_over) == (name, ())


@pytest.mark.parametrize(("family", "name"), [(f, n) for f, p in FAMILIES.items() for n in p.choices])
def test_an_explicit_unavailable_choice_is_an_error_with_its_reason(family: str, name: str) -> None:
    others = (other for other in ALL if other != name)
    with pytest.raises(DSparkError, match=f"the draft: attention_backend {name} .*no {name} here.*AUTO"):
        resolve_backend(config(family), CUDA, name, owner="the draft", backends=backends(*others))


@pytest.mark.parametrize("name", ["FLASHINFER", "vanilla", "auto", ""])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_choice_lists_the_familys_choices(family: str, name: str) -> None:
    with pytest.raises(DSparkError) as error:
        resolve_backend(config(family), CPU, name, backends=backends(*ALL))
    assert f"AUTO or one of {', '.join(FAMILIES[family].choices)}" in str(error.value)
    assert family in str(error.value) and repr(name) in str(error.value)


def test_a_choice_of_the_other_family_is_unknown_here() -> None:
    with pytest.raises(DSparkError, match="TRTLLM, VANILLA for the gqa family, it is 'CUTEDSL'"):
        resolve_backend(config("gqa"), CUDA, "CUTEDSL", backends=backends(*ALL))


def test_only_the_candidates_are_asked() -> None:
    asked: list[str] = []
    table = {
        name: Backend(name, lambda c, d, s, name=name: asked.append(name), vanilla.operations)  # type: ignore[func-returns-value]
        for name in ALL
    }
    resolve_backend(config("mla"), CPU, backends=table)
    assert asked == ["VANILLA"]


def test_the_real_table() -> None:
    assert set(BACKENDS) == set(ALL) == {backend.name for backend in BACKENDS.values()}
    for family in FAMILIES:
        choice = resolve_backend(config(family), CPU)
        assert choice.name == "VANILLA" and choice.block_attention is vanilla.block_attention
    shape = DraftShape.of(config("mla"))
    assert BACKENDS["VANILLA"].reason(config("mla"), CUDA, shape) is None  # by name it runs anywhere
    for name in ("CUTEDSL", "TRTLLM"):
        assert "needs a CUDA device, this one is cpu" in str(BACKENDS[name].reason(config("mla"), CPU, shape))


def test_a_backend_that_is_available_must_have_a_function() -> None:
    table = backends(*ALL) | {"VANILLA": Backend("VANILLA", vanilla.reason, None, checked=False)}
    with pytest.raises(AssertionError, match="VANILLA"):
        resolve_backend(config("mla"), CPU, backends=table)
