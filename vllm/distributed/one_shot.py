"""Sums of small tensors over the GPUs of one host, in one kernel that reads every rank's memory directly.

For the messages of a decode step NCCL needs several times as long, because of its protocol rather than the bytes. Built
on torch's symmetric memory; NVLink multicast is not used.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group

from vllm.logger import init_logger

logger = init_logger(__name__)

_BYTES = 1 << 20  # largest message
_ALIGN = 16
_DTYPES = (torch.bfloat16, torch.float32)
_PATIENCE_S = 0.2  # for steps that end by themselves
_ROUNDS = 1_000_000
_NUMBERS = itertools.count()  # symmetric memory keeps what it knows of a group's name for ever


class _FromZero(dist.Store):
    """A store in which the first exchange of this group has the number 0.

    Torch's symmetric memory (before 2.12) numbers its exchanges from the start of the process, so that the ranks of a
    second engine, the first of which is older than the others, would wait for each other under different keys.
    """

    _NUMBERED = re.compile(r"(.*?/)(\d+)((?:/\d+)?)")  # prefix / number of the exchange / rank

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._first = store, -1

    def _key(self, key: str) -> str:
        found = self._NUMBERED.fullmatch(key)
        if found is None:
            return key
        number = int(found[2])
        if self._first < 0:
            self._first = number
        return f"{found[1]}{number - self._first}{found[3]}"

    def set(self, key: str, value: str) -> None:  # torch itself gives bytes
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get([self._key(key) for key in keys])

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._key(key), amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        keys = [self._key(key) for key in keys]
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)


class OneShot:
    """The buffer that every rank maps, and the sum over it. Made by all ranks together."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        """Raises what torch raises where memory cannot be shared (RuntimeError, usually)."""
        from torch.distributed import _symmetric_memory as symmetric

        self._name = cast(Any, f"one-shot-{next(_NUMBERS)}")  # a GroupName, which torch has since 2.12
        self._store = _FromZero(dist.PrefixStore("one-shot", dist.distributed_c10d._get_default_store()))
        self._group = dist.ProcessGroup(self._store, rank, world)
        self._group._set_group_name(self._name)
        _register_process_group(self._name, self._group)
        self._buffer = symmetric.empty(_BYTES, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._buffer, self._name)
        self._device = device
        self._side = torch.cuda.Stream(device, priority=-1)  # in no queue behind a stream that waits
        signals = [self._handle.get_signal_pad(r) for r in range(world)]
        self._count = 1 << (signals[rank].nbytes // 4).bit_length() - 1
        self._pads = torch.tensor([pad.data_ptr() for pad in signals], device=device)
        self._rank = rank
        torch.cuda.synchronize(device)
        self._answer(0)  # a kernel that gets loaded only while another one waits would wait for that one

    def accepts(self, x: Tensor) -> bool:
        """Whether `sum` takes it. The same on every rank: it depends on shape and dtype."""
        return x.dtype in _DTYPES and 0 < x.nbytes <= _BYTES and x.nbytes % _ALIGN == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, added up in the same order everywhere. x: contiguous, `accepts`."""
        shared = self._buffer[: x.nbytes].view(x.dtype)
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x.view(-1), "sum", self._name)
        return out.view(x.shape)

    def release(self) -> None:
        """Let kernels that wait for a rank which is gone run to their end, with a wrong result.

        They wait for signals in memory, which a kernel beside them gives from now on for a second or two. It must need
        no further call: those that tear down what is left wait for the device, and others wait for them.
        """
        idle = torch.cuda.Event()
        idle.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + _PATIENCE_S
        while not idle.query():
            if time.monotonic() > deadline:
                self._answer(_ROUNDS)
                return
            time.sleep(0.001)

    def _answer(self, rounds: int) -> None:
        from vllm.ops.triton.signals import answer_signals

        with torch.cuda.stream(self._side):
            answer_signals(self._pads, self._count, self._rank, rounds)


def create(rank: int, world: int, device: torch.device) -> OneShot | None:
    """One for each rank, or None for all of them if some rank cannot."""
    made: OneShot | None = None
    try:
        made = OneShot(rank, world, device)
    except Exception as error:  # whatever it is, NCCL does the same work
        logger.info("Small all-reduces go through NCCL: %s: %s", type(error).__name__, error)
    able = torch.tensor([made is not None], dtype=torch.int32, device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN)
    return made if bool(able.item()) else None
