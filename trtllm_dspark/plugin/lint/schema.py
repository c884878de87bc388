"""The keys of a serving YAML, as recorded from TensorRT-LLM in `schema.json`, and the checks that need nothing else.

Every block that the record has is strict in TensorRT-LLM: a key it does not know is refused at start-up. Blocks without a
record are passed over. The record of a range is named in `schema.json`, with what of it was read and what carried over.
"""

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from trtllm_dspark.plugin.lint.document import Document, Key
from trtllm_dspark.plugin.lint.finding import Finding

KINDS = {
    "bool": "true or false",
    "int": "an integer",
    "number": "a number",
    "str": "a string",
    "list": "a list",
    "map": "a block of keys",
}
BOOLEAN_WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0"}  # pydantic's


@cache
def schema() -> Mapping[str, Any]:
    """The record. `ranges`, oldest first; `blocks`: dotted place -> key -> kind; `since`: keys that a later range added;
    `words`: dotted key -> first version of a range -> the words allowed from there on."""
    return json.loads(files("trtllm_dspark.plugin.lint").joinpath("schema.json").read_text(encoding="utf-8"))


def range_of(version: str) -> Mapping[str, Any] | None:
    """The recorded range that a version of TensorRT-LLM falls in. None: older than every record, or not a version."""
    found = None
    if (numbers := _order(version)) is not None:
        for entry in schema()["ranges"]:
            first = _order(entry["first"])
            if first is not None and first <= numbers:
                found = entry
    return found


def is_too_old(version: str) -> bool:
    """Before every recorded range: without the standalone DSpark. A version that cannot be read is not called old."""
    numbers, first = _order(version), _order(schema()["ranges"][0]["first"])
    return numbers is not None and first is not None and numbers < first


def check_keys(document: Document, place: Key, block: str, version: str | None, extra: str | None = None) -> Iterator[Finding]:
    """Unknown keys, values of the wrong kind and unknown words of one block, and of the recorded blocks inside it.

    Args:
        place: of the block in the file. block: its name in the record.
        version: of the installed host, where it is known: what its range does not know is an error, not a warning.
        extra: the record's name of a second block whose keys are allowed at the same place.
    """
    blocks = schema()["blocks"]
    known = {key: (block, kind) for key, kind in blocks[block].items()}
    if extra is not None:
        known.update({key: (extra, kind) for key, kind in blocks[extra].items() if key not in known})
    values = document.get(*place)
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        here = (*place, key)
        name = ".".join(map(str, here))
        if key not in known:
            yield Finding("error", document.line(*here), name, *_unknown(str(key), block, list(known), place))
            continue
        home, kind = known[key]
        if (problem := _wrong_kind(value, kind)) is not None:
            yield Finding("error", document.line(*here), name, f"{KINDS[kind.rstrip('?')]} is required, {problem} came.")
            continue
        yield from _versions(document, here, home, key, value, version)
        inner = f"{home}.{key}".lstrip(".")
        if inner in blocks and not _is_foreign(inner, value):
            yield from check_keys(document, here, inner, version)


def _versions(document: Document, here: Key, block: str, key: str, value: Any, version: str | None) -> Iterator[Finding]:
    """Is the key, and its word, known to the host; to every recorded range where the host's is not known?"""
    name, line = ".".join(map(str, here)), document.line(*here)
    host = None if version is None else range_of(version)
    first = next((first for first, keys in schema()["since"].get(block, {}).items() if key in keys), None)
    if first is not None and (host is None or _before(host["first"], first)):
        fact = f"TensorRT-LLM knows this key from {first} on"
        fix = f"Remove it where an earlier version than {first} reads the file."
        if host is None:
            yield Finding("warning", line, name, f"{fact}; earlier ones refuse the file.", fix)
        else:
            yield Finding("error", line, name, f"{fact}, {version} is installed.", fix)
        return
    table = schema()["words"].get(f"{block}.{key}".lstrip("."))
    if table is None or not isinstance(value, str):
        return
    allowed = [(entry["label"], _words(table, entry["first"])) for entry in (schema()["ranges"] if host is None else [host])]
    words = sorted({word for _, some in allowed for word in some})
    if value not in words:
        near = get_close_matches(value.lower(), [word.lower() for word in words], 1)
        hint = next((word for word in words if near and word.lower() == near[0]), None)
        fix = f"Did you mean {hint}?" if hint else "Choose one of these."
        yield Finding("error", line, name, f"one of {', '.join(words)} is required, {value!r} came.", fix)
        return
    missing = [label for label, some in allowed if value not in some]
    if missing:
        fix = "Choose a word that every version knows, or keep one file a version."
        if key == "attention_backend":
            fix = "Remove the key: an MLA draft then gets AUTO, and TRTLLM_DSPARK_ATTENTION_BACKEND asks for a backend by name."
        yield Finding("warning", line, name, f"{value} is refused by TensorRT-LLM {' and '.join(missing)}.", fix)


def _is_foreign(block: str, value: Any) -> bool:
    """A `speculative_config` for another of TensorRT-LLM's drafters: its keys are not recorded."""
    kind = value.get("decoding_type") if block == "speculative_config" and isinstance(value, Mapping) else None
    return kind != "DSpark" and kind in _words(
        schema()["words"]["speculative_config.decoding_type"], schema()["ranges"][-1]["first"]
    )


def _words(table: Mapping[str, list[str]], first: str) -> list[str]:
    """The words in force in the range that begins with `first`."""
    return next(words for since, words in reversed(list(table.items())) if not _before(first, since))


def _unknown(key: str, block: str, known: list[str], place: Key) -> tuple[str, str]:
    """Message and fix for an unknown key."""
    ranges = schema()["ranges"]
    home = ".".join(map(str, place)) or "the top level"
    where = f"not a key of {home} as recorded of {ranges[0]['first']} to {ranges[-1]['label']}, and unknown keys are refused."
    homes = [name for name, keys in schema()["blocks"].items() if key in keys and name != block]
    near = get_close_matches(key, known, 1, 0.75)
    if near:
        return where, f"Did you mean {near[0]}?"
    if homes:
        return where, f"It belongs in {' or '.join(name or 'the top level' for name in homes)}."
    return where, "Remove it."


def _wrong_kind(value: Any, kind: str) -> str | None:
    """What came, where pydantic would not take it for this kind; None where it would."""
    optional, kind = kind.endswith("?"), kind.rstrip("?")
    if value is None:
        return None if optional or kind == "any" else "null"
    number = as_number(value)
    fits = {
        "any": True,
        "bool": isinstance(value, bool) or value in (0, 1) or (isinstance(value, str) and value.lower() in BOOLEAN_WORDS),
        "int": isinstance(number, int) or (number is not None and number.is_integer()),
        "number": number is not None,
        "str": isinstance(value, str),
        "list": isinstance(value, list),
        "map": isinstance(value, Mapping),
    }
    return None if fits[kind] else repr(value)


def as_number(value: Any) -> int | float | None:
    """A number, or a string that spells one."""
    if isinstance(value, int | float):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _before(first: str, second: str) -> bool:
    a, b = _order(first), _order(second)
    assert a is not None and b is not None, (first, second)
    return a < b


def _order(version: str) -> tuple[int, int, int, float] | None:
    """A sortable form: a release comes after its candidates."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?rc(\d+))?", version)
    if match is None:
        return None
    major, minor, patch, candidate = match.groups()
    return int(major), int(minor), int(patch or 0), float("inf") if candidate is None else float(candidate)
