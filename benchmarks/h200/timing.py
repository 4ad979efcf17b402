"""Clocks for device work: medians of events, CUDA graph replays, and the ceilings of the chip at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def device_ms(run: Callable[[], object], reps: int = 20, warm: int = 3) -> float:
    """Median milliseconds of `run()` by device events."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(reps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph, after one warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def graph_ms(run: Callable[[], object], reps: int = 20) -> float:
    """Median milliseconds of a replay of `run`, launch gaps excluded."""
    return device_ms(capture(run).replay, reps=reps)


def _bandwidths() -> tuple[float, float]:
    """GB/s of reading, and of copying (read + written)."""
    a = torch.empty(2 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty_like(a)
    size = a.numel() * 2
    sums = (lambda: torch.sum(a.view(torch.float32)), lambda: torch.sum(a, dtype=torch.float32))
    return max(size / device_ms(f) / 1e6 for f in sums), 2 * size / device_ms(lambda: b.copy_(a)) / 1e6


def ceilings() -> dict[str, float]:
    """What plain PyTorch reaches here: GB/s read and copied, bf16 TFLOP/s of an 8192 cube."""
    read, copy = _bandwidths()
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"read_GBs": read, "copy_GBs": copy, "matmul_TFLOPs": 2 * 8192**3 / device_ms(lambda: x @ y) / 1e9}
