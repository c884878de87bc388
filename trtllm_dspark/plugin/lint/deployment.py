"""What one server gets from a file: its role and the settings that reach it."""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.errors import DSparkError
from trtllm_dspark.plugin.lint.document import Document, Key
from trtllm_dspark.plugin.lint.schema import as_number, schema

SERVERS = {"context_servers": "context", "generation_servers": "generation"}
NAMES_ONLY = {"model", "backend"}  # what the proxy itself uses of a server's keys
ROLE_WORDS = {"ctx": "context", "context": "context", "prefill": "context"} | {
    word: "generation" for word in ("gen", "generation", "decode")
}


@dataclass(frozen=True)
class Deployment:
    """One server's settings.

    Attributes:
        document: the file.
        role: aggregated, context, generation, or worker: of a disaggregated deployment, which kind the file does not say.
        place: of the settings in the file; () or a section of the proxy's file, which inherits the file's other keys.
    """

    document: Document
    role: str
    place: Key = ()

    def get(self, *place: Hashable) -> Any:
        """A setting, None where there is none."""
        value = self.document.get(*self.place, *place)
        return self.document.get(*place) if value is None and self.place else value

    def integer(self, *place: Hashable) -> int | None:
        """A setting that TensorRT-LLM would read as an integer; None where there is none, or where it would not."""
        value = as_number(self.get(*place))
        return None if isinstance(value, bool) or value is None or value != value // 1 else int(value)

    def line(self, *place: Hashable) -> int:
        """Its line in the file."""
        if self.place and place and self.document.get(*self.place, place[0]) is None and place[0] in self.document.value:
            return self.document.line(*place)
        return self.document.line(*self.place, *place)

    @property
    def speculates(self) -> bool:
        """Is there a `speculative_config` block?"""
        return isinstance(self.get("speculative_config"), Mapping)

    @property
    def dspark(self) -> bool:
        """Is it one for DSpark?"""
        return self.speculates and self.get("speculative_config", "decoding_type") == "DSpark"

    @property
    def draft_path(self) -> str | None:
        """`speculative_model`, under either of its names."""
        for name in ("speculative_model", "speculative_model_dir"):
            if isinstance(path := self.get("speculative_config", name), str) and path:
                return path
        return None

    @property
    def draft_key(self) -> Key:
        """The place of that path, or of the block where there is none."""
        for name in ("speculative_model", "speculative_model_dir"):
            if self.get("speculative_config", name) is not None:
                return ("speculative_config", name)
        return ("speculative_config",)

    @property
    def num_drafts(self) -> int | None:
        """`max_draft_len` where it is a positive integer."""
        value = self.integer("speculative_config", "max_draft_len")
        return value if value is not None and value > 0 else None

    @cached_property
    def draft(self) -> DraftConfig | DSparkError | None:
        """The draft's config, or why it cannot be read. None: it is not a folder on this machine."""
        if self.draft_path is None or not Path(self.draft_path).is_dir():
            return None
        try:
            return DraftConfig.from_pretrained(self.draft_path, require_block_size=False)
        except DSparkError as error:
            return error


def is_proxy(document: Document) -> bool:
    """Is it the file of `trtllm-serve disaggregated`?"""
    return isinstance(document.value, Mapping) and any(name in document.value for name in SERVERS)


def deployments(document: Document) -> list[Deployment]:
    """The servers that the file configures. A proxy's section that holds addresses alone configures none."""
    if not is_proxy(document):
        return [Deployment(document, _role(document))]
    blocks = schema()["blocks"]
    shared = set(document.value) & set(blocks[""]) - set(blocks["proxy"]) - NAMES_ONLY
    return [
        Deployment(document, role, (section,))
        for section, role in SERVERS.items()
        if isinstance(values := document.get(section), Mapping) and (shared or set(values) & set(blocks[""]) - NAMES_ONLY)
    ]


def _role(document: Document) -> str:
    """From the file's name; with a transceiver alone it is one worker or the other."""
    words = re.split(r"[^a-z]+", document.path.stem.lower())
    for word in words:
        if word in ROLE_WORDS:
            return ROLE_WORDS[word]
    return "worker" if document.get("cache_transceiver_config", "backend") is not None else "aggregated"
