"""Renders chat templates of strangers: in a process of its own, with limits of memory and time.

What a template can do to the process that renders it (build texts of any size, loop) is too much to bound filter by
filter. `python -m vllm.entrypoints.template_process` reads jobs from its standard input and writes what became of them:
frames of JSON with their length in front.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Any, BinaryIO

from vllm.entrypoints.chat_template import MAX_SECONDS, TemplateLimitError

MAX_MEGABYTES = 256  # beyond what the process needs by itself
START_SECONDS = 30.0
_LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1
# The environment may hold keys, and a template has no need of any of it.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ")


class TemplateProcess:
    """Started with the first job, and again after one that had to be ended. One job at a time; any thread may call."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, **job: Any) -> str:
        """The prompt of a conversation, see `chat_utils.apply_chat_template`; `job` has its arguments, all plain data,
        and `special_tokens`.

        Raises ValueError, saying what is wrong with messages or template, and TemplateLimitError.
        """
        with self._lock:
            process = self._running()
            try:
                answer = self._ask(process, job)
            except BaseException:
                self._end()
                raise
            if answer.get("last"):  # it has grown
                self._end()
        if "text" in answer:
            return str(answer["text"])
        raise (TemplateLimitError if answer["kind"] == "limit" else ValueError)(answer["error"])

    def close(self) -> None:
        """End the process, also in the middle of a job."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            )
            assert self._process.stdout is not None
            _receive(self._process.stdout.fileno(), time.monotonic() + START_SECONDS)  # that it is there
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], job: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, job)
            return _receive(process.stdout.fileno(), time.monotonic() + self._seconds)
        except TimeoutError:
            raise TemplateLimitError(
                f"The chat template took longer than {self._seconds:g} seconds to render."
            ) from None
        except (EOFError, BrokenPipeError):
            raise TemplateLimitError(_NEEDS_TOO_MUCH) from None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_NEEDS_TOO_MUCH = f"The chat template needs more than {MAX_MEGABYTES} MB of memory for these messages."


def _send(pipe: BinaryIO | Any, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(descriptor: int, deadline: float) -> dict[str, Any]:
    """One frame. Raises TimeoutError at the deadline, EOFError if the other side has ended."""
    size = _LENGTH.unpack(_read(descriptor, _LENGTH.size, deadline))[0]
    message: dict[str, Any] = json.loads(_read(descriptor, size, deadline))
    return message


def _read(descriptor: int, size: int, deadline: float) -> bytes:
    parts, left = [], size
    while left:
        patience = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        if not select.select([descriptor], [], [], patience)[0]:
            raise TimeoutError
        part = os.read(descriptor, min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


# -- the process -------------------------------------------------------------------------------------------------------


class _Specials:
    """What rendering needs of a tokenizer."""

    chat_template = None

    def __init__(self, special_tokens: dict[str, str]) -> None:
        self.special_tokens = special_tokens


def _rendered(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.entrypoints.chat_utils import apply_chat_template

    tokenizer: Any = _Specials(job.pop("special_tokens"))
    try:
        return {"text": apply_chat_template(tokenizer, job.pop("messages"), **job)}
    except MemoryError:
        return {"kind": "limit", "error": _NEEDS_TOO_MUCH}
    except TemplateLimitError as error:
        return {"kind": "limit", "error": str(error)}
    except Exception as error:
        if isinstance(error.__cause__, MemoryError):
            return {"kind": "limit", "error": _NEEDS_TOO_MUCH}
        return {"kind": "value", "error": str(error)[:2000]}


def _pages() -> int:
    """How large the address space is."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0])


def main(parent: int) -> None:
    """Serve until the other side has closed the pipe, or has died."""
    from vllm.entrypoints import chat_utils

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    jobs, results = sys.stdin.fileno(), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    chat_utils.apply_chat_template(_Specials({}), [{"role": "user", "content": ""}], chat_template="{{ 1 }}")  # type: ignore[arg-type]
    page = os.sysconf("SC_PAGE_SIZE")
    most = _pages() * page + (MAX_MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _send(results, {})
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            answer = _rendered(_receive(jobs, float("inf")))
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in KB
            _send(results, {**answer, "last": grown > 64 << 10})


if __name__ == "__main__":
    main(int(sys.argv[1]))
