"""The wheel's `.pth` hook: `register()` runs in every process that imports TensorRT-LLM's model registry, and in no other.

TensorRT-LLM keeps one registry a process and has no entry points, so its driver, MPI ranks, pool workers and Ray actors
must each be told. `site` runs `install()` at every start of Python. It puts one finder on `sys.meta_path` that lets every
name but the host's pass, and wraps the host's loaders until WATCHED is there and the outermost import of the host has
ended: earlier, the host's modules are half made and importing them from here would close a circle.

The build copies this file beside the `.pth`, under the name `trtllm_dspark_autoload`: an import inside the package would
load the package's parents at every start of Python. So it imports nothing that the interpreter has not already.
"""

import os
import sys
from _thread import get_ident  # threading would be an import

TYPE_CHECKING = False  # typing itself would be an import
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

HOST = "tensorrt_llm"
WATCHED = "tensorrt_llm._torch.models.modeling_utils"
KILL_SWITCH = "TRTLLM_DSPARK_DISABLE"


class HostWatcher:
    """A meta path finder that finds nothing itself: it wraps what the others find of the host."""

    watches = WATCHED  # by this `installed()` knows it, whichever of the file's two names loaded it

    def __init__(self) -> None:
        self.importing: list[str] = []  # host modules being executed, of all threads
        self._asking: set[tuple[int, str]] = set()  # thread, and the name that it is asking the other finders for

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """The spec that the finders behind this one give, its loader wrapped. None for any other package."""
        question = (get_ident(), name)
        if question in self._asking or (name != HOST and not name.startswith(HOST + ".")):
            return None  # the former: another finder like this one asks us in its turn
        self._asking.add(question)
        try:
            spec = self._others(name, path, target)
        finally:
            self._asking.discard(question)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment] # all of a loader that is asked for
        return spec

    def _others(self, name: str, path: "Any", target: "Any") -> "ModuleSpec | None":
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def finished(self) -> None:
        """A host module has been executed. Registers, once, where nothing of the host is half made any more."""
        if self.importing or WATCHED not in sys.modules:
            return
        try:
            sys.meta_path.remove(self)
        except ValueError:  # another thread was first
            return
        try:
            from trtllm_dspark.plugin import register

            register()
        except Exception as error:
            import logging

            logging.getLogger("trtllm_dspark").warning(
                "trtllm-dspark: its .pth hook could not register: %s: %s. TensorRT-LLM runs without it; "
                "`trtllm-dspark doctor` says more.",
                type(error).__name__,
                error,
            )


class _Loader:
    """A module's own loader, which tells the watcher when it has run. The module itself never sees this one."""

    def __init__(self, loader: "Any", watcher: HostWatcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        assert module.__spec__ is not None, module
        module.__spec__.loader = module.__loader__ = self._loader
        self._watcher.importing.append(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            self._watcher.importing.pop()
        self._watcher.finished()


def installed() -> "Any":
    """The watcher of this process, or None: never installed, or it has done its work."""
    return next((finder for finder in sys.meta_path if getattr(finder, "watches", None) == WATCHED), None)


def install() -> None:
    """Watch for the host. Nothing where the kill switch is set, or where a watcher is there already."""
    if os.environ.get(KILL_SWITCH, "").strip() != "1" and installed() is None:
        sys.meta_path.insert(0, HostWatcher())


def uninstall() -> bool:
    """Stop watching, for a process that looks at the host without changing it. Was there a watcher?"""
    watcher = installed()
    if watcher is not None:
        sys.meta_path.remove(watcher)
    return watcher is not None
