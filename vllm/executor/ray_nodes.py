"""What the engine does with the nodes of a Ray cluster, whoever runs there: what they inherit, whether they are alike,
how processes on them connect to this one. Needs no torch.
"""

from __future__ import annotations

import errno
import hmac
import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any, cast

from vllm import envs
from vllm.exceptions import EngineDeadError
from vllm.executor.rank_link import DEATH_NOTICE_S
from vllm.executor.ray_actor import keep_alive, versions
from vllm.ipc.child import module_path
from vllm.ipc.listeners import LOOPBACK, open_listener

SECRET_BYTES = 32
START_S = 120.0  # for actors to be there, and for their processes to connect
END_S = 5.0
MOST_SILENT = 128  # connections of which nobody knows yet who they are
_PORTS = 200  # from VLLM_PORT on
# What ranks on other nodes inherit from this process; keys and passwords are not among it.
CARRIED = ("VLLM_", "NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_", "HF_HUB_", "HF_HOME", "TRITON_", "UCX_", "TP_SOCKET_")
KEPT = ("VLLM_API_KEY", "VLLM_HOST_IP", "VLLM_PORT")


def carried_environment() -> dict[str, str]:
    """The variables that ranks on other nodes inherit."""
    found = {k: v for k, v in os.environ.items() if k.startswith(CARRIED) and k not in KEPT}
    return {**found, "PYTHONPATH": module_path()}


def status_of(ray: Any, actor: Any) -> int | None:
    status: int | None = ray.get(actor.status.remote(DEATH_NOTICE_S), timeout=3 * DEATH_NOTICE_S)
    return status


def answers(ray: Any, calls: list[Any], who: str) -> list[Any]:
    """What actors answer. Raises EngineDeadError with Ray's words if one does not."""
    try:
        found: list[Any] = ray.get(calls, timeout=START_S)
    except Exception as error:
        raise EngineDeadError(f"{who} did not answer: {type(error).__name__}: {error}") from error
    return found


def accept(listener: socket.socket, secret: bytes, count: int, deadline: float) -> dict[int, socket.socket]:
    """The connections of `count` ranks, by their numbers; of others, who do not know the secret, none is kept.

    Nobody waits for who says nothing, and of those only so many are kept, the newest. Raises EngineDeadError if the
    ranks are not there by `deadline` on the monotonic clock, whoever else comes.
    """
    found: dict[int, socket.socket] = {}
    callers: dict[socket.socket, bytearray] = {}  # what each has said, those that came first in front
    listener.setblocking(False)
    with selectors.DefaultSelector() as news, ExitStack() as ends:
        news.register(listener, selectors.EVENT_READ)

        @ends.callback
        def dismiss_all() -> None:
            for caller in callers:
                caller.close()

        def dismiss(caller: socket.socket) -> None:
            news.unregister(caller)
            del callers[caller]

        while len(found) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                for connection in found.values():
                    connection.close()
                raise EngineDeadError(
                    f"{count - len(found)} of {count} ranks have not connected to {listener.getsockname()[0]} within "
                    f"{START_S:.0f} s. Can the nodes reach it? VLLM_HOST_IP sets another address, VLLM_PORT the port."
                )
            for key, _ in news.select(left):
                caller = cast(socket.socket, key.fileobj)
                if caller is listener:
                    with suppress(BlockingIOError, ConnectionError):
                        caller, _ = listener.accept()
                        caller.setblocking(False)
                        callers[caller] = bytearray()
                        news.register(caller, selectors.EVENT_READ)
                    continue
                rank = _greeted(caller, callers[caller], secret)
                if rank is None:
                    continue
                dismiss(caller)
                if rank < 0 or rank in found:
                    caller.close()
                    continue
                caller.settimeout(None)
                keep_alive(caller)
                found[rank] = caller
            while len(callers) > MOST_SILENT:
                oldest = next(iter(callers))
                dismiss(oldest)
                oldest.close()
    return found


def _greeted(caller: socket.socket, said: bytearray, secret: bytes) -> int | None:
    """The rank that has said all it has to, -1 for a stranger; None for one that may go on."""
    wanted = len(secret) + 4
    try:
        heard = caller.recv(wanted - len(said))
    except BlockingIOError:
        return None
    except OSError:
        return -1
    said += heard
    if heard and len(said) < wanted:
        return None
    known = len(said) == wanted and hmac.compare_digest(bytes(said[: len(secret)]), secret)
    return int.from_bytes(said[len(secret) :], "little") if known else -1


def end_actors(ray: Any, actors: list[Any]) -> None:
    """End the ranks' processes and their actors."""
    with suppress(Exception):
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_S)
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)


def check_versions(found: list[dict[str, Any]]) -> None:
    mine = versions()
    for about in found:
        unlike = [f"{name} {about['versions'].get(name)}" for name in mine if about["versions"].get(name) != mine[name]]
        if unlike:
            wanted = ", ".join(f"{name} {version}" for name, version in mine.items())
            raise ValueError(
                f"The node {about['address']} has {', '.join(unlike)}, but all must have what this one has: {wanted}."
            )


def check_model(found: list[dict[str, Any]], model: str) -> None:
    """Raise ValueError if a node lacks the model's folder, before anything is loaded elsewhere."""
    lacking = list(dict.fromkeys(about["address"] for about in found if not about["has_model"]))
    if lacking:
        raise ValueError(
            f"The model's folder {model} is not on {', '.join(lacking)}. All nodes need the model at the same path: "
            "download it there first, or keep it in a file system that they share."
        )


def address_of(ray: Any, alone: bool) -> str:
    """Where other nodes reach this process; the loopback interface if all ranks are on this node."""
    if envs.VLLM_HOST_IP:
        return str(envs.VLLM_HOST_IP)
    return LOOPBACK if alone else str(ray.util.get_node_ip_address())


def open_port(host: str) -> socket.socket:
    """A listener at the first free port from VLLM_PORT on, at any free one if that is not set. Its port is nobody
    else's from here on. Raises ValueError if none of the next ones is free, or `host` is not an address of this host.
    """
    first = envs.VLLM_PORT or 0
    for port in range(first, min(first + _PORTS, 1 << 16)):
        try:
            return open_listener(host, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ValueError(
                    f"{host} is not an address of this host, at which others could reach it: {error}. VLLM_HOST_IP "
                    "sets the address."
                ) from error
    raise ValueError(f"No port from VLLM_PORT={first} to {first + _PORTS - 1} is free on {host}.")
