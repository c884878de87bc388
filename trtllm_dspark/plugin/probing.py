"""Look symbols of the installed TensorRT-LLM up in its source, without importing any of it.

An import of the host costs a minute on a real machine, runs MPI, and inside its own start-up would be circular. The
sources lie beside the packages, and what is asked of them is small: is the name there, which parameters does it take,
which names does its body use.
"""

import ast
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from trtllm_dspark.plugin.hooks import NATIVE, NATIVE_ARCHITECTURE, Hook

PACKAGE = "tensorrt_llm"


@dataclass(frozen=True)
class Found:
    """A symbol in the source.

    Attributes:
        place: "module:attribute", without the package. parameters: by name; None where it is not a function.
        keywords: whether it takes **kwargs. source: its text.
    """

    place: str
    parameters: tuple[str, ...] | None
    keywords: bool
    source: str

    def missing(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Parameters that it does not take."""
        if self.parameters is None or self.keywords:
            return ()
        return tuple(name for name in wanted if name not in self.parameters)

    @property
    def names(self) -> frozenset[str]:
        """Every variable and attribute that its body uses."""
        found: set[str] = set()
        tree = _parsed(self.source)
        assert tree is not None, "what was found was parsed"
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
        return frozenset(found)


@dataclass(frozen=True)
class HostSource:
    """The sources of one installation. root: the package's folder."""

    root: Path
    _modules: dict[str, str | None] = field(default_factory=dict)

    @cached_property
    def version(self) -> str:
        """Of the package's own version module, else of the installed distribution."""
        text = self.module("version") or self.module("__init__") or ""
        found = re.search(r"""^__version__\s*=\s*["']([^"']+)""", text, re.MULTILINE)
        if found:
            return found[1]
        try:
            return importlib.metadata.version("tensorrt-llm")
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def module(self, name: str) -> str | None:
        """The text of a module, None where there is no readable source of it."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            paths = (base.with_suffix(".py"), base / "__init__.py")
            path = next((p for p in paths if p.is_file()), None)
            self._modules[name] = path.read_text(encoding="utf-8", errors="replace") if path else None
        return self._modules[name]

    def find(self, place: str) -> Found | None:
        """The symbol at "module:attribute"; "module:Class(Base)" also asks for a base class."""
        module, _, attribute = place.partition(":")
        text = self.module(module)
        if text is None:
            return None
        base = re.fullmatch(r"(\w+)\((\w+)\)", attribute)
        parts = [base[1]] if base else attribute.split(".")
        whole: str = text
        for depth, part in enumerate(parts):
            text = _definition(text, part, depth * 4) if text is not None else None
        if text is None or _parsed(text) is None:
            text = _parsed_definition(whole, parts)  # slower, and sure: an odd layout is no missing symbol
        if text is None:
            return None
        if base and not re.match(rf"\s*class {base[1]}\([^)]*\b{base[2]}\b", _without_decorators(text)):
            return None
        parameters, keywords = _parameters(text)
        return Found(place, parameters, keywords, text)

    def find_any(self, hook: Hook) -> Found | None:
        """The first of a hook's places that is there."""
        return next((found for place in hook.places if (found := self.find(place))), None)

    @property
    def has_native(self) -> bool:
        """Whether the host has an MLA DSpark drafter of its own."""
        found = self.find(NATIVE)
        return found is not None and NATIVE_ARCHITECTURE in found.source


def _definition(text: str, name: str, indent: int) -> str | None:
    """The lines that define `name` at this indentation, its decorators included; the last of several definitions."""
    lead = " " * indent
    pattern = rf"^{lead}(?:(?:async )?def {name}\(|class {name}\b|{name}\s*(?::[^=\n]+)?=|{name}\s*:)"
    starts = [found.start() for found in re.finditer(pattern, text, re.MULTILINE)]
    if not starts:
        return None
    start = starts[-1]
    # to the next line that is no deeper, which neither closes a bracket nor comments
    after = text.find("\n", start) + 1
    stop = re.compile(rf"^ {{0,{indent}}}(?=[^\s#)\]}}])", re.MULTILINE).search(text, after) if after else None
    end = stop.start() if stop else len(text)
    decorators = re.search(rf"(?:^{lead}@[^\n]*\n)+\Z", text[:start], re.MULTILINE)
    return text[decorators.start() if decorators else start : end]


def _parsed(text: str) -> ast.stmt | None:
    """The one statement of this text, at whatever indentation; None where it is cut off."""
    try:
        if not text[0].isspace():
            return ast.parse(text).body[0]
        (block,) = ast.parse("if True:\n" + text).body  # not dedented: comments may stand at the margin
    except (SyntaxError, ValueError, IndexError):
        return None
    return block.body[0] if isinstance(block, ast.If) else None


def _parsed_definition(text: str, parts: list[str]) -> str | None:
    try:
        body: list[ast.stmt] = ast.parse(text).body
    except SyntaxError:
        return None
    node: ast.stmt | None = None
    for part in parts:
        node = next((node for node in body if part in _names_of(node)), None)
        if node is None:
            return None
        body = getattr(node, "body", [])
    assert node is not None, "a place names a symbol"
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def _names_of(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _without_decorators(text: str) -> str:
    return re.sub(r"\A(?:\s*@[^\n]*\n)+", "", text)


def _parameters(text: str) -> tuple[tuple[str, ...] | None, bool]:
    node = _parsed(text)
    if isinstance(node, ast.ClassDef):  # what its construction takes
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), node)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None, False
    arguments = node.args
    names = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return tuple(argument.arg for argument in names), arguments.kwarg is not None


@cache
def _source_at(root: str) -> HostSource:
    return HostSource(Path(root))


def locate() -> HostSource | None:
    """The installed host, without importing it; None where there is none."""
    loaded = sys.modules.get(PACKAGE)
    folders = list(getattr(loaded, "__path__", [])) if loaded is not None else []
    if not folders:
        try:
            spec = importlib.util.find_spec(PACKAGE)
        except (ImportError, ValueError):
            return None
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return _source_at(folders[0]) if folders else None
