"""Ranks on the nodes of a Ray cluster: Ray places and watches them, the engine's own connections carry the steps.

The first rank is in this process, beside the core; an actor holds its device. Every other rank is a process like those
of one host, started by an actor on its node, and connected by TCP: who connects must know a secret that travels through
Ray. An idle rank waits in a read and costs nothing.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.exceptions import EngineDeadError
from vllm.executor import rendezvous
from vllm.executor.multiproc import Cast, MultiprocExecutor, Place
from vllm.executor.rank_link import DEATH_NOTICE_S, RankLink
from vllm.executor.ray_actor import RankActor, keep_alive, versions
from vllm.executor.ray_utils import connect, import_ray, initialize_ray_cluster, order_of_bundles
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_SECRET_BYTES = 32
_START_S = 120.0  # for actors to be there, and for their processes to connect
_END_S = 5.0
_PORTS = 200  # from VLLM_PORT on
# What ranks on other nodes inherit from this process; keys and passwords are not among it.
CARRIED = ("VLLM_", "NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_", "HF_HUB_", "HF_HOME", "TRITON_", "UCX_", "TP_SOCKET_")
KEPT = ("VLLM_API_KEY", "VLLM_HOST_IP", "VLLM_PORT")


def carried_environment() -> dict[str, str]:
    """The variables that ranks on other nodes inherit."""
    found = {k: v for k, v in os.environ.items() if k.startswith(CARRIED) and k not in KEPT}
    path = dict.fromkeys([str(Path(vllm.__file__).resolve().parent.parent), *filter(None, sys.path)])
    return {**found, "PYTHONPATH": os.pathsep.join(path)}


class RemoteRank(RankLink):
    """A rank that an actor has started."""

    def __init__(
        self, rank: int, connection: socket.socket, pid: int, address: str, status: Callable[[], int | None]
    ) -> None:
        """status: asks how its process has ended; raises if nobody is there to answer."""
        super().__init__(rank, connection)
        self._pid, self._address, self._status = pid, address, status
        self._closed = select.poll()
        self._closed.register(connection, select.POLLRDHUP)

    @property
    def name(self) -> str:
        return f"Rank {self.rank} on {self._address}"

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def is_alive(self) -> bool:
        return not self._closed.poll(0)

    def _end_of_process(self) -> str:
        try:
            status = self._status()
        except Exception:
            return "is gone, and so is its actor: the node may have failed. `ray status` shows the nodes that are left."
        if status is None:
            return "has closed its connection."
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{how}. Its log lines are above."

    def join(self) -> None:
        """Its actor sees to it."""


class RayExecutor(MultiprocExecutor):
    """Executes plans on ranks that Ray has placed."""

    def _cast(self, config: VllmConfig) -> Cast:
        ray = import_ray()
        owner = connect()
        ends = self._others.finally_do
        if owner:
            ends.append(ray.shutdown)
        parallel, device = config.parallel_config, config.device_config.device
        inherited = ray.util.get_current_placement_group()
        group = initialize_ray_cluster(parallel, device=device)
        if inherited is None:
            ends.append(lambda: ray.util.remove_placement_group(group))
        actors = self._actors(ray, group, "GPU" if device == "cuda" else "CPU", parallel.world_size)
        ends.append(lambda: _end(ray, actors))
        model = str(config.model_config.path.absolute())
        found = _answers(ray, [actor.describe.remote(model) for actor in actors], "The nodes of the cluster")
        _check_versions(found)
        _check_model(found, model)
        nodes = [about["node"] for about in found]
        host = _address(ray, alone=len(set(nodes)) == 1)
        self._connect_all(ray, actors, found, host, device)
        logger.info(
            "Ray has placed %d ranks on %s.", len(actors), ", ".join(dict.fromkeys(a["address"] for a in found))
        )
        places = []
        for rank, about in enumerate(found):
            local = (nodes[:rank].count(about["node"]), nodes.count(about["node"]))
            places.append(Place(_own_device(about["gpus"]) if rank == 0 else 0, local))
        return Cast(host, 0 if envs.VLLM_PORT is None else _free_port(host), places)

    def _actors(self, ray: Any, group: Any, kind: str, world: int) -> list[Any]:
        """An actor for each rank, on neighbouring bundles."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        usable = [i for i, bundle in enumerate(group.bundle_specs) if bundle.get(kind, 0) >= 1]
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        driver = ray.get_runtime_context().get_node_id()
        order = order_of_bundles(nodes, driver, usable)[:world]
        if nodes[order[0]] != driver:
            raise ValueError(
                "The engine core's own rank runs beside it, but no place of the placement group is on this node "
                f"({ray.util.get_node_ip_address()}). Start the engine on a node that has a free {kind}."
            )
        made = []
        for rank, bundle in enumerate(order):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            options = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_gpus": 0, "num_cpus": 1}
            remote = ray.remote(RankActor).options(
                scheduling_strategy=strategy, runtime_env={"env_vars": carried_environment()}, max_restarts=0, **options
            )
            made.append(remote.remote(rank))
        return made

    def _connect_all(self, ray: Any, actors: list[Any], found: list[dict[str, Any]], host: str, device: str) -> None:
        """Let every actor but the first start its rank's process, and take in their connections."""
        secret = secrets.token_bytes(_SECRET_BYTES)
        with rendezvous.open_listener(host, 0 if envs.VLLM_PORT is None else _free_port(host)) as listener:
            port = listener.getsockname()[1]
            starts = []
            for rank, actor in enumerate(actors[1:], 1):
                about = found[rank]
                count = sum(other["node"] == about["node"] for other in found)
                threads = max(1, about["cores"] // count) if device == "cpu" else None
                threads = int(os.environ["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in os.environ else threads
                starts.append(actor.start.remote(host, port, secret, threads))
            connections = _accept(listener, secret, len(starts), time.monotonic() + _START_S)
        pids = _answers(ray, starts, "The ranks of the cluster")
        for rank, pid in enumerate(pids, 1):
            actor = actors[rank]
            self._ranks.append(
                RemoteRank(rank, connections[rank], pid, found[rank]["address"], lambda a=actor: _status(ray, a))  # type: ignore[misc]
            )


def _status(ray: Any, actor: Any) -> int | None:
    status: int | None = ray.get(actor.status.remote(DEATH_NOTICE_S), timeout=3 * DEATH_NOTICE_S)
    return status


def _answers(ray: Any, calls: list[Any], who: str) -> list[Any]:
    """What actors answer. Raises EngineDeadError with Ray's words if one does not."""
    try:
        answers: list[Any] = ray.get(calls, timeout=_START_S)
    except Exception as error:
        raise EngineDeadError(f"{who} did not answer: {type(error).__name__}: {error}") from error
    return answers


def _accept(listener: socket.socket, secret: bytes, count: int, deadline: float) -> dict[int, socket.socket]:
    """The connections of `count` ranks, by their numbers; of others, who do not know the secret, none is kept."""
    found: dict[int, socket.socket] = {}
    while len(found) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise EngineDeadError(
                f"{count - len(found)} of {count} ranks have not connected to {listener.getsockname()[0]} within "
                f"{_START_S:.0f} s. Can the nodes reach it? VLLM_HOST_IP sets another address, VLLM_PORT the port."
            ) from None
        connection.settimeout(5.0)
        with suppress(OSError):
            greeting = connection.recv(_SECRET_BYTES + 4, socket.MSG_WAITALL)
            rank = int.from_bytes(greeting[_SECRET_BYTES:], "little")
            known = hmac.compare_digest(greeting[:_SECRET_BYTES], secret)
            if known and len(greeting) == _SECRET_BYTES + 4 and rank not in found:
                connection.settimeout(None)
                keep_alive(connection)
                found[rank] = connection
                continue
        connection.close()
    return found


def _end(ray: Any, actors: list[Any]) -> None:
    """End the ranks' processes and their actors."""
    with suppress(Exception):
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=_END_S)
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)


def _check_versions(found: list[dict[str, Any]]) -> None:
    mine = versions()
    for about in found:
        unlike = [f"{name} {about['versions'].get(name)}" for name in mine if about["versions"].get(name) != mine[name]]
        if unlike:
            wanted = ", ".join(f"{name} {version}" for name, version in mine.items())
            raise ValueError(
                f"The node {about['address']} has {', '.join(unlike)}, but all must have what this one has: {wanted}."
            )


def _check_model(found: list[dict[str, Any]], model: str) -> None:
    """Raise ValueError if a node lacks the model's folder, before anything is loaded elsewhere."""
    lacking = list(dict.fromkeys(about["address"] for about in found if not about["has_model"]))
    if lacking:
        raise ValueError(
            f"The model's folder {model} is not on {', '.join(lacking)}. All nodes need the model at the same path: "
            "download it there first, or keep it in a file system that they share."
        )


def _address(ray: Any, alone: bool) -> str:
    """Where other nodes reach this process; the loopback interface if all ranks are on this node."""
    if envs.VLLM_HOST_IP:
        return str(envs.VLLM_HOST_IP)
    return rendezvous.LOOPBACK if alone else str(ray.util.get_node_ip_address())


def _free_port(host: str) -> int:
    """The first free port from VLLM_PORT on. Raises ValueError if there is none among the next ones."""
    first = envs.VLLM_PORT or 0
    for port in range(first, min(first + _PORTS, 1 << 16)):
        with suppress(OSError), rendezvous.open_listener(host, port):
            return port
    raise ValueError(f"No port from VLLM_PORT={first} to {first + _PORTS - 1} is free on {host}.")


def _own_device(gpus: list[str]) -> int:
    """The number, as this process counts, of the GPU that Ray has reserved for the first rank."""
    if not gpus:
        return 0
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if gpus[0] in visible:
        return visible.index(gpus[0])
    return int(gpus[0]) if gpus[0].isdecimal() and not visible else 0
