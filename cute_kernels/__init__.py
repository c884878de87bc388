"""Kernels of the DSpark drafter and their plain-torch twins. Knows no engine, no checkpoint and no `trtllm_dspark`."""
