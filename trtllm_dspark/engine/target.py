"""The target: any causal language model of Hugging Face transformers, with its own KV cache, and taps on its layers."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark.errors import DSparkError, UnsupportedError
from trtllm_dspark.step import Head

FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")


@dataclass
class TargetOutput:
    """One forward pass over T rows of one sequence.

    Attributes:
        logits: [n, V], of the last n rows. taps: [T, n_taps * D], or None where there are none to take.
    """

    logits: torch.Tensor
    taps: torch.Tensor | None


class HuggingFaceTarget:
    """A causal LM as the engine sees it.

    Tap l is the residual stream after 0-based layer l. For all but the last layer that is `hidden_states[l + 1]`; the last
    of those is already normalised, so the last layer's tap is taken at the final norm's input.

    Args:
        model: a transformers causal LM, in eval mode on its device. tokenizer: for text and stop strings; may be None.
        target_layer_ids: the layers to tap, ascending; empty for decoding without a drafter.
    Raises:
        DSparkError: a layer outside the model. UnsupportedError: a last-layer tap on a model whose final norm is unknown.
    """

    def __init__(self, model: Any, tokenizer: Any = None, target_layer_ids: Sequence[int] = ()) -> None:
        self.model, self.tokenizer = model, tokenizer
        config = model.config.get_text_config()
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.2x
        self.target_layer_ids: tuple[int, ...] = ()
        self.set_taps(target_layer_ids)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> "HuggingFaceTarget":
        """Load a target and, where there is one, its tokenizer.

        Args:
            path: a Hugging Face folder. device, dtype: of the weights; dtype None is the checkpoint's own.
        Raises:
            ImportError: transformers is not installed. DSparkError: transformers cannot load the folder, and its reason.
        """
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise ImportError(
                "HuggingFaceTarget: transformers is required, it is not installed. pip install 'trtllm-dspark[hf]'"
            ) from error
        if not (Path(path) / "config.json").is_file():
            raise DSparkError(
                f"target: a Hugging Face folder with config.json is required, {path} has none. Give the target's folder."
            )
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto").to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(path) if (Path(path) / "tokenizer_config.json").is_file() else None
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DSparkError(
                f"target: a folder that transformers can load is required, {path} cannot be loaded: {first_line} "
                "Check the target's folder."
            ) from error
        return cls(model.requires_grad_(False), tokenizer)

    def set_taps(self, target_layer_ids: Sequence[int]) -> None:
        """Choose the layers to tap; ids outside 0 .. num_layers-1 are an error."""
        bad = [i for i in target_layer_ids if not 0 <= i < self.num_layers]
        if bad:
            raise DSparkError(
                f"target: taps must lie in 0..{self.num_layers - 1} (the target has {self.num_layers} layers), {bad} do not. "
                "The draft was trained for another target."
            )
        self.target_layer_ids = tuple(target_layer_ids)
        if self.num_layers - 1 in self.target_layer_ids:
            self._final_norm()  # an unknown one is refused now, not at the first step

    def _final_norm(self) -> torch.nn.Module:
        base = self.model.base_model
        for name in FINAL_NORMS:
            if isinstance(getattr(base, name, None), torch.nn.Module):
                return getattr(base, name)
        raise UnsupportedError(
            f"target: a tap on the last layer needs the final norm's input, and {type(base).__name__} has none of "
            f"{', '.join(FINAL_NORMS)}. Use a draft that taps an earlier layer."
        )

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_parameters(self) -> int:
        """Values of the model, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] of any float dtype -> [..., V] in the target's: a draft may be loaded in another."""
        return self.model.get_output_embeddings()(hidden.to(self.dtype))

    def output_head(self, dtype: torch.dtype) -> Head:
        """For a draft in this dtype: the weight where the head is a bias-free linear layer in it, else `lm_head`.

        The weight is taken once: a head that hooks change, or that is not plainly laid out, is called instead.
        """
        head = self.model.get_output_embeddings()
        hooked = head._forward_hooks or head._forward_pre_hooks or hasattr(head, "_hf_hook")
        if type(head) is torch.nn.Linear and head.bias is None and not hooked:
            weight = head.weight.detach()
            is_plain = weight.is_contiguous() and weight.data_ptr() % 16 == 0
            if (weight.dtype, weight.device) == (dtype, self.device) and is_plain:
                return weight
        return self.lm_head

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation config; empty where it names none."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)

    def new_cache(self) -> Any:
        """An empty KV cache for one sequence, able to take back rejected rows."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return cache

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, cache: Any, logit_rows: int, *, with_taps: bool = False) -> TargetOutput:
        """Run T new tokens of one sequence.

        Args:
            ids: [T], int64, at the positions after those in the cache. cache: of `new_cache`, extended in place.
            logit_rows: n, how many of the last rows need logits. with_taps: also give the hidden states of the taps.
        """
        with self._taps(with_taps) as read_taps:
            result = self.model(
                input_ids=ids[None],
                use_cache=True,
                output_hidden_states=with_taps,
                logits_to_keep=logit_rows,
                **{self._cache_argument: cache},
            )
        return TargetOutput(result.logits[0, -logit_rows:], read_taps(result.hidden_states))

    @contextmanager
    def _taps(self, wanted: bool) -> Iterator[Callable[[Any], torch.Tensor | None]]:
        last = self.num_layers - 1
        at_final_norm: list[torch.Tensor] = []
        handle = None
        if wanted and last in self.target_layer_ids:
            handle = self._final_norm().register_forward_pre_hook(lambda module, args: at_final_norm.append(args[0]))

        def read(hidden_states: tuple[torch.Tensor, ...] | None) -> torch.Tensor | None:
            if not wanted:
                return None
            assert hidden_states is not None, "the model returned no hidden states"
            streams = [at_final_norm[0] if i == last else hidden_states[i + 1] for i in self.target_layer_ids]
            return torch.cat([stream[0] for stream in streams], -1)

        try:
            yield read
        finally:
            if handle is not None:
                handle.remove()

    def check_can_take_back(self) -> None:
        """Refuse a model whose cache cannot give rows back, before a request depends on it. Runs one row.

        A recurrent state exists only after a pass, so the question has no answer on an empty cache.
        """
        cache = self.new_cache()
        self.forward(torch.zeros(1, dtype=torch.long, device=self.device), cache, 1)
        if not getattr(cache, "is_croppable", True):
            raise UnsupportedError(
                f"target: a KV cache that can take rows back is required, that of {type(self.model).__name__} cannot. "
                "Decode this target without a drafter."
            )

    def copy_cache(self, cache: Any, rows_less: int) -> Any:
        """A cache of its own with the newest `rows_less` rows taken back."""
        copied = copy.deepcopy(cache)
        self.take_back(copied, rows_less)
        return copied

    def take_back(self, cache: Any, rows: int) -> None:
        """Remove the newest `rows` rows from a cache: those of rejected drafts."""
        if rows:
            cache.crop(-rows)
