"""Every TRTLLM_DSPARK_* environment variable. There is no other setting beyond the host's own YAML keys.

The prefix TRTLLM is one of the two that TensorRT-LLM's MPI worker pool passes on to its workers. Multi-node launchers
start the ranks beforehand: export there, before the launcher.
"""

import os
from dataclasses import dataclass

from trtllm_dspark.errors import DSparkError


@dataclass(frozen=True)
class Setting:
    """One variable.

    Attributes:
        name: of the environment variable.
        default: what an unset or empty variable means.
        choices: the values allowed; empty: any.
        meaning: one sentence.
    """

    name: str
    default: str
    choices: tuple[str, ...]
    meaning: str


DISABLE = Setting("TRTLLM_DSPARK_DISABLE", "0", ("0", "1"), "1: register() does nothing, TensorRT-LLM stays as it is.")
PREFER = Setting(
    "TRTLLM_DSPARK_PREFER",
    "auto",
    ("auto", "extension", "native"),
    "Which drafter serves an MLA checkpoint where TensorRT-LLM has its own class: auto takes ours where the host's cannot "
    "run on this GPU or lacks a fix that we carry.",
)
ATTENTION_BACKEND = Setting(
    "TRTLLM_DSPARK_ATTENTION_BACKEND",
    "",
    (),
    "The draft's attention backend, by name or AUTO; overrides speculative_config.attention_backend for MLA drafts.",
)
STATS_EVERY = Setting(
    "TRTLLM_DSPARK_STATS_EVERY",
    "0",
    (),
    "Steps between log lines of acceptance, counted on the device; 0: none. Each waits for the GPU.",
)
SETTINGS = (DISABLE, PREFER, ATTENTION_BACKEND, STATS_EVERY)


def read(setting: Setting) -> str:
    """Its value in this process.

    Raises:
        DSparkError: the value is not one of the choices.
    """
    value = os.environ.get(setting.name, "").strip() or setting.default
    if setting.choices and value not in setting.choices:
        raise DSparkError(
            f"{setting.name}: one of {', '.join(setting.choices)} is required, {value!r} came. Correct or unset the variable."
        )
    return value


def count(setting: Setting) -> int:
    """A setting that is a number of something, 0 or more.

    Raises:
        DSparkError: the value is not such a number.
    """
    value = read(setting)
    if not value.isdecimal():
        raise DSparkError(
            f"{setting.name}: a whole number of 0 or more is required, {value!r} came. Correct or unset the variable."
        )
    return int(value)
