"""What copies of an engine that share a model's experts exchange: tokens, and before each step what it will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.parallel_state import gather_into

# torch 2.13 renamed it
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


# Bytes saved that are worth dealing. Over NVLink the host's wait costs 350 us, and picking a row as much as sending it
# three times: two copies never gain (measured up to 32 MiB saved), eight should beyond this. Over gloo all gain.
_WORTH = {"nccl": 256 << 20, "gloo": 4 << 10}


class Exchange:
    """Brings tokens to the ranks that have their experts, and what these make of them back to where they came from.

    Copy `rank` of `world`. On several ranks per copy, those with the same share of each layer exchange with each other.
    There are two ways. `gather` brings all tokens to all copies, and `scatter` adds up and returns what each has made
    of them: every copy brings as many rows, so that nobody has to be told how many there are; what it lacks is padding.
    `deal` sends each row to those copies alone that have experts of it, and `collect` returns their parts: that is
    less, but the host must wait for the numbers first.
    """

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup) -> None:
        self.rank, self.world = rank, world
        self._group: dist.ProcessGroup | None = group
        self._worth = _WORTH.get(dist.get_backend(group), _WORTH["gloo"])
        self._rows = 0
        self._dealt: _Dealt | None = None

    def expect(self, rows: int) -> None:
        """From now on each copy brings so many rows, until this is called again, on all of them."""
        self._rows = rows

    def deals(self, choices: int, row_bytes: int, times: int) -> bool:
        """Whether rows are better dealt than gathered, if each has so many choices of experts; all copies say the same.

        Of n copies the choices of a row leave out (1 - 1/n)^choices, where they are spread evenly: so much of what
        gathering sends to others, there and back, need not be sent.
        """
        rows = self._rows * times * (self.world - 1)
        return 2 * rows * row_bytes * (1 - 1 / self.world) ** choices > self._worth

    @property
    def is_dealt(self) -> bool:
        """Whether rows that were dealt wait to be collected."""
        return self._dealt is not None

    def deal(self, copies: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send each row to those copies that one of its choices is at, and return the rows that came, copy by copy.

        copies: [rows, choices] int64, -1 for none.   parts: [rows, n] each, what is sent of a row.
        """
        wanted = copies.new_zeros(len(copies), self.world + 1, dtype=torch.bool)
        wanted = wanted.scatter_(1, copies.remainder(self.world + 1), True)[:, : self.world]
        sent = wanted.sum(0)
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent, group=self._group)
        to, of = torch.stack([sent, coming]).tolist()
        rows = wanted.T.nonzero()[:, 1]
        self._dealt = _Dealt(rows, to, of)
        return [self._send(part[rows], to, of) for part in parts]

    def collect(self, parts: Tensor, rows: int) -> Tensor:
        """What was made of the rows that `deal` returned, [those, n] -> [rows of this copy, n], the parts of all copies
        added up in the order of the copies.
        """
        if self._dealt is None:
            raise RuntimeError("Nothing was dealt.")
        dealt, self._dealt = self._dealt, None
        back = self._send(parts.contiguous(), dealt.of, dealt.to).float()
        out = back.new_zeros(rows, parts.shape[1])
        for index, part in zip(dealt.rows.split(dealt.to), back.split(dealt.to), strict=True):
            out[index] += part  # no row twice
        return out.to(parts.dtype)

    def _send(self, x: Tensor, to: list[int], of: list[int]) -> Tensor:
        """to, of: rows that each copy gets, and that come from it."""
        out = x.new_empty(sum(of), x.shape[1])
        dist.all_to_all_single(out, x, of, to, group=self._group)
        return out

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


@dataclass(frozen=True, slots=True)
class _Dealt:
    """rows: of this copy in the order in which they were sent.   to, of: how many to each copy, and from it."""

    rows: Tensor
    to: list[int]
    of: list[int]


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
