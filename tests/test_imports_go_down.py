"""Which rooms may import which: imports go down, also those inside functions, by name, or by way of a helper."""

from __future__ import annotations

import ast
import re
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
# All others stand above these, or are helpers, through which nobody reaches what is above.
ABOVE = {"vllm", "vllm.benchmarks", "vllm.collect_env", "vllm.entrypoints", "vllm.quantize", "vllm.v1"}
# Modules that are named in a text and stand above the file, with the reason. No line of code may do it otherwise.
BY_NAME = {
    ("vllm.config.scheduler", "vllm.core.scheduler.Scheduler"): "the default of a setting that names a class",
    ("vllm.executor.ray_actor", "vllm.engine.core_process"): "the program that an actor starts, as a host would",
    ("vllm.model_executor.model_loader.tensorizer", "vllm.engine.tensorize"): "a public name, looked up when asked for",
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
    """Line and full name of everything that is imported anywhere in a file, but for the benefit of types only. A text
    that names a module counts as an import, but for what `BY_NAME` lists.
    """
    tree = ast.parse(path.read_text())
    unread = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            unread |= {id(child) for statement in node.body for child in ast.walk(statement)}
        elif isinstance(node, ast.Expr):  # a text that is not used
            unread.add(id(node.value))
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: a relative import"
            for alias in node.names:
                home = vllm._HOME_OF.get(alias.name) if node.module == "vllm" else None
                yield node.lineno, f"{home or node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (module, node.value) not in BY_NAME:
            named = re.fullmatch(r"(vllm(?:\.\w+)+)(?::[\w.]+)?", node.value)
            if named is not None:
                yield node.lineno, named[1]


def forbidden(module: str) -> list[str]:
    return [name for room, names in NEVER.items() if is_in(module, room) for name in names]


def offences(module: str, path: Path) -> list[str]:
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(module, path)
        if any(is_in(name, other) for other in forbidden(module))
    ]


def reached(found: dict[str, set[str]], module: str) -> Iterator[tuple[str, str]]:
    """(helper, what it imports) for all that a module imports by way of modules which are in no room."""
    seen, todo = {module}, [module]
    while todo:
        for name in found.get(todo.pop(), ()):
            helper = next((m for m in (name, name.rpartition(".")[0]) if m in found), "vllm")
            if helper in seen or ".".join(helper.split(".")[:2]) in {*NEVER, *ABOVE}:
                continue
            seen.add(helper)
            todo.append(helper)
            yield from ((helper, other) for other in found[helper])


def test_imports_go_down() -> None:
    found = [offence for module, path in modules() for offence in offences(module, path)]
    assert not found, "\n".join(found)


def test_no_helper_is_a_way_up() -> None:
    found = {module: {name for _, name in imports(module, path)} for module, path in modules()}
    ways = {
        f"{module} imports {name} by way of {helper}"
        for module in found
        for helper, name in reached(found, module)
        if any(is_in(name, other) for other in forbidden(module) if other != "torch")  # which is seen below
    }
    assert not ways, "\n".join(sorted(ways))


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


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from vllm import LLM", "vllm.entrypoints.llm.LLM"),
        ("if not TYPE_CHECKING:\n    import vllm.engine.core", "vllm.engine.core"),
        ("import_module('vllm.engine.core')", "vllm.engine.core"),
        ("named('vllm.worker.worker:Worker')", "vllm.worker.worker"),
        ("'vllm.engine.core'", None),
    ],
)
def test_so_is_one_by_another_way(tmp_path: Path, code: str, name: str | None) -> None:
    (bad := tmp_path / "bad.py").write_text(code)
    assert [offence.split()[-1] for offence in offences("vllm.core.bad", bad)] == ([name] if name else [])


def test_so_is_one_through_a_helper() -> None:
    found = {"vllm.core.a": {"vllm.help.f"}, "vllm.help": {"vllm.more"}, "vllm.more": {"vllm.engine.core.EngineCore"}}
    assert ("vllm.more", "vllm.engine.core.EngineCore") in set(reached(found, "vllm.core.a"))


def test_every_room_is_there() -> None:
    names = {name for name, _ in modules()}
    assert {*NEVER, *ABOVE, *WITHOUT_TORCH} <= names
    files = dict(modules())
    assert all(f'"{text}"' in files[module].read_text() for module, text in BY_NAME)


@pytest.mark.parametrize("heavy", ["torch"])
def test_these_do_without(heavy: str) -> None:
    code = "import importlib, sys\nfor name in sys.argv[2:]:\n    importlib.import_module(name)\n" + (
        "    assert sys.argv[1] not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code, heavy, *WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
