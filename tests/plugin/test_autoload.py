"""The wheel's start-up hook: what it costs, when it registers, and that every kind of process gets it.

`tensorrt_llm` is here a package of five lines, there to be imported; what `register()` does to a host is tested elsewhere.
"""

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from trtllm_dspark.plugin import autoload, settings

ROOT = Path(__file__).parents[2]
HOST_FILES = {
    "__init__.py": "from tensorrt_llm._torch import models\nDONE = True\n",
    "_torch/__init__.py": "",
    "_torch/models/__init__.py": "from tensorrt_llm._torch.models import modeling_utils\n",
    "_torch/models/modeling_utils.py": "def register_draft_model(mode):\n    return lambda builder: builder\n",
    "version.py": '__version__ = "1.3.0rc27"\n',
}
SAY_OUTCOME = """
import json, sys
import tensorrt_llm
import trtllm_dspark
from trtllm_dspark.plugin import outcome

def say():
    found = outcome()
    return json.dumps({"state": found and found.state, "version": found and found.host_version, "from": trtllm_dspark.__file__})
"""


def write_host(folder, init=HOST_FILES["__init__.py"]):
    """A `tensorrt_llm` in `folder`, with this text as its `__init__`."""
    for name, text in (HOST_FILES | {"__init__.py": init}).items():
        path = folder / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# The watcher, with a fake plugin that says when it was called


@pytest.fixture
def watched(tmp_path):
    """Runs Python code in a process with the hook, a host and a plugin whose register() prints what it sees of the host."""
    shutil.copy(ROOT / "trtllm_dspark/plugin/autoload.py", tmp_path / "trtllm_dspark_autoload.py")
    plugin = tmp_path / "trtllm_dspark" / "plugin"
    plugin.mkdir(parents=True)
    (plugin.parent / "__init__.py").write_text("")
    seen = "getattr(sys.modules['tensorrt_llm'], 'DONE', False)"
    (plugin / "__init__.py").write_text(f"import sys\ndef register():\n    print('registered', {seen})\n")
    write_host(tmp_path)

    def run(code, **environment):
        start = "import trtllm_dspark_autoload as hook; hook.install(); import sys\n"
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), **environment}
        command = [sys.executable, "-c", start + code]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done

    run.folder = tmp_path
    return run


def test_it_registers_once_after_the_outermost_import(watched):
    """Fails where register() runs while the host's own __init__ is still running: its modules are half made then."""
    done = watched("import json; print('before'); import tensorrt_llm; import tensorrt_llm.version; print(hook.installed())")
    assert done.stdout.split("\n")[:3] == ["before", "registered True", "None"]


def test_it_does_nothing_before_the_registry_is_imported(watched):
    """A host that loads its models late: importing the package alone registers nothing."""
    write_host(watched.folder, "DONE = True\n")
    done = watched("import tensorrt_llm; print('late'); import tensorrt_llm._torch.models.modeling_utils")
    assert done.stdout.split("\n")[:2] == ["late", "registered True"]


def test_a_name_that_only_begins_like_the_hosts_is_let_pass(watched):
    """`tensorrt_llm_extra` is somebody else's."""
    (watched.folder / "tensorrt_llm_extra.py").write_text("")
    done = watched("import tensorrt_llm_extra; print(type(tensorrt_llm_extra.__loader__).__name__, bool(hook.installed()))")
    assert done.stdout == "SourceFileLoader True\n"


def test_the_hosts_modules_keep_their_own_loaders(watched):
    """inspect, pickle and importlib.resources ask a module for its loader, and must not meet ours."""
    code = """
import inspect, tensorrt_llm._torch.models.modeling_utils as m
print(type(m.__loader__).__name__, type(m.__spec__.loader).__name__, "register_draft_model" in inspect.getsource(m))
"""
    assert watched(code).stdout.endswith("SourceFileLoader SourceFileLoader True\n")


@pytest.mark.parametrize("place", (0, 1))
def test_another_packages_hook_beside_it(watched, place):
    """Fails on a finder that asks all others without noticing that they ask it: the two would call each other for ever."""
    code = f"""
class Other:
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("tensorrt_llm"):
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        return next((spec for spec in found if spec is not None), None)
sys.meta_path.insert({place}, Other())
import tensorrt_llm
"""
    assert watched(code).stdout == "registered True\n"


