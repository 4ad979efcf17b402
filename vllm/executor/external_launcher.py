"""Ranks that somebody else has started (`torchrun`): every one of them runs the same program and is its own driver.

All ranks plan the same steps from the same requests. The first one samples, and tells the others what a step brought,
so that they cannot come apart.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from vllm import envs
from vllm.distributed.parallel_state import TensorParallel
from vllm.distributed.ranks import Ranks
from vllm.executor.calls import callable_of, worker_class
from vllm.executor.uniproc import UniprocExecutor
from vllm.ipc import codec
from vllm.step.plan import RowMasks
from vllm.step.result import StepResult

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_decode: Callable[[bytes], StepResult] = codec.decoder(StepResult).decode
_JOINED = itertools.count()


@functools.cache
def _launchers_store() -> tuple[Any, int, int]:
    """(store, rank, world) of what the environment says; one connection for the whole program."""
    from torch.distributed.rendezvous import rendezvous

    found: tuple[Any, int, int] = next(rendezvous("env://"))
    return found


def _join(backend: str) -> None:
    """Become part of the default group. Another engine of this program, before, has left its addresses in the store:
    each group has names of its own there, which all processes count alike.
    """
    store, rank, world = _launchers_store()
    own = dist.PrefixStore(f"engine-{next(_JOINED)}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world)


class ExternalLauncherExecutor(UniprocExecutor):
    """Executes plans as one of `tensor_parallel_size` processes that torchrun (or anything that sets RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT) has started.
    """

    def __init__(self, config: VllmConfig) -> None:
        parallel = config.parallel_config
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing and not dist.is_initialized():
            raise ValueError(
                f"distributed_executor_backend='external_launcher' needs {', '.join(missing)} in the environment: "
                "start the program with torchrun --nproc-per-node=N."
            )
        device, local = config.device_config.device, envs.LOCAL_RANK
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            _join("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        if world != parallel.world_size:
            raise ValueError(
                f"The launcher has started {world} processes, but tensor_parallel_size is "
                f"{parallel.tensor_parallel_size}. Make them equal."
            )
        self._results = dist.new_group(backend="gloo")  # what steps bring, on the host
        count = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        ranks = Ranks(TensorParallel(rank, world), index=rank, world=world, device=local, local=(local, count))
        worker = worker_class(config)(config, ranks)
        blocks = torch.tensor([worker.count_blocks()])
        dist.all_reduce(blocks, dist.ReduceOp.MIN, group=self._results)
        self._start(worker, int(blocks.item()), 1)

    def complete(self, step_id: int, masks: RowMasks | None) -> None:
        """Give the step submitted last the masks that it waits for."""
        if dist.get_rank() == 0:
            self.worker.complete(step_id, masks)

    def collect(self) -> StepResult:
        """The result of the oldest step in flight, which is the first rank's."""
        result = self._in_flight.popleft().result()
        body = codec.encode(result) if dist.get_rank() == 0 else b""
        size = torch.tensor([len(body)])
        dist.broadcast(size, 0, group=self._results)
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        if body:
            data.copy_(torch.from_numpy(np.frombuffer(bytearray(body), np.uint8)))
        dist.broadcast(data, 0, group=self._results)
        return result if body else _decode(data.numpy().tobytes())

    def prepare(self) -> bool:
        """Nothing: ranks capture together, in the steps that they run."""
        return False

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of this rank's worker: its result alone, since every rank makes the same call itself."""
        return [callable_of(self.worker, method)(*args, **(kwargs or {}))]

    def shutdown(self) -> None:
        """Drop the model and the cache, and leave the group if this has joined it."""
        had_worker = self._worker is not None
        super().shutdown()
        if had_worker and self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
