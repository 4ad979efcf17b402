"""Stages of a pipeline: which layers each of them has, and how hidden states get from one to the next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Link:
    """A one-way connection to one other rank, over a process group of these two.

    What is sent is kept until it has arrived: at most `depth` sendings are under way, more wait for the oldest.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, depth: int) -> None:
        """peer: the other one's rank in the default group."""
        self._peer, self._depth = peer, depth
        self._group: dist.ProcessGroup | None = group
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Begin to send; returns at once. `x` may not be changed afterwards."""
        x = x.contiguous()
        while len(self._sent) >= self._depth:
            work, _ = self._sent.popleft()
            work.wait()
        self._sent.append((dist.isend(x, self._peer, group=self._group), x))

    def receive(self, x: Tensor) -> Tensor:
        """Fill `x` with what the other one sends next: at once on the host, in the order of its stream on a device."""
        work = dist.irecv(x, self._peer, group=self._group)
        assert work is not None
        work.wait()
        return x

    def close(self) -> None:
        """Let go of the connection, whoever still knows this object."""
        self._sent.clear()
        self._group = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """This rank's stage among `world`.   previous, next: links to the ranks that have the layers before and after,
    None at the ends, and for a stage that is looked at alone.   tokens: between the last stage and the first, which
    learns from it what was sampled; None for stages in between, and where the host tells it.
    """

    rank: int = 0
    world: int = 1
    previous: Link | None = None
    next: Link | None = None
    tokens: Link | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world - 1

    def receive(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, padding: int = 0
    ) -> Tensor | None:
        """The stream behind the stage before, [rows + padding, width], the last of which are zeros; None on the first
        stage.
        """
        if self.previous is None:
            return None
        stream = torch.empty(rows + padding, width, dtype=dtype, device=device)
        self.previous.receive(stream[:rows])
        stream[rows:].zero_()
        return stream

    def receive_into(self, stream: Tensor) -> None:
        """Fill `stream`, [rows, width], with the stream behind the stage before; on the first stage do nothing."""
        if self.previous is not None:
            self.previous.receive(stream)

    def close(self) -> None:
        """Let go of the neighbours."""
        for link in (self.previous, self.next, self.tokens):
            if link is not None:
                link.close()

    def send(self, stream: Tensor) -> None:
        """Hand the stream on to the next stage."""
        if self.next is None:
            raise RuntimeError(f"Stage {self.rank} of {self.world} has nobody to send to.")
        self.next.send(stream)


ONE_STAGE = Pipeline()
