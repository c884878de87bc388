"""The drafters' networks. One MLA class serves the embedded engine and TensorRT-LLM."""
