"""Reading a symbol off a source file, however it is laid out."""

from pathlib import Path

import pytest

from trtllm_dspark.plugin import probing
from trtllm_dspark.plugin.probing import HostSource

SOURCE = '''
"""Module."""
TABLE: dict[str, str] = {
    "K3DsparkForCausalLM": "modeling_dspark",
}
PLAIN = {}


def decorated(mode):
    def decorator(builder):
        return builder

    return decorator


@first
@second(
    1,
)
def old(): ...


class Base(Generic[T],
           Other[T]):
    field: Literal["A", "B"] = (
        "A"
    )

    def spread(
        self,
        one: int,
        *,
        two: "str | None" = None,
    ) -> dict[str, int]:
        # a comment
# at the margin
        return one.attribute + two

    @property
    def later(self):
        return 1

    def last(self, *, three, **kwargs): ...


class Odd(Base):
    def before(self):
        text = """
lines at the margin
"""
        return text

    def behind(self, four):
        return four.seen


class Sub(Mixin, Base):
    def __init__(self, mapping): ...
'''


@pytest.fixture
def source(tmp_path: Path) -> HostSource:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text(SOURCE)
    (tmp_path / "a" / "broken.py").write_text("def broken(:\n")
    (tmp_path / "__init__.py").write_text("")
    return HostSource(tmp_path)


@pytest.mark.parametrize(
    ("attribute", "parameters"),
    [
        ("TABLE", None),
        ("PLAIN", None),
        ("decorated", ("mode",)),
        ("old", ()),
        ("Base", None),
        ("Base.field", None),
        ("Base.spread", ("self", "one", "two")),
        ("Base.later", ("self",)),
        ("Base.last", ("self", "three")),
        ("Odd.behind", ("self", "four")),
        ("Sub", ("self", "mapping")),
        ("Sub(Base)", ("self", "mapping")),
        ("Sub(Mixin)", ("self", "mapping")),
    ],
)
def test_found(attribute, parameters, source) -> None:
    found = source.find(f"a.b:{attribute}")
    assert found is not None and found.parameters == parameters


@pytest.mark.parametrize(
    "place", ["a.b:MISSING", "a.b:Base.missing", "a.b:spread", "a.b:Sub(Odd)", "a.b:decorator", "a.c:x", "a.broken:other"]
)
def test_not_found(place, source) -> None:
    assert source.find(place) is None


def test_what_is_missing_and_what_is_used(source) -> None:
    spread, last = source.find("a.b:Base.spread"), source.find("a.b:Base.last")
    assert spread.missing(("one", "three")) == ("three",) and last.missing(("anything",)) == ()
    assert {"one", "two", "attribute"} <= spread.names and "mapping" not in spread.names
    assert "seen" in source.find("a.b:Odd.behind").names
    assert '"K3DsparkForCausalLM"' in source.find("a.b:TABLE").source


def test_nothing_is_imported(source, monkeypatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("an import")

    monkeypatch.setattr("builtins.__import__", forbidden)
    assert source.find("a.b:Base.spread") is not None


def test_the_host_is_found_where_it_is_installed(clean, packages, monkeypatch) -> None:
    import sys

    folder = packages("1.3.0rc28")
    monkeypatch.syspath_prepend(str(folder))
    host = probing.locate()
    assert host.root == folder / "tensorrt_llm" and host.version == "1.3.0rc28" and not host.has_native
    assert "tensorrt_llm" not in sys.modules
