"""One dispatch for every operation: by device type, fixed at start-up, reference implementation always present."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Op:
    """An operation with a torch reference and, per device type, at most one faster kernel.

    Calling it looks at the device type of the first tensor argument only. A kernel that covers just part of the cases
    decides that itself and calls `op.reference` for the rest.
    """

    def __init__(self, reference: Callable[..., Any]) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.__doc__ = reference.__doc__
        self._kernels: dict[str, Callable[..., Any]] = {}

    def register(self, device_type: str, kernel: Callable[..., Any]) -> None:
        """Use `kernel` for tensors on `device_type` ("cpu", "cuda") from now on."""
        self._kernels[device_type] = kernel

    def unregister(self, device_type: str) -> None:
        """Go back to the reference on `device_type`."""
        self._kernels.pop(device_type, None)

    def kernel(self, device_type: str) -> Callable[..., Any]:
        """The implementation that a call with tensors on `device_type` runs."""
        return self._kernels.get(device_type, self.reference)

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return self._kernels.get(first.device.type, self.reference)(first, *args, **kwargs)


def op(reference: Callable[..., Any]) -> Op:
    """Decorator: make the reference implementation an `Op`."""
    return Op(reference)
