"""`lint_file`: a serving YAML in, findings out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.plugin.lint.checkpoint_checks import CHECKPOINT_CHECKS
from trtllm_dspark.plugin.lint.deployment import SERVERS, deployments, is_proxy
from trtllm_dspark.plugin.lint.document import Document, YamlError, read_document
from trtllm_dspark.plugin.lint.finding import Finding
from trtllm_dspark.plugin.lint.schema import check_keys
from trtllm_dspark.plugin.lint.settings_checks import SETTINGS_CHECKS


@dataclass(frozen=True)
class Report:
    """path: of the file. roles: of the servers it configures; proxy where it is only that. findings: by line. draft: of the
    first server whose MLA draft is a readable folder here."""

    path: Path
    roles: tuple[str, ...]
    findings: tuple[Finding, ...]
    draft: DraftConfig | None = None

    @property
    def errors(self) -> int:
        """Findings with which the server would not start, or not work."""
        return sum(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"file": str(self.path), "roles": self.roles, "findings": [finding.as_dict() for finding in self.findings]}


def lint_file(path: str | Path, version: str | None = None) -> Report:
    """Check a file for `trtllm-serve`, without importing tensorrt_llm.

    Args:
        path: of the YAML. version: of the TensorRT-LLM that will read it; None: every recorded one.
    Raises:
        DSparkError: there is no such file, or it is not text.
    """
    try:
        document = read_document(path)
    except YamlError as error:
        return Report(Path(path), (), (Finding("error", error.line, "", str(error), "Correct the syntax there."),))
    if not isinstance(document.value, Mapping):
        came = "an empty file" if document.value is None else f"a {type(document.value).__name__}"
        message = f"a mapping of keys is required, {came} came."
        return Report(Path(path), (), (Finding("error", document.line(), "", message, "Write one `key: value` a line."),))
    servers = deployments(document)
    findings = list(_keys(document, version))
    for line, key in document.repeated:
        findings.append(Finding("warning", line, key, "this key was given before; this one counts.", "Keep one of them."))
    wrong = {finding.key for finding in findings if finding.severity == "error"}
    for server in servers:
        for check in (*SETTINGS_CHECKS, *CHECKPOINT_CHECKS):
            findings += [finding for finding in check(server) if finding.key not in wrong]
        if not server.speculates and server.role in ("aggregated", "generation"):
            findings.append(
                Finding("note", server.line(), "speculative_config", "none here: this server runs without a drafter.")
            )
    roles = tuple(server.role for server in servers) or ("proxy",)
    drafts = (server.draft for server in servers if server.dspark)
    draft = next((draft for draft in drafts if isinstance(draft, DraftConfig) and draft.family == "mla"), None)
    return Report(Path(path), roles, tuple(sorted(findings, key=lambda finding: finding.line)), draft)


def _keys(document: Document, version: str | None) -> Iterator[Finding]:
    """Every key of the file against the record."""
    if not is_proxy(document):
        yield from check_keys(document, (), "", version)
        return
    yield from check_keys(document, (), "proxy", version, extra="")
    for section in SERVERS:
        yield from check_keys(document, (section,), "proxy.servers", version, extra="")