def test_a_host_that_fails_once_can_be_imported_again(watched):
    """The error is the host's own, and the watcher goes on."""
    write_host(watched.folder, "import os\nfrom tensorrt_llm._torch import models\nDONE = 1 / int(os.environ['OK'])\n")
    code = """
import os
try:
    import tensorrt_llm
except ZeroDivisionError as error:
    print("failed:", error)
os.environ["OK"] = "1"
import tensorrt_llm
"""
    assert watched(code, OK="0").stdout == "failed: division by zero\nregistered 1.0\n"


def test_a_plugin_that_fails_leaves_the_host_running(watched):
    """One warning on stderr, and the import succeeds."""
    (watched.folder / "trtllm_dspark/plugin/__init__.py").write_text("import nothing_of_this_name\n")
    done = watched("import tensorrt_llm; print('running')")
    assert done.stdout == "running\n"
    assert "could not register: ModuleNotFoundError" in done.stderr


def test_a_second_install_is_the_first(watched):
    """Wheel and explicit call: one watcher, one registration."""
    done = watched("hook.install(); print(sum(hasattr(f, 'watches') for f in sys.meta_path)); import tensorrt_llm")
    assert done.stdout == "1\nregistered True\n"


def test_a_forked_child_registers_too(watched):
    """The finder is inherited; the parent, which never imports the host, registers nothing."""
    code = """
import os
child = os.fork()
if child == 0:
    import tensorrt_llm
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
print("parent still watches:", bool(hook.installed()))
"""
    assert watched(code).stdout == "registered True\nparent still watches: True\n"


def test_the_kill_switch(watched):
    """Nothing is put anywhere. The control is every test above."""
    done = watched("print(hook.installed()); import tensorrt_llm", TRTLLM_DSPARK_DISABLE="1")
    assert done.stdout == "None\n"
    assert autoload.KILL_SWITCH == settings.DISABLE.name


