"""Reading what safetensors files say of themselves: headers and indexes, never tensor data.

A damaged file is told apart here, in one line: truncated, gapped, overlapping, packed under another size.
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.tensor_names import canonical_name

WHO = "checkpoint"
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor, by its header."""

    name: str  # canonical
    stored_name: str
    dtype: str  # as safetensors writes it: "BF16"
    shape: tuple[int, ...]
    nbytes: int
    file: Path


def listed(names: Iterable[str], limit: int = 20) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def main_file(path: Path) -> Path:
    """The single `.safetensors` file or the index that `path` means."""
    if not path.exists():
        raise DSparkError(f"{WHO}: {path} does not exist. Give a draft's folder or .safetensors file.")
    if path.is_file():
        if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
            return path
        raise DSparkError(f"{WHO}: a .safetensors file, its index or a folder is required, came {path}.")
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors").is_file() and indexes:
        raise DSparkError(f"{WHO}: {path} has both model.safetensors and {indexes[0].name}. Give the one that is meant.")
    for found in ([path / "model.safetensors"] if (path / "model.safetensors").is_file() else [], indexes, files):
        if len(found) == 1:
            return found[0]
        if found:
            raise DSparkError(f"{WHO}: {path} must have one checkpoint, came {listed(f.name for f in found)}. Give the file.")
    raise DSparkError(f"{WHO}: {path} has no .safetensors file; no other format is read. Fetch or convert the weights.")


def read_index(path: Path) -> dict[str, str]:
    """Stored name -> shard file name, with every shard there."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DSparkError(f"{WHO}: {path} must be JSON with a weight_map: {type(error).__name__} {error}.") from None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(f, str) and f and Path(f).name == f for f in weight_map.values())
    ):
        raise DSparkError(f"{WHO}: {path}: weight_map must give each tensor the plain file name of its shard. Fetch it again.")
    missing = [name for name in sorted(set(weight_map.values())) if not (path.parent / name).is_file()]
    if missing:
        raise DSparkError(f"{WHO}: {path} names shards that are not there: {listed(missing)}. Fetch them.")
    return weight_map


def read_header(path: Path) -> tuple[list[TensorEntry], dict[str, str]]:
    """Entries and metadata of one file. Layout: u64 length n, n bytes of JSON, then the tensors back to back."""
    try:
        with open(path, "rb") as file:
            total = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise DSparkError(f"{WHO}: {path} cannot be read: {error}.") from None
    if length > MAX_HEADER_BYTES:
        raise DSparkError(f"{WHO}: {path} is not safetensors: a header of {length} bytes (at most {MAX_HEADER_BYTES}).")
    if len(prefix) < 8 or len(text) < length:
        raise DSparkError(f"{WHO}: {path} is truncated: {8 + length} bytes of header expected, {total} found. Fetch it again.")
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise DSparkError(f"{WHO}: {path}: the header is not parseable JSON: {error}. Fetch it again.") from None
    metadata = (header.pop("__metadata__", None) or {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise DSparkError(f"{WHO}: {path}: the header and its __metadata__ must be JSON objects, came {text[:60]!r}.")
    spans = sorted((_entry(path, name, item) for name, item in header.items()), key=lambda span: span[:2])
    at = 0
    for begin, end, entry in spans:
        if begin != at:
            kind = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise DSparkError(
                f"{WHO}: {path}: {entry.stored_name} starts at byte {begin} and {kind} (byte {at}). Fetch it again."
            )
        at = end
    expected = 8 + length + at
    if total != expected:
        kind = "is truncated" if total < expected else "has bytes past its last tensor"
        raise DSparkError(f"{WHO}: {path} {kind}: {expected} bytes expected, {total} found. Fetch it again.")
    return [entry for _, _, entry in spans], {str(key): str(value) for key, value in metadata.items()}


def _entry(path: Path, name: str, item: Any) -> tuple[int, int, TensorEntry]:
    """(first byte, end, entry) of one header item, with bytes = elements x dtype checked."""
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or end < begin:
            raise ValueError("not a name, sizes and offsets")
    except (KeyError, TypeError, ValueError):
        raise DSparkError(
            f"{WHO}: {path}: the header of {name} must have dtype, shape and data_offsets, came {item!r}."
        ) from None
    if dtype in BITS and (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise DSparkError(
            f"{WHO}: {path}: {name} {dtype} {list(shape)} must be {math.prod(shape) * BITS[dtype] // 8} bytes, its "
            f"offsets give {end - begin}. Fetch it again."
        )
    return begin, end, TensorEntry(canonical_name(name), name, dtype, shape, end - begin, path)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"{key} is there twice")
        seen[key] = value
    return seen
