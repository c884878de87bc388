"""DraftCheckpoint: the tensors of a draft, checked against a `DraftConfig` one by one before any of them is read.

Opening reads safetensors headers only. Coverage is per tensor: each name in `tensor_table` is there with its exact
shape and a dense dtype, and each tensor in the file is in the table, or it is named in the error. Nothing is left
uninitialised and nothing is dropped in silence.

Canonical names are those of the MLA checkpoint without `model.`; the GQA family's own words are aliases:

    fc -> context_proj    hidden_norm -> context_norm    norm -> final_norm
    markov_w1, markov_w2 -> markov_head.*                confidence_proj -> confidence_head.proj
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError

WHO = "checkpoint"
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
DENSE_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
ALIASES = {
    "fc.": "context_proj.",
    "hidden_norm.": "context_norm.",
    "norm.": "final_norm.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence_proj.": "confidence_head.proj.",
}


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor, by its header."""

    name: str  # canonical
    stored_name: str
    dtype: str  # as safetensors writes it: "BF16"
    shape: tuple[int, ...]
    nbytes: int
    file: Path


@dataclass(frozen=True)
class TensorSpec:
    """What a draft of some config must hold under one canonical name."""

    shape: tuple[int, ...]
    required: bool = True  # False: the target's own tensor serves where the file has none


def canonical_name(stored: str) -> str:
    """The name under which a stored tensor is known here: without `model.`, in the MLA checkpoint's words."""
    name = stored.removeprefix("model.")
    for prefix, ours in ALIASES.items():
        if name.startswith(prefix) and not name.removeprefix(prefix)[:1].isdigit():
            return ours + name.removeprefix(prefix)
    return name


def tensor_table(config: DraftConfig) -> dict[str, TensorSpec]:
    """Canonical name -> shape ([out, in] for a projection) for every tensor that a draft of this config may hold.

    The published MLA draft has 68 required names, the GQA one 62. `lm_head` is always the target's, and `embed_tokens`
    is for GQA: both are listed, and not required there.
    """
    d, f, v, heads = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (d, config.num_taps * config.target_hidden_size),
        "context_norm.weight": (d,),
        "final_norm.weight": (d,),
    }
    if config.per_tap_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(config.num_taps)}
    if config.markov_rank:
        shapes |= {f"markov_head.markov_{w}.weight": (v, config.markov_rank) for w in ("w1", "w2")}
    if config.confidence_head:
        shapes["confidence_head.proj.weight"] = (1, d + (config.markov_rank if config.confidence_with_markov else 0))
        if config.confidence_bias:
            shapes["confidence_head.proj.bias"] = (1,)
    if config.family == "mla":
        q_rank, kv_rank = config.q_lora_rank or 0, config.kv_lora_rank or 0
        nope, v_dim = config.qk_nope_head_dim or 0, config.v_head_dim or 0
        attention: dict[str, tuple[int, ...]] = {
            "q_a_proj": (q_rank, d),
            "q_a_layernorm": (q_rank,),
            "q_b_proj": (heads * config.qk_head_dim, q_rank),  # per head: nope rows, then rope rows
            "kv_a_proj_with_mqa": (config.latent_width, d),  # latent rows, then rope rows
            "kv_a_layernorm": (kv_rank,),
            "kv_b_proj": (heads * (nope + v_dim), kv_rank),  # per head: key rows, then value rows
            "o_proj": (d, heads * v_dim),
        }
    else:
        dim = config.qk_head_dim
        attention = {
            "q_proj": (heads * dim, d),
            "k_proj": (config.num_kv_heads * dim, d),
            "v_proj": (config.num_kv_heads * dim, d),
            "o_proj": (d, heads * dim),
            "q_norm": (dim,),
            "k_norm": (dim,),
        }
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        shapes |= {f"{at}{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{at}mlp.{name}.weight": (f, d) for name in ("gate_proj", "up_proj")}
        shapes[f"{at}mlp.down_proj.weight"] = (d, f)
    table = {name: TensorSpec(shape) for name, shape in shapes.items()}
    table["embed_tokens.weight"] = TensorSpec((v, d), required=config.family == "mla")
    table["lm_head.weight"] = TensorSpec((v, d), required=False)
    return table


