"""Sums of a few rows of hidden states over the GPUs of one host, in one kernel that writes into every rank's memory.

For the messages of a decode step NCCL needs several times as long, because of its protocol rather than the bytes. The
memory is torch's symmetric memory; NVLink multicast is not used.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.ops.triton.rank_sum import Exchange

logger = init_logger(__name__)

_BYTES = 1 << 21  # largest message times ranks: beyond that NCCL is as fast, which does not write everything twice
_PATIENCE_S = 0.2  # for steps that end by themselves
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


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What is summed: rows of `width` numbers of one dtype."""

    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def rows(self, world: int) -> int:
        """Of the largest message."""
        return _BYTES // (world * self.row_bytes) if self.row_bytes % 4 == 0 else 0


class OneShot:
    """The sum over memory that every rank maps."""

    def __init__(self, exchange: Exchange, states: HiddenStates, keep: object = None) -> None:
        """keep: what must live as long as the memory."""
        from vllm.ops.triton.rank_sum import sum_ranks  # Triton is there where GPUs are

        self._exchange, self._states, self._keep = exchange, states, keep
        self._sum = sum_ranks
        device = exchange.stopped.device
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # waits for no other

    def accepts(self, x: Tensor) -> bool:
        """Whether `sum` takes it. The same on every rank: it depends on shape and dtype."""
        states = self._states
        return (
            x.dtype == states.dtype
            and x.shape[-1] == states.width
            and 0 < x.nbytes <= self._exchange.rows * states.row_bytes
        )

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, added up in the same order everywhere. x: contiguous, `accepts`."""
        return self._sum(self._exchange, x)

    def sum_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool = False) -> Tensor:
        """The RMS norm, times weight, of residual + `sum(x)`, which is left in residual.

        pdl: as for `ops.triton.norm.add_rms_norm`.
        """
        return self._sum(self._exchange, x, residual, weight, eps, pdl=pdl)

    def release(self) -> None:
        """Let kernels that wait for a rank which is gone run to their end, with a wrong result."""
        stream = torch.cuda.current_stream(self._exchange.stopped.device)
        idle = torch.cuda.Event()
        idle.record(stream)
        deadline = time.monotonic() + _PATIENCE_S
        while not idle.query():
            if time.monotonic() > deadline:
                self.stop(1)
                return
            time.sleep(0.001)

    def stop(self, stopped: int) -> None:
        """1: from now on no kernel waits for another rank."""
        with torch.cuda.stream(self._side):
            self._exchange.stopped.fill_(stopped)


def without_memory(rank: int, world: int, states: HiddenStates) -> OneShot:
    """For a dry run that finds out which kernels will be needed."""
    meta = torch.device("meta")
    inboxes = torch.empty(world, dtype=torch.int64, device=meta)
    epochs, stopped = _counters(states.rows(world), meta)
    return OneShot(_exchange(rank, world, states, inboxes, epochs, stopped), states)


def create(rank: int, world: int, device: torch.device, states: HiddenStates) -> OneShot | None:
    """One for each rank, or None for all of them if some rank cannot. Called by all ranks together."""
    made: OneShot | None = None
    try:
        made = _meet(rank, world, device, states)
    except Exception as error:  # whatever it is, NCCL does the same work
        logger.info("Small all-reduces go through NCCL: %s: %s", type(error).__name__, error)
    able = torch.tensor([made is not None], dtype=torch.int32, device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN)
    return made if bool(able.item()) else None


def _meet(rank: int, world: int, device: torch.device, states: HiddenStates) -> OneShot:
    """Map the other ranks' memory. Raises what torch raises where that is not possible (RuntimeError, usually)."""
    from torch.distributed import _symmetric_memory as symmetric

    rows = states.rows(world)
    if not rows:
        raise ValueError(f"A row of {states.row_bytes} bytes does not fit.")
    name = cast(Any, f"one-shot-{next(_NUMBERS)}")  # a GroupName, which torch has since 2.12
    store = _FromZero(dist.PrefixStore("one-shot", dist.distributed_c10d._get_default_store()))
    group = dist.ProcessGroup(store, rank, world)
    group._set_group_name(name)
    _register_process_group(name, group)
    inbox = symmetric.empty(2 * world * rows * states.row_bytes // 4, dtype=torch.int64, device=device)
    inbox.zero_()
    epochs, stopped = _counters(rows, device)
    torch.cuda.synchronize(device)  # nobody writes into it before
    handle = symmetric.rendezvous(inbox, name)
    inboxes = torch.tensor([int(address) for address in handle.buffer_ptrs], device=device)
    exchange = _exchange(rank, world, states, inboxes, epochs, stopped)
    made = OneShot(exchange, states, keep=(store, group, inbox, handle))
    made.stop(0)  # a kernel that gets loaded only while another one waits would wait for that one
    return made


def _counters(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`Exchange.epochs` and `.stopped`."""
    return torch.zeros(rows, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)


def _exchange(
    rank: int, world: int, states: HiddenStates, inboxes: Tensor, epochs: Tensor, stopped: Tensor
) -> Exchange:
    from vllm.ops.triton.rank_sum import Exchange

    return Exchange(rank, world, states.rows(world), states.row_bytes // 4, inboxes, epochs, stopped)
