"""What we touch in TensorRT-LLM, as data. `trtllm-dspark doctor` prints this table; `probing` looks each row up.

A place is "module:attribute" under `tensorrt_llm`, the newest first: upstream moves files. Nothing of the host is imported
to look a place up. Versions are those in which the symbol was first and last seen; None: before, or still there.
"""

from dataclasses import dataclass

UPSTREAM = "NVIDIA/TensorRT-LLM"
MINIMUM = "1.3.0rc26"

INTERFACE = "_torch.speculative.interface"
DFLASH = "_torch.speculative.dflash"
DSPARK = "_torch.speculative.dspark"
MODELING = "_torch.models.modeling_utils"
UTIL = "_torch.pyexecutor._util"


@dataclass(frozen=True)
class Hook:
    """One symbol of the host.

    Attributes:
        name: ours. places: where it may be. parameters: it must take these by name; () is not checked.
        required: without it the host is refused and nothing is applied.
        doing: what we do with it. why: the reason. since, until: versions it is known in.
        reference: path in UPSTREAM and the commit that was read.
        without: what follows where an optional symbol is missing. host_has_it: the first place is the host's own remedy,
            and where it is there we do nothing.
    """

    name: str
    places: tuple[str, ...]
    parameters: tuple[str, ...]
    required: bool
    doing: str
    why: str
    since: str | None
    until: str | None
    reference: str
    without: str = ""
    host_has_it: bool = False


WORKER_AT = "tensorrt_llm/_torch/speculative/dflash.py at 00679c66"
INTERFACE_AT = (
    "tensorrt_llm/_torch/speculative/interface.py (version with the standalone DSpark form check, pull request 18043)"
)
MODELING_AT = "tensorrt_llm/_torch/models/modeling_utils.py (version with register_draft_model, pull request 18043)"

