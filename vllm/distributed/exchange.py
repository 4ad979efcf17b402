"""What copies of an engine that share a model's experts exchange: tokens, and before each step what it will take."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.parallel_state import gather_into

# torch 2.13 renamed it
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Exchange:
    """Brings the tokens of all copies to each rank, and what ranks make of them back to where they came from.

    Copy `rank` of `world`. Each brings as many rows, so that nobody has to be told how many there are: what it lacks is
    padding. On several ranks per copy, those with the same share of each layer exchange with each other.
    """

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup) -> None:
        self.rank, self.world = rank, world
        self._group: dist.ProcessGroup | None = group
        self._rows = 0

    def expect(self, rows: int) -> None:
        """From now on each copy brings so many rows, until this is called again, on all of them."""
        self._rows = rows

    def gather(self, x: Tensor, times: int, padding: float) -> Tensor:
        """[rows of this copy, n] -> [world * expected * times, n], those of copy 0 first; a copy's last are padding.

        times: rows for each of those that were expected. Raises ValueError if there are more.
        """
        most = self._rows * times
        if len(x) > most:
            raise ValueError(f"{len(x)} rows are exchanged where {most} were expected.")
        sent = x.new_full((most, x.shape[1]), padding)
        sent[: len(x)] = x
        out = x.new_empty((self.world * most, x.shape[1]))
        gather_into(out.view(-1), sent.view(-1), group=self._group)
        return out

    def scatter(self, parts: Tensor, times: int) -> Tensor:
        """[world * expected * times, n], each rank's part of every row -> [expected * times, n], all parts of this
        copy's rows added up.
        """
        out = parts.new_empty((self._rows * times, parts.shape[1]))
        _reduce_scatter(out, parts.contiguous(), group=self._group)
        return out

    def close(self) -> None:
        """Let go of the group, whoever still knows this object."""
        self._group = None


class Peers:
    """The cores of all copies. They step together: who has nothing to compute still has experts that others need."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def agree(self, tokens: int, busy: bool, calls: int) -> tuple[int, bool]:
        """(tokens, busy): the most that any core has in its next step, and whether they go on together. Waits for all.

        busy: whether this core has work.   calls: how often it was told that there is some. They go on while one of
        them has work, or has heard of some that another one has not heard of yet.
        """
        said = torch.tensor([tokens, busy, calls, -calls])
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group)
        most, working, last, first = said.tolist()
        return most, bool(working) or last != -first

    def close(self) -> None:
        """Let go of the group."""
        self._group = None