# The wheel, in an environment of its own


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An interpreter with the wheel installed as a user would; torch and the rest come from this environment's folder."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"setuptools 77 is required to build the wheel, {setuptools.__version__} is here")
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for name in ("trtllm_dspark", "cute_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]
    build = [*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", work, source]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = work.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", work / "venv"], check=True, timeout=120)
    python = work / "venv/bin/python"
    install = [*pip, "--python", python, "install", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    (packages,) = (work / "venv/lib").glob("python*/site-packages")
    (packages / "zz_dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    host = work / "host"
    write_host(host)
    (host / "say_outcome.py").write_text(SAY_OUTCOME)
    return {"python": str(python), "packages": packages, "host": host}


def run_in(environment, *command, extra_path="", **variables):
    """Output of a command, run where `tensorrt_llm` is on the path."""
    path = os.pathsep.join(filter(None, (str(environment["host"]), extra_path)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRTLLM_", "VIRTUAL_ENV"))}
    variables = {**kept, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, env=variables, cwd=environment["host"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_registered(environment, line):
    """The plugin of the installed wheel looked at our host."""
    said = json.loads(line)
    assert said["state"] is not None and said["version"] == "1.3.0rc27", said
    assert Path(said["from"]).is_relative_to(environment["packages"]), said


def test_the_wheel_has_the_hook_beside_the_packages(environment):
    """One line, which `site` runs."""
    (line,) = (environment["packages"] / "trtllm_dspark.pth").read_text().splitlines()
    assert line == "import trtllm_dspark_autoload; trtllm_dspark_autoload.install()"
    assert (environment["packages"] / "trtllm_dspark/plugin/lint/schema.json").is_file()
    record = next(environment["packages"].glob("trtllm_dspark-*.dist-info/RECORD")).read_text()
    assert "trtllm_dspark.pth," in record and "trtllm_dspark_autoload.py," in record, "pip uninstall would leave them behind"


def milliseconds(environment, line):
    """Median cost of one .pth line at the start of Python, as `site` would run it, each time in a new process."""
    code = f"import os, sys, time; sys.path.insert(0, {str(environment['packages'])!r}); start = time.perf_counter()\n{line}\n"
    code += "print(time.perf_counter() - start)"
    command = [environment["python"], "-S", "-c", code]
    return 1000 * statistics.median(float(run_in(environment, *command)) for _ in range(9))


def test_starting_python_costs_under_two_milliseconds(environment):
    """The control: the same line with an import of the package itself takes longer than the limit."""
    line = (environment["packages"] / "trtllm_dspark.pth").read_text().strip()
    assert milliseconds(environment, line) < 2
    assert milliseconds(environment, "import trtllm_dspark.plugin") > 2


def test_starting_python_loads_nothing_of_the_package(environment):
    """Neither torch, nor pydantic, nor the package: only the hook."""
    code = "import sys; print(sorted(name for name in sys.modules if name.split('.')[0] in NAMES))"
    code = code.replace("NAMES", "('trtllm_dspark', 'trtllm_dspark_autoload', 'torch', 'pydantic', 'cute_kernels')")
    assert run_in(environment, environment["python"], "-c", code) == "['trtllm_dspark_autoload']\n"


def test_a_spawned_interpreter_registers(environment):
    """As an MPI pool's workers and `trtllm-eval` start: plain Python, told nothing."""
    assert_registered(
        environment, run_in(environment, environment["python"], "-c", "import say_outcome; print(say_outcome.say())")
    )


def test_on_the_stand_in_host_it_is_active(environment, packages):
    """The hook, the wheel and the host's registry together: our builder serves DSPARK in a process told nothing."""
    code = """
import tensorrt_llm._torch.models.modeling_utils as modeling
from trtllm_dspark.plugin import outcome
print(outcome().state, *(builder.__module__ for builder in modeling.DRAFT_MODEL_BUILDER_MAPPING.values()))
"""
    host = {**environment, "host": packages("1.3.0rc28")}
    assert run_in(host, environment["python"], "-c", code) == "active trtllm_dspark.plugin.builder\n"


def test_with_the_kill_switch_it_does_not(environment):
    """The control of the test above: the same process, and register() was never called."""
    command = [environment["python"], "-c", "import say_outcome; print(say_outcome.say())"]
    assert json.loads(run_in(environment, *command, TRTLLM_DSPARK_DISABLE="1"))["state"] is None


def test_a_multiprocessing_spawn_child_registers(environment):
    """The parent never imports the host; its child unpickles a function of a module that does."""
    script = environment["host"] / "spawn.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def child():\n"
        "    import say_outcome\n"
        "    return say_outcome.say()\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(child))\n"
        "    assert 'tensorrt_llm' not in sys.modules\n"
    )
    assert_registered(environment, run_in(environment, environment["python"], script))


def test_both_processes_of_an_mpi_launch_register(environment):
    """Ranks that a launcher starts before the driver runs: TensorRT-LLM's multi-node case."""
    launcher, binding = shutil.which("mpiexec"), importlib.util.find_spec("mpi4py")
    if launcher is None or binding is None:
        pytest.skip("mpiexec (openmpi-bin) and mpi4py are required")
    (environment["host"] / "rank.py").write_text(
        "from mpi4py import MPI\n"
        "import say_outcome\n"
        "world = MPI.COMM_WORLD\n"
        "lines = world.gather(say_outcome.say())\n"
        "print('\\n'.join([str(world.size), *lines]) if world.rank == 0 else '', end='')\n"
    )
    product = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
    oversubscribe = ("--oversubscribe",) if "Open MPI" in product or "OpenRTE" in product else ()
    output = run_in(
        environment,
        *(launcher, *oversubscribe, "-n", "2", environment["python"], "rank.py"),
        extra_path=str(Path(binding.origin).parents[1]),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    size, *lines = output.splitlines()
    assert size == "2" and len(lines) == 2
    for line in lines:
        assert_registered(environment, line)


def test_custom_module_dirs_registers_in_the_process_that_imports_it(environment):
    """TensorRT-LLM's option: the folder's parent goes first on sys.path, the folder is imported by its last name.

    The control is the parent's content: a second importable name there would shadow one of the host's.
    """
    code = """
import importlib, json, sys
from trtllm_dspark.plugin import outcome
from trtllm_dspark.plugin.custom_modules import FOLDER
assert outcome() is None
sys.path.insert(0, str(FOLDER.parent))
module = importlib.import_module(FOLDER.name)
print(json.dumps([outcome().host_version, module.RayWorkerExtension.__name__, sorted(p.name for p in FOLDER.parent.iterdir())]))
"""
    version, extension, names = json.loads(run_in(environment, environment["python"], "-c", code, TRTLLM_DSPARK_DISABLE="0"))
    assert version == "1.3.0rc27" and extension == "RayWorkerExtension"
    assert set(names) - {"__pycache__", "__init__.py"} == {"trtllm_dspark_register"}
