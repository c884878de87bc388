"""Text to measure on that every machine already has: the Python standard library, with whole modules held out of training.

The only owner of the held-out list. The tests of a held-out module are in neither set: they would leak it.
"""

import random
import re
import sysconfig
from pathlib import Path
from typing import Any

from trtllm_dspark.errors import DSparkError

HELD_OUT = (
    "argparse", "calendar", "csv", "fractions", "heapq", "json",
    "queue", "shlex", "statistics", "textwrap", "tomllib", "zipapp",
)  # fmt: skip
TABLES = ("encodings", "pydoc_data")  # data rather than code
NOT_LIBRARY = ("site-packages", "dist-packages", "lib-dynload", "__pycache__")
TEST_FOLDERS = ("test", "tests", "idle_test")
CHARACTERS_A_TOKEN = 6  # a first guess of how much text a prompt takes; twice that, then the whole file, come next


def module_of(path: Path) -> str:
    """The module that a library file belongs to; a file of test/ belongs to the module that it tests.

    Args:
        path: relative to the standard library: json/decoder.py, or test/test_json/test_scanner.py; both are json.
    """
    parts = [part.removesuffix(".py") for part in path.parts]
    tested = (part.removeprefix("test_") for part in parts if part.startswith("test_"))
    return next(tested, "test") if parts[0] == "test" else parts[0]


def training_files(stdlib: Path | None = None) -> list[Path]:
    """Library files that may be trained on, tests included, sorted: nothing of a held-out module."""
    root = _root(stdlib)
    return [path for path in _library_files(root) if _held_out_module(path.relative_to(root)) is None and _is_utf8(path)]


def held_out_files(stdlib: Path | None = None) -> list[Path]:
    """Files of the held-out modules, without their tests, sorted. A module that this Python lacks is skipped.

    Raises:
        DSparkError: no held-out module is there.
    """
    root = _root(stdlib)
    relative = ((path, path.relative_to(root)) for path in _library_files(root))
    found = [path for path, name in relative if _held_out_module(name) and not _is_test(name) and _is_utf8(path)]
    if not found:
        raise DSparkError(
            f"stdlib_text: sources of {', '.join(HELD_OUT)} are required, {root} has none of them. "
            "Give the folder of a Python installation with .py files."
        )
    return found


def held_out_prompts(
    tokenizer: Any, count: int, length: int, *, ending: str = "def", seed: int = 0, stdlib: Path | None = None
) -> list[list[int]]:
    """Prompts from held-out modules, each cut just after a keyword, the way somebody would ask for code.

    The modules take turns, so that no large one dominates. No two prompts share text.

    Args:
        tokenizer: of transformers: `encode(text, add_special_tokens=False)` and `decode(ids)`.
        count: how many. length: tokens in each.
        ending: a keyword that begins a statement; the prompt ends with it. seed: which prompts. stdlib: None is this Python's.
    Returns:
        count lists of exactly `length` ids; the same arguments give the same prompts on the same Python.
    Raises:
        DSparkError: the held-out modules do not hold so many.
    """
    root, rng = _root(stdlib), random.Random(seed)
    statement = re.compile(rf"^[ \t]*(?:async )?{re.escape(ending)}(?= )", re.MULTILINE)
    texts = {path: path.read_text("utf-8") for path in held_out_files(stdlib)}
    spots: dict[str, list[tuple[Path, int]]] = {}
    for path, text in texts.items():
        ends = spots.setdefault(module_of(path.relative_to(root)), [])
        ends += [(path, match.end()) for match in statement.finditer(text)]
    for ends in spots.values():
        rng.shuffle(ends)
    turns = list(spots.values())
    rng.shuffle(turns)

    prompts: list[list[int]] = []
    used: dict[Path, list[range]] = {path: [] for path in texts}
    while len(prompts) < count and any(turns):
        for ends in turns:
            found = _next_prompt(tokenizer, texts, ends, used, length) if len(prompts) < count else None
            if found is not None:
                prompts.append(found)
    if len(prompts) < count:
        raise DSparkError(
            f"stdlib_text: {count} prompts of {length} tokens that end with {ending!r} were asked for, the held-out modules "
            f"hold {len(prompts)}. Ask for fewer or shorter ones."
        )
    return prompts


def _next_prompt(
    tokenizer: Any,
    texts: dict[Path, str],
    ends: list[tuple[Path, int]],
    used: dict[Path, list[range]],
    length: int,
) -> list[int] | None:
    """The first of a module's remaining spots with `length` unused tokens before it. Tried spots are removed."""
    while ends:
        path, end = ends.pop()
        window = CHARACTERS_A_TOKEN * length
        ids: list[int] = []
        for start in (max(0, end - window), max(0, end - 2 * window), 0):
            if len(ids) < length:
                ids = tokenizer.encode(texts[path][start:end], add_special_tokens=False)
        if len(ids) < length:
            continue
        prompt = list(ids[-length:])
        span = range(end - len(tokenizer.decode(prompt)), end)
        if not any(span.start < other.stop and other.start < span.stop for other in used[path]):
            used[path].append(span)
            return prompt
    return None


def _root(stdlib: Path | None) -> Path:
    return Path(sysconfig.get_path("stdlib") if stdlib is None else stdlib)


def _library_files(root: Path) -> list[Path]:
    """.py files of the library itself, sorted: no installed packages, no tables, nothing that the build wrote."""

    def wanted(path: Path) -> bool:
        parts = path.relative_to(root).parts
        written_by_build = parts[0].startswith(("config-", "_sysconfigdata"))
        return not (set(parts) & {*TABLES, *NOT_LIBRARY} or written_by_build)

    return [path for path in sorted(root.rglob("*.py")) if path.is_file() and wanted(path)]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):  # a handful of files test other encodings
        return False
    return True


def _is_test(path: Path) -> bool:
    return any(part in TEST_FOLDERS or part.startswith("test_") for part in path.parts)


def _held_out_module(path: Path) -> str | None:
    """The held-out module that a file, or what it tests, belongs to."""
    module = module_of(path)
    return next((name for name in HELD_OUT if module == name or module.startswith(f"{name}_")), None)
