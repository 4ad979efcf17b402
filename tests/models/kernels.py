"""Running a test on the reference operations, or on the fastest kernels that this machine has."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

from vllm import ops
from vllm.ops.registry import Op


def _all_ops() -> list[Op]:
    modules = [importlib.import_module(f"vllm.ops.{m.name}") for m in pkgutil.iter_modules(ops.__path__) if not m.ispkg]
    return list({id(value): value for m in modules for value in vars(m).values() if isinstance(value, Op)}.values())


@contextmanager
def kernels(kind: str) -> Iterator[None]:
    """kind: "reference", or anything else for the fast ones. What was registered before is again afterwards."""
    before = [(op, dict(op._kernels)) for op in _all_ops()]
    for op, _ in before:
        op._kernels.clear()
    try:
        if kind != "reference":
            ops.setup("cpu")
        yield
    finally:
        for op, registered in before:
            op._kernels.clear()
            op._kernels.update(registered)
