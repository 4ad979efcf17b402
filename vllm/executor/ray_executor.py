"""Ranks on the nodes of a Ray cluster: Ray places and watches them, the engine's own connections carry the steps.

The first rank is in this process, beside the core; an actor holds its device. Every other rank is a process like those
of one host, started by an actor on its node, and connected by TCP: who connects must know a secret that travels through
Ray. An idle rank waits in a read and costs nothing.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.executor.multiproc import Cast, MultiprocExecutor, Place
from vllm.executor.rank_link import RankLink
from vllm.executor.ray_actor import RankActor
from vllm.executor.ray_nodes import (
    SECRET_BYTES,
    START_S,
    accept,
    address_of,
    answers,
    carried_environment,
    check_model,
    check_versions,
    end_actors,
    open_port,
    status_of,
)
from vllm.executor.ray_utils import (
    connect,
    current_placement_group,
    import_ray,
    initialize_ray_cluster,
    order_of_bundles,
    usable_bundles,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


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

    @property
    def was_killed(self) -> bool:
        """Also where its whole node is gone."""
        if self.is_alive:
            return False
        try:
            return (self._status() or 0) < 0
        except Exception:
            return True

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
        inherited = current_placement_group()
        group = initialize_ray_cluster(parallel, device=device)
        if inherited is None:
            ends.append(lambda: ray.util.remove_placement_group(group))
        actors = self._actors(ray, group, device == "cuda", parallel.world_size, shared=inherited is not None)
        ends.append(lambda: end_actors(ray, actors))
        model = str(config.model_config.path.absolute())
        found = answers(ray, [actor.describe.remote(model) for actor in actors], "The nodes of the cluster")
        check_versions(found)
        check_model(found, model)
        nodes = [about["node"] for about in found]
        host = address_of(ray, alone=len(set(nodes)) == 1)
        own = os.environ.get("CUDA_VISIBLE_DEVICES")
        views = views_of(nodes, [about["gpus"] for about in found], own) if device == "cuda" else [View()] * len(nodes)
        self._connect_all(ray, actors, found, views, host, device)
        logger.info(
            "Ray has placed %d ranks on %s.", len(actors), ", ".join(dict.fromkeys(a["address"] for a in found))
        )
        places = []
        for rank in range(len(found)):
            local = (nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank]))
            places.append(Place(views[rank].device, local))
        return Cast(host, open_port(host), places)

    def _actors(self, ray: Any, group: Any, gpus: bool, world: int, *, shared: bool) -> list[Any]:
        """An actor for each rank, on neighbouring bundles.   shared: whether the group is that of the actor which this
        engine is in. That one may have taken a CPU of it, which is then its first rank's: no rank asks for another.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = "GPU" if gpus else "CPU"
        part = envs.VLLM_RAY_PER_WORKER_GPUS
        wanted = {"num_gpus": part, "num_cpus": 0} if gpus else {"num_gpus": 0, "num_cpus": 0 if shared else 1}
        usable = usable_bundles(group.bundle_specs, kind, world)
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        driver = ray.get_runtime_context().get_node_id()
        order = order_of_bundles(nodes, driver, usable)[:world]
        if nodes[order[0]] != driver:
            address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            places = ", ".join(f"{address.get(node)} ({node:.8})" for node in dict.fromkeys(nodes.values()))
            raise ValueError(
                f"The engine core's own rank runs beside it, on the node {address.get(driver)} ({driver:.8}), but the "
                f"places of the placement group are on: {places}. Start the engine on one of these nodes, or in a "
                f"placement group with a {kind} of this one."
            )
        made = []
        for rank, bundle in enumerate(order):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            remote = ray.remote(RankActor).options(
                scheduling_strategy=strategy, runtime_env={"env_vars": carried_environment()}, max_restarts=0, **wanted
            )
            made.append(remote.remote(rank))
        return made

    def _connect_all(
        self, ray: Any, actors: list[Any], found: list[dict[str, Any]], views: list[View], host: str, device: str
    ) -> None:
        """Let every actor but the first start its rank's process, and take in their connections."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with open_port(host) as listener:
            port = listener.getsockname()[1]
            starts = []
            for rank, actor in enumerate(actors[1:], 1):
                about = found[rank]
                count = sum(other["node"] == about["node"] for other in found)
                threads = max(1, about["cores"] // count) if device == "cpu" else None
                threads = int(os.environ["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in os.environ else threads
                starts.append(actor.start.remote(host, port, secret, threads, views[rank].visible))
            connections = accept(listener, secret, len(starts), time.monotonic() + START_S)
        pids = answers(ray, starts, "The ranks of the cluster")
        for rank, pid in enumerate(pids, 1):
            actor = actors[rank]
            self._ranks.append(
                RemoteRank(rank, connections[rank], pid, found[rank]["address"], lambda a=actor: status_of(ray, a))  # type: ignore[misc]
            )


@dataclass(frozen=True, slots=True)
class View:
    """What a rank's process sees. visible: its CUDA_VISIBLE_DEVICES, None for what it has anyway.   device: its own."""

    visible: str | None = None
    device: int = 0


def views_of(nodes: list[str], gpus: list[list[str]], own: str | None) -> list[View]:
    """How the ranks see GPUs: on each node all alike, so that the number of a GPU is the same in each process. Ranks
    that write into each other's memory tell each other's GPUs apart by it.

    nodes, gpus: of each rank, its node and what Ray has reserved for it there.   own: CUDA_VISIBLE_DEVICES of this
    process, which is the first rank; None if it is not set.
    """
    names = [found[0] if found else "" for found in gpus]
    here = [name for place, name in zip(nodes, names, strict=True) if place == nodes[0]]
    if own is not None:
        ours = [name.strip() for name in own.split(",") if name.strip()]
    else:
        ours = [str(n) for n in range(1 + max(map(int, here)))] if all(name.isdecimal() for name in here) else []
    views = []
    for rank, (node, name) in enumerate(zip(nodes, names, strict=True)):
        neighbours = [other for place, other in zip(nodes, names, strict=True) if place == node]
        visible = ours if node == nodes[0] else neighbours
        if set(neighbours) <= set(visible) and len(set(neighbours)) == len(neighbours):
            views.append(View(",".join(visible), visible.index(name)))
        else:  # this process is an actor itself, say, to which Ray shows other devices
            views.append(View(None, ours.index(name) if rank == 0 and name in ours else 0))
    return views
