"""Functions in messages: by the name under which the other process imports them or, where the operator allows it, by
value. Torch's dtypes travel by their names, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from vllm import envs

_NAMED, _PICKLED = 1, 2  # codes of msgpack extensions
_ALLOW = "VLLM_ALLOW_INSECURE_SERIALIZATION"


def portable(value: Any) -> Any:
    """`value`, a function or a dtype in it as something that travels. Looks into lists, tuples and dictionaries.

    Raises TypeError for a function that has no name another process could import it by, unless
    VLLM_ALLOW_INSECURE_SERIALIZATION=1 lets it go by value.
    """
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return msgspec.msgpack.Ext(_NAMED, str(value).encode())
    return _sent(value) if callable(value) else value


def received(value: Any) -> Any:
    """The inverse of `portable`."""
    if isinstance(value, list):
        return [received(item) for item in value]
    if isinstance(value, dict):
        return {key: received(item) for key, item in value.items()}
    if not isinstance(value, msgspec.msgpack.Ext):
        return value
    if value.code == _NAMED:
        return named(bytes(value.data).decode())
    if value.code == _PICKLED and envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        return _cloudpickle().loads(bytes(value.data))
    raise ValueError(f"A message holds a value of kind {value.code}, which is not read here.")


def named(path: str, argument: str = "") -> Any:
    """The object called `path`, "module:name" or "module.name"; ValueError, which names the argument that has the path
    for a value, if there is none."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        if not module:
            raise ValueError("it names no module.")
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        given = f"{argument}={path!r}" if argument else repr(path)
        raise ValueError(
            f"{given} cannot be imported: {str(error).rstrip('.')}. Expected the path of something that every process "
            "can import, such as package.module.Name or package.module:Name."
        ) from error
    return found


def _sent(function: Callable[..., Any]) -> msgspec.msgpack.Ext:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is not None and name is not None and module != "__main__" and _is_found(function, module, name):
        return msgspec.msgpack.Ext(_NAMED, f"{module}:{name}".encode())
    if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        return msgspec.msgpack.Ext(_PICKLED, _cloudpickle().dumps(function))
    raise TypeError(
        f"{name or function!r} cannot be sent to another process: no name there leads to it. Put the function into a "
        f"module that can be imported, or set {_ALLOW}=1, which sends any function by value (pip install cloudpickle) "
        "and lets whoever reaches the engine's sockets run code."
    )


def _is_found(function: Callable[..., Any], module: str, name: str) -> bool:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def _cloudpickle() -> Any:
    try:
        return import_module("cloudpickle")
    except ImportError as error:
        raise TypeError(f"Sending functions by value ({_ALLOW}=1) needs a package: pip install cloudpickle.") from error
