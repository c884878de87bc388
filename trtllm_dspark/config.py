"""DraftConfig: every published dialect of a DSpark draft's `config.json` in, one validated, frozen object out.

The dialects differ in where a key lives, in what it is called, and in what it means:

- a DSpark key may be top level, `dspark_<key>`, in `dspark_config` or in `dflash_config`. Equal values in several
  places are fine, different ones are an error that prints each value and its place. A null says nothing;
- `num_target_layers` counts the taps in an MLA config and the target's layers in a GQA one;
- RoPE is `rope_parameters` (transformers 5), or `rope_scaling` (null: plain) beside a top-level `rope_theta`.

What changes the maths and is absent is an error, never a guess; what changes the maths and is not built is refused by
name. The backbone family comes from `architectures` and `model_type` alone, never from a path.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from trtllm_dspark.dialects import Overrides, resolve
from trtllm_dspark.errors import DSparkError

WHO = "DraftConfig"
PositiveInt = Annotated[int, Field(strict=True, gt=0)]
Index = Annotated[int, Field(strict=True)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
M = TypeVar("M", bound=BaseModel)


class RopeConfig(BaseModel):
    """Rotary embedding as the checkpoint states it; every number still unapplied. Lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["default", "yarn"]
    theta: Positive
    factor: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = 1.0
    original_max_position_embeddings: PositiveInt | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: NonNegative | None = None  # None where the config has no such key
    mscale_all_dim: NonNegative | None = None
    attention_factor: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rope_type == "yarn" and self.original_max_position_embeddings is None:
            raise DSparkError(f"{WHO}: rope_type yarn requires original_max_position_embeddings, which is missing.")
        if self.rope_type == "default" and self.factor != 1.0:
            raise DSparkError(f"{WHO}: rope_type default has no factor, came factor {self.factor:g}. Say which one is meant.")
        return self


