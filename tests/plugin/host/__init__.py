"""A stand-in for TensorRT-LLM, built from a recorded contract: `contract.json` and `tree/`. `executor.py` drives it."""
