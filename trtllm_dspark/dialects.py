"""Where the keys of a DSpark draft's `config.json` live in each published dialect, and what they mean there.

`resolve` turns a raw object into the fields of a `DraftConfig`. What changes the maths and is absent is an error; what
changes the maths and is not built is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_dspark.errors import DSparkError, UnsupportedError

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

_CONFIDENCE = ("enable_confidence_head", "use_confidence_head")
_MLA_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Reader:
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


@dataclass(frozen=True)
class Overrides:
    """What the caller decides over the checkpoint; None leaves it to the checkpoint. See `DraftConfig.from_pretrained`."""

    max_draft_len: int | None = None
    rope_theta: float | None = None
    aux_stream: str | None = None
    sample_from_anchor: bool | None = None
    require_block_size: bool = True


def resolve(raw: Mapping[str, Any], who: str, quantization: Mapping[str, Any] | None, asked: Overrides) -> dict[str, Any]:
    """The fields of a `DraftConfig`, `notes` among them, from a config object. `who` begins every error."""
    reader = Reader(raw, who)
    family, architecture, model_type = _family(raw, who)
    if all(reader.find(*names) is None for names in (("markov_rank",), ("markov_head_type",), _CONFIDENCE)):
        raise DSparkError(
            f"{who}: a DSpark draft declares markov_rank and enable_confidence_head, neither is there. This "
            "looks like a DFlash draft; serve it with decoding_type DFlash."
        )
    _refuse_unbuilt(reader, family, quantization)
    notes: list[str] = []

    anchor_first = _anchor_first(reader, architecture, asked.sample_from_anchor, notes)
    block_size = _block_size(reader, anchor_first, asked, notes)
    stream = _aux_stream(reader, family, asked.aux_stream, notes)
    taps, depth = _taps(reader, family)
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
    fields: dict[str, Any] = {
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
        "rope": _rope(reader, asked.rope_theta, notes),
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
    return fields | {"notes": tuple(notes)}


def _anchor_first(reader: Reader, architecture: str, asked: bool | None, notes: list[str]) -> bool:
    """The block layout: what was asked for, else what is declared, else anchor-first, which both architectures are."""
    anchor_first, declared = _layout(reader)
    if asked is not None:
        if declared is not None and anchor_first != asked:
            notes.append(f"block layout overridden: the config says {declared}, using sample_from_anchor={asked}")
        elif anchor_first != asked:
            notes.append(f"block layout overridden: {architecture} is anchor-first, using fill-in (row 0 predicts nothing)")
        anchor_first = asked
    elif not anchor_first:
        notes.append(f"block layout is fill-in: {declared}; row 0 is the bonus token and predicts nothing")
    return anchor_first


def _block_size(reader: Reader, anchor_first: bool, asked: Overrides, notes: list[str]) -> Any:
    """Rows of a block; the caller's max_draft_len stands in where the config has none."""
    block_size = reader.find("block_size")
    if block_size is None and asked.max_draft_len is not None:
        block_size = asked.max_draft_len + (not anchor_first)
        notes.append(f"block_size is not in the config: taken as {block_size} from max_draft_len={asked.max_draft_len}")
    if block_size is None and asked.require_block_size:
        raise DSparkError(
            f"{reader.who}: block_size is not in the config and has no default. Give max_draft_len (the rows trained)."
        )
    return block_size


def _aux_stream(reader: Reader, family: str, asked: str | None, notes: list[str]) -> Any:
    """Which residual stream of the target the taps read; undeclared, the one that the family was trained on."""
    own_stream = reader.find("aux_hidden_stream", "aux_stream")
    own_stream = ("prefix" if family == "mla" else "attn_res") if own_stream is None else own_stream
    stream = own_stream if asked is None else asked
    for value in (own_stream, stream):
        if value not in AUX_STREAMS:
            raise DSparkError(f"{reader.who}: aux_hidden_stream must be {' or '.join(AUX_STREAMS)}, came {value!r}.")
    if stream != own_stream:
        notes.append(f"aux_stream overridden: the draft's is {own_stream}, using {stream}")
    return stream


def _taps(reader: Reader, family: str) -> tuple[list[Any] | tuple[Any, ...], Any]:
    """(taps, depth of the target). `num_target_layers` counts the taps in one family and is the depth in the other."""
    taps = reader.need("target_layer_ids")
    if not isinstance(taps, list | tuple):
        raise DSparkError(f"{reader.who}: target_layer_ids must be a list of layer ids, came {taps!r}.")
    declared_taps, depth = reader.find("num_target_layers"), reader.find("target_num_hidden_layers")
    if family == "mla" and declared_taps not in (None, len(taps)):
        raise DSparkError(
            f"{reader.who}: num_target_layers counts the taps of an MLA draft and must be {len(taps)} for "
            f"target_layer_ids {list(taps)}, came {declared_taps}."
        )
    if family == "gqa":
        depth = reader.same("the target's depth", ("num_target_layers", declared_taps), ("target_num_hidden_layers", depth))
    return taps, depth


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


def _refuse_unbuilt(reader: Reader, family: str, quantization: Mapping[str, Any] | None) -> None:
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
    if not isinstance(kinds, list | tuple) or any(kind != "full_attention" for kind in kinds):
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


def _layout(reader: Reader) -> tuple[bool, str | None]:
    """(anchor-first?, what the config declares or None). Where nothing is declared, both architectures are."""
    names = ("sample_from_anchor", "shift_label", "query_zero_predicts_next")
    direct = reader.flag(*names) if reader.find(*names) is not None else None
    bonus = reader.flag("bonus_anchor") if reader.find("bonus_anchor") is not None else None
    inverse = None if bonus is None else not bonus
    first = reader.same("the block layout", ("sample_from_anchor", direct), ("not dspark_bonus_anchor", inverse))
    if first is None:
        return True, None
    return first, f"sample_from_anchor {direct}" if direct is not None else f"dspark_bonus_anchor {bonus}"


def _rope(reader: Reader, override: float | None, notes: list[str]) -> dict[str, Any]:
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
            was, now = (f"{x:g}" if isinstance(x, int | float) else repr(x) for x in (theta, override))
            notes.append(f"rope_theta overridden: config {was}, using {now} (asked for by the caller)")
        theta = override
    return dict(rope_type=kind or "default", theta=theta, **settings)


def _dtype(reader: Reader, notes: list[str]) -> str:
    value = reader.same(
        "dtype", *((k, str(v).removeprefix("torch.")) for k in ("dtype", "torch_dtype") if (v := reader.find(k)))
    )
    if value in (None, "auto"):
        notes.append("dtype is not in the config: taken as bfloat16")
        return "bfloat16"
    return value
