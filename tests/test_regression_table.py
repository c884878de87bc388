"""The table of public bugs and the tests agree."""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
TABLED = ("config", "loader", "model", "target", "kv", "worker", "kernel")  # regressions/test_*_bugs.py: every test has a row
REQUIRED = (
    "C01 C02 C04 C05 C06 C07 C08 C09 C10 C11 C12 C13 C14 C15 C17 C18 C19 C20 C21 C22 C23 C25 C26 K01 K02 K03 K04 K06 K07 "
    "K08 K09 K10 K12 K13 K14 K16 K17 K18 K19 K20 S01 S03 S04 L01 L04 L06 L08 L10 L11 N01 N02 N03 N04 N06 N08 N09 N10 N11 "
    "N13 N14 N15 N16 N17 N18 N19 N20 N21 N22 W01 W02 W03 W04 W05 W06 W07 W08 W09 W10 W11 W12 W14 W16 W17 W18 W19 X01 X02"
).split()


def table() -> dict[str, list[str]]:
    """Bug id -> the tests that its row names."""
    rows = re.findall(r"^\| ([A-Z]\d\d) \|(.*)$", (TESTS / "regressions" / "README.md").read_text(), re.MULTILINE)
    assert len({bug for bug, _ in rows}) == len(rows), "an id has two rows"
    return {bug: re.findall(r"`(test_\w+)`", row) for bug, row in rows}


def functions(*files: str) -> dict[str, list[str]]:
    """Name -> docstrings of the test functions in these files, by default in all of `tests`. Two files may share a name."""
    paths = [TESTS / file for file in files] or sorted(TESTS.rglob("test_*.py"))
    found = defaultdict(list)
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name].append(ast.get_docstring(node) or "")
    return found


def tabled() -> dict[str, list[str]]:
    """The tests of the files that hold nothing but regressions."""
    return functions(*(f"regressions/test_{area}_bugs.py" for area in TABLED))


def test_every_id_has_a_test_that_exists() -> None:
    known, rows = functions(), table()
    assert set(REQUIRED) <= set(rows), sorted(set(REQUIRED) - set(rows))
    for bug, tests in rows.items():
        assert tests, f"{bug} names no test"
        assert all(name.startswith(f"test_{bug.lower()}_") for name in tests), (bug, tests)
        assert set(tests) <= set(known), f"{bug}: no such test {sorted(set(tests) - set(known))}"


def test_every_test_of_the_tabled_files_is_in_the_table() -> None:
    named = {name for tests in table().values() for name in tests}
    assert set(tabled()) <= named, sorted(set(tabled()) - named)


def test_every_test_of_the_table_says_what_it_fails_on() -> None:
    known = functions()
    named = {name for tests in table().values() for name in tests} | set(tabled())
    silent = sorted(name for name in named for doc in known.get(name, ()) if not re.search(r"[Ff]ail", doc))
    assert named and not silent, silent
