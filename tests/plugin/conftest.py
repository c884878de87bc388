"""A stand-in host for a test: generated, importable as `tensorrt_llm`, and gone afterwards with all that it left."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_pair import FOLDER, Pair, load_pair
from plugin.host.build import build

DRAFT = FOLDER / "draft"


@pytest.fixture(scope="session")
def pair() -> Pair:
    return load_pair()


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of the generated package; made once for each set of arguments."""
    made: dict[tuple, Path] = {}

    def package(version: str, **changes: str) -> Path:
        key = (version, *changes.items())
        if key not in made:
            made[key] = build(tmp_path_factory.mktemp("host"), version, **changes)
        return made[key]

    return package


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nothing was imported or registered."""
    from trtllm_dspark.plugin import builder, registration

    def purge() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]

    for name in [name for name in os.environ if name.startswith("TRTLLM_DSPARK")]:
        monkeypatch.delenv(name)
    purge()
    monkeypatch.setattr(registration, "_outcome", None)
    monkeypatch.setattr(builder, "_earlier", None)
    yield
    purge()
    forget_config_route()


def forget_config_route() -> None:
    if "transformers" in sys.modules:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        CONFIG_MAPPING._extra_content.pop("k3_dspark", None)


@pytest.fixture
def host(
    clean: None, packages: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable:
    """`host(version, ...)` puts that stand-in on the path."""
    caplog.set_level(logging.INFO, "trtllm_dspark.plugin")

    def install(version: str, **changes: str) -> Path:
        folder = packages(version, **changes)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return install
