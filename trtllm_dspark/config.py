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

from trtllm_dspark.errors import DSparkError, UnsupportedError

WHO = "DraftConfig"
MLA_ARCHITECTURES = ("K3DSparkModel", "KimiK3DSparkMLADraftModel", "K3DSparkForCausalLM")
MLA_MODEL_TYPES = ("k3_dspark",)
GQA_ARCHITECTURES = ("DSparkDraftModel",)
GQA_MODEL_TYPES = ("qwen3",)
RECOGNISED = (
    f"Recognised: {', '.join(MLA_ARCHITECTURES)} with model_type k3_dspark (MLA), DSparkDraftModel with model_type qwen3 (GQA)"
)
AUX_STREAMS = ("prefix", "attn_res")
NESTED = ("dspark_config", "dflash_config")
ROPE_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
# Keys that change nothing a drafter computes; any other unread key is named once in `notes`.
HARMLESS = frozenset(
    "architectures model_type auto_map transformers_version _torchspec_version torchspec_version _name_or_path "
    "bos_token_id eos_token_id pad_token_id attention_dropout initializer_range use_cache max_window_layers "
    "tie_word_embeddings is_decoder is_encoder_decoder output_attentions output_hidden_states return_dict "
    "chunk_size_feed_forward id2label label2id problem_type pretraining_tp".split()
)

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
        return self.block_size if self.sample_from_anchor else self.block_size - 1

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
        reader = _Reader(raw, who)
        family, architecture, model_type = _family(raw, who)
        if all(reader.find(*names) is None for names in (("markov_rank",), ("markov_head_type",), _CONFIDENCE)):
            raise DSparkError(
                f"{who}: a DSpark draft declares markov_rank and enable_confidence_head, neither is there. This "
                "looks like a DFlash draft; serve it with decoding_type DFlash."
            )
        _refuse_unbuilt(reader, family, quantization)
        notes: list[str] = []

        anchor_first, declared = _layout(reader)
        if sample_from_anchor is not None:
            if declared is not None and anchor_first != sample_from_anchor:
                notes.append(
                    f"block layout overridden: the config says {declared}, using sample_from_anchor={sample_from_anchor}"
                )
            elif anchor_first != sample_from_anchor:
                notes.append(f"block layout overridden: {architecture} is anchor-first, using fill-in (row 0 predicts nothing)")
            anchor_first = sample_from_anchor
        elif not anchor_first:
            notes.append(f"block layout is fill-in: {declared}; row 0 is the bonus token and predicts nothing")

        block_size = reader.find("block_size")
        if block_size is None and max_draft_len is not None:
            block_size = max_draft_len if anchor_first else max_draft_len + 1
            notes.append(f"block_size is not in the config: taken as {block_size} from max_draft_len={max_draft_len}")
        if block_size is None and require_block_size:
            raise DSparkError(
                f"{who}: block_size is not in the config and has no default. Give max_draft_len (the rows trained)."
            )

        own_stream = reader.find("aux_hidden_stream", "aux_stream")
        own_stream = ("prefix" if family == "mla" else "attn_res") if own_stream is None else own_stream
        stream = own_stream if aux_stream is None else aux_stream
        for value in (own_stream, stream):
            if value not in AUX_STREAMS:
                raise DSparkError(f"{who}: aux_hidden_stream must be {' or '.join(AUX_STREAMS)}, came {value!r}.")
        if stream != own_stream:
            notes.append(f"aux_stream overridden: the draft's is {own_stream}, using {stream}")

        taps = reader.need("target_layer_ids")
        if not isinstance(taps, list | tuple):
            raise DSparkError(f"{who}: target_layer_ids must be a list of layer ids, came {taps!r}.")
        declared_taps, depth = reader.find("num_target_layers"), reader.find("target_num_hidden_layers")
        if family == "mla" and declared_taps not in (None, len(taps)):
            raise DSparkError(
                f"{who}: num_target_layers counts the taps of an MLA draft and must be {len(taps)} for "
                f"target_layer_ids {list(taps)}, came {declared_taps}."
            )
        if family == "gqa":
            depth = reader.same("the target's depth", ("num_target_layers", declared_taps), ("target_num_hidden_layers", depth))

        markov_rank = reader.need("markov_rank")
        head_type = reader.need("markov_head_type") if markov_rank else reader.find("markov_head_type")
        if head_type not in (None, "vanilla"):
            raise UnsupportedError(f"{who}: markov_head_type {head_type!r} is not supported, only 'vanilla'.")
        confidence = reader.flag(*_CONFIDENCE, required=True)
        with_markov = reader.flag("confidence_head_with_markov", required=confidence)
        hidden_size, target_hidden_size = reader.need("hidden_size"), reader.find("target_hidden_size")
        widths = {k: reader.need(k) if family == "mla" else None for k in _MLA_WIDTHS}
        num_heads = reader.need("num_attention_heads")
        kv_heads = reader.find("num_key_value_heads") if family == "mla" else reader.need("num_key_value_heads")
        fields = {
            "family": family,
            "architecture": architecture,
            "model_type": model_type,
            "hidden_size": hidden_size,
            "intermediate_size": reader.need("intermediate_size"),
            "num_layers": reader.need("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": num_heads if kv_heads is None else kv_heads,
            "head_dim": reader.need("head_dim") if family == "gqa" else None,
            **widths,
            "vocab_size": reader.need("vocab_size"),
            "max_position_embeddings": reader.need("max_position_embeddings"),
            "rms_norm_eps": reader.need("rms_norm_eps"),
            "rope": _rope(reader, rope_theta, notes),
            "target_layer_ids": tuple(taps),
            "target_hidden_size": hidden_size if target_hidden_size is None else target_hidden_size,
            "target_num_layers": depth,
            "mask_token_id": reader.need("mask_token_id", "noise_token_id"),
            "block_size": block_size,
            "sample_from_anchor": anchor_first,
            "markov_rank": markov_rank,
            "confidence_head": confidence,
            "confidence_with_markov": with_markov,
            "confidence_bias": reader.flag("confidence_head_bias", default=True),
            "aux_stream": stream,
            "per_tap_norm": reader.flag("fc_norm"),
            "dtype": _dtype(reader, notes),
        }
        unknown = reader.unread()
        if unknown:
            notes.append(f"config keys that are not known and were not used: {', '.join(unknown)}")
        config = _build(cls, who, notes=tuple(notes), **fields)
        if max_draft_len is not None:
            config.check_num_drafts(max_draft_len)
        return config


_CONFIDENCE = ("enable_confidence_head", "use_confidence_head")
_CONFIG_KEYS = {  # our fields whose key in config.json has another name
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "target_num_layers": "target_num_hidden_layers",
    "theta": "rope_theta",
}
_MLA_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class _Reader:
    """Looks a key up under all its names in all its places, and remembers which keys were looked up."""

    def __init__(self, raw: Mapping[str, Any], who: str):
        self.who = who
        self.places: dict[str, Mapping[str, Any]] = {"": raw}
        self.known: set[str] = set(HARMLESS)
        for name in NESTED:
            inner = raw.get(name)
            if inner is not None and not isinstance(inner, Mapping):
                raise DSparkError(f"{who}: {name} must be an object, came {inner!r}.")
            self.places[name] = inner or {}

    def find(self, *names: str) -> Any:
        """The value said under any of `names`, or None. Different values are an error that prints each of them."""
        said = []
        for key in (spelling for name in names for spelling in (name, f"dspark_{name}")):
            self.known.add(key)
            for place, values in self.places.items():
                said.append((f"{place}.{key}" if place else key, values.get(key)))
        return self.same(names[0], *said)

    def same(self, what: str, *said: tuple[str, Any]) -> Any:
        """The one value among `(where, value)` pairs; None where all are null."""
        said = tuple((where, value) for where, value in said if value is not None)
        for where, value in said[1:]:
            if value != said[0][1] or isinstance(value, bool) != isinstance(said[0][1], bool):
                raise DSparkError(
                    f"{self.who}: {what} must have one value, came {said[0][1]!r} at {said[0][0]} and {value!r} at "
                    f"{where}. Remove the wrong one."
                )
        return said[0][1] if said else None

    def need(self, *names: str) -> Any:
        value = self.find(*names)
        if value is None:
            raise DSparkError(
                f"{self.who}: {' or '.join(names)} is required and has no default; it is neither top level nor in "
                f"{' or '.join(NESTED)}. Add the value that the draft was trained with."
            )
        return value

    def flag(self, *names: str, required: bool = False, default: bool = False) -> bool:
        value = self.need(*names) if required else self.find(*names)
        if value is not None and not isinstance(value, bool):
            raise DSparkError(f"{self.who}: {names[0]} must be true or false, came {value!r}.")
        return default if value is None else value

    def unread(self) -> list[str]:
        self.known.update(NESTED)
        return sorted(f"{p}.{k}" if p else k for p, values in self.places.items() for k in values if k not in self.known)


def _family(raw: Mapping[str, Any], who: str) -> tuple[Literal["mla", "gqa"], str, str]:
    """(family, architecture, model_type) from the two keys that name them."""
    if raw.get("speculators_model_type") is not None:
        raise UnsupportedError(
            f"{who}: speculators_model_type {raw['speculators_model_type']!r}: the speculators format is not "
            "supported. Convert the draft to one of the plain formats. " + RECOGNISED + "."
        )
    names, model_type = raw.get("architectures") or [], raw.get("model_type") or ""
    if not isinstance(names, list | tuple) or not all(isinstance(x, str) for x in [*names, model_type]):
        raise DSparkError(
            f"{who}: architectures must be a list of names and model_type a name, came {names!r}, {model_type!r}."
        )
    is_mla = [name in MLA_ARCHITECTURES for name in names]
    is_gqa = [name in GQA_ARCHITECTURES for name in names]
    if any("DFlash" in name for name in names):
        raise UnsupportedError(
            f"{who}: architecture {names} looks like a DFlash draft; serve it with decoding_type DFlash. {RECOGNISED}."
        )
    if all(is_mla) and (names or model_type in MLA_MODEL_TYPES) and model_type in ("", *MLA_MODEL_TYPES):
        return "mla", names[0] if names else MLA_ARCHITECTURES[0], model_type or MLA_MODEL_TYPES[0]
    if names and all(is_gqa) and model_type in GQA_MODEL_TYPES:
        return "gqa", names[0], model_type
    if any(is_mla) or any(is_gqa):
        raise DSparkError(
            f"{who}: architectures and model_type must name the same family, came {list(names)} and {model_type!r}. "
            f"{RECOGNISED}."
        )
    raise UnsupportedError(
        f"{who}: architecture {list(names)} with model_type {model_type!r} is not a DSpark draft that is known. {RECOGNISED}."
    )


def _refuse_unbuilt(reader: _Reader, family: str, quantization: Mapping[str, Any] | None) -> None:
    """Raise for every switch whose maths is not implemented."""
    who = reader.who
    for declared in (reader.find("quantization_config", "compression_config"), quantization):
        if declared:
            inner = declared.get("quantization", declared) if isinstance(declared, Mapping) else {}
            method = inner.get("quant_method") or inner.get("quant_algo") or "unnamed" if isinstance(inner, Mapping) else inner
            raise UnsupportedError(f"{who}: a quantised draft (quant_method {method}) is not supported. Dequantise it to bf16.")
    for switch in (
        "mla_use_output_gate",
        "mla_use_nope",
        "mla_use_qk_norm",
        "attention_bias",
        "mlp_bias",
        "use_sliding_window",
    ):
        if reader.flag(switch):
            raise UnsupportedError(f"{who}: {switch} true is not supported.")
    causal = reader.find("causal", "is_causal")
    if causal is True or (isinstance(causal, list | tuple) and any(one is not False for one in causal)):
        raise UnsupportedError(f"{who}: causal {causal!r} is not supported: rows of a block attend to the whole block.")
    if not isinstance(causal, list | tuple):
        reader.flag("causal", "is_causal")
    window = reader.find("sliding_window")
    if window is not None and reader.find("use_sliding_window") is not False:
        raise UnsupportedError(f"{who}: sliding_window {window} is not supported, attention is full.")
    kinds = reader.find("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise UnsupportedError(f"{who}: layer_types must all be full_attention, came {kinds}.")
    act = reader.find("hidden_act")
    if act not in (None, "silu"):
        raise UnsupportedError(f"{who}: hidden_act {act!r} is not supported, only silu.")
    if reader.find("partial_rotary_factor") not in (None, 1):
        raise UnsupportedError(f"{who}: partial_rotary_factor {reader.find('partial_rotary_factor')} is not supported, only 1.")
    draft_vocab, vocab = reader.find("draft_vocab_size"), reader.need("vocab_size")
    if draft_vocab not in (None, vocab):
        raise UnsupportedError(
            f"{who}: a reduced vocabulary is not supported: draft_vocab_size {draft_vocab}, vocab_size {vocab}; they "
            "must be equal."
        )
    if family == "mla" and "q_lora_rank" in reader.places[""] and reader.find("q_lora_rank") is None:
        raise UnsupportedError(f"{who}: q_lora_rank null (a full-rank query projection) is not supported, only a low-rank one.")


def _layout(reader: _Reader) -> tuple[bool, str | None]:
    """(anchor-first?, what the config declares or None). Where nothing is declared, both architectures are."""
    names = ("sample_from_anchor", "shift_label", "query_zero_predicts_next")
    direct = reader.flag(*names) if reader.find(*names) is not None else None
    bonus = reader.flag("bonus_anchor") if reader.find("bonus_anchor") is not None else None
    inverse = None if bonus is None else not bonus
    first = reader.same("the block layout", ("sample_from_anchor", direct), ("not dspark_bonus_anchor", inverse))
    if first is None:
        return True, None
    return first, f"sample_from_anchor {direct}" if direct is not None else f"dspark_bonus_anchor {bonus}"


def _rope(reader: _Reader, override: float | None, notes: list[str]) -> RopeConfig:
    """The two spellings of RoPE, merged key by key."""
    who, said = reader.who, {}
    for place in ("rope_parameters", "rope_scaling"):
        values = reader.find(place)
        if isinstance(values, Mapping) and isinstance(values.get("full_attention"), Mapping) and len(values) == 1:
            values = values["full_attention"]
        if values is not None and not isinstance(values, Mapping):
            raise DSparkError(f"{who}: {place} must be an object or null, came {values!r}.")
        said[place] = dict(values or {})

    def get(*names: str) -> Any:
        found = [(f"{place}.{name}", values.get(name)) for place, values in said.items() for name in names]
        top = [(name, reader.find(name)) for name in names if name in ("rope_theta", "original_max_position_embeddings")]
        return reader.same(f"RoPE's {names[0]}", *found, *top)

    kind, theta = get("rope_type", "type"), get("rope_theta")
    if kind not in (None, "default", "yarn"):
        raise UnsupportedError(f"{who}: rope type {kind!r} is not supported, only 'default' and 'yarn'.")
    if get("truncate") is False:
        raise UnsupportedError(f"{who}: rope truncate false (unrounded YaRN ramp) is not supported.")
    if get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedError(f"{who}: partial_rotary_factor {get('partial_rotary_factor')} is not supported, only 1.")
    known = {"rope_type", "type", "rope_theta", "truncate", "partial_rotary_factor", *ROPE_KEYS}
    unknown = sorted({key for values in said.values() for key in values} - known)
    if unknown:
        raise UnsupportedError(f"{who}: RoPE settings {', '.join(unknown)} are not known and may change the angles.")
    settings = {key: value for key in ROPE_KEYS if (value := get(key)) is not None}
    if kind is None and settings.keys() - {"original_max_position_embeddings"}:
        raise DSparkError(f"{who}: RoPE says {', '.join(settings)} but no rope_type. Add rope_type 'default' or 'yarn'.")
    if kind == "yarn" and "factor" not in settings:
        raise DSparkError(f"{who}: rope_type yarn requires factor, which is missing.")
    if kind != "yarn":
        settings = {key: settings[key] for key in ("factor",) if key in settings}
    if theta is None and override is None:
        raise DSparkError(f"{who}: rope_theta is required and has no default. Add the value that the draft was trained with.")
    if override is not None:
        if theta != override:
            was = "not set" if theta is None else f"{theta:g}"
            notes.append(f"rope_theta overridden: config {was}, using {override:g} (asked for by the caller)")
        theta = override
    return _build(RopeConfig, who, rope_type=kind or "default", theta=theta, **settings)


def _dtype(reader: _Reader, notes: list[str]) -> str:
    value = reader.same(
        "dtype", *((k, str(v).removeprefix("torch.")) for k in ("dtype", "torch_dtype") if (v := reader.find(k)))
    )
    if value in (None, "auto"):
        notes.append("dtype is not in the config: taken as bfloat16")
        return "bfloat16"
    return value


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
    except (OSError, ValueError) as error:
        raise DSparkError(f"{WHO}: {path} must be readable JSON: {error}.") from None
    if not isinstance(value, dict):
        raise DSparkError(f"{WHO}: {path} must hold a JSON object, came {type(value).__name__}.")
    return value


def _defined(value: int | None, what: str) -> int:
    if value is None:
        raise DSparkError(f"{WHO}: {what} is not defined for this family.")
    return value
