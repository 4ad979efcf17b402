"""Blocks of the KV cache kept in host memory: what was evicted from the device can be brought back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm.worker.device import DeviceContext
from vllm.worker.kv_memory import lazy_zeros

_ALIGN = 16  # bytes, where the part of each memory begins in a place
_STAGED = 256 << 20  # bytes that are on their way at once


class HostTier(Protocol):
    """Places for blocks of token pages outside the device. blocks, places: [n] int64, one transfer each."""

    def save(self, pages: Sequence[Tensor], blocks: np.ndarray, places: np.ndarray) -> None:
        """Copy blocks to places, as they are before what is queued next. They may not be written before `settle`."""

    def load(self, pages: Sequence[Tensor], blocks: np.ndarray, places: np.ndarray) -> None:
        """Copy places to blocks. They may not be read before `settle`."""

    def settle(self) -> None:
        """Whatever is queued next comes after all copies so far."""


def create_tier(pages: Sequence[Tensor], num_places: int, context: DeviceContext) -> HostTier:
    """A tier of `num_places` places, beside the null place.   pages: the memories, [blocks, words] each."""
    if context.device.type == "cuda":
        return CudaTier(pages, num_places, context)
    return CpuTier(pages, num_places)


def place_bytes(pages: Sequence[Tensor]) -> tuple[list[slice], int]:
    """Where each memory's part of a block stands in a place, and the bytes of one."""
    parts, end = [], 0
    for memory in pages:
        size = memory.shape[1] * memory.itemsize
        parts.append(slice(end, end + size))
        end += -(-size // _ALIGN) * _ALIGN
    return parts, end


class CpuTier:
    """On the CPU both tiers are host memory, and a copy is done when it is asked for."""

    def __init__(self, pages: Sequence[Tensor], num_places: int) -> None:
        self._parts, size = place_bytes(pages)
        self._memory = lazy_zeros((num_places + 1, size), torch.uint8)

    def _views(self, pages: Sequence[Tensor]) -> list[Tensor]:
        return [self._memory[:, part].view(page.dtype) for part, page in zip(self._parts, pages, strict=True)]

    def save(self, pages: Sequence[Tensor], blocks: np.ndarray, places: np.ndarray) -> None:
        src, dst = torch.from_numpy(blocks), torch.from_numpy(places)
        for memory, page in zip(self._views(pages), pages, strict=True):
            memory[dst] = page[src]

    def load(self, pages: Sequence[Tensor], blocks: np.ndarray, places: np.ndarray) -> None:
        dst, src = torch.from_numpy(blocks), torch.from_numpy(places)
        for memory, page in zip(self._views(pages), pages, strict=True):
            page[dst] = memory[src]

    def settle(self) -> None:
        return


class CudaTier:
    """Pinned memory, filled and read on a stream of its own, beside the steps.

    A block's parts are gathered on the device first, so that a block is one copy over the bus, not one for each layer.
    """

    def __init__(self, pages: Sequence[Tensor], num_places: int, context: DeviceContext) -> None:
        self._context = context
        self._parts, self._size = place_bytes(pages)
        self._memory = torch.empty(num_places + 1, self._size, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(context.device)
        self._moved: torch.cuda.Event | None = None

    def _stages(self, blocks: np.ndarray, places: np.ndarray) -> list[tuple[Tensor, list[int], Tensor]]:
        """Blocks as indices on the device, their places, and room for them, as many at once as may be on their way."""
        count = max(1, _STAGED // self._size)
        found = []
        for i in range(0, len(blocks), count):
            (index,) = self._context.upload([blocks[i : i + count].astype(np.int64)])
            room = torch.empty(len(index), self._size, dtype=torch.uint8, device=self._context.device)
            found.append((index, places[i : i + count].tolist(), room))
        return found

    def save(self, pages: Sequence[Tensor], blocks: np.ndarray, places: np.ndarray) -> None:
        with torch.cuda.stream(self._begin()):
            for index, where, room in self._stages(blocks, places):
                for part, page in zip(self._parts, pages, strict=True):
                    room[:, part].view(page.dtype).copy_(page.index_select(0, index))
                for row, place in enumerate(where):
                    self._memory[place].copy_(room[row], non_blocking=True)
        self._end()

    def load(self, pages: Sequence[Tensor], blocks: np.ndarray, places: np.ndarray) -> None:
        with torch.cuda.stream(self._begin()):
            for index, where, room in self._stages(blocks, places):
                for row, place in enumerate(where):
                    room[row].copy_(self._memory[place], non_blocking=True)
                for part, page in zip(self._parts, pages, strict=True):
                    page.index_copy_(0, index, room[:, part].view(page.dtype))
        self._end()

    def _begin(self) -> torch.cuda.Stream:
        self._stream.wait_stream(torch.cuda.current_stream())  # steps before may still use the blocks
        return self._stream

    def _end(self) -> None:
        self._moved = torch.cuda.Event()
        self._moved.record(self._stream)

    def settle(self) -> None:
        if self._moved is not None:
            torch.cuda.current_stream().wait_event(self._moved)
            self._moved = None
