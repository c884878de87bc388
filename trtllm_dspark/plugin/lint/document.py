"""A YAML file as values and line numbers."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trtllm_dspark.errors import DSparkError

Key = tuple[Hashable, ...]
"""A place in the document: ("kv_cache_config", "dtype"); () is the whole of it."""


@dataclass
class Document:
    """A parsed file.

    Attributes:
        path: as the user gave it. value: what YAML makes of it; None for an empty file.
        lines: place, its parts as strings -> line of its key, from 1.
        repeated: (line, key) of keys that override an earlier one of the same name.
    """

    path: Path
    value: Any
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    repeated: list[tuple[int, str]] = field(default_factory=list)

    def get(self, *place: Hashable) -> Any:
        """The value at a place, None where there is none."""
        value = self.value
        for key in place:
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        return value

    def line(self, *place: Hashable) -> int:
        """Line of a place; where it is not in the file, that of the nearest place around it."""
        names = tuple(map(str, place))
        while names and names not in self.lines:
            names = names[:-1]
        return self.lines.get(names, 1)


class YamlError(DSparkError):
    """Not YAML. line: where, from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read_document(path: str | Path) -> Document:
    """Parse a file.

    Raises:
        DSparkError: there is no such file, or it is not text. YamlError: it is not YAML.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DSparkError(f"--config: a readable YAML file is required, {path}: {error}. Correct the path.") from None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        document = Document(path, None if node is None else loader.construct_document(node))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise YamlError(f"YAML is required, {what} came.", mark.line + 1 if mark else 1) from None
    if node is not None:
        _walk(document, node, (), set())
    return document


def _walk(document: Document, node: yaml.Node, place: tuple[str, ...], above: set[int]) -> None:
    """Record the lines under a node. `above`: nodes on the way here, as an alias may lead back to one of them."""
    document.lines.setdefault(place, node.start_mark.line + 1)
    if not isinstance(node, yaml.CollectionNode) or id(node) in above:
        return
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(document, item, (*place, str(index)), above)
        return
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in seen:
            document.repeated.append((line, key.value))
        seen.add(key.value)
        document.lines[(*place, key.value)] = line
        _walk(document, value, (*place, key.value), above)
