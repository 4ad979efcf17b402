"""Processes of this package: how one is started with a socket to its parent, and how it ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import vllm

_PR_SET_PDEATHSIG = 1
# How Python runs a module without putting the current folder in front of where modules are found.
_RUN_BEFORE_3_11 = ("-c", "import sys; sys.path.remove(''); import runpy; del sys.argv[0]; "
                          "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)")  # fmt: skip
_RUN = ("-P", "-m") if sys.version_info >= (3, 11) else _RUN_BEFORE_3_11


def wide_pair(buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Two ends of a socket, that hold so many bytes."""
    pair = socket.socketpair()
    if buffer_bytes is not None:
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return pair


def module_path() -> str:
    """PYTHONPATH of a process that is to find the same modules as this one, in the same order: this package, and the
    user's own models. The current folder is among it only where it is here.
    """
    path = list(map(os.path.abspath, sys.path))
    package = str(Path(vllm.__file__).absolute().parent.parent)
    return os.pathsep.join(dict.fromkeys(path if package in path else [package, *path]))


def start_child(
    module: str,
    *,
    leads_session: bool = False,
    buffer_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    further: Sequence[socket.socket | BinaryIO] = (),
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `python -m module FD PARENT [FD ...]` with one end of a socket pair; the process, and the other end.

    leads_session: one signal to its group then reaches it and all processes it starts.   buffer_bytes: of the sockets.
    environment: its variables, but for where modules are found; None for ours.   further: sockets and files that
    it gets, too, and which are its own from here on.

    It is started by a thread that outlives it: the kernel ends a process with the *thread* it came from
    (`end_with_parent`).
    """
    ours, theirs = wide_pair(buffer_bytes)
    try:
        return run_child(module, theirs, leads_session=leads_session, environment=environment, further=further), ours
    except BaseException:
        ours.close()
        raise


def run_child(
    module: str,
    theirs: socket.socket,
    *,
    leads_session: bool = False,
    environment: Mapping[str, str] | None = None,
    further: Sequence[socket.socket | BinaryIO] = (),
    path: str | None = None,
) -> subprocess.Popen[bytes]:
    """As `start_child`, with a socket that is there already; it is the child's from here on.

    path: its PYTHONPATH; None for `module_path`.
    """
    variables = {**(os.environ if environment is None else environment), "PYTHONPATH": path or module_path()}
    started: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()

    def keep() -> None:
        try:
            with contextlib.ExitStack() as ends:
                every: list[socket.socket | BinaryIO] = [theirs, *further]
                for end in every:
                    ends.callback(end.close)
                first, *others = [end.fileno() for end in every]
                process = subprocess.Popen(
                    [sys.executable, *_RUN, module, str(first), str(os.getpid()), *map(str, others)],
                    pass_fds=[first, *others],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    start_new_session=leads_session,
                )
        except BaseException as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    threading.Thread(target=keep, name=f"{module}-keeper", daemon=True).start()
    result = started.get()
    if isinstance(result, BaseException):
        raise result
    return result


def die_with(parent: int) -> bool:
    """Have the kernel end this process when the one that started it ends; False if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def end_with_parent(connection: socket.socket, parent: int, end: Callable[[], object]) -> None:
    """Make sure that this process does not outlive its parent, whatever either of them is doing.

    The kernel's own signal ends it even when it is stopped; `end` is called as soon as the parent's end of `connection`
    is closed, by a thread of its own, also while the model loads or a step takes long. It must not return.
    """
    if not die_with(parent):
        end()

    def watch() -> None:
        closed = select.poll()
        closed.register(connection, select.POLLRDHUP)  # nothing but its end
        closed.poll()
        end()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
