"""`support_torch_compile`, with which model classes say that they may be compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from torch import nn

_Class = TypeVar("_Class", bound=type[nn.Module])


@overload
def support_torch_compile(cls: _Class) -> _Class: ...


@overload
def support_torch_compile(*, dynamic_arg_dims: Mapping[str, Any] | None) -> Callable[[_Class], _Class]: ...


def support_torch_compile(cls: Any = None, *, dynamic_arg_dims: Mapping[str, Any] | None = None) -> Any:
    """Mark a class as one that may be compiled, and check what it says of its arguments; with or without arguments.

    Nothing is compiled: this engine fuses and captures steps itself, and runs the class as it is written. Raises
    ValueError for an argument that `forward` does not have, TypeError for what is no class of modules.
    """

    def marked(found: Any) -> Any:
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise TypeError(f"support_torch_compile decorates classes of modules, got {found!r}.")
        known = inspect.signature(found.forward).parameters
        for name in dynamic_arg_dims or ():
            if name not in known:
                raise ValueError(f"Argument {name} not found in the forward method of {found}")
        return found

    return marked if cls is None else marked(cls)
