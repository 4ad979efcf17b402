"""VLLM_TRACE_FUNCTION=1: a file per thread with every call of our functions, to see where a process hangs."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_begun = threading.Lock()


def begin_if_asked() -> None:
    """Trace all threads of this process from now on, if VLLM_TRACE_FUNCTION is set. Everything becomes much slower."""
    if not envs.VLLM_TRACE_FUNCTION or not _begun.acquire(blocking=False):
        return
    folder = Path(tempfile.gettempdir()) / f"vllm-trace-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    logger.warning(
        "VLLM_TRACE_FUNCTION is set: every call is written to %s, which slows everything down.",
        folder / f"process_{os.getpid()}_thread_*.log",
    )
    calls = _Calls(folder)
    threading.setprofile(calls)
    sys.setprofile(calls)


class _Calls:
    """A profile function: writes calls and returns of the package's own functions, a line each, at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(_PACKAGE):
            return
        file: IO[str] | None = getattr(self._local, "file", None)
        if file is None:
            name = f"process_{os.getpid()}_thread_{threading.get_native_id()}.log"
            file = self._local.file = (self._folder / name).open("a", buffering=1, encoding="utf-8")
        caller = frame.f_back
        origin = (
            "" if caller is None else f" from {caller.f_code.co_name} in {caller.f_code.co_filename}:{caller.f_lineno}"
        )
        word = "Call to" if event == "call" else "Return from"
        where = f"{code.co_name} in {code.co_filename}:{frame.f_lineno}"
        file.write(f"{time.time():.6f} {word} {where}{origin if event == 'call' else ''}\n")
