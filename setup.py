"""The part of the package build that needs code: compiling the native CPU library, if a compiler is there.

Everything else is declared in pyproject.toml. Without a compiler (or if it fails) the package is built all the same;
it then computes with torch alone, and says so when it starts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE = Path("vllm") / "_native"


def build_native(folder: Path) -> None:
    """Compile the native libraries into `folder`; VLLM_BUILD_NATIVE=0 leaves them out, =1 makes a failure an error."""
    wish = os.environ.get("VLLM_BUILD_NATIVE", "auto")
    if wish == "0":
        return
    try:
        spec = importlib.util.spec_from_file_location("build_native", ROOT / "tools" / "build_native.py")
        if spec is None or spec.loader is None:
            raise RuntimeError("tools/build_native.py is not there.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.build(folder)
    except (OSError, RuntimeError) as error:
        if wish == "1":
            raise
        print(f"warning: built without the native CPU library: {error}", file=sys.stderr)


class BuildPackage(build_py):
    """Copies the Python files and adds the native libraries; an editable install gets them in the source tree."""

    def run(self) -> None:
        super().run()
        build_native(ROOT / NATIVE if self.editable_mode else Path(self.build_lib) / NATIVE)


class BuildWheel(bdist_wheel):
    """The libraries are loaded by ctypes: any Python 3 can use the wheel, but only on this platform."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        libraries = list((Path(self.bdist_dir or ".") / NATIVE).glob("*.so"))
        return "py3", "none", super().get_tag()[2] if libraries else "any"


class PlatformDistribution(Distribution):
    """Makes setuptools put the package where platform-specific code belongs."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel}, distclass=PlatformDistribution)
