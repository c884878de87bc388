"""Kernels compiled ahead of time: found by the same keys that a launch looks up, and never compiled again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_kernels import cache, prebuild
from cute_kernels.errors import KernelError
from cute_kernels.few_row_linear import Product, few_row_linear, few_row_silu_mul
from cute_kernels.few_row_linear.config import COLUMNS, SILU_MUL
from cute_kernels.prebuild import Deployment, build, tasks
from trtllm_dspark import cli

pytest.importorskip("cutlass")

PRODUCTS = (Product(64, 512), Product(64, 64, form=SILU_MUL), Product(64, 64, 3, transposed=True), Product(60, 64))
SMALL = Deployment(64, 16, ((128, False), (256, False), (256, True)), PRODUCTS, (16,), "bfloat16", 32, ("bfloat16",))
COUNT = 17


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("aot")
    build(SMALL, ["sm_90a"], made, jobs=1)
    return made


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No entry of another run is seen."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget_memory()


def never() -> object:
    raise AssertionError("compiled")


def test_every_kernel_is_loaded_and_none_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a key depends on where or when a kernel was built. Controls: another architecture, another dtype."""
    assert len(list(folder.glob("*.o"))) == len(tasks(SMALL, "sm_90a")) == COUNT
    monkeypatch.setenv("CUTE_KERNELS_AOT_DIR", str(folder))
    for task in tasks(SMALL, "sm_90a"):
        assert callable(cache.compiled(task.kernel, task.config, "sm_90a", never))
    task = tasks(SMALL, "sm_90a")[0]
    with pytest.raises(KernelError, match="compiled"):
        cache.compiled(task.kernel, task.config, "sm_80", never)
    monkeypatch.delenv("CUTE_KERNELS_AOT_DIR")
    cache.forget_memory()
    with pytest.raises(KernelError, match="compiled"):
        cache.compiled(task.kernel, task.config, "sm_90a", never)


