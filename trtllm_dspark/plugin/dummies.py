"""Which request ids are padding: of attention-DP ranks without work, and of CUDA graphs larger than their batch.

Source: NVIDIA/TensorRT-LLM `_torch/speculative/dflash.py` at 00679c66: graph padding counts down from one id, at most a
draft length; an idle attention-DP rank uses another.
"""

import sys

from trtllm_dspark.plugin.probing import PACKAGE


def _constant(module: str, name: str) -> int | None:
    """None where the host has no such constant."""
    loaded = sys.modules.get(f"{PACKAGE}.{module}")
    return getattr(loaded, name, None)


def is_dummy(request: int, num_drafts: int) -> bool:
    """Whether this id belongs to no user's request."""
    of_graphs = _constant("_torch.pyexecutor.cuda_graph_runner", "CUDA_GRAPH_DUMMY_REQUEST_ID")
    of_idle_ranks = _constant("_torch.pyexecutor.llm_request", "ATTENTION_DP_DUMMY_REQUEST_ID")
    return request == of_idle_ranks or (of_graphs is not None and request >= of_graphs - num_drafts)
