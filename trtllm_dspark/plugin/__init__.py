"""TensorRT-LLM takes the drafter. The only place that imports tensorrt_llm, and never at import time.

from trtllm_dspark.plugin import register
print(register().reason)
"""

from trtllm_dspark.plugin.outcome import HookVerdict, Outcome
from trtllm_dspark.plugin.registration import outcome, probe, register

__all__ = ["HookVerdict", "Outcome", "outcome", "probe", "register"]