def test_the_tasks_are_what_launches_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a launch asks for a kernel or settings that the list does not hold."""
    import cute_kernels.few_row_linear as linear
    from cute_kernels import add_rms_norm, context_append, markov_chain, query_rope
    from cute_kernels.block_attention import kernels, launch, workspace

    asked = []

    def compiled(kernel, config, arch, make):  # type: ignore[no-untyped-def]
        asked.append((kernel, config))
        return lambda *arguments: None

    for module in (add_rms_norm, context_append, linear, kernels, markov_chain, query_rope, workspace):
        monkeypatch.setattr(module, "compiled", compiled)
    for module in (add_rms_norm, context_append, linear, markov_chain, query_rope, launch, workspace):
        monkeypatch.setattr(module, "arch_name", lambda device: "sm_90a")
        monkeypatch.setattr(module, "device_reason", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": 132}))
    bf16, cpu = torch.bfloat16, torch.device("cpu")
    pool = torch.zeros(2, 3, 16, 80, dtype=bf16)
    angles = torch.zeros(5, 8), torch.zeros(5, 8)
    slots = torch.zeros(5, dtype=torch.int64)
    context_append.context_append(
        torch.zeros(5, 2, 80, dtype=bf16), torch.zeros(2, 64, dtype=bf16), *angles, slots, pool.unbind(0), 1e-5
    )
    q = torch.zeros(5, 4, 3, 80, dtype=bf16)
    query_rope.query_rope(q[..., 64:], torch.zeros(5, 4, 8), torch.zeros(5, 4, 8), q)
    for batch in (1, 20, 70):
        base, tables = torch.zeros(batch, 3, 100, dtype=bf16), torch.zeros(100, 32, dtype=bf16)
        anchors, codes = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, 3, 32, dtype=bf16)
        markov_chain.markov_chain(base, anchors, tables, tables, codes)
    plan = workspace.BlockAttentionWorkspace.allocate(
        max_batch=5, block_rows=4, heads=3, value_width=64, device=cpu, num_sms=132
    )
    lengths = torch.ones(5, dtype=torch.int32)
    workspace._launch_plan(lengths, None, plan.requests, plan.boundaries, 4, 48)
    table = torch.zeros(5, 3, dtype=torch.int32)
    launch.block_attention(q, q[:, :, 0], pool[0], table, lengths, scale=0.1, value_width=64, plan=plan)
    for size, residual in ((256, True), (256, False), (128, False)):
        x = torch.zeros(4, size, dtype=bf16)
        add_rms_norm.add_rms_norm(x, x[0], 1e-5, x if residual else None)
    for rows in COLUMNS:
        weight, x = torch.zeros(3, 64, 512, dtype=bf16), torch.zeros(rows, 3, 512, dtype=bf16)
        few_row_linear(x[:, 0], weight[0])
        few_row_linear(x[..., :64], weight[..., :64].mT)
        few_row_silu_mul(x[:, 0, :64], weight[0, :, :64], weight[1, :, :64])
    listed = {(task.kernel, task.config) for task in tasks(SMALL, "sm_90a")}
    assert len(asked) >= COUNT and set(asked) == listed


def test_building_again_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.o")}
    monkeypatch.setattr(prebuild.Task, "build", lambda task, arch: never())
    assert len(build(SMALL, ["sm_90a"], folder, jobs=1)) == COUNT
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.o")} == stamps


def test_an_entry_names_what_it_is(folder: Path) -> None:
    facts = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert {fact["arch"] for fact in facts} == {"sm_90a"} and all(fact["nvidia-cutlass-dsl"] for fact in facts)
    assert {fact["kernel"] for fact in facts} == {task.kernel for task in tasks(SMALL, "sm_90a")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arch", "sm_90"], "architectures must be among sm_80, .*; sm_90 came"),
        (["--arch", ","], "none came"),
        (["--arch", "sm_90a", "--page-size", "many"], "--page-size must be numbers such as 32,64, it is 'many'"),
        (["--arch", "sm_90a", "--page-size", "48", "--jobs", "1"], "page size must be one of 16, 32, 64, 128, it is 48"),
        (["--arch", "sm_90a", "--dtype", "float32", "--jobs", "1"], "dtype must be bfloat16 or float16, it is float32"),
    ],
    ids=["arch", "no-arch", "page-size", "page-size-unbuilt", "dtype"],
)
def test_bad_input_is_one_line(options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert cli.main(["kernels", "build", *options, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert re.search(words, printed) and printed.count("\n") == 1
    assert not list((tmp_path / "out").glob("*.o"))


def test_hopper_gets_its_own_schedule_where_that_takes_the_draft() -> None:
    """Fails where a part loads kernels that its launches do not look up, or compiles at the first step."""
    k3 = Deployment(512, 64, ((7168, True),), (Product(1536, 7168),), (16, 64), "bfloat16", 0, ())
    named = {arch: [task.kernel for task in tasks(k3, arch)] for arch in ("sm_90a", "sm_80")}
    assert named["sm_90a"].count("block_attention_sm90") == named["sm_90a"].count("block_attention") == 1
    assert named["sm_90a"].count("few_row_linear") >= len(COLUMNS) and "few_row_linear" not in named["sm_80"]
    assert named["sm_80"].count("block_attention") == 2 and "block_attention_sm90" not in named["sm_80"]
    assert named["sm_90a"].count("block_attention_plan") == 2 and named["sm_80"].count("block_attention_plan") == 1


def test_a_schedule_of_one_architecture_is_built_for_it_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails where the Hopper schedule of the Markov chain is forgotten, or compiled for another part."""
    deployment, built = replace(SMALL, products=(), markov_rank=256), []
    monkeypatch.setattr(prebuild, "_build_one", lambda item: built.append((item[0].config, item[1])))
    build(deployment, ["sm_90a", "sm_100a"], tmp_path, jobs=1)
    chains = [(config.groups, arch) for config, arch in built if getattr(config, "schedule", None) == "sm90"]
    assert chains == [(1, "sm_90a"), (2, "sm_90a"), (4, "sm_90a")]
    counts = [len(tasks(deployment, arch)) for arch in ("sm_90a", "sm_100a")]
    assert len(built) == sum(counts) and counts[0] == counts[1] + len(chains)
