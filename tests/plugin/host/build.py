"""The stand-in host on disk: Python files made from `tree/` for one version of the recorded contract.

It is a stand-in: our own code under the names that `contract.json` records of NVIDIA/TensorRT-LLM. A symbol that the
contract does not have at a version is cut out of the files; one whose recorded parameters are not those of the file is an
error. So a test that edits the contract edits the host.
"""

import ast
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VERSIONS = ("1.2.1", "1.3.0rc22", "1.3.0rc25", "1.3.0rc26", "1.3.0rc28", "1.3.0rc29")
Row = dict[str, Any]


def contract() -> list[Row]:
    """Rows of symbol, parameters, since, until, path, commit."""
    return json.loads((HERE / "contract.json").read_text())["symbols"]


def at(version: str, row: Row) -> bool:
    """Whether a version has this symbol."""
    index = VERSIONS.index(version)
    return VERSIONS.index(row["since"] or VERSIONS[0]) <= index <= VERSIONS.index(row["until"] or VERSIONS[-1])


def build(
    folder: Path, version: str, rows: Sequence[Row] | None = None, drop: str | None = None, rename: str | None = None
) -> Path:
    """Write the package `tensorrt_llm` into a folder, and return the folder.

    Args:
        version: of VERSIONS. rows: the contract. drop: a symbol to leave out, with what is in it. rename: one whose last
            recorded parameter gets another name, its body with it.
    """
    rows = contract() if rows is None else rows
    for source in sorted((HERE / "tree").rglob("*.py.in")):
        name = source.relative_to(HERE / "tree").with_suffix("").with_suffix("")
        module = ".".join(name.parts)
        tree = ast.parse(_preprocessed(source.read_text(), version))
        for row in (row for row in rows if row["symbol"].split(":")[0] == module):
            attribute = row["symbol"].split(":")[1]
            if not at(version, row) or (drop and f"{row['symbol']}.".startswith(f"{drop}.")):
                _cut(tree, attribute)
                continue
            node = _node(tree, attribute)
            assert node is not None, f"{row['symbol']} is recorded for {version} and not in the stand-in"
            if row["parameters"]:
                _check(row, node)
            if row["symbol"] == rename:
                _rename(node, row["parameters"][-1])
        path = folder / "tensorrt_llm" / name.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ast.unparse(tree).replace("@VERSION@", version) + "\n")
    return folder


def _preprocessed(text: str, version: str) -> str:
    kept, stack = [], [True]
    for line in text.splitlines():
        if found := re.fullmatch(r"#if >= (\S+)", line):
            stack.append(stack[-1] and VERSIONS.index(version) >= VERSIONS.index(found[1]))
        elif line == "#else":
            stack[-1] = not stack[-1] and stack[-2]
        elif line == "#endif":
            stack.pop()
        elif stack[-1]:
            kept.append(line)
    assert stack == [True], "an #if without its #endif"
    return "\n".join(kept)


def _named(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _node(tree: ast.Module, attribute: str) -> ast.stmt | None:
    body: list[ast.stmt] = tree.body
    node = None
    for part in attribute.split("."):
        node = _named(body, part)
        body = getattr(node, "body", [])
    return node


def _cut(tree: ast.Module, attribute: str) -> None:
    *outer, name = attribute.split(".")
    owner: Any = _node(tree, ".".join(outer)) if outer else tree
    if owner is None:
        return
    owner.body = [node for node in owner.body if node is not _named(owner.body, name)] or ast.parse("pass").body


def _arguments(node: ast.stmt) -> list[ast.arg]:
    if isinstance(node, ast.ClassDef):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert isinstance(node, ast.FunctionDef)
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _check(row: Row, node: ast.stmt) -> None:
    has = [argument.arg for argument in _arguments(node)]
    wanting = [name for name in row["parameters"] if name not in has]
    assert not wanting, f"{row['symbol']}: recorded parameters {wanting} are not in the stand-in, it takes {has}"


def _rename(node: ast.stmt, parameter: str) -> None:
    for part in ast.walk(node):
        if isinstance(part, ast.arg) and part.arg == parameter:
            part.arg = f"{parameter}_renamed"
        elif isinstance(part, ast.Name) and part.id == parameter:
            part.id = f"{parameter}_renamed"


def script(lines: str) -> str:
    """A child process's program."""
    return textwrap.dedent(lines)
