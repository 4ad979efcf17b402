"""Tensors between a trainer and the ranks of an engine: NCCL between GPUs, gloo on the host."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp, Store

from vllm.distributed.utils import StatelessProcessGroup


class PyNcclCommunicator:
    """Collectives of all ranks of `group`, of tensors on `device`. All ranks make the same calls in the same order.

    They run in the order of the current stream; `stream`, if given, is used instead.
    """

    def __init__(
        self, group: StatelessProcessGroup, device: int | str | torch.device, library_path: Any = None
    ) -> None:
        if not isinstance(group, StatelessProcessGroup):
            raise NotImplementedError(
                "PyNcclCommunicator works on a StatelessProcessGroup; for torch.distributed's own groups call "
                "torch.distributed."
            )
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.available, self.disabled = True, False
        number = group.broadcast_obj(group.store.add("communicators", 1) if group.rank == 0 else None, 0)
        self._group: Any = _process_group(
            PrefixStore(f"communicator-{number}", group.store), group.rank, group.world_size, self.device
        )

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Make `tensor` that of rank `src`."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._run(tensor, stream, lambda x: self._group.broadcast([x], options))

    def all_reduce(self, in_tensor: Tensor, op: Any = ReduceOp.SUM, stream: Any = None) -> Tensor:
        """The sum (or what `op` says) of every rank's tensor, on all of them."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        out = in_tensor.clone()
        self._run(out, stream, lambda x: self._group.allreduce([x], options))
        return out

    def _run(self, tensor: Tensor, stream: Any, call: Any) -> None:
        if tensor.device.type != self.device.type:
            raise ValueError(f"The tensor is on {tensor.device}, and the communicator is for {self.device}.")
        on_device: Any = nullcontext()
        if self.device.type == "cuda":
            on_device = torch.cuda.stream(stream or torch.cuda.current_stream(self.device))
        with on_device:
            whole = tensor.contiguous()
            call(whole).wait()
            if whole is not tensor:
                tensor.copy_(whole)


def _process_group(store: Store, rank: int, world: int, device: torch.device) -> Any:
    """One that torch.distributed does not list."""
    timeout = timedelta(minutes=10)
    if device.type != "cuda":
        return ProcessGroupGloo(store, rank, world, timeout)
    from torch.distributed import ProcessGroupNCCL

    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, world, options)
