"""Registers when it is imported: by `--custom_module_dirs`, by a plain import, or in a Ray actor by its class's name.

`--custom_module_dirs` imports it in the server's main process alone. The ranks and pool workers are other processes, and
the draft's builder is one of the registrations that TensorRT-LLM does not hand to them: they need the start-up hook.
"""

from trtllm_dspark.plugin import register

register()


class RayWorkerExtension:
    """Adds nothing to Ray's worker: `ray_worker_extension_cls` names it so that each actor imports this module."""
