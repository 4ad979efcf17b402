"""A copy of the engine on a node of a Ray cluster: Ray finds the place and watches it, requests and tokens take a
connection of the engine's own.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from vllm.engine.core_client import CoreProcess
from vllm.exceptions import EngineDeadError
from vllm.executor.ray_actor import CoreActor
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
from vllm.executor.ray_utils import connect, import_ray
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_SAY_S = 10.0
_connecting = threading.Lock()  # copies are started at the same time


class _Elsewhere:
    """As much of `subprocess.Popen` as is asked of a core's process, of one that an actor has started."""

    def __init__(self, ray: Any, actor: Any, pid: int) -> None:
        self._ray, self._actor, self.pid = ray, actor, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """What is known; the end of the connection tells of the end of the process."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            try:
                self.returncode = status_of(self._ray, self._actor)
            except Exception:  # nobody is there to answer, so nothing runs there
                self.returncode = -9
            if self.returncode is None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the engine core", timeout or 0.0)
        return self.returncode


class RayCore(CoreProcess):
    """The core of copy `index` as a process that an actor starts on its node; its other ranks are there, too."""

    def __init__(
        self, index: int, config: VllmConfig, stall_seconds: float, health_seconds: float, *, again: bool = False
    ) -> None:
        """again: it has run before, so that the cluster has a place for it or will have one when a node is replaced."""
        parallel = config.parallel_config
        alone = replace(parallel, data_parallel_rank=index, data_parallel_size_local=None, data_parallel_backend="mp")
        document = replace(config, parallel_config=alone).to_dict()
        super().__init__(document, stall_seconds, health_seconds=health_seconds)
        self._index, self._copies, self._devices = index, parallel.local_replicas, parallel.world_size
        self._kind = "GPU" if config.device_config.device == "cuda" else "CPU"
        self._model = str(config.model_config.path.absolute())
        self._again = again
        self._actor: Any = None
        self._ending: threading.Thread | None = None

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ray = import_ray()
        with _connecting:
            connect()
        if not self._again:
            self._check_size(ray)
        gpus = self._kind == "GPU"
        resources = {"num_gpus": self._devices if gpus else 0, "num_cpus": 0 if gpus else self._devices}
        environment = {"env_vars": carried_environment()}
        made = ray.remote(CoreActor).options(runtime_env=environment, max_restarts=0, **resources)
        self._actor = actor = made.remote(self._index)
        try:
            about = self._placed(ray)
            check_versions([about])
            check_model([about], self._model)
            host = address_of(ray, alone=about["node"] == ray.get_runtime_context().get_node_id())
            secret = secrets.token_bytes(SECRET_BYTES)
            with open_port(host) as listener:
                pid = actor.start.remote(host, listener.getsockname()[1], secret, self._threads(about["cores"]))
                connection = accept(listener, secret, 1, time.monotonic() + START_S)[self._index]
            process = _Elsewhere(ray, actor, answers(ray, [pid], f"Replica {self._index}")[0])
        except BaseException:
            end_actors(ray, [actor])
            raise
        logger.info("Ray has placed replica %d on %s.", self._index, about["address"])
        return cast("subprocess.Popen[bytes]", process), connection

    def _placed(self, ray: Any) -> dict[str, Any]:
        """What the actor says of its node, when it has one. A copy that is to run again waits until there is one."""
        who = f"a node with {self._devices} free {self._kind}s for replica {self._index}"
        asked, deadline = self._actor.describe.remote(self._model), time.monotonic() + START_S
        while not ray.wait([asked], timeout=_SAY_S)[0]:
            free = ray.available_resources().get(self._kind, 0)
            if not self._again and time.monotonic() > deadline:
                raise EngineDeadError(
                    f"There was no place for {START_S:.0f} s: {who} was wanted, and of the Ray cluster's {self._kind}s "
                    f"{free:g} are free now. `ray status` shows them."
                )
            logger.info("Waiting for %s; of the Ray cluster's %ss %g are free now.", who, self._kind, free)
        about: dict[str, Any] = answers(ray, [asked], f"The node of replica {self._index}")[0]
        return about

    def _check_size(self, ray: Any) -> None:
        """Raise ValueError if the cluster has no places for all copies, whoever uses them now."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        found = {node["NodeManagerAddress"]: int(node["Resources"].get(self._kind, 0)) for node in nodes}
        if sum(int(node["Resources"].get(self._kind, 0)) // self._devices for node in nodes) < self._copies:
            has = ", ".join(f"{address}: {count}" for address, count in found.items())
            raise ValueError(
                f"data_parallel_size={self._copies} needs as many places of {self._devices} {self._kind}s on one node, "
                f"which the Ray cluster does not have ({has}). Add nodes with `ray start --address=...`, or ask for "
                "less."
            )

    def _threads(self, cores: int) -> int | None:
        """Of a copy on the CPU, where others may be on the same node."""
        if self._kind == "GPU":
            return None
        return int(os.environ.get("OMP_NUM_THREADS", max(1, cores // self._copies)))

    def _kill_group(self) -> None:
        if self._actor is None or self._group_ended:
            return
        self._group_ended = True
        self._ending = threading.Thread(target=end_actors, args=(import_ray(), [self._actor]), name="end-replica")
        self._ending.start()  # it may wait for a node that does not answer

    def _reap(self, process: subprocess.Popen[bytes], patience: float) -> None:
        super()._reap(process, patience)
        if self._ending is not None:
            self._ending.join()

    def kill(self) -> None:
        super().kill()
        if self._ending is not None:
            self._ending.join()
