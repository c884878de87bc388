"""Checks of settings against each other: what the key and word checks of `schema` cannot see, and no checkpoint is needed for.

Facts about TensorRT-LLM: tensorrt_llm/llmapi/llm_args.py at 0004396 (validation of `speculative_config`),
examples/kimi_k3/disagg at 07dd0bc (what Kimi-K3 asks of a disaggregated server), pull request 19040 (block reuse).
"""

from collections.abc import Callable, Iterator, Mapping

from trtllm_dspark.plugin.lint.deployment import Deployment
from trtllm_dspark.plugin.lint.finding import Finding

PAGES = (16, 32, 64, 128)
TRTLLM_PAGES = (32, 64)  # FlashInfer's decode takes no other; the other backends take them all
DERIVED = ("mask_token_id", "target_layer_ids", "block_size", "markov_rank", "markov_head_type")


def speculation_is_on_generation_only(server: Deployment) -> Iterator[Finding]:
    """The drafter works where tokens are generated; a context server with it loads it and pays for a pool for nothing."""
    if server.role == "context" and server.speculates:
        yield Finding(
            "error",
            server.line("speculative_config"),
            "speculative_config",
            "the drafter belongs on the generation servers alone, this configures a context server.",
            "Move the block to the generation servers' file or section.",
        )
    if server.role == "worker" and server.speculates:
        yield Finding(
            "note",
            server.line("speculative_config"),
            "speculative_config",
            "cache_transceiver_config makes this a worker of a disaggregated deployment: taken as a generation server.",
            "Leave speculative_config out of the context servers' file.",
        )


def decoding_type_is_given(server: Deployment) -> Iterator[Finding]:
    """It decides which of TensorRT-LLM's drafters the block is for."""
    kind = server.get("speculative_config", "decoding_type")
    if server.speculates and kind is None:
        yield Finding(
            "error",
            server.line("speculative_config"),
            "speculative_config.decoding_type",
            "a decoding_type is required, none came.",
            "Add `decoding_type: DSpark`.",
        )
    elif server.speculates and not server.dspark:
        yield Finding(
            "note",
            server.line("speculative_config", "decoding_type"),
            "speculative_config.decoding_type",
            f"{kind} is TensorRT-LLM's own: this package takes no part, and the block's other keys were not checked.",
        )


def draft_length_is_given(server: Deployment) -> Iterator[Finding]:
    """DSpark has no default for max_draft_len."""
    value = server.get("speculative_config", "max_draft_len")
    if server.dspark and server.num_drafts is None:
        yield Finding(
            "error",
            server.line("speculative_config", "max_draft_len"),
            "speculative_config.max_draft_len",
            f"max_draft_len of at least 1 is required, {'none' if value is None else value} came.",
            "Set it to the checkpoint's block_size; `trtllm-dspark inspect DRAFT` prints it.",
        )


def token_budget_holds_a_step(server: Deployment) -> Iterator[Finding]:
    """Every sequence is verified with K + 1 rows, and one step cannot be split."""
    batch, tokens, drafts = server.integer("max_batch_size"), server.integer("max_num_tokens"), server.num_drafts
    if server.dspark and drafts and batch is not None and tokens is not None and tokens < batch * (drafts + 1):
        yield Finding(
            "error",
            server.line("max_num_tokens"),
            "max_num_tokens",
            f"max_batch_size {batch} x (max_draft_len {drafts} + 1) = {batch * (drafts + 1)} is required, {tokens} came.",
            f"Set max_num_tokens to {batch * (drafts + 1)} or more, or max_batch_size to {tokens // (drafts + 1)} or less.",
        )


def page_size_is_known(server: Deployment) -> Iterator[Finding]:
    """Kernels exist for some page sizes."""
    place = ("kv_cache_config", "tokens_per_block")
    value = server.integer(*place)
    if not server.dspark:
        return
    if server.get(*place) is None:
        yield Finding(
            "note",
            server.line("kv_cache_config"),
            "kv_cache_config.tokens_per_block",
            "not set: TensorRT-LLM takes 64 for Kimi-K3 and 32 for other targets.",
        )
    elif value is not None and value not in PAGES:
        yield Finding(
            "error",
            server.line(*place),
            "kv_cache_config.tokens_per_block",
            f"one of {', '.join(map(str, PAGES))} is required, {value} came.",
            "Set it to 64, which Kimi-K3's own kernels need.",
        )
    elif value is not None and value not in TRTLLM_PAGES:
        yield Finding(
            "note",
            server.line(*place),
            "kv_cache_config.tokens_per_block",
            f"the draft backend TRTLLM takes {' or '.join(map(str, TRTLLM_PAGES))} only, so AUTO has CUTEDSL alone at {value}.",
        )


