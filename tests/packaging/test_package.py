"""The package as others get it: what it declares, what a wheel holds, what the Makefile promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from vllm.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
# Import name -> distribution name, where they differ.
DISTRIBUTIONS = {
    "yaml": "pyyaml", "prometheus_client": "prometheus-client", "starlette": "fastapi",
    "lmformatenforcer": "lm-format-enforcer",
}  # fmt: skip
# Imported only where a machine or a wish calls for it, after a check and with a clear error.
OPTIONAL = {"triton", "openai", "pynvml", "flash_attn", "flashinfer"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=!~;\[]", item)[0].lower() for item in requirements}


def imported_modules() -> dict[str, str]:
    """Top-level module -> one file of the package that imports it."""
    found: dict[str, str] = {}
    for path in (ROOT / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            else:
                continue
            for module in modules:
                found.setdefault(module.split(".")[0], str(path.relative_to(ROOT)))
    return found


def test_every_import_is_declared() -> None:
    declared = names(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        declared |= names(extra)
    undeclared = {
        module: path
        for module, path in imported_modules().items()
        if module not in sys.stdlib_module_names | OPTIONAL | {"vllm"}
        and DISTRIBUTIONS.get(module, module).lower() not in declared
    }
    assert undeclared == {}


def test_every_dependency_is_used() -> None:
    used = {DISTRIBUTIONS.get(module, module).lower() for module in imported_modules()}
    assert names(PROJECT["dependencies"]) - used == set()


def test_dependencies_are_ranges() -> None:
    assert not [item for item in PROJECT["dependencies"] if "==" in item.split(";")[0]]


def test_importing_the_command_line_is_light() -> None:
    code = "import sys; from vllm.entrypoints.cli import main; print('torch' in sys.modules, callable(main.main))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    package = ROOT / "vllm"
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["vllm"]
    covered = {path for pattern in patterns for path in package.glob(pattern)}
    here = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".so") and "_native" not in path.parts
    }
    assert here - covered == set()
    assert package / "assets" / "demo" / "model.safetensors" in covered


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "vllm").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_version_is_the_one_of_the_api_that_it_follows() -> None:
    assert re.fullmatch(r"0\.9\.2\+py\d+", __version__)
    assert SETTINGS["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "vllm.version.__version__"}
