"""The held-out text: what is in which set, and that prompts repeat exactly and never leak from the training files."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.evaluation import stdlib_text
from trtllm_dspark.evaluation.stdlib_text import HELD_OUT, held_out_files, held_out_prompts, module_of, training_files

DEF_FILE = "\n".join(f"def f{i}(a, b):\n    return a * {i} + b\n" for i in range(40))


class CharacterTokenizer:
    """One token a character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class PairTokenizer(CharacterTokenizer):
    """One token for two characters, counted from the end."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        text = "#" * (len(text) % 2) + text
        return [ord(a) << 16 | ord(b) for a, b in zip(text[::2], text[1::2], strict=True)]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i >> 16) + chr(i & 0xFFFF) for i in ids)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library with a held-out file and a held-out package, their tests, and things to leave alone."""
    files = [
        "csv.py", "json/__init__.py", "json/decoder.py",  # held out
        "test/test_csv.py", "test/test_json/test_decode.py", "json/tests/test_tool.py", "test/test_csv_dialect.py",  # neither
        "abc.py", "csvlike.py", "asyncio/queues.py", "test/test_abc.py",  # trained on
        "encodings/cp037.py", "site-packages/csv.py", "dist-packages/abc.py", "config-3.11-x/makesetup.py",
        "_sysconfigdata__linux.py", "__pycache__/abc.py",
    ]  # fmt: skip
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n{DEF_FILE}")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("csv.py", "csv"),
        ("json/decoder.py", "json"),
        ("json/tests/test_tool.py", "json"),
        ("test/test_csv.py", "csv"),
        ("test/test_json/test_scanner.py", "json"),
        ("test/test_asyncio/test_queues.py", "asyncio"),
        ("test/support/os_helper.py", "test"),
    ],
)
def test_module_of(path: str, module: str) -> None:
    assert module_of(Path(path)) == module


def test_sets(library: Path) -> None:
    names = lambda paths: [str(path.relative_to(library)) for path in paths]  # noqa: E731
    assert names(held_out_files(library)) == ["csv.py", "json/__init__.py", "json/decoder.py"]
    assert names(training_files(library)) == ["abc.py", "asyncio/queues.py", "csvlike.py", "test/test_abc.py"]


def test_no_held_out_module_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "abc.py").write_text(DEF_FILE)
    with pytest.raises(DSparkError, match=r"sources of argparse, .* are required, .* has none of them"):
        held_out_files(tmp_path)


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer(), PairTokenizer()], ids=["one", "two"])
def test_prompts(library: Path, tokenizer: CharacterTokenizer) -> None:
    prompts = held_out_prompts(tokenizer, 9, 50, stdlib=library)
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    assert len(prompts) == 9 and {len(prompt) for prompt in prompts} == {50}
    assert all(text.endswith("def") for text in texts)
    assert prompts == held_out_prompts(tokenizer, 9, 50, stdlib=library)
    assert prompts != held_out_prompts(tokenizer, 9, 50, seed=1, stdlib=library)
    files = [path.read_text() for path in held_out_files(library)]
    assert all(any(text in file for file in files) for text in texts)


def test_prompts_never_overlap_and_spread_over_modules(tmp_path: Path) -> None:
    for name in ("csv.py", "heapq.py"):
        text = "\n".join(f"def {name[0]}{i}(a):\n    return {i}\n" for i in range(100, 160))
        (tmp_path / name).write_text(text)
    tokenizer = CharacterTokenizer()
    prompts = held_out_prompts(tokenizer, 20, 60, stdlib=tmp_path)
    for module in ("csv.py", "heapq.py"):
        text = (tmp_path / module).read_text()
        starts = sorted(text.index(tokenizer.decode(p)) for p in prompts if tokenizer.decode(p) in text)
        assert len(starts) == 10
        assert all(after - before >= 60 for before, after in pairwise(starts))


def test_other_ending_and_too_many(library: Path) -> None:
    (library / "heapq.py").write_text("x = 1\n" * 20 + "class A:\n    pass\n")
    (prompt,) = held_out_prompts(CharacterTokenizer(), 1, 20, ending="class", stdlib=library)
    assert CharacterTokenizer().decode(prompt).endswith("x = 1\nclass")
    with pytest.raises(DSparkError, match=r"2 prompts of 20 tokens that end with 'class' .* hold 1"):
        held_out_prompts(CharacterTokenizer(), 2, 20, ending="class", stdlib=library)


def test_this_python() -> None:
    """On the Python that runs the tests: nothing of a held-out module is trained on, and no prompt is in a training file."""
    try:
        held = held_out_files()
    except DSparkError as error:
        pytest.skip(str(error))
    trained = training_files()
    root = stdlib_text._root(None)
    modules = {module_of(path.relative_to(root)) for path in held}
    assert modules <= set(HELD_OUT) and len(modules) >= 11  # tomllib came with 3.11
    assert not modules & {module_of(path.relative_to(root)) for path in trained}
    assert not set(held) & set(trained)
    tokenizer = CharacterTokenizer()
    texts = {tokenizer.decode(prompt) for prompt in held_out_prompts(tokenizer, 24, 300)}
    assert len(texts) == 24
    for path in trained:
        file = path.read_text("utf-8")
        assert not any(text in file for text in texts), path


def test_import_is_light() -> None:
    code = "import sys, trtllm_dspark.evaluation.stdlib_text; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
