"""The table of public bugs and the tests agree."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
FILES = ("test_config_bugs", "test_loader_bugs", "test_model_bugs", "test_target_bugs", "test_kv_bugs", "test_worker_bugs")
REQUIRED = (
    "C01 C02 C04 C05 C07 C08 C09 C10 C18 C22 C23 C25 K01 K02 K03 K04 K06 K07 K08 K09 K10 K12 K13 K14 K16 K17 K19 K20 "
    "L01 L04 L06 L08 L10 L11 N01 N06 N08 N20 W01 W02 W03 W04 W05 W06 W07 W08 W17"
).split()


def table() -> dict[str, list[str]]:
    """Bug id -> the tests that its row names."""
    rows = re.findall(r"^\| ([A-Z]\d\d) \|(.*)$", (TESTS / "regressions" / "README.md").read_text(), re.MULTILINE)
    assert len({bug for bug, _ in rows}) == len(rows), "an id has two rows"
    return {bug: re.findall(r"`(test_\w+)`", row) for bug, row in rows}


def functions(*files: str) -> dict[str, str]:
    """Name -> docstring of the regression tests in these files, by default in all of them."""
    found = {}
    for path in sorted((TESTS / "regressions").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and (not files or path.stem in files):
                found[node.name] = ast.get_docstring(node) or ""
    return found


def test_every_id_has_a_test_that_exists() -> None:
    known, rows = functions(), table()
    assert set(REQUIRED) <= set(rows)
    for bug, tests in rows.items():
        assert tests, f"{bug} names no test"
        assert all(name.startswith(f"test_{bug.lower()}_") for name in tests), (bug, tests)
        assert set(tests) <= set(known), f"{bug}: no such test {sorted(set(tests) - set(known))}"


def test_every_test_of_the_tabled_files_is_in_the_table() -> None:
    named = {name for tests in table().values() for name in tests}
    assert set(functions(*FILES)) <= named, sorted(set(functions(*FILES)) - named)


def test_every_test_of_the_tabled_files_says_what_it_fails_on() -> None:
    silent = [name for name, doc in functions(*FILES).items() if not re.search(r"[Ff]ail", doc)]
    assert functions(*FILES) and not silent, silent
