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
NATIVE = "_torch.models._arch_index:MODEL_ARCH_TO_MODULE"
NATIVE_ARCHITECTURE = "K3DsparkForCausalLM"


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
        places=(f"{MODELING}:register_draft_model",),
        parameters=("mode",),
        required=True,
        doing="register our builder for SpeculativeDecodingMode.DSPARK",
        why="the public way to supply a drafter; an external builder takes precedence over the built-in one",
        since="1.3.0rc26",
        until=None,
        reference=MODELING_AT,
    ),
    Hook(
        "draft-model table",
        places=(f"{MODELING}:DRAFT_MODEL_BUILDER_MAPPING",),
        parameters=(),
        required=True,
        doing="read: which builder serves DSPARK, ours or another extension's",
        why="an extension that came first keeps every draft that is not ours",
        since="1.3.0rc26",
        until=None,
        reference=MODELING_AT,
    ),
    Hook(
        "draft-model dispatch",
        places=(f"{MODELING}:get_registered_draft_model_builder",),
        parameters=("mode",),
        required=True,
        doing="rely on: the host asks the registry which builder serves a mode",
        why="a host without it builds drafts from a fixed list",
        since="1.3.0rc26",
        until=None,
        reference=MODELING_AT,
    ),
    Hook(
        "speculation mode",
        places=(f"{INTERFACE}:SpeculativeDecodingMode.DSPARK",),
        parameters=(),
        required=True,
        doing="read: the key of our builder",
        why="decoding_type DSpark of a serving YAML arrives as this mode",
        since="1.3.0rc22",
        until=None,
        reference=INTERFACE_AT,
    ),
    Hook(
        "standalone worker",
        places=(f"{DSPARK}:DSparkWorker(DFlashWorker)",),
        parameters=(),
        required=True,
        doing="subclass, and put an instance in the place of the stock one once the model is built",
        why="before pull request 18043 the same name is the worker of drafts embedded in DeepSeek-V4",
        since="1.3.0rc26",
        until=None,
        reference="tensorrt_llm/_torch/speculative/dspark.py (version with DSv4DSparkWorker beside it)",
    ),
    Hook(
        "worker step",
        places=(f"{DFLASH}:DFlashWorker._forward_impl",),
        parameters=(
            "input_ids",
            "position_ids",
            "hidden_states",
            "logits",
            "attn_metadata",
            "spec_metadata",
            "draft_model",
            "resource_manager",
        ),
        required=True,
        doing="extend: bind the pool before it, draft for the prompts of the step after it",
        why="acceptance, guided decoding, recurrent states and rewinds stay the host's own",
        since="1.3.0rc26",
        until=None,
        reference=WORKER_AT,
    ),
    Hook(
        "worker buffers",
        places=(f"{DFLASH}:DFlashWorker._lazy_init_ctx_buffers",),
        parameters=("draft_model", "spec_metadata"),
        required=True,
        doing="replace: the context lives in the draft manager's pool alone",
        why="the stock one falls back to a private arena outside the memory budget",
        since="1.3.0rc26",
        until=None,
        reference=WORKER_AT,
    ),
    Hook(
        "prompt context",
        places=(f"{DFLASH}:DFlashWorker._store_prefill_context",),
        parameters=("draft_model", "spec_metadata", "attn_metadata", "position_ids", "total_target_tokens"),
        required=True,
        doing="replace: one append for all prompts of the step, at absolute positions, without a host sync",
        why="the stock one loops over requests, reads lengths back and numbers positions from its own count",
        since="1.3.0rc26",
        until=None,
        reference=WORKER_AT,
    ),
    Hook(
        "draft inputs",
        places=(f"{DFLASH}:DFlashWorker.prepare_1st_drafter_inputs",),
        parameters=(
            "position_ids",
            "accepted_tokens",
            "num_accepted_tokens",
            "attn_metadata",
            "spec_metadata",
            "draft_model",
            "total_target_tokens",
        ),
        required=True,
        doing="replace: append accepted rows within the manager's grant, build the blocks",
        why="the stock one writes rejected rows and clamps past the grant",
        since="1.3.0rc26",
        until=None,
        reference=WORKER_AT,
    ),
    Hook(
        "slots of a block",
        places=(f"{DFLASH}:DFlashWorker._draft_slot_ids",),
        parameters=("draft_model", "num_gens", "block_size", "num_draft_tokens"),
        required=True,
        doing="call, for the prompts of a step",
        why="which rows of a block become drafts is the checkpoint's convention",
        since="1.3.0rc26",
        until=None,
        reference=WORKER_AT,
    ),
    Hook(
        "Markov chain",
        places=(f"{DSPARK}:DSparkWorker._refine_block_logits",),
        parameters=("draft_model", "gen_logits", "inputs", "spec_metadata"),
        required=True,
        doing="call, for the prompts of a step",
        why="logits that are sharded over the vocabulary are chained with the host's own argmax",
        since="1.3.0rc26",
        until=None,
        reference="tensorrt_llm/_torch/speculative/dspark.py (version with DSv4DSparkWorker beside it)",
    ),
    Hook(
        "acceptance",
        places=(
            f"{INTERFACE}:SpecWorkerBase.sample_and_accept_draft_tokens",
            f"{DFLASH}:DFlashWorker.sample_and_accept_draft_tokens",
        ),
        parameters=("logits", "attn_metadata", "spec_metadata"),
        required=True,
        doing="extend: count accepted drafts on the device",
        why="the host's own recorder reads counts back and is off in CUDA graphs",
        since="1.3.0rc26",
        until=None,
        reference=INTERFACE_AT,
    ),
    Hook(
        "draft sampling",
        places=(f"{INTERFACE}:SpecWorkerBase.sample_draft_tokens",),
        parameters=("logits", "spec_metadata", "batch_size", "num_contexts"),
        required=True,
        doing="call, for the prompts of a step",
        why="argmax or rejection sampling is the deployment's choice",
        since="1.3.0rc26",
        until=None,
        reference=INTERFACE_AT,
    ),
    Hook(
        "draft KV manager",
        places=(f"{INTERFACE}:SpecWorkerBase.get_draft_kv_cache_manager",),
        parameters=("resource_manager",),
        required=True,
        doing="call: the manager whose pages hold the draft context",
        why="the pool is budgeted and granted by the host, a request at a time",
        since="1.3.0rc11",
        until=None,
        reference=INTERFACE_AT,
    ),
    Hook(
        "step metadata",
        places=(f"{DFLASH}:DFlashSpecMetadata.prepare",),
        parameters=(),
        required=True,
        doing="extend, on the instances our worker meets: look up grants before each step, graph replays included",
        why="it is the host's only call that runs before every step, and it names the requests of the batch",
        since="1.3.0rc11",
        until=None,
        reference=WORKER_AT,
    ),
    Hook(
        "captured features",
        places=(f"{DFLASH}:DFlashSpecMetadata.get_hidden_states",),
        parameters=("num_tokens",),
        required=True,
        doing="call: the tapped rows of a step",
        why="what the draft context is made of",
        since="1.3.0rc11",
        until=None,
        reference=WORKER_AT,
    ),
    Hook(
        "target wrapper",
        places=("_torch.models.modeling_speculative:SpecDecOneEngineForCausalLM.load_draft_weights",),
        parameters=("weights",),
        required=True,
        doing="rely on: it calls the drafter's load_weights_from_target_model with the target, where the worker is replaced",
        why="the one moment after construction that is the drafter's own, of dummy weights too; no factory is patched",
        since="1.3.0rc11",
        until=None,
        reference="tensorrt_llm/_torch/models/modeling_speculative.py (version with external_drafter_config_kwargs)",
    ),
    Hook(
        "KV charge",
        places=(f"{UTIL}:KvCacheCreator._get_draft_kv_model_config", f"{UTIL}:KvCacheCreator._get_effective_draft_config"),
        parameters=("self",),
        required=False,
        doing="wrapped when a draft is built under an fp8 target KV cache",
        why="an MLA draft token costs 5,760 bytes and would be charged 2,880: the draft pool is half of what it must hold",
        since="1.3.0rc11",
        until=None,
        reference="tensorrt_llm/_torch/pyexecutor/_util.py (version with CacheCost; the helper came with pull request 19040)",
        without="Under an fp8 target KV cache a draft is not built; set kv_cache_config.dtype to auto.",
        host_has_it=True,
    ),
    Hook(
        "backend choice",
        places=("llmapi.llm_args:DSparkDecodingConfig.attention_backend",),
        parameters=(),
        required=False,
        doing="read: whether AUTO can be asked for",
        why="where it cannot, the default VANILLA stands for AUTO",
        since="1.3.0rc26",
        until=None,
        reference="tensorrt_llm/llmapi/llm_args.py at 7b625920",
        without="VANILLA then stands for AUTO.",
    ),
    Hook(
        "dummy requests of graphs",
        places=("_torch.pyexecutor.cuda_graph_runner:CUDA_GRAPH_DUMMY_REQUEST_ID",),
        parameters=(),
        required=False,
        doing="read: ids that are padding are not counted as requests",
        why="acceptance figures count real requests only",
        since="1.2.1",
        until=None,
        reference=WORKER_AT,
        without="Padding then counts as requests in acceptance figures.",
    ),
    Hook(
        "dummy requests of attention-DP",
        places=("_torch.pyexecutor.llm_request:ATTENTION_DP_DUMMY_REQUEST_ID",),
        parameters=(),
        required=False,
        doing="read: ids that are padding are not counted as requests",
        why="acceptance figures count real requests only",
        since="1.3.0rc11",
        until=None,
        reference=WORKER_AT,
        without="Padding then counts as requests in acceptance figures.",
    ),
    Hook(
        "sum over ranks",
        places=("_torch.distributed.ops:AllReduce",),
        parameters=("mapping",),
        required=False,
        doing="call, under tensor parallelism: joins the ranks' slices of a layer",
        why="the host's own collective is the one that CUDA graphs and its runtime know",
        since="1.2.1",
        until=None,
        reference="tensorrt_llm/_torch/distributed/ops.py",
        without="Tensor parallelism without attention-DP then needs torch.distributed.",
    ),
    Hook(
        "index of the model zoo",
        places=(NATIVE,),
        parameters=(),
        required=False,
        doing=f"read: whether the host has an MLA drafter of its own, {NATIVE_ARCHITECTURE}",
        why="it shows there without an import of the zoo",
        since="1.3.0rc25",
        until=None,
        reference="tensorrt_llm/_torch/models/_arch_index.py",
        without="The host then counts as one without a drafter of its own.",
    ),
)
"""In the order in which the doctor prints them."""
