"""Which rooms may import which: imports go down, also those inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm

PACKAGE = Path(vllm.__file__).resolve().parent

# A room (a module or package) and what nothing in it imports. A name stands for all that is below it.
_ABOVE = ["vllm.entrypoints"]
NEVER = {
    "vllm.step": ["torch", "vllm.core", "vllm.engine", "vllm.executor", "vllm.worker", "vllm.ops", *_ABOVE],
    "vllm.ipc": ["torch", "vllm.core", "vllm.engine", "vllm.executor", "vllm.worker", "vllm.ops", *_ABOVE],
    "vllm.core": ["torch", "vllm.engine", "vllm.executor", "vllm.worker", "vllm.ops", "vllm.model_executor", *_ABOVE],
    "vllm.distributed": ["vllm.core", "vllm.engine", "vllm.executor", "vllm.worker", "vllm.model_executor", *_ABOVE],
    "vllm.ops": ["vllm.core", "vllm.engine", "vllm.executor", "vllm.worker", "vllm.model_executor", *_ABOVE],
    "vllm.lora": ["vllm.core", "vllm.engine", "vllm.executor", "vllm.worker", *_ABOVE],
    "vllm.model_executor": ["vllm.core", "vllm.engine", "vllm.executor", "vllm.worker", *_ABOVE],
    "vllm.worker": ["vllm.core", "vllm.engine", "vllm.executor", *_ABOVE],
    "vllm.executor": ["vllm.core", "vllm.engine", *_ABOVE],
    "vllm.config": ["torch", "vllm.core", "vllm.engine", "vllm.executor", "vllm.worker", "vllm.ops", *_ABOVE],
    "vllm.structured_output": ["vllm.executor", "vllm.worker", "vllm.ops", "vllm.model_executor", *_ABOVE],
    "vllm.tool_parsers": ["torch", "vllm.core", "vllm.executor", "vllm.worker", "vllm.ops", *_ABOVE],
    "vllm.metrics": ["torch", "vllm.core", "vllm.engine", "vllm.executor", "vllm.worker", *_ABOVE],
    "vllm.engine": _ABOVE,
}
# These must be free of torch when they are imported, all that they bring along included.
WITHOUT_TORCH = [
    "vllm",
    "vllm.config",
    "vllm.core.scheduler",
    "vllm.engine.core",
    "vllm.engine.core_client",
    "vllm.engine.wire",
    "vllm.ipc.child",
    "vllm.ipc.codec",
    "vllm.ipc.frames",
    "vllm.model_executor.models.registry",
    "vllm.step.block_hash",
    "vllm.step.inputs",
    "vllm.step.kv_need",
    "vllm.step.kv_policy",
    "vllm.step.messages",
    "vllm.step.plan",
    "vllm.step.result",
    "vllm.step.rng",
]


def is_in(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["vllm", *path.relative_to(PACKAGE).with_suffix("").parts]
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that is imported anywhere in a file, but for the benefit of types only."""
    tree = ast.parse(path.read_text())
    unread = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            unread |= {id(child) for statement in node.body for child in ast.walk(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in unread:
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and id(node) not in unread:
            assert not node.level, f"{module}:{node.lineno}: a relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def offences(module: str, path: Path) -> list[str]:
    forbidden = [name for room, names in NEVER.items() if is_in(module, room) for name in names]
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(module, path)
        if any(is_in(name, other) for other in forbidden)
    ]


def test_imports_go_down() -> None:
    found = [offence for module, path in modules() for offence in offences(module, path)]
    assert not found, "\n".join(found)


def test_an_import_that_goes_up_is_seen(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def f():\n    from vllm.engine import core\n    import torch.nn as nn\n    return core, nn\n"
    )
    assert offences("vllm.core.bad", bad) == [
        "vllm.core.bad:5 imports vllm.engine.core",
        "vllm.core.bad:6 imports torch.nn",
    ]
    assert not offences("vllm.entrypoints.bad", bad)


def test_every_room_is_there() -> None:
    names = {name for name, _ in modules()}
    assert {*NEVER, *WITHOUT_TORCH} <= names


@pytest.mark.parametrize("heavy", ["torch"])
def test_these_do_without(heavy: str) -> None:
    code = "import importlib, sys\nfor name in sys.argv[2:]:\n    importlib.import_module(name)\n" + (
        "    assert sys.argv[1] not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code, heavy, *WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
