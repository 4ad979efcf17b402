"""Ranks that somebody else has started (`torchrun`): every one of them runs the same program and is its own driver.

Each `tensor_parallel_size` of them, in the order of their numbers, are one engine. Its ranks are asked the same, but
what they do depends on more than that (what steps took, when a grammar was compiled or an adapter read): so the first
one decides everything, and tells the others, step by step, what to compute and what to answer. See `engine.joint_core`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from struct import Struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from vllm import envs
from vllm.distributed.parallel_state import SINGLE, GroupRank, TensorParallel, WorldRank, take_place
from vllm.distributed.ranks import Ranks
from vllm.exceptions import EngineDeadError
from vllm.executor import codec
from vllm.executor.calls import callable_of, worker_class
from vllm.executor.uniproc import UniprocExecutor
from vllm.executor.worker_process import answer
from vllm.ipc import functions
from vllm.ipc.codec import decoder, encode
from vllm.step.plan import StepPlan
from vllm.step.result import StepResult

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_JOINED = itertools.count()
_FIRST_BYTES = 4096  # most messages fit into them
_LENGTH = Struct("<q")


class Said(msgspec.Struct, array_like=True, tag="said"):
    """What the first rank's core says to the front ends of the others."""

    body: bytes


_decode: Callable[[bytes], codec.Step | codec.Call | Said] = decoder(codec.Step | codec.Call | Said).decode
_decode_result: Callable[[bytes], codec.Result] = decoder(codec.Result).decode


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
        self._talk, _ = dist.new_subgroups(size, backend="gloo")  # of the ranks of an engine, on the host
        hosts = self._talk if size == world else dist.new_group(backend="gloo")
        self._groups = [group for group in (shards, self._talk, hosts) if group is not everybody]
        count = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        self._tp = TensorParallel(rank % size, size, shards, cpu_group=self._talk)
        process = WorldRank(rank, world, local, hosts, everybody, copy=GroupRank(rank // size, world // size))
        ranks = Ranks(self._tp, index=rank % size, world=size, device=local, local=(local, count), process=process)
        worker = worker_class(config)(config, ranks)
        blocks = torch.tensor([worker.count_blocks()])
        dist.all_reduce(blocks, dist.ReduceOp.MIN, group=self._talk)
        alone = size == 1 and worker.context.is_async and config.overlap_steps
        self._start(worker, int(blocks.item()), 2 if alone else 1)
        self._leave = take_place(self._tp, process)

    @property
    def is_first(self) -> bool:
        """Whether this rank's core decides what all ranks of the engine do."""
        return self._tp.is_first

    @property
    def must_be_led(self) -> bool:
        """Whether the engine has other ranks: its core must be a `JointCore`."""
        return self._tp.world > 1

    def of_all_ranks(self) -> JointExecutor:
        """On the first rank, for the core: what executes plans on all."""
        return JointExecutor(self)

    def say(self, message: codec.Step | codec.Call | bytes) -> None:
        """From the first rank to the others, which `follow`. Raises EngineDeadError if one is gone."""
        self._share(encode(Said(message) if isinstance(message, bytes) else message), 0)

    def follow(self) -> bytes:
        """On the others: do what the first one says, until it says what is for this rank's front end."""
        while True:
            message = _decode(self._share(None, 0))
            if isinstance(message, Said):
                return message.body
            if isinstance(message, codec.Call):
                self.call(message)
            else:
                self.worker.follow(message.plan, None, 0)

    def call(self, message: codec.Call) -> list[codec.Result]:
        """Answer a call, as all ranks do, and hear all answers, by rank."""
        own = encode(answer(self.worker, message))
        answers = [self._share(own if rank == self._tp.rank else None, rank) for rank in range(self._tp.world)]
        return [_decode_result(answer) for answer in answers]

    def _share(self, body: bytes | None, sender: int) -> bytes:
        """What the rank `sender` says to all, which gives `body`: a first message of one size, and the rest."""
        first: np.ndarray = np.zeros(_FIRST_BYTES, np.uint8)
        if body is not None:
            first[: _LENGTH.size] = np.frombuffer(_LENGTH.pack(len(body)), np.uint8)
            head = np.frombuffer(body[: _FIRST_BYTES - _LENGTH.size], np.uint8)
            first[_LENGTH.size : _LENGTH.size + len(head)] = head
        data = self._broadcast(first, sender)
        (length,) = _LENGTH.unpack_from(data)
        found = data[_LENGTH.size : _LENGTH.size + length]
        if len(found) == length:
            return found
        rest: np.ndarray = np.zeros(length - len(found), np.uint8)
        if body is not None:
            rest[:] = np.frombuffer(body[len(found) :], np.uint8)
        return found + self._broadcast(rest, sender)

    def _broadcast(self, data: np.ndarray, sender: int) -> bytes:
        try:
            dist.broadcast(torch.from_numpy(data), group=self._talk, group_src=sender)
        except RuntimeError as error:
            raise EngineDeadError(f"A rank of this engine is gone: {error}") from error
        return data.tobytes()

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
        del self._talk
        gc.collect()  # modules, which know the groups, refer to each other


class JointExecutor:
    """What the first rank's core executes plans with: all ranks of its engine, which must be following.

    Where one fails in the middle of something, they cannot be brought together again.
    """

    must_be_led = False

    def __init__(self, own: ExternalLauncherExecutor) -> None:
        self._own = own
        self._broken: EngineDeadError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def submit(self, plan: StepPlan) -> None:
        """Start a step on all ranks."""
        with self._whole():
            self._own.say(codec.step_message(plan))
            self._own.submit(plan)

    def collect(self) -> StepResult:
        """The result of the oldest step in flight."""
        with self._whole():
            return self._own.collect()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every rank's worker; results by rank. Raises RuntimeError if one failed."""
        sent, named = functions.portable(list(args)), functions.portable(dict(kwargs or {}))
        call = codec.Call(0, functions.portable(method), sent, named)
        with self._whole():
            self._own.say(call)
            answers = self._own.call(call)
        for rank, found in enumerate(answers):
            if found.error is not None:
                raise RuntimeError(f"Rank {rank}: {found.error}")
        return [functions.received(found.value) for found in answers]

    def check_health(self) -> None:
        """Raises EngineDeadError if the ranks do not work together any more."""
        if self._broken is not None:
            raise self._broken
        self._own.check_health()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Inside, what fails ends the executor."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except BaseException as error:
            if not isinstance(error, EngineDeadError):
                self._broken = EngineDeadError(f"A step failed: {type(error).__name__}: {error}")
            else:
                self._broken = error
            if isinstance(error, Exception):
                raise self._broken from error
            raise
