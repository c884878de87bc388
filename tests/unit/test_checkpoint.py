"""DraftCheckpoint: the two published layouts to the byte, each missing tensor named, each kind of damage refused."""

import builtins
import json
import struct

import pytest
import torch
from published import (
    CONFIGS,
    WEIGHTS,
    header_bytes,
    layout,
    tiny,
    tiny_tensors,
    write_config,
    write_published,
    write_sharded,
    write_sparse,
    write_tiny,
)
from safetensors.torch import save_file

import trtllm_dspark.safetensors_headers as module
from trtllm_dspark.checkpoint import DraftCheckpoint
from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.tensor_names import canonical_name, tensor_table

FAMILIES = ["mla", "gqa"]


def opening_fails(path, *words):
    with pytest.raises(DSparkError) as caught:
        DraftCheckpoint.open(path)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("checkpoint: ")
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


def write_raw(path, header, size, prefix=None):
    """A file from a header object (or its bytes), however wrong it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((struct.pack("<Q", len(text)) if prefix is None else prefix) + text + b"\0" * size)
    return path


# --- the published two


@pytest.mark.parametrize("name", ["inferact", "radixark"])
def test_published_layout_opens_without_its_tensors(tmp_path, monkeypatch, name):
    folder = write_published(tmp_path / name, name)
    file = folder / "model.safetensors"
    metadata, header_size, file_size, count = WEIGHTS[name]
    assert file.stat().st_size == file_size
    with open(file, "rb") as raw_file:
        assert struct.unpack("<Q", raw_file.read(8))[0] == header_size

    sizes = []

    class Counting:
        def __init__(self, *args):
            self.file = builtins.open(*args)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def seek(self, *args):
            return self.file.seek(*args)

        def read(self, n):
            sizes.append(n)
            return self.file.read(n)

    monkeypatch.setattr(module, "open", Counting, raising=False)
    checkpoint = DraftCheckpoint.open(folder)
    assert sizes == [8, header_size]
    assert file.stat().st_blocks * 512 < 1_000_000  # still a file of holes
    config = DraftConfig.from_pretrained(folder, max_draft_len=7)
    assert checkpoint.problems(config) == []
    checkpoint.check(config)
    assert checkpoint.notes(config) == []
    assert (checkpoint.metadata, len(checkpoint.tensors)) == (metadata, count)
    assert checkpoint.nbytes == file_size - 8 - header_size == 2 * checkpoint.num_parameters
    assert checkpoint.num_parameters == {"inferact": 3_562_312_961, "radixark": 2_249_289_601}[name]


@pytest.mark.parametrize("name", ["inferact", "radixark"])
def test_published_layout_is_the_required_part_of_the_table(name):
    raw = CONFIGS[name][0]
    table = tensor_table(DraftConfig.from_dict(raw, max_draft_len=7))
    stored = {canonical_name(key): tuple(shape) for key, shape in layout(raw).items()}
    assert {key: spec.shape for key, spec in table.items() if spec.required} == stored
    optional = {key for key, spec in table.items() if not spec.required}
    assert optional == ({"lm_head.weight"} if name == "inferact" else {"lm_head.weight", "embed_tokens.weight"})
    assert all(table[key].shape == (163840, 7168) for key in optional)


@pytest.mark.parametrize("name", ["inferact", "radixark"])
def test_each_published_tensor_is_missed_by_name(tmp_path, name):
    raw = CONFIGS[name][0]
    config, full = DraftConfig.from_dict(raw, max_draft_len=7), layout(raw)
    for gone in full:
        path = write_sparse(tmp_path / "d.safetensors", {key: s for key, s in full.items() if key != gone})
        found = DraftCheckpoint.open(path).problems(config)
        assert len(found) == 1 and found[0].startswith(f"missing {canonical_name(gone)} "), (gone, found)
        with pytest.raises(DSparkError, match="not a complete draft"):
            DraftCheckpoint.open(path).check(config)


# --- names


def test_canonical_names():
    for stored, name in {
        "model.fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "model.norm.weight": "final_norm.weight",
        "markov_w1.weight": "markov_head.markov_w1.weight",
        "markov_w2.weight": "markov_head.markov_w2.weight",
        "confidence_proj.bias": "confidence_head.proj.bias",
        "model.layers.0.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
        "context_proj.weight": "context_proj.weight",
        "fc_norm.0.weight": "fc_norm.0.weight",
        "lm_head.weight": "lm_head.weight",
        "layers.0.self_attn.q_norm.weight": "layers.0.self_attn.q_norm.weight",
    }.items():
        assert canonical_name(stored) == name


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_and_aliases_are_one_checkpoint(tmp_path, family):
    raw = tiny(family)
    config, tensors = DraftConfig.from_dict(raw), tiny_tensors(raw)
    flat = {key.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): t for key, t in tensors.items()}
    write_tiny(tmp_path / "plain", raw, tensors)
    write_tiny(tmp_path / "model", raw, {f"model.{key}": t for key, t in tensors.items()})
    write_tiny(tmp_path / "flat", raw, flat)
    for folder in ("plain", "model", "flat"):
        checkpoint = DraftCheckpoint.open(tmp_path / folder)
        assert checkpoint.problems(config) == []
        for key, tensor in tensors.items():
            assert torch.equal(checkpoint.read(canonical_name(key)), tensor)


def test_two_stored_names_for_one_tensor(tmp_path):
    raw = tiny("gqa")
    tensors = tiny_tensors(raw)
    write_tiny(tmp_path / "d", raw, tensors | {"context_proj.weight": tensors["fc.weight"].clone()})
    opening_fails(tmp_path / "d", "fc.weight", "context_proj.weight", "both")


def test_per_tap_norms(tmp_path):
    raw = tiny(fc_norm=True)
    norms = {f"fc_norm.{i}.weight": torch.ones(64, dtype=torch.bfloat16) for i in range(2)}
    config = DraftConfig.from_dict(raw)
    whole = DraftCheckpoint.open(write_tiny(tmp_path / "a", raw, tiny_tensors(raw) | norms))
    assert whole.problems(config) == []
    assert "unknown" in whole.problems(DraftConfig.from_dict(tiny()))[0]
    part = DraftCheckpoint.open(
        write_tiny(tmp_path / "b", raw, tiny_tensors(raw) | {"fc_norm.0.weight": norms["fc_norm.0.weight"]})
    )
    assert [text.split()[1] for text in part.problems(config)] == ["fc_norm.1.weight"]


# --- what is wrong with the tensors


def test_wrong_shape_prints_both(tmp_path):
    raw = tiny()
    tensors = tiny_tensors(raw)
    tensors["layers.1.self_attn.o_proj.weight"] = torch.zeros(64, 63, dtype=torch.bfloat16)
    tensors["layers.0.mlp.down_proj.weight"] = tensors["layers.0.mlp.down_proj.weight"].T.contiguous()
    found = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tensors)).problems(DraftConfig.from_dict(raw))
    assert found == [
        "layers.0.mlp.down_proj.weight must be [64, 96], came [96, 64]",
        "layers.1.self_attn.o_proj.weight must be [64, 64], came [64, 63]",
    ]


def test_every_problem_is_in_one_error(tmp_path):
    raw = tiny()
    tensors = tiny_tensors(raw) | {"zeta.weight": torch.zeros(1), "alpha.weight": torch.zeros(1)}
    del tensors["final_norm.weight"]
    tensors["context_norm.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(DSparkError) as caught:
        DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tensors)).check(DraftConfig.from_dict(raw))
    for word in ("missing final_norm.weight [64]", "context_norm.weight must be [64], came [3]", "alpha.weight, zeta.weight"):
        assert word in str(caught.value)


def test_dense_dtypes_are_allowed_and_said(tmp_path):
    raw = tiny()
    config = DraftConfig.from_dict(raw)
    for dtype, word in ((torch.float32, "float32"), (torch.float16, "float16")):
        checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / word, raw, tiny_tensors(raw, dtype)))
        assert checkpoint.problems(config) == []
        assert checkpoint.notes(config) == [f"tensors stored as {word}, the config's dtype is bfloat16"]
        assert checkpoint.read("final_norm.weight").dtype == dtype
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float64):
        bad = tiny_tensors(raw) | {"final_norm.weight": torch.zeros(64).to(dtype)}
        checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / str(dtype), raw, bad))
        assert len(checkpoint.problems(config)) == 1 and "final_norm.weight" in checkpoint.problems(config)[0]
        with pytest.raises(DSparkError, match=r"final_norm\.weight"):
            checkpoint.read("final_norm.weight")


def test_own_lm_head_is_said_and_its_shape_checked(tmp_path):
    raw = tiny("gqa")
    config = DraftConfig.from_dict(raw)
    extra = {name: torch.zeros(128, 64, dtype=torch.bfloat16) for name in ("lm_head.weight", "embed_tokens.weight")}
    checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tiny_tensors(raw) | extra))
    assert checkpoint.problems(config) == []
    assert checkpoint.notes(config) == ["lm_head.weight is in the checkpoint: ignored, logits come from the target's lm_head"]


# --- damaged files


def test_truncated_at_any_place(tmp_path):
    folder = write_tiny(tmp_path / "d", tiny())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for keep in (0, 5, 8, header - 1, header, len(whole) - 1):
        file.write_bytes(whole[:keep])
        opening_fails(folder, "truncated", f"{keep} found", str(file))
    file.write_bytes(whole[:-1])
    opening_fails(folder, f"{len(whole)} bytes expected, {len(whole) - 1} found")
    file.write_bytes(whole + b"\0")
    opening_fails(folder, "past its last tensor", f"{len(whole) + 1} found")
    file.write_bytes(whole)
    DraftCheckpoint.open(folder)


def test_headers_that_are_not_headers(tmp_path):
    def item(shape, begin, end, dtype="BF16"):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    path = tmp_path / "d.safetensors"
    opening_fails(write_raw(path, b"{not json", 0), "not parseable")
    opening_fails(write_raw(path, b"[1, 2]  ", 0), "must be JSON objects")
    opening_fails(write_raw(path, b"\xff" * 16, 0), "not parseable")
    opening_fails(write_raw(path, b"[" * 200_000, 0), "not parseable")
    opening_fails(write_raw(path, {"__metadata__": "x"}, 0), "must be JSON objects")
    opening_fails(write_raw(path, b"<html>", 0, b"version "), "not safetensors", "100000000")
    opening_fails(write_raw(path, {"a": item([2], 0, 2)}, 2), "a BF16 [2] must be 4 bytes", "give 2")
    opening_fails(write_raw(path, {"a": item([2], 0, 4), "b": item([2], 2, 6)}, 6), "b starts at byte 2", "overlaps")
    opening_fails(write_raw(path, {"a": item([2], 0, 4), "b": item([2], 6, 10)}, 10), "b starts at byte 6", "gap")
    opening_fails(write_raw(path, {"a": item([2], 4, 8)}, 8), "a starts at byte 4", "gap")
    opening_fails(write_raw(path, {"a": item([-2], 0, 4)}, 4), "the header of a")
    opening_fails(write_raw(path, {"a": item([True], 0, 2)}, 2), "the header of a")
    opening_fails(write_raw(path, {"a": item([2], 4, 0)}, 4), "the header of a")
    opening_fails(write_raw(path, {"a": {"dtype": "BF16"}}, 0), "the header of a")
    opening_fails(write_raw(path, {"a": 3}, 0), "the header of a")
    twice = b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    opening_fails(write_raw(path, twice, 2), "a is there twice")
    checkpoint = DraftCheckpoint.open(write_raw(path, {"b": item([2], 0, 4), "a": item([], 4, 6)}, 6))
    assert (checkpoint.num_parameters, checkpoint.nbytes, checkpoint.metadata) == (3, 6, {})


def test_places_that_hold_no_checkpoint(tmp_path):
    opening_fails(tmp_path / "nowhere", "does not exist")
    (tmp_path / "folder.safetensors" / "x.safetensors").mkdir(parents=True)
    opening_fails(tmp_path / "folder.safetensors", "cannot be read")
    (tmp_path / "empty").mkdir()
    opening_fails(tmp_path / "empty", "no .safetensors file")
    text = tmp_path / "weights.bin"
    text.write_text("x")
    opening_fails(text, "weights.bin")
    many = write_tiny(tmp_path / "many", tiny())
    (many / "model.safetensors").rename(many / "a.safetensors")
    assert len(DraftCheckpoint.open(many).tensors) == 32  # a single file of another name will do
    (many / "b.safetensors").write_bytes((many / "a.safetensors").read_bytes())
    opening_fails(many, "a.safetensors, b.safetensors")
    assert DraftCheckpoint.open(many / "b.safetensors").files == (many / "b.safetensors",)


# --- shards


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_sharded_is_the_single_file(tmp_path, family, shards):
    raw = tiny(family)
    tensors = tiny_tensors(raw)
    one = DraftCheckpoint.open(write_tiny(tmp_path / "one", raw, tensors))
    many = DraftCheckpoint.open(write_sharded(tmp_path / "many", raw, tensors, shards))
    assert len(many.files) == shards and set(many.tensors) == set(one.tensors)
    assert (many.num_parameters, many.nbytes) == (one.num_parameters, one.nbytes)
    assert many.problems(DraftConfig.from_dict(raw)) == []
    for name in one.tensors:
        assert torch.equal(one.read(name), many.read(name))
    by_index = DraftCheckpoint.open(tmp_path / "many" / "model.safetensors.index.json")
    assert dict(by_index.tensors) == dict(many.tensors)


def test_index_and_shards_that_disagree(tmp_path):
    raw = tiny()
    folder = write_sharded(tmp_path / "d", raw, tiny_tensors(raw))
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def with_map(**changes):
        weight_map = {k: v for k, v in (good["weight_map"] | changes).items() if v is not None}
        index.write_text(json.dumps({"weight_map": weight_map}))
        return folder

    first, second = sorted(set(good["weight_map"].values()))
    wrong = second if good["weight_map"]["final_norm.weight"] == first else first
    opening_fails(with_map(**{"ghost.weight": first}), f"ghost.weight is not in {first}")
    opening_fails(with_map(**{"final_norm.weight": None}), "final_norm.weight", "not in the index")
    opening_fails(with_map(**{"final_norm.weight": wrong}), f"final_norm.weight is not in {wrong}")
    opening_fails(with_map(**{"final_norm.weight": "../other.safetensors"}), "plain file name")
    opening_fails(with_map(**{"final_norm.weight": "lost.safetensors"}), "not there: lost.safetensors")
    for text in ("{", "{}", "[]", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        opening_fails(folder, "weight_map")
    index.write_text(json.dumps(good))
    DraftCheckpoint.open(folder)
    (folder / second).unlink()
    opening_fails(folder, "shards that are not there", second)
    (folder / second).write_bytes(b"")
    opening_fails(folder, "truncated", second)


def test_single_file_and_index_together_are_ambiguous(tmp_path):
    raw = tiny()
    folder = write_sharded(tmp_path / "d", raw, tiny_tensors(raw))
    write_tiny(folder, raw)
    opening_fails(folder, "both model.safetensors and model.safetensors.index.json")


# --- reading


def test_read_is_a_share_of_the_tensor(tmp_path):
    raw = tiny()
    tensors = tiny_tensors(raw)
    checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tensors))
    name = "layers.0.self_attn.q_b_proj.weight"
    whole = checkpoint.read(name)
    assert torch.equal(whole, tensors[name])
    for dim in (0, 1, -1):
        parts = [checkpoint.read(name, dim=dim, rank=rank, size=4) for rank in range(4)]
        assert torch.equal(torch.cat(parts, dim), whole)
        assert parts[0].shape[dim] == whole.shape[dim] // 4
        assert not torch.equal(parts[0], parts[1])
        assert all(part.is_contiguous() for part in parts)
    assert torch.equal(checkpoint.read(name, rank=3, size=4), whole)  # no dim: the same on every rank
    assert torch.equal(checkpoint.read("final_norm.weight", dim=0, rank=1, size=2), tensors["final_norm.weight"][32:])
    assert checkpoint.read(name, device="meta").device.type == "meta"


def test_read_refuses(tmp_path):
    folder = write_tiny(tmp_path / "d", tiny())
    checkpoint = DraftCheckpoint.open(folder)
    for call, word in (
        (lambda: checkpoint.read("nothing.weight"), "has no nothing.weight"),
        (lambda: checkpoint.read("final_norm.weight", dim=0, size=3), "divisible by 3"),
        (lambda: checkpoint.read("final_norm.weight", dim=1, size=2), "no dimension 1"),
        (lambda: checkpoint.read("final_norm.weight", dim=0, rank=2, size=2), "rank 2 of size 2"),
        (lambda: checkpoint.read("final_norm.weight", dim=0, rank=0, size=0), "size 0"),
    ):
        with pytest.raises(DSparkError, match=word):
            call()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DSparkError, match="changed since"):
        checkpoint.read("final_norm.weight")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_read_refuses_what_is_not_finite(tmp_path, bad):
    raw = tiny()
    tensors = tiny_tensors(raw)
    name = "layers.1.mlp.up_proj.weight"
    tensors[name][50, 3] = bad
    tensors[name][50, 7] = bad
    checkpoint = DraftCheckpoint.open(write_tiny(tmp_path / "d", raw, tensors))
    with pytest.raises(DSparkError) as caught:
        checkpoint.read(name)
    assert name in str(caught.value) and "2 NaN or Inf of 6144" in str(caught.value) and "[50, 3]" in str(caught.value)
    with pytest.raises(DSparkError, match=r"first at \[50, 3\]"):  # counted in the whole tensor, read as a share
        checkpoint.read(name, dim=0, rank=1, size=2)
    assert torch.equal(checkpoint.read(name, dim=0, rank=0, size=2), tensors[name][:48])


def test_only_a_share_is_read_from_disk(tmp_path):
    """A share of a sparse 2 GiB tensor costs its own bytes, not the tensor's."""
    path = write_sparse(tmp_path / "d.safetensors", {"embed_tokens.weight": [163840, 7168]})
    share = DraftCheckpoint.open(path).read("embed_tokens.weight", dim=0, rank=4095, size=4096)
    held = share.untyped_storage().nbytes()
    assert (share.shape, held) == ((40, 7168), 40 * 7168 * 2)


def test_config_only_folder_is_told_apart(tmp_path):
    opening_fails(write_config(tmp_path / "d", tiny()), "no .safetensors file")


def test_metadata_of_shards_is_merged(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", {"one": "1"})
    save_file({"b": torch.zeros(1)}, tmp_path / "y.safetensors", {"two": "2"})
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert DraftCheckpoint.open(tmp_path).metadata == {"one": "1", "two": "2"}


def test_header_helper_is_what_the_library_writes(tmp_path):
    """The sparse files of these tests have the header that safetensors itself writes for the same tensors."""
    raw = tiny()
    tensors = tiny_tensors(raw)
    save_file(tensors, tmp_path / "d.safetensors", {"format": "pt"})
    head, size = header_bytes(layout(raw), {"format": "pt"})
    assert (tmp_path / "d.safetensors").read_bytes()[: len(head)] == head
    assert (tmp_path / "d.safetensors").stat().st_size == len(head) + size
