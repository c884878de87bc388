"""Checks of a serving YAML, without importing tensorrt_llm: `lint_file`."""

from trtllm_dspark.plugin.lint.finding import Finding
from trtllm_dspark.plugin.lint.lint import Report, lint_file

__all__ = ["Finding", "Report", "lint_file"]
