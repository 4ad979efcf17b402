"""The native CPU library, one build per instruction set that this processor can run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tools import build_native
from vllm.ops.cpu import library
from vllm.ops.cpu.native import NativeKernels

# tools/sanitize_native.sh
settings.register_profile("sanitize", max_examples=4)
settings.register_profile("sanitize-quick", max_examples=1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-dir", type=Path, help="test the builds in this folder, as they are, instead of our own")


def _fresh(path: Path) -> bool:
    """Built, and not older than its sources."""
    return path.exists() and path.stat().st_mtime >= max(p.stat().st_mtime for p in build_native.SOURCES.iterdir())


@pytest.fixture(scope="session")
def native_builds(request: pytest.FixtureRequest) -> dict[str, NativeKernels]:
    """Instruction set -> kernels. Compiles what is missing or stale."""
    names = library.supported_instruction_sets(library.processor_flags())
    given = request.config.getoption("--native-dir", default=None)
    directory = given or library.DIRECTORY
    if given is None and (stale := [name for name in names if not _fresh(library.path_of(name))]):
        build_native.build(only=stale)
    paths = {name: library.path_of(name, directory) for name in names}
    return {name: NativeKernels(library.load(path)) for name, path in paths.items() if path.exists()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `native` run with each build in turn."""
    if "native" in metafunc.fixturenames:
        names = library.supported_instruction_sets(library.processor_flags())
        given = metafunc.config.getoption("--native-dir", default=None)
        if given is not None:
            names = [name for name in names if library.path_of(name, given).exists()]
        metafunc.parametrize("native", names, indirect=True)


@pytest.fixture
def native(request: pytest.FixtureRequest, native_builds: dict[str, NativeKernels]) -> NativeKernels:
    """The kernels of one build."""
    return native_builds[request.param]
