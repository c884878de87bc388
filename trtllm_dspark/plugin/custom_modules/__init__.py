"""Where TensorRT-LLM's import options find a module that registers by being imported.

`trtllm-serve --custom_module_dirs DIR` puts DIR's parent first on `sys.path` and imports DIR by its last name, so the
folder lies in one of its own: nothing else of this package becomes importable by a short name.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "trtllm_dspark_register"
