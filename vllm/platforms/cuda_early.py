"""What a CUDA engine waits for and needs no PyTorch for, done in a thread while PyTorch is imported.

The device's context (about 0.4 s) is the process's primary one, which PyTorch's runtime then finds in place. What
Triton makes once per process (about 1 s: keys of its cache from its own files and the version of ptxas, a compiled
helper) it remembers, also in the processes forked later to compile kernels. Whatever fails here is done again by
whoever needs it, and reported there.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib import metadata

from vllm.logger import init_logger

logger = init_logger(__name__)

_thread: threading.Thread | None = None
_CONTROL_DEVICE = "/dev/nvidiactl"
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability


def begin(device: str) -> None:
    """Start, if an engine on `device` ("auto", "cuda", ...) in this process will need it."""
    global _thread
    if device not in ("auto", "cuda") or "torch" in sys.modules or not _has_cuda():
        return
    _thread = threading.Thread(target=_prepare, name="cuda-early", daemon=True)
    _thread.start()


def finish() -> None:
    """Wait until all that was started is done. A process forked earlier could find an import half done, for ever."""
    if _thread is not None:
        _thread.join()


def _has_cuda() -> bool:
    """Whether there is a driver, and a PyTorch that can use it."""
    try:
        return os.path.exists(_CONTROL_DEVICE) and not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _prepare() -> None:
    try:
        _prepare_triton(_open_first_device())
    except Exception as error:
        logger.debug("Preparing CUDA early failed: %s: %s", type(error).__name__, error)


def _open_first_device() -> int:
    """Make the primary context of the first visible device. Returns its compute capability, 90 for 9.0."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    major, minor = ctypes.c_int(), ctypes.c_int()
    for call, arguments in (
        (driver.cuInit, (0,)),
        (driver.cuDeviceGet, (ctypes.byref(device), 0)),
        (driver.cuDeviceGetAttribute, (ctypes.byref(major), _MAJOR, device)),
        (driver.cuDeviceGetAttribute, (ctypes.byref(minor), _MINOR, device)),
        (driver.cuDevicePrimaryCtxRetain, (ctypes.byref(context), device)),
    ):
        status = call(*arguments)
        if status:
            raise RuntimeError(f"{call.__name__} answered {status}")
    return major.value * 10 + minor.value


def _prepare_triton(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaUtils
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    triton_key()
    make_backend(GPUTarget("cuda", capability, 32)).hash()
    CudaUtils()
