"""Filling a drafter from a checkpoint: every parameter from the file, none left as allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from trtllm_dspark.attention.operations import DraftShape
from trtllm_dspark.checkpoint import DraftCheckpoint
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.model.parallel import SINGLE, TensorParallel
from trtllm_dspark.tensor_names import tensor_table

if TYPE_CHECKING:
    from trtllm_dspark.attention.policy import BackendChoice

Model = TypeVar("Model", bound="LoadableModel")


@dataclass(frozen=True)
class Binding:
    """Where a checkpoint tensor goes.

    Attributes:
        tensor: a parameter, or a view into one. shard_dim: the dim that tensor parallelism slices; None: whole.
    """

    tensor: torch.Tensor
    shard_dim: int | None = None


class LoadableModel(nn.Module):
    """A drafter that knows the checkpoint name of each of its values."""

    config: DraftConfig
    tp: TensorParallel
    backend: BackendChoice

    def bindings(self) -> dict[str, Binding]:
        """Canonical checkpoint name -> where its values go."""
        raise NotImplementedError("a drafter class must say where each checkpoint tensor goes")

    @classmethod
    def resolve_backend(
        cls, config: DraftConfig, device: torch.device, requested: str = "AUTO", shape: DraftShape | None = None
    ) -> BackendChoice:
        """The attention backend of this family on this device."""
        raise NotImplementedError("a drafter class must say which attention backend it runs on")

    @classmethod
    def empty(
        cls: type[Model],
        config: DraftConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention_backend: str = "AUTO",
        page_size: int = 64,
        tp: TensorParallel = SINGLE,
    ) -> Model:
        """A drafter whose every value is NaN, so that one that is never filled shows in the first output."""
        device = torch.device(device)
        shape = DraftShape.of(config, dtype=dtype, page_size=page_size, tp=tp)
        backend = cls.resolve_backend(config, device, attention_backend, shape)
        with torch.device("meta"):
            model = cls(config, backend=backend, tp=tp)
        model = model.to(dtype).to_empty(device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        return model

    @classmethod
    def from_pretrained(
        cls: type[Model],
        path: str | Path,
        *,
        config: DraftConfig | None = None,
        num_drafts: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        attention_backend: str = "AUTO",
        page_size: int = 64,
        tp: TensorParallel = SINGLE,
    ) -> Model:
        """Load a drafter from a folder with config.json and safetensors.

        Args:
            path: the folder. config: read from it where None.
            num_drafts: K; fills a missing block_size, and is checked against a present one.
            device, dtype: of the parameters; dtype None is the checkpoint's own.
            attention_backend: AUTO or a name of the family. page_size: of the pool it will run on.
            tp: this rank's slice; only that slice is read.
        Raises:
            DSparkError: anything in the folder that is missing, unknown, of another shape, packed or not finite.
        """
        config = config or DraftConfig.from_pretrained(path, max_draft_len=num_drafts)
        checkpoint = DraftCheckpoint.open(path)
        checkpoint.check(config)
        dtype = dtype or getattr(torch, config.dtype)
        model = cls.empty(config, device=device, dtype=dtype, attention_backend=attention_backend, page_size=page_size, tp=tp)
        model.fill(lambda name, dim: checkpoint.read(name, dim=dim, rank=tp.rank, size=tp.size))
        return model.eval().requires_grad_(False)

    def fill(self, read: Callable[[str, int | None], torch.Tensor]) -> None:
        """Copy every bound tensor from `read(canonical name, shard dim)`; shapes must agree exactly."""
        bindings = self.bindings()
        required = {name for name, spec in tensor_table(self.config).items() if spec.required}
        assert required == set(bindings), f"bindings and tensor table differ: {sorted(required ^ set(bindings))}"
        with torch.no_grad():
            for name, binding in bindings.items():
                value = read(name, binding.shard_dim)
                if value.shape != binding.tensor.shape:
                    raise DSparkError(
                        f"{type(self).__name__}: {name} must have shape {tuple(binding.tensor.shape)} on this rank, "
                        f"it has {tuple(value.shape)}. The checkpoint does not fit its config.json."
                    )
                binding.tensor.copy_(value)
        for device in {binding.tensor.device for binding in bindings.values()}:
            if device.type == "cuda":  # a kernel may read weights before the launch ahead of it has ended
                torch.cuda.synchronize(device)

    def checkpoint_tensors(self) -> Mapping[str, torch.Tensor]:
        """Canonical name -> value, on the CPU and contiguous: what `safetensors.torch.save_file` takes."""
        return {name: binding.tensor.detach().cpu().contiguous() for name, binding in self.bindings().items()}
