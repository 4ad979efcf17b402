"""Ray's part in an engine: the cluster, and places in it for all ranks. Nothing here is used without Ray."""

from __future__ import annotations

import inspect
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)

_WAIT_S = 300  # for devices that the cluster has, but others use
_SAY_S = 10
_REACH_S = 5.0  # for a cluster to answer at all; Ray itself tries for minutes, and says nothing
# How every connection of gRPC begins (RFC 9113, 3.4); the other end's first frame is of the same type.
_HELLO, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), 4
_NOT_RAY = "what answers there is not Ray's head (8265, say, is the port of its dashboard, 10001 of its clients)"
_UNIMPLEMENTED = 12  # of the codes of gRPC
_NODE_LABEL = "ray.io/node-id"  # that every node has, from the versions on that place by labels
_GROUP = "_VLLM_RAY_PLACEMENT_GROUP"  # of the process that has started this one, in hexadecimal digits


def import_ray() -> Any:
    """The module `ray`. Raises ValueError with what to do if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "The backend 'ray' needs Ray on every node: pip install 'vllm[ray]'. On one host 'mp' does without it."
        ) from error
    return ray


def connect(address: str | None = None) -> bool:
    """Connect to the cluster at `address`, to the one that this host belongs to, or to a new one on this host. Whether
    this call has connected; False if the process was connected already. Raises ValueError if no cluster answers at an
    address that was named.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    name = "RAY_ADDRESS" if address is None else "ray_address"
    _check_reachable(ray, name, address or os.environ.get("RAY_ADDRESS", ""))
    options = {"log_to_driver": True, "logging_level": "warning", "include_dashboard": False}
    if address is not None:
        options.pop("include_dashboard")
        ray.init(address=address, **options)
        return True
    logger.info("Looking for a Ray cluster that this host belongs to.")
    try:
        ray.init(address="auto", log_to_driver=True, logging_level="warning")
    except ConnectionError:
        logger.info("There is no Ray cluster on this host: starting one for this engine.")
        ray.init(**options)
    return True


