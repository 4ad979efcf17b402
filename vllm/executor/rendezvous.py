"""Where ranks meet: a store that is gone with the first rank, on the loopback interface if all are on one host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vllm.distributed.exchange import Exchange, Peers
from vllm.distributed.one_shot import HiddenStates, without_memory
from vllm.distributed.one_shot import create as create_one_shot
from vllm.distributed.parallel_state import TensorParallel
from vllm.distributed.pipeline import Link, Pipeline
from vllm.distributed.ranks import Ranks, Seat
from vllm.ipc.listeners import LOOPBACK as LOOPBACK
from vllm.ipc.listeners import open_listener as open_listener
from vllm.model_executor.layers.dtypes import dtype_of

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

_MEETING_S = 60  # every rank is up before the first one waits here


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and for how long. timeout: of collective operations, in seconds.   file: where copies that share experts
    meet, in place of a port.
    """

    host: str
    port: int
    timeout: int
    file: str = ""

    @property
    def is_local(self) -> bool:
        return self.host == LOOPBACK


def seat_of(parallel: ParallelConfig, index: int) -> Seat:
    """What worker `index` of a copy of the engine does."""
    copies = parallel.data_parallel_size if parallel.shares_experts else 1
    copy = parallel.replica if copies > 1 else 0
    return Seat(index, parallel.tensor_parallel_size, parallel.pipeline_parallel_size, copy, copies)


def one_shot_states(config: VllmConfig) -> HiddenStates | None:
    """What `join` may sum by writing into other ranks' memory; None if it must not."""
    parallel = config.parallel_config
    if config.device_config.device != "cuda" or parallel.disable_custom_all_reduce:
        return None
    if parallel.tensor_parallel_size == 1 or parallel.pipeline_parallel_size > 1 or parallel.shares_experts:
        return None
    model = config.model_config
    return HiddenStates(model.get_hidden_size(), dtype_of(model.dtype))


def dry_run(world: int, states: HiddenStates | None) -> TensorParallel:
    """The first rank of a group that has not met yet, for finding out which kernels it will need."""
    return TensorParallel(0, world, one_shot=None if states is None else without_memory(0, world, states))


def join(
    device_type: str,
    seat: Seat,
    meeting: Meeting,
    device: int = 0,
    local: tuple[int, int] = (0, 1),
    listener: socket.socket | None = None,
    one_shot: HiddenStates | None = None,
) -> Ranks:
    """Become worker `seat.index`. The first one brings the listener that `meeting` is about.

    device, local: see `Ranks`.   one_shot: on GPUs, sum a few rows of such states by writing into the other ranks'
    memory, where that is possible.

    Raises RuntimeError if this process has a default process group already: torch.distributed knows only one.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is in use in this process already (by another tensor-parallel engine, or by your "
            "program). Shut that down first, or start this engine in a process of its own."
        )
    timeout = timedelta(seconds=meeting.timeout)
    store = _store(meeting, seat, listener)
    one_group = seat.pp == 1 and seat.copies == 1
    number, count = seat.everybody
    with _on_loopback() if meeting.is_local else nullcontext():
        made = None
        if device_type == "cuda":
            place = torch.device("cuda", device)
            torch.cuda.set_device(place)
            dist.init_process_group(
                "nccl", store=store, rank=number, world_size=count, timeout=timeout, device_id=place
            )
            if one_shot is not None and one_group:
                made = create_one_shot(seat.index, seat.world, place, one_shot)
        else:
            dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=timeout)
        sharers = None if one_group else _sharers(seat, timeout)
        exchange, peers = _exchange(seat, timeout)
        tp = TensorParallel(seat.tp_rank, seat.tp, sharers, one_shot=made, exchange=exchange)
        pipeline = _linked(seat, timeout, torch.device(device_type, device if device_type == "cuda" else 0))
    return Ranks(tp, pipeline, seat.index, seat.world, device, local, peers)


def _store(meeting: Meeting, seat: Seat, listener: socket.socket | None) -> dist.Store:
    wait = timedelta(seconds=min(meeting.timeout, _MEETING_S))
    if seat.copies > 1:
        store = dist.FileStore(meeting.file, seat.everybody[1])
        store.set_timeout(wait)
        return store
    return dist.TCPStore(
        meeting.host,
        meeting.port,
        seat.world,
        is_master=listener is not None,
        timeout=wait,
        wait_for_workers=False,
        # the store closes what it is given
        master_listen_fd=None if listener is None else os.dup(listener.fileno()),
    )


def _sharers(seat: Seat, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of those that share this worker's layers. All workers make all groups, in one order."""
    found, number = None, seat.everybody[0]
    for copy in range(seat.copies):
        for stage in range(seat.pp):
            members = [copy * seat.world + index for index in seat.sharers(stage)]
            group = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
            if number in members:
                found = group
    return found


def _exchange(seat: Seat, timeout: timedelta) -> tuple[Exchange | None, Peers | None]:
    """What this worker shares with other copies of the engine. All workers make all groups, in one order."""
    if seat.copies == 1:
        return None, None
    groups = [dist.new_group(seat.counterparts(index), timeout=timeout) for index in range(seat.world)]
    cores = dist.new_group(seat.counterparts(0), timeout=timeout, backend="gloo")
    mine = groups[seat.index]
    assert mine is not None
    return Exchange(seat.copy, seat.copies, mine), Peers(cores) if seat.index == 0 and cores is not None else None


def _linked(seat: Seat, timeout: timedelta, device: torch.device) -> Pipeline:
    """This worker's stage, connected to its neighbours."""
    links: dict[int, Link] = {}
    # each link has a group of its own, in which nothing else has to wait for it: no need to be told so by every rank
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    for stage in range(seat.pp - 1):
        for before, after in zip(seat.sharers(stage), seat.sharers(stage + 1), strict=True):
            group = dist.new_group([before, after], timeout=timeout)
            if seat.index in (before, after):
                links[stage] = Link(after if seat.index == before else before, group, depth=seat.pp + 1)
    tokens = _token_link(seat, timeout) if seat.pp > 1 else None
    pipeline = Pipeline(seat.stage, seat.pp, links.get(seat.stage - 1), links.get(seat.stage), tokens)
    # a group's first message sets up its connection, which may wait for the other end: stage by stage, now
    pipeline.receive(1, 1, torch.float32, device)
    if pipeline.next is not None:
        pipeline.send(torch.zeros(1, 1, device=device))
    if tokens is not None and pipeline.is_last:
        tokens.send(torch.zeros(1, device=device))
    elif tokens is not None:
        tokens.receive(torch.zeros(1, device=device))
    return pipeline


def _token_link(seat: Seat, timeout: timedelta) -> Link | None:
    """From each rank of the last stage to its counterpart in the first; None for stages in between."""
    found = None
    for first, last in zip(seat.sharers(0), seat.sharers(seat.pp - 1), strict=True):
        group = dist.new_group([last, first], timeout=timeout)
        if seat.index in (first, last):
            # what was sampled is received when a plan needs it, or with the first one after its result
            found = Link(first if seat.index == last else last, group, depth=2 * (seat.pp + 1))
    return found


def leave() -> None:
    """Undo `join`, without waiting for the others, which may be gone.

    On CUDA no captured graph may hold a collective any more: NCCL would wait for the graph's end.
    """
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """gloo reads the interface to listen on from the environment; the data is for nobody outside this host."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
