"""Groups of a trainer's making, which torch.distributed's default group knows nothing of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.utils import get_open_port


def _rank(port: int, rank: int) -> list[Any]:
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, 2, store_timeout=30)
    found: list[Any] = [group.broadcast_obj({"from": (rank, {rank})}, 1), group.all_gather_obj(rank)]
    if rank:
        group.send_obj("first", 0)
        group.send_obj("second", 0)
    else:
        found += [group.recv_obj(1), group.recv_obj(1)]
    for _ in range(2):  # another one over the same group
        communicator = PyNcclCommunicator(group, device="cpu")
        weights = torch.full((3, 2), float(rank)).T  # not contiguous
        communicator.broadcast(weights, src=1)
        found += [weights.tolist(), communicator.all_reduce(torch.tensor([rank + 1.0])).item()]
        communicator.group.barrier()
    return found


def test_tensors_and_objects_reach_all_ranks() -> None:
    port = get_open_port()
    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(_rank, [port, port], range(2), timeout=60)
    received = [[[1.0] * 3] * 2, 3.0] * 2
    assert first == [{"from": (1, {1})}, [0, 1], "first", "second", *received]
    assert second == [{"from": (1, {1})}, [0, 1], *received]
    assert not dist.is_initialized()


def test_wrong_ranks_and_groups_and_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="Rank 2 of 2"):
        StatelessProcessGroup(2, 2, dist.HashStore())
    with pytest.raises(TypeError):
        StatelessProcessGroup(0, 1, dist.HashStore()).broadcast_obj(object(), 0)
    with pytest.raises(NotImplementedError, match=r"torch\.distributed"):
        PyNcclCommunicator(object(), 0)  # type: ignore[arg-type]
    alone = PyNcclCommunicator(StatelessProcessGroup(0, 1, dist.HashStore()), "cpu")
    with pytest.raises(ValueError, match="on meta"):
        alone.broadcast(torch.empty(1, device="meta"), 0)


def test_what_a_server_cannot_do_says_what_can() -> None:
    with pytest.raises(NotImplementedError, match="external_launcher"):
        NCCLWeightTransferEngine.trainer_init({})
