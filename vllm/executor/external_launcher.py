"""Ranks that somebody else has started (`torchrun`): every one of them runs the same program and is its own driver.

Each `tensor_parallel_size` of them, in the order of their numbers, are one engine. Its ranks plan the same steps from
the same requests. The first one samples, and tells the others what a step brought, so that they cannot come apart.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from vllm import envs
from vllm.distributed.parallel_state import SINGLE, TensorParallel, WorldRank, take_place
from vllm.distributed.ranks import Ranks
from vllm.executor.calls import callable_of, worker_class
from vllm.executor.uniproc import UniprocExecutor
from vllm.ipc import codec
from vllm.step.plan import RowMasks, StepPlan
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
    MASTER_ADDR and MASTER_PORT) has started. If it has started a multiple of them, there are as many engines, which get
    their own requests and know nothing of each other. While this lives, `vllm.distributed` says the process's ranks.
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
        rank, world, size = dist.get_rank(), dist.get_world_size(), parallel.world_size
        if world % size:
            raise ValueError(
                f"The launcher has started {world} processes, which is no multiple of tensor_parallel_size={size}: "
                f"each {size} of them are one engine."
            )
        everybody = dist.group.WORLD
        # A group of the program's own may outlive this, and so may its threads, see `shutdown`.
        shares = size == world and (self._owns_group or device == "cuda")
        shards = everybody if shares else dist.new_subgroups(size)[0]
        self._results, _ = dist.new_subgroups(size, backend="gloo")  # what steps bring, on the host
        hosts = self._results if size == world else dist.new_group(backend="gloo")
        self._groups = [group for group in (shards, self._results, hosts) if group is not everybody]
        count = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        self._tp = TensorParallel(rank % size, size, shards, cpu_group=self._results)
        process = WorldRank(rank, world, local, hosts, everybody)
        ranks = Ranks(self._tp, index=rank % size, world=size, device=local, local=(local, count), process=process)
        worker = worker_class(config)(config, ranks)
        blocks = torch.tensor([worker.count_blocks()])
        dist.all_reduce(blocks, dist.ReduceOp.MIN, group=self._results)
        alone = size == 1 and worker.context.is_async and config.overlap_steps
        self._start(worker, int(blocks.item()), 2 if alone else 1)
        self._begun = 0.0
        # How large steps are depends on what others took: ranks that plan for themselves must not measure differently.
        started = torch.tensor([time.time()], dtype=torch.float64)
        dist.broadcast(started, group=self._results, group_src=0)
        self._worked = float(started.item())  # and what the first rank's steps have taken since
        self.clock: Callable[[], float] = time.time if size == 1 else lambda: self._worked
        self._leave = take_place(self._tp, process)

    def submit(self, plan: StepPlan) -> None:
        """Start a step."""
        self._begun = time.perf_counter()
        super().submit(plan)

    def complete(self, step_id: int, masks: RowMasks | None) -> None:
        """Give the step submitted last the masks that it waits for."""
        if self._tp.is_first:
            self.worker.complete(step_id, masks)

    def collect(self) -> StepResult:
        """The result of the oldest step in flight, which is the first rank's."""
        result = self._in_flight.popleft().result()
        if self._tp.world == 1:
            return result
        body = codec.encode(result) if self._tp.is_first else b""
        said = torch.tensor([len(body), time.perf_counter() - self._begun], dtype=torch.float64)
        dist.broadcast(said, group=self._results, group_src=0)
        size, seconds = said.tolist()
        self._worked += seconds
        data = torch.empty(int(size), dtype=torch.uint8)
        if body:
            data.copy_(torch.from_numpy(np.frombuffer(bytearray(body), np.uint8)))
        dist.broadcast(data, group=self._results, group_src=0)
        return result if body else _decode(data.numpy().tobytes())

    def prepare(self) -> bool:
        """Let a worker without others capture graphs; ranks capture together, in the steps that they run."""
        return self._tp.world == 1 and super().prepare()

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
        """Drop the model and the cache, and leave the groups that this has joined.

        Their threads end with the last reference to them. One that lived on could drop the tensors of a last step while
        the interpreter ends, and would take the process with it.
        """
        had_worker = self._worker is not None
        super().shutdown()
        if not had_worker:
            return
        self._leave()
        if dist.is_initialized():
            for group in [None] if self._owns_group else self._groups:
                with suppress(ValueError):  # the program has made its groups anew meanwhile
                    dist.destroy_process_group(group)
        self._groups.clear()
        self._tp, self._leave = SINGLE, lambda: None
        del self._results
        gc.collect()  # modules, which know the groups, refer to each other
