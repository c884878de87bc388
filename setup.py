"""The wheel's two files outside the packages; everything else is in pyproject.toml.

`trtllm_dspark.pth` and the module it calls lie directly in site-packages, where `site` looks for `.pth` files. An editable
install has neither: there `import trtllm_dspark.plugin` and `register()` must be called, and `trtllm-dspark doctor` says so.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOOK = Path("trtllm_dspark/plugin/autoload.py")
PTH = "import trtllm_dspark_autoload; trtllm_dspark_autoload.install()\n"


class BuildPy(build_py):
    """build_py that also writes the start-up hook."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        module, pth = self._hook_files()
        module.write_bytes(HOOK.read_bytes())
        pth.write_text(PTH)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *map(str, self._hook_files())]

    def _hook_files(self) -> tuple[Path, Path]:
        root = Path(self.build_lib)
        return root / "trtllm_dspark_autoload.py", root / "trtllm_dspark.pth"


setup(cmdclass={"build_py": BuildPy})
