"""The drafter in an llm-api script: two prompts, their text, and the tokens a target step commits.

    python examples/llm_api.py --model /models/Kimi-K3 --draft /models/Kimi-K3-DSpark --tp 8

Needs TensorRT-LLM and its GPUs. On several nodes put `trtllm-llmapi-launch` before it, on every rank. It could not be run
where it was written: there was no TensorRT-LLM.
"""

import argparse
import importlib.util
import sys

PROMPTS = ["def fibonacci(n):", "The three laws of thermodynamics are"]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of the MLA DSpark draft")
    parser.add_argument("--drafts", type=int, default=7, metavar="K", help="the draft's block_size (default 7)")
    parser.add_argument("--tp", type=int, default=8, metavar="N", help="GPUs (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default 256")
    arguments = parser.parse_args()
    if importlib.util.find_spec("tensorrt_llm") is None:
        print(
            "llm_api.py: tensorrt_llm is required, it is not installed. Install NVIDIA's wheel, or run `make demo`, "
            "which needs none.",
            file=sys.stderr,
        )
        return 3
    return generate(arguments)


def generate(arguments: argparse.Namespace) -> int:
    """Register here, in the driver; the wheel's start-up hook does it in the workers, which are other processes."""
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import DSparkDecodingConfig, KvCacheConfig

    from trtllm_dspark.plugin import register

    outcome = register()
    print(f"trtllm-dspark: {outcome.state}. {outcome.reason} {outcome.remedy}".rstrip())
    if outcome.state not in ("active", "native"):
        return 3
    llm = LLM(
        model=arguments.model,
        tensor_parallel_size=arguments.tp,
        moe_expert_parallel_size=arguments.tp,
        trust_remote_code=True,
        max_batch_size=16,
        max_num_tokens=8208,
        max_seq_len=9344,
        kv_cache_config=KvCacheConfig(tokens_per_block=64, free_gpu_memory_fraction=0.25, enable_block_reuse=False),
        speculative_config=DSparkDecodingConfig(speculative_model=arguments.draft, max_draft_len=arguments.drafts),
    )
    try:
        for output in llm.generate(PROMPTS, SamplingParams(max_tokens=arguments.max_new_tokens, temperature=0.0)):
            print(f"\n{output.prompt}{output.outputs[0].text}")
            committed = getattr(output, "avg_decoded_tokens_per_iter", None)  # not in every version
            if committed is not None:
                print(f"accept_len {committed:.2f}, the bonus token included")
    finally:
        llm.shutdown()
    return 0


if __name__ == "__main__":  # TensorRT-LLM spawns workers that import this file
    sys.exit(main())