HOOKS = (
    Hook(
        "draft-model registry",
        (f"{MODELING}:register_draft_model",),
        ("mode",),
        True,
        "register our builder for SpeculativeDecodingMode.DSPARK",
        "the public way to supply a drafter; an external builder takes precedence over the built-in one",
        "1.3.0rc26",
        None,
        MODELING_AT,
    ),
    Hook(
        "draft-model table",
        (f"{MODELING}:DRAFT_MODEL_BUILDER_MAPPING",),
        (),
        True,
        "read: which builder serves DSPARK, ours or another extension's",
        "an extension that came first keeps every draft that is not ours",
        "1.3.0rc26",
        None,
        MODELING_AT,
    ),
    Hook(
        "speculation mode",
        (f"{INTERFACE}:SpeculativeDecodingMode.DSPARK",),
        (),
        True,
        "read: the key of our builder",
        "decoding_type DSpark of a serving YAML arrives as this mode",
        "1.3.0rc22",
        None,
        INTERFACE_AT,
    ),
    Hook(
        "standalone worker",
        (f"{DSPARK}:DSparkWorker(DFlashWorker)",),
        (),
        True,
        "subclass, and put an instance in the place of the stock one once the model is built",
        "before pull request 18043 the same name is the worker of drafts embedded in DeepSeek-V4",
        "1.3.0rc26",
        None,
        "tensorrt_llm/_torch/speculative/dspark.py (version with DSv4DSparkWorker beside it)",
    ),
    Hook(
        "worker step",
        (f"{DFLASH}:DFlashWorker._forward_impl",),
        (
            "input_ids",
            "position_ids",
            "hidden_states",
            "logits",
            "attn_metadata",
            "spec_metadata",
            "draft_model",
            "resource_manager",
        ),
        True,
        "extend: bind the pool before it, draft for the prompts of the step after it",
        "acceptance, guided decoding, recurrent states and rewinds stay the host's own",
        "1.3.0rc26",
        None,
        WORKER_AT,
    ),
    Hook(
        "worker buffers",
        (f"{DFLASH}:DFlashWorker._lazy_init_ctx_buffers",),
        ("draft_model", "spec_metadata"),
        True,
        "replace: the context lives in the draft manager's pool alone",
        "the stock one falls back to a private arena outside the memory budget",
        "1.3.0rc26",
        None,
        WORKER_AT,
    ),
    Hook(
        "prompt context",
        (f"{DFLASH}:DFlashWorker._store_prefill_context",),
        ("draft_model", "spec_metadata", "attn_metadata", "position_ids", "total_target_tokens"),
        True,
        "replace: one append for all prompts of the step, at absolute positions, without a host sync",
        "the stock one loops over requests, reads lengths back and numbers positions from its own count",
        "1.3.0rc26",
        None,
        WORKER_AT,
    ),
    Hook(
        "draft inputs",
        (f"{DFLASH}:DFlashWorker.prepare_1st_drafter_inputs",),
        (
            "position_ids",
            "accepted_tokens",
            "num_accepted_tokens",
            "attn_metadata",
            "spec_metadata",
            "draft_model",
            "total_target_tokens",
        ),
        True,
        "replace: append accepted rows within the manager's grant, build the blocks",
        "the stock one writes rejected rows and clamps past the grant",
        "1.3.0rc26",
        None,
        WORKER_AT,
    ),
    Hook(
        "slots of a block",
        (f"{DFLASH}:DFlashWorker._draft_slot_ids",),
        ("draft_model", "num_gens", "block_size", "num_draft_tokens"),
        True,
        "call, for the prompts of a step",
        "which rows of a block become drafts is the checkpoint's convention",
        "1.3.0rc26",
        None,
        WORKER_AT,
    ),
    Hook(
        "Markov chain",
        (f"{DSPARK}:DSparkWorker._refine_block_logits",),
        ("draft_model", "gen_logits", "inputs", "spec_metadata"),
        True,
        "call, for the prompts of a step",
        "logits that are sharded over the vocabulary are chained with the host's own argmax",
        "1.3.0rc26",
        None,
        "tensorrt_llm/_torch/speculative/dspark.py (version with DSv4DSparkWorker beside it)",
    ),
    Hook(
        "acceptance",
        (f"{INTERFACE}:SpecWorkerBase.sample_and_accept_draft_tokens", f"{DFLASH}:DFlashWorker.sample_and_accept_draft_tokens"),
        ("logits", "attn_metadata", "spec_metadata"),
        True,
        "extend: count accepted drafts on the device",
        "the host's own recorder reads counts back and is off in CUDA graphs",
        "1.3.0rc26",
        None,
        INTERFACE_AT,
    ),
    Hook(
        "draft sampling",
        (f"{INTERFACE}:SpecWorkerBase.sample_draft_tokens",),
        ("logits", "spec_metadata", "batch_size", "num_contexts"),
        True,
        "call, for the prompts of a step",
        "argmax or rejection sampling is the deployment's choice",
        "1.3.0rc26",
        None,
        INTERFACE_AT,
    ),
    Hook(
        "draft KV manager",
        (f"{INTERFACE}:SpecWorkerBase.get_draft_kv_cache_manager",),
        ("resource_manager",),
        True,
        "call: the manager whose pages hold the draft context",
        "the pool is budgeted and granted by the host, a request at a time",
        "1.3.0rc11",
        None,
        INTERFACE_AT,
    ),
    Hook(
        "step metadata",
        (f"{DFLASH}:DFlashSpecMetadata.prepare",),
        (),
        True,
        "extend, on the instances our worker meets: look up grants before each step, graph replays included",
        "it is the host's only call that runs before every step, and it names the requests of the batch",
        "1.3.0rc11",
        None,
        WORKER_AT,
    ),
    Hook(
        "captured features",
        (f"{DFLASH}:DFlashSpecMetadata.get_hidden_states",),
        ("num_tokens",),
        True,
        "call: the tapped rows of a step",
        "what the draft context is made of",
        "1.3.0rc11",
        None,
        WORKER_AT,
    ),
    Hook(
        "target wrapper",
        ("_torch.models.modeling_speculative:SpecDecOneEngineForCausalLM.load_draft_weights",),
        ("weights",),
        True,
        "rely on: it calls the drafter's load_weights_from_target_model with the target, where the worker is replaced",
        "the one moment after construction that is the drafter's own; no factory is patched",
        "1.3.0rc11",
        None,
        "tensorrt_llm/_torch/models/modeling_speculative.py (version with external_drafter_config_kwargs)",
    ),
    Hook(
        "KV charge",
        (f"{UTIL}:KvCacheCreator._get_draft_kv_model_config", f"{UTIL}:KvCacheCreator._get_effective_draft_config"),
        ("self",),
        False,
        "wrap the second where the first is missing, when a draft is built under an fp8 target KV cache",
        "an MLA draft token costs 5,760 bytes and would be charged 2,880: the draft pool is half of what it must hold",
        "1.3.0rc11",
        None,
        "tensorrt_llm/_torch/pyexecutor/_util.py (version with CacheCost; the helper came with pull request 19040)",
        "Under an fp8 target KV cache a draft is not built; set kv_cache_config.dtype to auto.",
        True,
    ),
    Hook(
        "backend choice",
        ("llmapi.llm_args:DSparkDecodingConfig.attention_backend",),
        (),
        False,
        "read: whether AUTO can be asked for",
        "where it cannot, the default VANILLA stands for AUTO",
        "1.3.0rc26",
        None,
        "tensorrt_llm/llmapi/llm_args.py at 7b625920",
        "VANILLA then stands for AUTO.",
    ),
    Hook(
        "dummy requests of graphs",
        ("_torch.pyexecutor.cuda_graph_runner:CUDA_GRAPH_DUMMY_REQUEST_ID",),
        (),
        False,
        "read: ids that are padding are not counted as requests",
        "acceptance figures count real requests only",
        "1.2.1",
        None,
        WORKER_AT,
        "Padding then counts as requests in acceptance figures.",
    ),
    Hook(
        "dummy requests of attention-DP",
        ("_torch.pyexecutor.llm_request:ATTENTION_DP_DUMMY_REQUEST_ID",),
        (),
        False,
        "read: ids that are padding are not counted as requests",
        "acceptance figures count real requests only",
        "1.3.0rc11",
        None,
        WORKER_AT,
        "Padding then counts as requests in acceptance figures.",
    ),
    Hook(
        "sum over ranks",
        ("_torch.distributed.ops:AllReduce",),
        ("mapping",),
        False,
        "call, under tensor parallelism: joins the ranks' slices of a layer",
        "the host's own collective is the one that CUDA graphs and its runtime know",
        "1.2.1",
        None,
        "tensorrt_llm/_torch/distributed/ops.py",
        "Tensor parallelism without attention-DP then needs torch.distributed.",
    ),
)
"""In the order in which the doctor prints them."""

NATIVE = "_torch.models._arch_index:MODEL_ARCH_TO_MODULE"
NATIVE_ARCHITECTURE = "K3DsparkForCausalLM"
"""Where the host's own MLA drafter shows without an import of its model zoo: an entry of this table."""