@dataclass(frozen=True)
class DraftCheckpoint:
    """The headers of one draft. `tensors` is keyed by canonical name; `metadata` merges the files' `__metadata__`."""

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]
    metadata: dict[str, str]

    @classmethod
    def open(cls, path: str | Path) -> "DraftCheckpoint":
        """Read the headers of a `.safetensors` file, an index, or the folder that holds one of them.

        Raises:
            DSparkError: nothing to open, a damaged file or index, or two tensors with one canonical name.
        """
        path = Path(path)
        main = _main_file(path)
        index = _read_index(main) if main.suffix == ".json" else None
        files = (main,) if index is None else tuple(main.parent / name for name in sorted(set(index.values())))
        tensors: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        stored: dict[str, str] = {}
        for file in files:
            entries, file_metadata = _read_header(file)
            metadata |= file_metadata
            for entry in entries:
                other = tensors.get(entry.name)
                if other is not None:
                    raise DSparkError(
                        f"{WHO}: {entry.stored_name} ({entry.file.name}) and {other.stored_name} ({other.file.name}) "
                        f"are both {entry.name}. Keep one of them."
                    )
                tensors[entry.name] = entry
                stored[entry.stored_name] = file.name
        if index is not None and index != stored:
            wrong = [f"{name} is not in {file}" for name, file in index.items() if stored.get(name) != file]
            wrong += [f"{name} of {file} is not in the index" for name, file in stored.items() if name not in index]
            raise DSparkError(
                f"{WHO}: {main} must list the tensors of its shards: {_listed(wrong)}. Fetch index and shards again."
            )
        return cls(path, files, MappingProxyType(tensors), metadata)

    @property
    def num_parameters(self) -> int:
        """Elements in all tensors of the files, used or not."""
        return sum(math.prod(entry.shape) for entry in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the headers."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def problems(self, config: DraftConfig) -> list[str]:
        """All that keeps these tensors from being a draft of `config`, each naming its tensor; [] if nothing does."""
        table, found = tensor_table(config), []
        for name, spec in table.items():
            entry = self.tensors.get(name)
            if entry is None:
                if spec.required:
                    found.append(f"missing {name} {list(spec.shape)}{_hint(name, config)}")
            elif entry.dtype not in DENSE_DTYPES:
                found.append(
                    f"{entry.stored_name} is {entry.dtype} {list(entry.shape)}, required {'/'.join(DENSE_DTYPES)} "
                    f"{list(spec.shape)}: a packed or quantised draft under bf16 names; dequantise it to bf16"
                )
            elif entry.shape != spec.shape:
                found.append(f"{entry.stored_name} must be {list(spec.shape)}, came {list(entry.shape)}{_hint(name, config)}")
        unknown = sorted(e.stored_name for n, e in self.tensors.items() if n not in table and not _switched_off(n, config))
        if unknown:
            found.append(f"unknown tensors that this draft's config has no place for: {_listed(unknown)}")
        return found

    def check(self, config: DraftConfig) -> None:
        """Raise one `DSparkError` that names every problem."""
        found = self.problems(config)
        if found:
            raise DSparkError(f"{WHO}: {self.path} is not a complete draft of its config: {'; '.join(found)}.")

    def notes(self, config: DraftConfig) -> list[str]:
        """Facts worth one line each at load: what is in the files and not used, or is stored in another dtype."""
        said = []
        off = {head for name in self.tensors if (head := _switched_off(name, config))}
        said += [f"{head} is in the checkpoint but switched off by the config: ignored" for head in sorted(off)]
        if "lm_head.weight" in self.tensors:
            said.append("lm_head.weight is in the checkpoint: ignored, logits come from the target's lm_head")
        dtypes = sorted({DENSE_DTYPES.get(e.dtype, e.dtype) for e in self.tensors.values()} - {config.dtype})
        if dtypes:
            said.append(f"tensors stored as {', '.join(dtypes)}, the config's dtype is {config.dtype}")
        return said

    def read(
        self, name: str, *, dim: int | None = None, rank: int = 0, size: int = 1, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """One tensor, or this rank's equal share of it; only that share is read from disk.

        Args:
            name: canonical name.
            dim: the dimension to divide into `size` shares. None: the whole tensor, on every rank.
            rank, size: which share, of how many.
        Returns:
            The tensor in its stored dtype, contiguous, in memory of its own.
        Raises:
            DSparkError: unknown name, dtype that is not dense, a dimension that `size` does not divide, NaN or Inf.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise DSparkError(f"{WHO}: {self.path} has no {name}. Run check(config) before reading.")
        if entry.dtype not in DENSE_DTYPES:
            raise DSparkError(
                f"{WHO}: {entry.stored_name} must be {'/'.join(DENSE_DTYPES)}, came {entry.dtype}. Dequantise it."
            )
        if not 0 <= rank < size:
            raise DSparkError(f"{WHO}: {name}: rank must be in 0..size-1, came rank {rank} of size {size}.")
        window = [slice(0, n) for n in entry.shape]
        if dim is not None:
            if not -len(window) <= dim < len(window):
                raise DSparkError(f"{WHO}: {name} of shape {list(entry.shape)} has no dimension {dim}.")
            if entry.shape[dim] % size:
                raise DSparkError(
                    f"{WHO}: {name}: dimension {dim} of {list(entry.shape)} must be divisible by {size} ranks. Use a "
                    "size that divides it."
                )
            share = entry.shape[dim] // size
            window[dim] = slice(rank * share, (rank + 1) * share)
        try:
            with safe_open(entry.file, framework="pt", device="cpu") as file:
                whole = all(w.stop - w.start == n for w, n in zip(window, entry.shape, strict=True))
                value = file.get_tensor(entry.stored_name) if whole else file.get_slice(entry.stored_name)[tuple(window)]
        except (OSError, SafetensorError) as error:
            raise DSparkError(f"{WHO}: {entry.file} changed since it was opened, or cannot be read: {error}.") from None
        _refuse_non_finite(value, entry, [w.start for w in window])
        # A copy: what the library gives may be a view of the mapped file, which dies with it.
        return value.to(device, copy=True, memory_format=torch.contiguous_format)


def _refuse_non_finite(value: torch.Tensor, entry: TensorEntry, start: list[int]) -> None:
    bad = ~torch.isfinite(value)
    if bad.any():
        first = [i + s for i, s in zip(bad.nonzero()[0].tolist(), start, strict=True)]
        raise DSparkError(
            f"{WHO}: {entry.stored_name} must be finite, came {int(bad.sum())} NaN or Inf of {value.numel()} values, "
            f"the first at {first}. The checkpoint is damaged; fetch it again."
        )


def _switched_off(name: str, config: DraftConfig) -> str | None:
    """The head that `name` belongs to, where the config switches that head off."""
    if name.startswith("confidence_head.") and not config.confidence_head:
        return "confidence_head"
    if name.startswith("markov_head.") and not config.markov_rank:
        return "markov_head"
    return None


def _hint(name: str, config: DraftConfig) -> str:
    if name == "context_proj.weight":
        return f" ({config.num_taps} taps x target hidden size {config.target_hidden_size} columns)"
    if name == "confidence_head.proj.bias":
        return " (a head without bias declares confidence_head_bias: false)"
    return ""


def _listed(names: Iterable[str], limit: int = 20) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _main_file(path: Path) -> Path:
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
            raise DSparkError(f"{WHO}: {path} must have one checkpoint, came {_listed(f.name for f in found)}. Give the file.")
    raise DSparkError(f"{WHO}: {path} has no .safetensors file; no other format is read. Fetch or convert the weights.")


def _read_index(path: Path) -> dict[str, str]:
    """Stored name -> shard file name, with every shard there."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DSparkError(f"{WHO}: {path} must be JSON with a weight_map: {type(error).__name__} {error}.") from None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(f, str) and f and Path(f).name == f for f in weight_map.values())
    ):
        raise DSparkError(f"{WHO}: {path}: weight_map must give each tensor the plain file name of its shard. Fetch it again.")
    missing = [name for name in sorted(set(weight_map.values())) if not (path.parent / name).is_file()]
    if missing:
        raise DSparkError(f"{WHO}: {path} names shards that are not there: {_listed(missing)}. Fetch them.")
    return weight_map


def _read_header(path: Path) -> tuple[list[TensorEntry], dict[str, str]]:
    """Entries and metadata of one file. Layout: u64 length n, n bytes of JSON, then the tensors back to back."""
    with open(path, "rb") as file:
        total = file.seek(0, 2)
        file.seek(0)
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or (8 + length > total and length <= MAX_HEADER_BYTES):
            raise DSparkError(
                f"{WHO}: {path} is truncated: {8 + length} bytes of header expected, {total} found. Fetch it again."
            )
        if length > MAX_HEADER_BYTES:
            raise DSparkError(f"{WHO}: {path} is not safetensors: a header of {length} bytes (at most {MAX_HEADER_BYTES}).")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except ValueError as error:
        raise DSparkError(f"{WHO}: {path}: the header is not parseable JSON: {error}. Fetch it again.") from None
    if not isinstance(header, dict):
        raise DSparkError(f"{WHO}: {path}: the header must be a JSON object, came {type(header).__name__}.")
    metadata = header.pop("__metadata__", None) or {}
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
    return [entry for _, _, entry in spans], {str(key): str(value) for key, value in dict(metadata).items()}


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
