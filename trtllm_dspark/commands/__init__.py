"""What each command of `trtllm-dspark` does. Arguments are declared in `trtllm_dspark.cli`."""
