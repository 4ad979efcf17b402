"""All that the worker knows about its device: how numbers get there and back, and whether it runs ahead of the host."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_POLL_S = 2e-5
_ALIGN = 16  # bytes, so that every array in a packed buffer starts where any dtype may


class Download(Protocol):
    """Numbers on their way to the host."""

    def wait(self) -> list[np.ndarray]:
        """Block until they are here."""

    def wait_for(self, seconds: float) -> bool:
        """Block until they are here, but no longer than that; whether they are."""


class DeviceContext(Protocol):
    """One device. `is_async`: work is queued and the host may plan the next step before it is done."""

    device: torch.device
    is_async: bool

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays on the device, in one transfer. They may not be changed afterwards."""

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start to bring tensors to the host."""

    def host_bytes(self, count: int) -> Tensor:
        """uint8 [count] in host memory, from where copies to the device need not be waited for."""

    def product_rows(self, rows: int) -> int:
        """`rows`, or a few more: of how many a product should be that needs so many.

        cuBLAS has about one kernel for every eight rows and loads each at its first use, which waits for all that is
        queued. Those of these numbers are loaded at start-up.
        """

    def mark(self) -> Any:
        """A point in the device's queue of work."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks that have been passed."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""


class Replay(Protocol):
    """A recorded piece of work."""

    def replay(self) -> None:
        """Queue it again."""

    def reset(self) -> None:
        """Forget it, without waiting for the device."""


class Event(Protocol):
    """A point in the device's queue of work, at one place of memory that can be used again."""

    def record(self) -> None: ...

    def wait(self) -> None:
        """What is queued next on the current stream waits for it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class RecordingContext(DeviceContext, Protocol):
    """A device that can record what is queued, and do it again at the cost of one launch."""

    def pinned(self, *shape: int) -> Tensor:
        """int32 numbers in host memory, which the device reads and writes."""

    def event(self) -> Event: ...

    def copy_beside(self, target: Tensor, host: Tensor, after: Event) -> None:
        """Copy pinned memory to the device beside what is queued there, once it has passed `after`; what is queued next
        waits for the copy.
        """

    def new_pool(self) -> Any:
        """Memory that recorded pieces share; it ends with the last of them."""

    def record(self, run: Callable[[], Any], pool: Any) -> Replay:
        """Record what `run` queues, whose kernels have been used before. Nothing is computed."""


def rounded_rows(rows: int) -> int:
    """At most an eighth more, and one of few numbers: powers of 2 up to 8, multiples of 8 up to 128, of 16 up to 256,
    of 32 beyond.
    """
    if rows <= 8:
        return 1 << (rows - 1).bit_length() if rows else 0
    step = min(32, max(8, 1 << ((rows - 1).bit_length() - 4)))
    return -(-rows // step) * step


class _Here:
    """Tensors in host memory: nothing to wait for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrays = [t.numpy() for t in tensors]

    def wait(self) -> list[np.ndarray]:
        return self._arrays

    def wait_for(self, seconds: float) -> bool:
        return True


class CpuContext:
    """The host's own memory: arrays and tensors are the same bytes."""

    is_async = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(a) for a in arrays]

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return _Here(tensors)

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def product_rows(self, rows: int) -> int:
        return rows

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        return


def passed(event: Event, seconds: float) -> bool:
    """Wait until the device has passed an event, but no longer than that; whether it has."""
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


class _Pinned:
    """Tensors being copied to pinned host memory on the device's stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> list[np.ndarray]:
        self._done.synchronize()
        return [t.numpy() for t in self._host]

    def wait_for(self, seconds: float) -> bool:
        return passed(self._done, seconds)


def _offsets(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each array begins in a buffer that holds all of them, and its size."""
    offsets, total = [], 0
    for a in arrays:
        offsets.append(total)
        total += -(-a.nbytes // _ALIGN) * _ALIGN
    return offsets, total


def _packed(arrays: Sequence[np.ndarray]) -> Tensor:
    """The arrays, one behind the other in pinned memory."""
    offsets, total = _offsets(arrays)
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    host = packed.numpy()
    for a, offset in zip(arrays, offsets, strict=True):
        host[offset : offset + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    return packed


def _unpacked(packed: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of the arrays in a copy of what `_packed` made of them."""
    return [
        packed[offset : offset + a.nbytes].view(_TORCH_DTYPE[a.dtype]).view(a.shape)
        for a, offset in zip(arrays, _offsets(arrays)[0], strict=True)
    ]


class CudaContext:
    """A CUDA device. What one call uploads is packed into a pinned buffer and sent asynchronously.

    PyTorch's allocator of pinned memory keeps buffers for the next call, and gives none out that a copy still reads.
    """

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return _unpacked(_packed(arrays).to(self.device, non_blocking=True), arrays)

    def keep(self, arrays: Sequence[np.ndarray]) -> tuple[Tensor, list[Tensor]]:
        """As `upload`, and the memory that holds all of them, where `replace` puts others of the same shapes."""
        sent = _packed(arrays).to(self.device, non_blocking=True)
        return sent, _unpacked(sent, arrays)

    def replace(self, kept: Tensor, arrays: Sequence[np.ndarray]) -> None:
        """Upload `arrays` to where others were kept."""
        kept.copy_(_packed(arrays), non_blocking=True)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return _Pinned(tensors)

    def pinned(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, pin_memory=True)

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def product_rows(self, rows: int) -> int:
        return rounded_rows(rows)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def copy_beside(self, target: Tensor, host: Tensor, after: Event) -> None:
        main, side = torch.cuda.current_stream(), _copying_stream(self.device)
        with torch.cuda.stream(side):
            after.wait()
            target.copy_(host, non_blocking=True)
        main.wait_stream(side)

    def new_pool(self) -> Any:
        stream = _recording_stream(self.device)
        with torch.cuda.stream(stream):  # its cuBLAS workspace must not come to lie in a graph's memory
            one = torch.ones(16, 16, device=self.device, dtype=torch.bfloat16)
            torch.mm(one, one)
        return torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Any], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        main, stream = torch.cuda.current_stream(), _recording_stream(self.device)
        stream.wait_stream(main)
        try:
            with torch.cuda.stream(stream), _no_collection():
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            with suppress(RuntimeError):  # what has gone wrong is told, whatever becomes of this
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.graphsafe_set_state(generator.clone_state())  # else it stays in the capture and draws nothing
            raise RuntimeError(
                "A step of this model cannot be captured as a CUDA graph, probably because a layer asks the device for "
                f"a number ({_first_line(error)}). Keep such numbers on the device, or set enforce_eager=True."
            ) from error
        main.wait_stream(stream)
        return graph

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def _first_line(error: BaseException) -> str:
    """What was said of the failure that came first: one inside a capture makes its end fail, too."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collections: what one may destroy (graphs and streams of an engine that is gone) spoils a capture
    in progress.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One per device and process: cuBLAS keeps a workspace for every stream that it has ever seen."""
    return torch.cuda.Stream(device)


@functools.cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """What is copied to the device beside its computations."""
    return torch.cuda.Stream(device)


_TORCH_DTYPE: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
}


def create_context(device: torch.device) -> DeviceContext:
    """The context for `device`."""
    if device.type == "cpu":
        return CpuContext()
    if device.type == "cuda":
        return CudaContext(device)
    raise RuntimeError(f"Not support device type: {device}")
