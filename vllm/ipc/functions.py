"""What msgpack cannot hold, in messages: functions by the name under which the other process imports them or, where the
operator allows it, by value; tensors, arrays, tuples and the like as plain data with a word of what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from vllm import envs
from vllm.ipc import codec

_NAMED, _PICKLED, _TYPED = 1, 2, 3  # codes of msgpack extensions
_ALLOW = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_decode: Callable[[bytes], Any] = codec.decoder(Any).decode


def portable(value: Any) -> Any:
    """`value`, with what msgpack cannot hold in it as something that travels. Looks into lists, tuples, sets and
    dictionaries.

    Raises TypeError for a function that has no name another process could import it by, unless
    VLLM_ALLOW_INSECURE_SERIALIZATION=1 lets it go by value.
    """
    if isinstance(value, list):
        return [portable(item) for item in value]
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return msgspec.msgpack.Ext(_NAMED, str(value).encode())
    content = _content(value, torch)
    if content is not None:
        return msgspec.msgpack.Ext(_TYPED, codec.encode(content))
    return _sent(value) if callable(value) else value


def received(value: Any) -> Any:
    """The inverse of `portable`. Tensors are on the CPU."""
    if isinstance(value, list):
        return [received(item) for item in value]
    if isinstance(value, dict):
        return {key: received(item) for key, item in value.items()}
    if not isinstance(value, msgspec.msgpack.Ext):
        return value
    if value.code == _NAMED:
        return named(bytes(value.data).decode())
    if value.code == _TYPED:
        return _of_content(_decode(bytes(value.data)))
    if value.code == _PICKLED and envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        return _cloudpickle().loads(bytes(value.data))
    raise ValueError(f"A message holds a value of kind {value.code}, which is not read here.")


def copied(value: Any) -> Any:
    """`value` as it would arrive in another process."""
    return received(_decode(codec.encode(portable(value))))


def _content(value: Any, torch: Any) -> list[Any] | None:
    """What a value is and what it consists of; None for what is no such thing."""
    if isinstance(value, tuple):
        return ["tuple", [portable(item) for item in value]]
    if isinstance(value, set | frozenset):
        return ["set", [portable(item) for item in value]]
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
        return ["array", value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, msgspec.Struct) and _name_of(type(value)) is not None:
        return ["struct", _name_of(type(value)), codec.encode(value)]
    if torch is not None and isinstance(value, torch.device):
        return ["device", str(value)]
    if torch is not None and isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return ["tensor", str(value.dtype), value.shape, data.numpy().tobytes()]
    return None


def _of_content(content: Any) -> Any:
    """The inverse of `_content`. Raises ValueError for anything else."""
    match content:
        case ["tuple", [*items]]:
            return tuple(received(item) for item in items)
        case ["set", [*items]]:
            return {received(item) for item in items}
        case ["array", str(dtype), [*shape], bytes(data)]:
            return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)
        case ["struct", str(path), bytes(data)]:
            kind = named(path)
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                return codec.decoder(kind).decode(data)
        case ["device", str(name)]:
            return import_module("torch").device(name)
        case ["tensor", str(path), [*shape], bytes(data)]:
            torch, dtype = import_module("torch"), named(path)
            if isinstance(dtype, torch.dtype):
                return (torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(
                    shape
                )
    raise ValueError("A message holds something that is not read here.")


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
    path = _name_of(function)
    if path is not None:
        return msgspec.msgpack.Ext(_NAMED, path.encode())
    if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        return msgspec.msgpack.Ext(_PICKLED, _cloudpickle().dumps(function))
    raise TypeError(
        f"{getattr(function, '__qualname__', None) or repr(function)} cannot be sent to another process: no name there "
        f"leads to it. Put the function into a module that can be imported, or set {_ALLOW}=1, which sends any "
        "function by value (pip install cloudpickle) and lets whoever reaches the engine's sockets run code."
    )


def _name_of(thing: Any) -> str | None:
    """The path by which other processes find a function or a class, if there is one."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module is None or name is None or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing else None


def _cloudpickle() -> Any:
    try:
        return import_module("cloudpickle")
    except ImportError as error:
        raise TypeError(f"Sending functions by value ({_ALLOW}=1) needs a package: pip install cloudpickle.") from error
