"""What `register()` decides and does on each host, in any order, in any process, and that it never raises."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from plugin.host.build import HERE, VERSIONS, script

from trtllm_dspark.plugin import builder, decision, outcome, probe, register
from trtllm_dspark.plugin.hooks import HOOKS, MINIMUM
from trtllm_dspark.plugin.outcome import STATES, VERDICTS

ROOT = Path(__file__).parents[2]
EXPECTED = json.loads((HERE / "contract.json").read_text())["expected"]


def mapping() -> dict:
    from tensorrt_llm._torch.models import modeling_utils

    return modeling_utils.DRAFT_MODEL_BUILDER_MAPPING


def dspark():
    from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode

    return SpeculativeDecodingMode.DSPARK


def knows_config() -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return "k3_dspark" in CONFIG_MAPPING


@pytest.mark.parametrize("version", VERSIONS)
def test_each_recorded_version(version, host) -> None:
    host(version)
    assert outcome() is None
    expected = probe()
    assert outcome() is None and not knows_config()
    found = register()
    assert (found.state, found.reason, found.host_version) == (EXPECTED[version], expected.reason, version)
    assert outcome() is found is register()
    assert found.state in STATES and {verdict.verdict for verdict in found.hooks} <= set(VERDICTS)
    assert [verdict.name for verdict in found.hooks][: len(HOOKS)] == [hook.name for hook in HOOKS]
    if found.state == "refused":
        assert MINIMUM in found.reason and MINIMUM in found.remedy
        assert not knows_config() and "applied" not in {verdict.verdict for verdict in found.hooks}
    else:
        assert mapping()[dspark()] is builder.build_draft and knows_config()
        assert {verdict.verdict for verdict in found.hooks} <= {"applied", "not needed"}


def test_no_host(clean) -> None:
    found = register()
    assert (found.state, found.host_version, found.hooks) == ("absent", None, ()) and "not installed" in found.reason
    assert found.remedy and probe() == found


def test_a_broken_host_is_named_with_its_reason(clean, tmp_path, monkeypatch) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "version.py").write_text('__version__ = "1.3.0rc28"\n')
    (package / "__init__.py").write_text('raise OSError("libnvinfer.so.10: cannot open shared object file")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    for found in (probe(), register()):
        assert found.state == "absent" and found.host_version == "1.3.0rc28"
        assert "libnvinfer.so.10: cannot open shared object file" in found.reason and "Repair" in found.remedy
        assert {verdict.verdict for verdict in found.hooks} == {"not found"}  # looked up all the same, in the sources


def test_kill_switch_and_bad_settings(host, monkeypatch) -> None:
    host("1.3.0rc28")
    monkeypatch.setenv("TRTLLM_DSPARK_DISABLE", "1")
    assert probe().state == "disabled" and "tensorrt_llm" not in sys.modules
    monkeypatch.setenv("TRTLLM_DSPARK_DISABLE", "yes")
    found = register()
    assert found.state == "refused" and "TRTLLM_DSPARK_DISABLE" in found.reason and "'yes'" in found.reason


def test_one_line_whatever_the_number_of_calls_and_threads(host, caplog) -> None:
    host("1.3.0rc28")
    found = []
    threads = [threading.Thread(target=lambda: found.append(register())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(one) for one in found}) == 1
    assert len([record for record in caplog.records if "active on tensorrt_llm 1.3.0rc28" in record.message]) == 1
    assert mapping() == {dspark(): builder.build_draft}


def test_milliseconds(host) -> None:
    """On a host that is imported, as it is where the start-up hook calls. Twenty on an idle core of the test machine."""
    host("1.3.0rc28")
    import tensorrt_llm._torch.models.modeling_utils  # noqa: F401
    import transformers  # noqa: F401

    start = time.perf_counter()
    assert register().state == "active"
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("first", ["ours", "the host's"])
def test_the_order_of_imports_does_not_matter(first, host) -> None:
    host("1.3.0rc28")
    if first == "ours":
        register()
    import tensorrt_llm._torch.models.modeling_dspark as modeling_dspark

    register()
    assert mapping()[dspark()] is builder.build_draft
    assert builder.host_builder() is modeling_dspark._build_dspark_draft


def test_another_extension_keeps_what_is_not_ours(host) -> None:
    host("1.3.0rc28")
    from tensorrt_llm._torch.models.modeling_utils import register_draft_model

    def other(model_config, draft_config, lm_head, model):
        return "theirs"

    register_draft_model(dspark())(other)
    register()

    class Embedded:
        class spec_config:
            draft_is_embedded_in_target = True

    assert builder.build_draft(Embedded, None, None, None) == "theirs"


def test_prefer_where_the_host_has_its_own(host, monkeypatch) -> None:
    """auto: ours where the host's lacks a fix or cannot run on the GPU; else the host's, and nothing is touched."""
    host("1.3.0rc29")
    assert "it lacks page bound" in decision.decide().outcome.reason
    monkeypatch.setenv("TRTLLM_DSPARK_PREFER", "native")
    found = register()
    assert found.state == "native" and "TRTLLM_DSPARK_PREFER is native" in found.reason and mapping() == {}
    monkeypatch.setenv("TRTLLM_DSPARK_PREFER", "extension")
    assert "TRTLLM_DSPARK_PREFER is extension" in decision.decide().outcome.reason

    monkeypatch.setenv("TRTLLM_DSPARK_PREFER", "auto")
    monkeypatch.setattr(decision, "diagnose", lambda source: ())
    for gpu, state in (("9.0", "active"), ("10.0", "native"), (None, "native")):
        monkeypatch.setattr(decision, "_gpu", lambda gpu=gpu: gpu)
        assert decision.decide().outcome.state == state
    monkeypatch.setattr(decision, "_gpu", lambda: "9.0")
    assert "compute capability 9.0" in decision.decide().outcome.reason


def test_what_the_host_raises_while_we_register_is_a_refusal(host, monkeypatch) -> None:
    host("1.3.0rc28")
    from tensorrt_llm._torch.models import modeling_utils

    def broken(mode):
        raise RuntimeError("registry is sealed")

    monkeypatch.setattr(modeling_utils, "register_draft_model", broken)
    found = register()
    assert found.state == "refused" and "registry is sealed" in found.reason
    assert "applied" not in {verdict.verdict for verdict in found.hooks}


def test_fork_keeps_the_outcome(host, caplog) -> None:
    host("1.3.0rc28")
    register()
    before = len(caplog.records)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        again = register()
        line = f"{again.state} {mapping()[dspark()] is builder.build_draft} {len(caplog.records) - before}"
        os.write(write, line.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"active True 0"


def test_spawned_processes_register_for_themselves(packages, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        script("""
        import multiprocessing

        def child(queue):
            from trtllm_dspark.plugin import builder, outcome, register

            first = outcome()
            found = register()
            from tensorrt_llm._torch.models.modeling_utils import DRAFT_MODEL_BUILDER_MAPPING as mapping
            queue.put((first, found.state, [b is builder.build_draft for b in mapping.values()]))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(*queue.get())
            process.join()
        """)
    )
    paths = os.pathsep.join(map(str, (packages("1.3.0rc28"), ROOT)))
    done = subprocess.run(
        [sys.executable, program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["None", "active", "[True]"], done.stderr


def test_importing_the_package_touches_no_host(clean) -> None:
    heavy = ("torch", "tensorrt_llm", "transformers", "cutlass")
    code = f"import sys, trtllm_dspark, trtllm_dspark.plugin; print([m for m in {heavy} if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_refusal_is_a_warning(host, caplog) -> None:
    host("1.2.1")
    register()
    assert [record.levelno for record in caplog.records if "trtllm-dspark: refused" in record.message] == [logging.WARNING]