def fp8_cache_needs_a_fix(server: Deployment) -> Iterator[Finding]:
    """The host charges the draft's pool at the target's dtype unless the plugin, or the host itself, corrects it."""
    value = server.get("kv_cache_config", "dtype")
    if server.dspark and isinstance(value, str) and value.lower() in ("fp8", "fp8_ds_mla", "nvfp4"):
        yield Finding(
            "note",
            server.line("kv_cache_config", "dtype"),
            "kv_cache_config.dtype",
            f"the target's KV is {value}, the draft's stays bfloat16 (5,760 bytes a token). TensorRT-LLM before 1.3.0rc29 "
            "charges it at the target's dtype; the plugin corrects that, and construction fails where it cannot.",
            "`trtllm-dspark doctor` on the serving machine says whether its KV charge hook holds.",
        )


def block_reuse_costs_acceptance(server: Deployment) -> Iterator[Finding]:
    """A matched prefix that the draft's pool does not share is context that the drafter never sees."""
    place = ("kv_cache_config", "enable_block_reuse")
    value = server.get(*place)
    if server.dspark and value is True:
        yield Finding(
            "warning",
            server.line(*place),
            "kv_cache_config.enable_block_reuse",
            "where TensorRT-LLM does not let the drafter join the reuse, it drafts without the matched prefix: accept_len "
            "2.21 instead of 2.87 over 522 published turns. The text stays the same.",
            "Set it to false, unless the plugin does not warn of it at start-up.",
        )
    if server.dspark and value is None:
        yield Finding(
            "note",
            server.line("kv_cache_config"),
            "kv_cache_config.enable_block_reuse",
            "not set: TensorRT-LLM's default is true, its Kimi-K3 model sets false.",
        )


def parallelism_suits_the_draft(server: Deployment) -> Iterator[Finding]:
    """What the drafter and its target cannot be split by."""
    if not server.dspark:
        return
    context, pipeline = server.integer("context_parallel_size"), server.integer("pipeline_parallel_size")
    if context is not None and context > 1:
        yield Finding(
            "error",
            server.line("context_parallel_size"),
            "context_parallel_size",
            f"1 is required by an MLA draft, {context} came.",
            "Set it to 1.",
        )
    if pipeline is not None and pipeline > 1:
        yield Finding(
            "warning",
            server.line("pipeline_parallel_size"),
            "pipeline_parallel_size",
            f"Kimi-K3 in TensorRT-LLM has no pipeline parallelism, {pipeline} came.",
            "Set it to 1.",
        )


def transceiver_suits_kimi_k3(server: Deployment) -> Iterator[Finding]:
    """Kimi-K3's recurrent state moves by the Python transceiver over NIXL only, and its context servers do not overlap."""
    transceiver = server.get("cache_transceiver_config")
    if not isinstance(transceiver, Mapping) or transceiver.get("backend") is None:
        return
    wanted = {"backend": "NIXL", "transceiver_runtime": "PYTHON"}
    for key, value in wanted.items():
        came = transceiver.get(key)
        if came != value:
            yield Finding(
                "warning",
                server.line("cache_transceiver_config", key),
                f"cache_transceiver_config.{key}",
                f"{value} is required by a Kimi-K3 target, {'none' if came is None else came} came.",
                f"Set it to {value}.",
            )
    if server.role == "context" and server.get("disable_overlap_scheduler") is not True:
        yield Finding(
            "warning",
            server.line("disable_overlap_scheduler"),
            "disable_overlap_scheduler",
            "a context server runs without the overlap scheduler.",
            "Set it to true.",
        )
    if server.dspark and server.role != "context":
        yield Finding(
            "note",
            server.line("speculative_config"),
            "speculative_config",
            "the draft's context is not transferred with the target's KV: the drafter of a transferred request starts with "
            "the tokens generated here. Fewer drafts are accepted; the text stays the same.",
        )


def derived_keys_are_left_alone(server: Deployment) -> Iterator[Finding]:
    """TensorRT-LLM reads these from the checkpoint. Without the checkpoint at hand nothing says that they are right."""
    if not server.dspark or server.draft is not None:
        return
    for key in DERIVED:
        if server.get("speculative_config", key) is not None:
            yield Finding(
                "warning",
                server.line("speculative_config", key),
                f"speculative_config.{key}",
                "this is a fact of the checkpoint, and TensorRT-LLM reads it from there.",
                "Remove it.",
            )


SETTINGS_CHECKS: tuple[Callable[[Deployment], Iterator[Finding]], ...] = (
    speculation_is_on_generation_only,
    decoding_type_is_given,
    draft_length_is_given,
    token_budget_holds_a_step,
    page_size_is_known,
    fp8_cache_needs_a_fix,
    block_reuse_costs_acceptance,
    parallelism_suits_the_draft,
    transceiver_suits_kimi_k3,
    derived_keys_are_left_alone,
)
