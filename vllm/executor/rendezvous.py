"""Where the ranks of one host meet: a store on the loopback interface, gone with the first rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vllm.distributed.one_shot import HiddenStates, without_memory
from vllm.distributed.one_shot import create as create_one_shot
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.dtypes import dtype_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_HOST = "127.0.0.1"
_MEETING_S = 60  # every rank is up before the first one waits here


def open_listener() -> socket.socket:
    """A listening socket on a free port of the loopback interface, for the store."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((_HOST, 0))
    listener.listen(128)
    return listener


def one_shot_states(config: VllmConfig) -> HiddenStates | None:
    """What `join` may sum by writing into other ranks' memory; None if it must not."""
    if config.device_config.device != "cuda" or config.parallel_config.disable_custom_all_reduce:
        return None
    model = config.model_config
    return HiddenStates(model.get_hidden_size(), dtype_of(model.dtype))


def dry_run(world: int, states: HiddenStates | None) -> TensorParallel:
    """The first rank of a group that has not met yet, for finding out which kernels it will need."""
    return TensorParallel(0, world, one_shot=None if states is None else without_memory(0, world, states))


def join(
    device_type: str,
    rank: int,
    world: int,
    port: int,
    timeout_s: int,
    listener: socket.socket | None = None,
    one_shot: HiddenStates | None = None,
) -> TensorParallel:
    """Become rank `rank` of `world`. The first rank brings the listener that `port` belongs to.

    one_shot: on GPUs, sum a few rows of such states by writing into the other ranks' memory, where that is possible.

    Raises RuntimeError if this process has a default process group already: torch.distributed knows only one.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is in use in this process already (by another tensor-parallel engine, or by your "
            "program). Shut that down first, or start this engine in a process of its own."
        )
    timeout = timedelta(seconds=timeout_s)
    meeting = timedelta(seconds=min(timeout_s, _MEETING_S))
    store = dist.TCPStore(
        _HOST,
        port,
        world,
        is_master=listener is not None,
        timeout=meeting,
        wait_for_workers=False,
        # the store closes what it is given
        master_listen_fd=None if listener is None else os.dup(listener.fileno()),
    )
    with _on_loopback():
        if device_type == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timeout, device_id=device)
            made = None if one_shot is None else create_one_shot(rank, world, device, one_shot)
            return TensorParallel(rank, world, one_shot=made)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    return TensorParallel(rank, world)


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
