"""DraftCheckpoint: the tensors of a draft, checked against a `DraftConfig` one by one before any of them is read.

Opening reads safetensors headers only. Coverage is per tensor: each name in `tensor_table` is there with its exact
shape and a dense dtype, and each tensor in the file is in the table, or it is named in the error. Nothing is left
uninitialised and nothing is dropped in silence.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.safetensors_headers import WHO, TensorEntry, listed, main_file, read_header, read_index
from trtllm_dspark.tensor_names import tensor_table

DENSE_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


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
        main = main_file(path)
        index = read_index(main) if main.suffix == ".json" else None
        files = (main,) if index is None else tuple(main.parent / name for name in sorted(set(index.values())))
        tensors: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        stored: dict[str, str] = {}
        for file in files:
            entries, file_metadata = read_header(file)
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
                f"{WHO}: {main} must list the tensors of its shards: {listed(wrong)}. Fetch index and shards again."
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
            found.append(f"unknown tensors that this draft's config has no place for: {listed(unknown)}")
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