class DraftConfig(BaseModel):
    """One DSpark draft, resolved. Widths are in elements, ids are 0-based. `from_pretrained` reads a folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["mla", "gqa"]
    architecture: str
    model_type: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt | None = None  # GQA only
    q_lora_rank: PositiveInt | None = None  # this and the next four: MLA only, all of them set there
    kv_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt  # a claim of the checkpoint: nothing may be sized from it
    rms_norm_eps: Positive
    rope: RopeConfig
    target_layer_ids: tuple[Index, ...]  # taps: the output of 0-based target layer l, ascending
    target_hidden_size: PositiveInt
    target_num_layers: PositiveInt | None = None  # depth of the target, where the checkpoint says it
    mask_token_id: Index
    block_size: PositiveInt | None = None  # rows the checkpoint was trained for; None only with require_block_size=False
    sample_from_anchor: Flag = True  # True: row 0 predicts too, B rows give B drafts. False (fill-in): rows 1.. predict
    markov_rank: Annotated[int, Field(strict=True, ge=0)]  # 0: no Markov head
    markov_head_type: Literal["vanilla"] = "vanilla"
    confidence_head: Flag
    confidence_with_markov: Flag
    confidence_bias: Flag
    aux_stream: Literal["prefix", "attn_res"]
    per_tap_norm: Flag = False
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    notes: tuple[str, ...] = ()  # facts to be said once, at start-up

    @property
    def num_taps(self) -> int:
        """Tapped target layers."""
        return len(self.target_layer_ids)

    @property
    def latent_width(self) -> int:
        """Elements of a cached context row of one layer, MLA only: normalised latent, then rotated key (512 + 64)."""
        return _defined(self.kv_lora_rank, "latent_width") + _defined(self.qk_rope_head_dim, "latent_width")

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head before absorption: nope + rope for MLA, head_dim for GQA."""
        if self.family == "gqa":
            return _defined(self.head_dim, "qk_head_dim")
        return _defined(self.qk_nope_head_dim, "qk_head_dim") + _defined(self.qk_rope_head_dim, "qk_head_dim")

    @property
    def max_drafts(self) -> int:
        """Drafts one block can give: every row, or every row but the anchor's in the fill-in layout."""
        if self.block_size is None:
            raise DSparkError(f"{WHO}: the block size is unknown: the checkpoint has none. Give max_draft_len.")
        return self.block_size - self.first_draft_row

    @property
    def first_draft_row(self) -> int:
        """The block row that gives the first draft: the anchor's own, or the one behind it in the fill-in layout."""
        return 0 if self.sample_from_anchor else 1

    def check_num_drafts(self, num_drafts: int) -> int:
        """`num_drafts` itself where one block can give that many. Fewer is legal: later rows go unused."""
        if isinstance(num_drafts, bool) or not isinstance(num_drafts, int) or num_drafts < 1:
            raise DSparkError(f"{WHO}: num_drafts must be an integer of at least 1, came {num_drafts!r}.")
        if num_drafts > self.max_drafts:
            layout = "anchor-first" if self.sample_from_anchor else "fill-in (row 0 is the bonus token and predicts nothing)"
            raise DSparkError(
                f"{WHO}: num_drafts K must be at most {self.max_drafts}, came K={num_drafts}; the checkpoint's "
                f"block_size is {self.block_size}, layout {layout}. Set max_draft_len to {self.max_drafts} or less."
            )
        return num_drafts

    def check_target(self, *, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Raise `DSparkError` with every mismatch where this draft was trained for another target."""
        wrong = []
        if self.target_hidden_size != hidden_size:
            wrong.append(f"target_hidden_size {self.target_hidden_size}, the target's hidden size {hidden_size}")
        if self.hidden_size != hidden_size:
            wrong.append(f"hidden_size {self.hidden_size}, the target's lm_head takes {hidden_size}")
        if self.vocab_size != vocab_size:
            wrong.append(f"vocab_size {self.vocab_size}, the target's {vocab_size}")
        if self.target_num_layers not in (None, num_layers):
            wrong.append(f"a target of {self.target_num_layers} layers, the target has {num_layers}")
        if self.target_layer_ids[-1] >= num_layers:
            wrong.append(f"target_layer_ids {list(self.target_layer_ids)}, valid ids are 0..{num_layers - 1}")
        if wrong:
            raise DSparkError(f"{WHO}: this is a draft for another target: {'; '.join(wrong)}. Use this target's own draft.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        mla = (self.q_lora_rank, self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        if self.family == "mla" and (None in mla or self.head_dim is not None):
            raise DSparkError(f"{WHO}: an MLA draft has the five low-rank widths and no head_dim, came {mla}, {self.head_dim}.")
        if self.family == "gqa" and (self.head_dim is None or any(x is not None for x in mla)):
            raise DSparkError(f"{WHO}: a GQA draft has head_dim and no low-rank widths, came {self.head_dim}, {mla}.")
        if self.num_heads % self.num_kv_heads:
            raise DSparkError(f"{WHO}: num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}.")
        rotary = self.qk_rope_head_dim or self.head_dim or 0
        if rotary % 2:
            raise DSparkError(f"{WHO}: RoPE turns pairs, so its width must be even, came {rotary}.")
        taps, depth = self.target_layer_ids, self.target_num_layers
        valid = f"0..{depth - 1}" if depth else "0 and up, below the target's depth"
        if not taps or min(taps) < 0 or (depth and max(taps) >= depth):
            raise DSparkError(f"{WHO}: target_layer_ids must name target layers, valid ids are {valid}; came {list(taps)}.")
        if any(a >= b for a, b in pairwise(taps)):
            raise DSparkError(
                f"{WHO}: target_layer_ids must be distinct and ascending (the taps are concatenated in that order), "
                f"valid ids are {valid}; came {list(taps)}."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DSparkError(
                f"{WHO}: mask_token_id must be an id of the vocabulary, 0..{self.vocab_size - 1}; came {self.mask_token_id}."
            )
        if self.block_size is not None and self.max_drafts < 1:
            raise DSparkError(f"{WHO}: a fill-in block needs 2 rows or more, came block_size {self.block_size}.")
        if self.confidence_head and self.confidence_with_markov and not self.markov_rank:
            raise DSparkError(f"{WHO}: confidence_head_with_markov is true, but markov_rank is 0: there is no Markov feature.")
        return self

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        max_draft_len: int | None = None,
        rope_theta: float | None = None,
        aux_stream: str | None = None,
        sample_from_anchor: bool | None = None,
        require_block_size: bool = True,
    ) -> Self:
        """Read `config.json` in the folder `path`, and refuse what a quantisation file beside it declares.

        Args:
            path: the checkpoint's folder. Its name decides nothing.
            max_draft_len: drafts a step. Checked against the block size; stands in for it where there is none.
            rope_theta, aux_stream, sample_from_anchor: override the checkpoint; each is said in `notes`.
            require_block_size: False leaves `block_size` None where neither checkpoint nor caller says it.
        Raises:
            DSparkError: no readable config there, or one that is incomplete or contradicts itself.
            UnsupportedError: a legal draft that this version does not implement.
        """
        folder = Path(path)
        if not folder.exists():
            raise DSparkError(f"{WHO}: {folder} does not exist. Give the folder of a draft checkpoint.")
        if not folder.is_dir():
            raise DSparkError(f"{WHO}: a checkpoint folder is required, {folder} is a file. Give the folder that holds it.")
        if not (folder / "config.json").is_file():
            raise DSparkError(f"{WHO}: {folder} has no config.json. Give the folder of a draft checkpoint.")
        quantization: Mapping[str, Any] | None = None
        for name in ("quantization_config.json", "hf_quant_config.json"):
            if quantization is None and (folder / name).is_file():
                quantization = _read_object(folder / name)
        return cls.from_dict(
            _read_object(folder / "config.json"),
            source=str(folder / "config.json"),
            quantization=quantization,
            max_draft_len=max_draft_len,
            rope_theta=rope_theta,
            aux_stream=aux_stream,
            sample_from_anchor=sample_from_anchor,
            require_block_size=require_block_size,
        )

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        *,
        source: str = "config.json",
        quantization: Mapping[str, Any] | None = None,
        max_draft_len: int | None = None,
        rope_theta: float | None = None,
        aux_stream: str | None = None,
        sample_from_anchor: bool | None = None,
        require_block_size: bool = True,
    ) -> Self:
        """The same from an object already in memory. `quantization`: what a file beside the config declared, if any."""
        who = f"{WHO} ({source})"
        if not isinstance(raw, Mapping):
            raise DSparkError(f"{who}: a JSON object is required, came {type(raw).__name__}.")
        if max_draft_len is not None and (type(max_draft_len) is not int or max_draft_len < 1):
            raise DSparkError(f"{WHO}: max_draft_len must be an integer of at least 1, came {max_draft_len!r}.")
        asked = Overrides(max_draft_len, rope_theta, aux_stream, sample_from_anchor, require_block_size)
        config = _build(cls, who, **resolve(raw, who, quantization, asked))
        if max_draft_len is not None:
            config.check_num_drafts(max_draft_len)
        return config


_CONFIG_KEYS = {  # our fields whose key in config.json has another name
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "target_num_layers": "target_num_hidden_layers",
    "theta": "rope_theta",
}


def _build(kind: type[M], who: str, **fields: Any) -> M:
    """`kind(**fields)`, with pydantic's report turned into one line."""
    try:
        return kind(**fields)
    except ValidationError as error:
        wrong = []
        for item in error.errors():
            cause = item.get("ctx", {}).get("error")
            if isinstance(cause, DSparkError):
                raise DSparkError(str(cause).replace(WHO, who, 1)) from None
            field = ".".join(_CONFIG_KEYS.get(str(part), str(part)) for part in item["loc"])
            wrong.append(f"{field}: {item['msg'][0].lower()}{item['msg'][1:]}, came {item['input']!r}")
        raise DSparkError(f"{who}: {'; '.join(wrong)}.") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DSparkError(f"{WHO}: {path} must be readable JSON: {error}.") from None
    if not isinstance(value, dict):
        raise DSparkError(f"{WHO}: {path} must hold a JSON object, came {type(value).__name__}.")
    return value


def _defined(value: int | None, what: str) -> int:
    if value is None:
        raise DSparkError(f"{WHO}: {what} is not defined for this family.")
    return value
