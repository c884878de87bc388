"""`trtllm-dspark budget`: the published figures from a header alone, the comparison, the pictures; bad input is one line."""

import importlib.util
import json
import subprocess
import sys

import published
import pytest

from trtllm_dspark.budget import PUBLISHED, CacheCost, Deployment, dtype_of
from trtllm_dspark.cli import main
from trtllm_dspark.commands.budget import BAR, OVER, bars, compare

GIB = 2**30
K3 = ["--target-bytes-per-token", "27648", "--target-state-gib", "7.53"]
# name -> (draft bytes a token, tokens, bytes of both pools a token, draft GiB)
MEASURED = {"inferact": (5_760, 2_491_831, 33_408, 13.37), "radixark": (20_480, 1_779_275, 48_128, 33.94)}
FIELDS = {"tokens", "target_bytes", "draft_bytes", "draft_bytes_per_token", "ranks"}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """The published drafts: config, header, and holes for tensors."""
    folder = tmp_path_factory.mktemp("drafts")
    return {name: published.write_published(folder / name, name) for name in MEASURED}


def total_gib(name):
    _, tokens, both, _ = MEASURED[name]
    return repr(7.53 + tokens * both / GIB)


def printed(capsys, *arguments):
    assert main(["budget", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert main(["budget", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("trtllm-dspark: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
def test_measured_table_from_the_header(capsys, drafts, name, as_file):
    slope, tokens, both, gib = MEASURED[name]
    path = drafts[name] / "model.safetensors" if as_file else drafts[name]
    said = json.loads(printed(capsys, "--draft", path, *K3, "--total-gib", total_gib(name), "--json"))
    assert said["tokens"] == tokens and said["draft_bytes_per_token"] == slope and said["bytes_per_token"] == both
    assert said["draft_bytes"] == tokens * slope and round(said["draft_bytes"] / GIB, 2) == gib == round(said["draft_gib"], 2)
    assert said["target_bytes"] == int(7.53 * GIB) + tokens * 27_648
    assert said["target_bytes"] + said["draft_bytes"] + said["unused_bytes"] == said["total_bytes"]
    assert said["ranks"] == 1 and said["whole_pages"]["tokens"] == tokens // 64 * 64
    # Controls: at fp8, and with the other draft, other tokens.
    for other in (["--draft", path, "--draft-dtype", "float8_e4m3fn"], ["--draft", drafts[({*MEASURED} - {name}).pop()]]):
        assert json.loads(printed(capsys, *other, *K3, "--total-gib", total_gib(name), "--json"))["tokens"] != tokens


def test_total_in_bytes_is_the_same(capsys, drafts):
    total = int(7.53 * GIB) + 2_491_831 * 33_408
    said = [
        json.loads(printed(capsys, "--draft", drafts["inferact"], *K3, *given, "--json"))
        for given in (["--total-bytes", total], ["--total-gib", total_gib("inferact")], ["--total-bytes", total - 1])
    ]
    assert said[0] == said[1] and said[2]["tokens"] == 2_491_830


@pytest.mark.parametrize(("name", "other", "slope"), [("inferact", "GQA", 20_480), ("radixark", "MLA", 5_760)])
def test_alternatives(capsys, drafts, name, other, slope):
    said = json.loads(printed(capsys, "--draft", drafts[name], *K3, "--total-gib", 80, "--json"))
    published_one, wrong = said["alternatives"]
    assert FIELDS <= said.keys() and FIELDS <= published_one.keys() and FIELDS <= wrong.keys()
    assert published_one["name"] == f"{other}, as published" and published_one["draft_bytes_per_token"] == slope
    free = 80 * GIB - int(7.53 * GIB)
    assert published_one["tokens"] == free // (27_648 + slope)
    assert wrong["draft_bytes_per_token"] * 2 == wrong["real_draft_bytes_per_token"] == said["draft_bytes_per_token"]
    needed = int(7.53 * GIB) + wrong["tokens"] * said["bytes_per_token"]
    assert wrong["overcommit_bytes"] == needed - 80 * GIB > 0
    assert wrong["draft_pool_tokens"] == wrong["tokens"] // 2


def test_a_charge_above_the_cost_wastes_and_does_not_overcommit(capsys, drafts):
    said = json.loads(
        printed(capsys, "--draft", drafts["inferact"], *K3, "--total-gib", 80, "--draft-dtype", "float8_e4m3fn", "--json")
    )
    wrong = said["alternatives"][1]
    assert (said["draft_bytes_per_token"], wrong["draft_bytes_per_token"], wrong["overcommit_bytes"]) == (2_880, 5_760, 0)
    assert wrong["tokens"] < said["tokens"] and said["checkpoint_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "gqa", "ranks", "sets"),
    [
        (["--tp", 16], 1_280, 16, 1),
        (["--tp", 16, "--attention-dp"], 20_480, 16, 16),
        (["--tp", 4, "--ranks", 16], 5_120, 16, 4),
        (["--tp", 64], 1_280, 64, 1),
    ],
)
def test_deployment(capsys, drafts, options, gqa, ranks, sets):
    slopes = {}
    for name in MEASURED:
        said = json.loads(printed(capsys, "--draft", drafts[name], *K3, "--total-gib", 80, *options, "--json"))
        slopes[name] = said["draft_bytes_per_token"]
        assert said["ranks"] == said["alternatives"][0]["ranks"] == ranks
        assert said["all_ranks"]["tokens"] == sets * said["tokens"]
        assert said["all_ranks"]["draft_bytes"] == ranks * said["draft_bytes"]
    assert slopes == {"inferact": 5_760, "radixark": gqa}


def test_host_tier_is_split_by_slope(capsys, drafts):
    said = json.loads(printed(capsys, "--draft", drafts["inferact"], *K3, "--total-gib", 80, "--host-gib", 200, "--json"))
    host = said["host"]
    assert host["tokens"] == 200 * GIB // 33_408 and host["draft_quota_bytes"] == 200 * GIB * 5_760 // 33_408
    assert host["target_quota_bytes"] + host["draft_quota_bytes"] == host["total_bytes"] == 200 * GIB


def test_what_a_person_reads(capsys, drafts):
    options = ["--tp", 16, "--attention-dp", "--host-gib", 200]
    text = printed(capsys, "--draft", drafts["inferact"], *K3, "--total-gib", total_gib("inferact"), *options)
    for words in (
        "2,491,831 (2,491,776 in 38,934 whole pages of 64)",
        "14,352,946,560 bytes (13.37 GiB)",
        "16 ranks, tensor parallelism 16, attention-DP",
        "39,869,296 tokens",
        "27,648 + 5,760",
        "27,648 + 20,480",
        "GQA, as published",
        "MLA charged float8",
        "past the total",
        "7,853,485,824 bytes (7.31 GiB) more than there is",
        "host tier",
    ):
        assert words in text, words
    assert all(len(line.rstrip()) < 200 for line in text.splitlines())


def test_the_tiny_pair_is_the_default(capsys):
    said = json.loads(printed(capsys, "--target-bytes-per-token", 512, "--total-gib", 1, "--json"))
    assert said["family"] == "mla" and said["tokens"] == GIB // (512 + said["draft_bytes_per_token"])
    assert "MLA, this draft" in printed(capsys, "--target-bytes-per-token", 512, "--total-bytes", GIB)


def test_bars_are_to_one_scale():
    arms = compare(PUBLISHED["mla"], dtype_of("bfloat16"), Deployment(), CacheCost(27_648, 8 * GIB), 80 * GIB)
    lines = bars(arms, 80 * GIB)
    used = [line.split()[-1] for line in lines[:3]]
    assert len(used[2]) == BAR and OVER in used[2] and OVER not in used[0] + used[1]
    assert len(used[0]) == len(used[1]) == len(used[2].rstrip(OVER)) == round(BAR * 80 * GIB / sum(arms[2].parts))
    assert used[0].count("▒") == used[1].count("▒") and used[0].count("░") < used[1].count("░")


def test_an_alternative_that_does_not_fit_says_so(capsys, drafts):
    arguments = ["--draft", drafts["inferact"], "--target-bytes-per-token", 100, "--total-bytes", 64 * 5_860]
    said = json.loads(printed(capsys, *arguments, "--json"))
    assert said["tokens"] == 64 and said["alternatives"][0]["tokens"] == 0 and "more" in said["alternatives"][0]["problem"]
    assert "does not fit" in printed(capsys, *arguments)


# --- the picture


def test_plot_without_matplotlib_names_the_pip_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    file = tmp_path / "budget.png"
    err = refused(capsys, "--target-bytes-per-token", 512, "--total-gib", 1, "--plot", file)
    assert "pip install 'trtllm-dspark[plot]'" in err and not file.exists()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (extra: plot)")
def test_plot_is_a_png(capsys, drafts, tmp_path):
    file = tmp_path / "budget.png"
    text = printed(capsys, "--draft", drafts["inferact"], *K3, "--total-gib", 80, "--plot", file)
    assert file.read_bytes().startswith(b"\x89PNG\r\n") and f"written: {file}" in text.replace("\n", "")


@pytest.mark.parametrize("name", ["budget.pdf", "missing/budget.png", "budget"])
def test_plot_path(capsys, tmp_path, name):
    err = refused(capsys, "--target-bytes-per-token", 512, "--total-gib", 1, "--plot", tmp_path / name)
    assert "--plot must be a .png file in a folder that exists" in err


# --- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--total-gib", "-1"], "--total-gib must be 0 to 1,048,576 GiB, came -1.0"),
        (["--total-gib", "nan"], "came nan"),
        (["--total-gib", "1e300"], "came 1e+300"),
        (["--total-gib", "0"], "total bytes must be a whole number from 1 to"),
        (["--total-bytes", "0"], "came 0"),
        (["--total-bytes", str(10**30)], "total bytes must be a whole number"),
        (["--total-gib", "1", "--target-bytes-per-token", "0"], "bytes a token must be a whole number from 1"),
        (["--total-gib", "1", "--target-bytes-per-token", "-27648"], "came -27,648"),
        (["--total-gib", "1", "--target-bytes-per-token", str(10**15)], "came 1,000,000,000,000,000"),
        (["--total-gib", "1", "--target-state-gib", "-7.53"], "--target-state-gib must be 0 to"),
        (["--total-gib", "1", "--target-state-gib", "inf"], "came inf"),
        (["--total-gib", "1", "--tp", "0"], "tensor parallelism must be a whole number from 1"),
        (["--total-gib", "1", "--ranks", "-3"], "ranks must be a whole number from 1"),
        (["--total-gib", "1", "--tp", "8", "--ranks", "12"], "ranks must be a multiple of tensor parallelism 8, came 12"),
        (["--total-gib", "1", "--page-size", "0"], "page size must be a whole number from 1"),
        (["--total-gib", "1", "--page-size", "100000000"], "page size must be a whole number from 1"),
        (["--total-gib", "1", "--draft-dtype", "fp4"], "must be one of bfloat16, float16, float32, float8_e4m3fn, came 'fp4'"),
        (["--total-gib", "1", "--host-gib", "-1"], "--host-gib must be 0 to"),
        (["--total-gib", "1", "--host-gib", "0"], "budget (host tier): total bytes"),
        (["--total-gib", "7.5", "--target-state-gib", "7.53"], "Give the KV cache"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_2(capsys, options, words):
    err = refused(capsys, "--target-bytes-per-token", 512, *options)
    assert err.startswith("trtllm-dspark: budget") and words in err and err.endswith(".\n")


def test_an_infeasible_budget_names_its_shortfall(capsys, drafts):
    needed = int(7.53 * GIB) + 64 * 33_408
    err = refused(capsys, "--draft", drafts["inferact"], *K3, "--total-gib", "7")
    assert f"{needed - 7 * GIB:,} bytes (0.53 GiB) more" in err
    assert main(["budget", "--draft", str(drafts["inferact"]), *K3, "--total-bytes", str(needed)]) == 0
    capsys.readouterr()
    refused(capsys, "--draft", drafts["inferact"], *K3, "--total-bytes", needed - 1)


def test_a_draft_that_is_none_is_refused(capsys, tmp_path, drafts):
    rest = ["--target-bytes-per-token", 512, "--total-gib", 1]
    assert str(tmp_path / "none") in refused(capsys, "--draft", tmp_path / "none", *rest)
    shapes = published.layout(published.INFERACT)
    del shapes["layers.3.self_attn.kv_b_proj.weight"]
    folder = published.write_config(tmp_path / "damaged", published.INFERACT)
    published.write_sparse(folder / "model.safetensors", shapes)
    assert "missing layers.3.self_attn.kv_b_proj.weight" in refused(capsys, "--draft", folder, *rest)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--target-bytes-per-token", "512"],
        ["--total-gib", "1"],
        ["--target-bytes-per-token", "512", "--total-gib", "1", "--total-bytes", "9"],
        ["--target-bytes-per-token", "many", "--total-gib", "1"],
    ],
)
def test_missing_or_malformed_options_exit_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(["budget", *arguments])
    assert caught.value.code == 2 and "error:" in capsys.readouterr().err


def test_the_parser_needs_no_torch():
    code = "import sys, trtllm_dspark.cli as c; c.build_parser(); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