def _check_reachable(ray: Any, name: str, address: str) -> None:
    """Raise ValueError unless something that may be a Ray cluster answers at `address`, which `name` has given."""
    place = address.removeprefix("ray://")
    if place in ("", "auto", "local") or "://" in place:
        return
    host, _, port = place.rpartition(":")
    try:
        if not host or not port.isdecimal():
            raise ValueError("that is no HOST:PORT")
        with socket.create_connection((host.strip("[]"), int(port)), _REACH_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(_HELLO)
                if connection.recv(9)[3:4] != bytes((_SETTINGS,)):
                    raise ValueError(_NOT_RAY)
        if _is_other_service(ray, place):
            raise ValueError(_NOT_RAY)
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(
            f"There is no Ray cluster at {name}={address}: {error}. It is to be the address that `ray start --head` "
            "has printed on the first host (its port is 6379 by default), which must be reachable from here. Without "
            f"{name} the cluster that this host belongs to is used, or a new one is started."
        ) from error


def _is_other_service(ray: Any, address: str) -> bool:
    """Whether a server of gRPC answers that knows nothing of clusters, another one of Ray, say. Ray would ask it for a
    minute.
    """
    try:
        ray._raylet.GcsClient(address=address)
    except Exception as error:
        return getattr(error, "rpc_code", None) == _UNIMPLEMENTED
    return False


def handed_on() -> dict[str, str]:
    """Variables by which a process that this one starts finds the cluster and the placement group that this one is in;
    empty if this one has not connected to Ray as a part of the cluster.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.util.client.ray.is_connected():
        return {}
    variables = {"RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)}
    group = current_placement_group()
    return variables if group is None else {**variables, _GROUP: group.id.hex()}


def current_placement_group() -> Any:
    """The placement group that this process is in, or the one that started it (`handed_on`); None without one."""
    ray = import_ray()
    group = ray.util.get_current_placement_group()
    if group is None and os.environ.get(_GROUP):
        from ray.util.placement_group import PlacementGroup

        group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(os.environ[_GROUP])))
    return group


def initialize_ray_cluster(parallel_config: ParallelConfig, ray_address: str | None = None, device: str = "") -> Any:
    """Connect to Ray and reserve a place for each rank: the placement group, which is ready.

    Without `ray_address` the cluster that this host belongs to is used, or a new one is started. The group packs ranks
    on as few nodes as possible, the first one on this node, where the engine core is. Inside of a placement group that
    one is used.   device: "cuda" or "cpu"; by default GPUs where the cluster has some.

    Raises ValueError without Ray, and if the cluster is too small, or does not become free in time.
    """
    ray = import_ray()
    connect(ray_address)
    total = ray.cluster_resources()
    kind = {"cuda": "GPU", "cpu": "CPU"}.get(device) or ("GPU" if total.get("GPU") else "CPU")
    world = parallel_config.world_size
    current = current_placement_group()
    if current is not None:
        usable = [bundle for bundle in current.bundle_specs if bundle.get(kind, 0) >= 1]
        if len(usable) < world:
            raise ValueError(
                f"{world} ranks need as many bundles with a {kind} in the current placement group, which has "
                f"{len(usable)}: {current.bundle_specs}. Make it larger, or ask for fewer ranks."
            )
        return current
    if total.get(kind, 0) < world:
        nodes = ", ".join(
            f"{node['NodeManagerAddress']}: {node['Resources'].get(kind, 0):g}" for node in ray.nodes() if node["Alive"]
        )
        raise ValueError(
            f"{parallel_config.sizes} needs {world} {kind}s, but the Ray cluster has {total.get(kind, 0):g} "
            f"({nodes}). Add nodes with `ray start --address=...`, or ask for less."
        )
    bundles: list[dict[str, float]] = [{kind: 1.0} for _ in range(world)]
    here, address = ray.get_runtime_context().get_node_id(), f"node:{ray.util.get_node_ip_address()}"
    options = {}
    if "bundle_label_selector" in inspect.signature(ray.util.placement_group).parameters:
        options["bundle_label_selector"] = [{_NODE_LABEL: here}, *({} for _ in range(world - 1))]
    elif address in total:
        bundles[0][address] = 0.001
    group = ray.util.placement_group(bundles, strategy="PACK", **options)
    _wait_until_ready(ray, group, parallel_config, kind)
    return group


def _wait_until_ready(ray: Any, group: Any, config: ParallelConfig, kind: str) -> None:
    """Wait until all bundles are reserved. Raises ValueError, with the group removed, if that takes too long."""
    deadline, ready = time.monotonic() + _WAIT_S, group.ready()
    while time.monotonic() < deadline:
        if ray.wait([ready], timeout=_SAY_S)[0]:
            return
        free = ray.available_resources()
        logger.info("Waiting for %d %ss of the Ray cluster; free now: %g.", config.world_size, kind, free.get(kind, 0))
    ray.util.remove_placement_group(group)
    raise ValueError(
        f"{config.sizes}: the Ray cluster has enough {kind}s, but they were in use for {_WAIT_S} s, or this node "
        f"({ray.util.get_node_ip_address()}), where the first rank must be, has none. `ray status` shows them."
    )


def usable_bundles(specs: Sequence[Mapping[str, float]], kind: str, world: int) -> list[int]:
    """The bundles that have a device, or those that VLLM_RAY_BUNDLE_INDICES names, in its order.

    specs: what each bundle of the group has.   kind: "GPU" or "CPU".   world: how many ranks there are.
    """
    usable = [i for i, bundle in enumerate(specs) if bundle.get(kind, 0) >= 1]
    named: list[int] = envs.VLLM_RAY_BUNDLE_INDICES
    if not named:
        return usable
    if len(set(named)) != len(named) or len(named) != world or not set(named) <= set(usable):
        raise ValueError(
            f"VLLM_RAY_BUNDLE_INDICES must name a bundle for each of the {world} ranks, got {named}; bundles with a "
            f"{kind} are {usable}."
        )
    return named


def order_of_bundles(nodes: Mapping[int, str], driver: str, needed: Sequence[int]) -> list[int]:
    """Bundles in the order of ranks: first those of the driver's node, then node by node, so that neighbours share one.

    nodes: of each bundle.   needed: the bundles that may be used; those of one node stay in this order.
    """
    return sorted(needed, key=lambda bundle: (nodes[bundle] != driver, nodes[bundle]))
