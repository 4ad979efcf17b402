"""The native CPU library, one build per instruction set that this processor can run."""

from __future__ import annotations

import pytest

from tools import build_native
from vllm.ops.cpu import library
from vllm.ops.cpu.native import NativeKernels


def _fresh(path) -> bool:
    """Built, and not older than its sources."""
    return path.exists() and path.stat().st_mtime >= max(p.stat().st_mtime for p in build_native.SOURCES.iterdir())


@pytest.fixture(scope="session")
def native_builds() -> dict[str, NativeKernels]:
    """Instruction set -> kernels. Compiles what is missing or stale."""
    names = library.supported_instruction_sets(library.processor_flags())
    stale = [name for name in names if not _fresh(library.path_of(name))]
    if stale:
        build_native.build(only=stale)
    return {name: NativeKernels(library.load(library.path_of(name))) for name in names}


@pytest.fixture(params=list(library.INSTRUCTION_SETS))
def native(request, native_builds) -> NativeKernels:
    """Each build in turn. A processor without an instruction set runs the tests with its best build instead."""
    return native_builds.get(request.param) or next(iter(native_builds.values()))
