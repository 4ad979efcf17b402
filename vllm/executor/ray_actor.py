"""What Ray runs for each rank: an actor that starts the rank's process and looks after it.

It is light: the process has the model, and talks with the first rank over a connection of its own, so that no step
passes through Ray.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm.ipc.child import run_child
from vllm.version import __version__

_CONNECT_S = 30.0


def versions() -> dict[str, str]:
    """Of everything that must be alike on all nodes."""
    found = {"python": platform.python_version(), "vllm": __version__}
    for package in ("torch", "msgspec"):
        try:
            found[package] = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def keep_alive(connection: socket.socket) -> None:
    """Notice within seconds that the other host is gone, and send small frames at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 6000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class RankActor:
    """Holds the devices of one rank. Its log lines begin with the rank's number."""

    module = "vllm.executor.worker_process"
    leads_session = False

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"rank {self._rank}"

    def describe(self, model: str) -> dict[str, Any]:
        """The node, what is installed there, whether it has the model's folder, and which devices Ray has given to this
        actor.
        """
        import ray

        context = ray.get_runtime_context()
        return {
            "address": ray.util.get_node_ip_address(),
            "node": context.get_node_id(),
            "pid": os.getpid(),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])],
            "versions": versions(),
            "has_model": Path(model).is_dir(),
        }

    def start(self, host: str, port: int, secret: bytes, threads: int | None, visible: str | None = None) -> int:
        """Start the rank's process, connected to the first rank; its pid. threads: for computing on the CPU.

        visible: CUDA_VISIBLE_DEVICES of the process; None: the devices that Ray has given to this actor.
        """
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        connection = socket.create_connection((host, port), _CONNECT_S)
        connection.settimeout(None)
        keep_alive(connection)
        connection.sendall(secret + self._rank.to_bytes(4, "little"))
        sys.stdout.flush()
        # not the actor's own path, at whose head Ray has put the engine's current folder
        path = os.environ.get("PYTHONPATH")
        self._process = run_child(self.module, connection, leads_session=self.leads_session, path=path)
        return self._process.pid

    def status(self, seconds: float) -> int | None:
        """How the process has ended, None if it does not within so many seconds."""
        try:
            return None if self._process is None else self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the process, which usually has ended by itself, since its connection is closed."""
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class CoreActor(RankActor):
    """Holds the devices of a copy of the engine, whose core is the process and starts its other ranks itself."""

    module = "vllm.engine.core_process"
    leads_session = True

    def __repr__(self) -> str:
        return f"replica {self._rank}"

    def end(self) -> None:
        """End the core and its ranks at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
