"""Sums over two GPUs by writing into each other's memory, against sums in this process."""

import os
import subprocess
import sys

import pytest
import torch

from vllm.distributed.one_shot import HiddenStates
from vllm.distributed.ranks import Seat
from vllm.executor import rendezvous

pytestmark = pytest.mark.timeout(100)  # ranks that wait for each other would wait for ever

SHAPES = [(torch.bfloat16, 4096), (torch.bfloat16, 896), (torch.float32, 640), (torch.float16, 1024)]


def random_rows(generator, dtype, width):
    rows = int(torch.randint(1, 200, (1,), generator=generator)) if torch.rand(1, generator=generator) < 0.7 else 1
    return [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2)]


def compare(tp, dtype, width):
    """Random sums, one after the other and from a graph; every rank knows what every rank has."""
    device = torch.device("cuda", tp.rank)
    generator = torch.Generator().manual_seed(width)
    weight = torch.rand(width, generator=generator).to(device, dtype)
    for i in range(120):
        xs = random_rows(generator, dtype, width)
        total = (xs[0].float() + xs[1].float()).to(dtype).to(device)
        mine = xs[tp.rank].to(device)
        if not tp.one_shot.accepts(mine):
            assert mine.nbytes > 1 << 20
            continue
        if i % 2:
            assert torch.equal(tp.one_shot.sum(mine), total)
            continue
        residual = torch.randn(mine.shape, generator=generator).to(dtype).to(device)
        want = (total.float() + residual.float()).to(dtype)
        out = tp.one_shot.sum_add_norm(mine, residual, weight, 1e-6)
        assert torch.equal(residual, want)
        norm = torch.nn.functional.rms_norm(want.double(), (width,), weight.double(), 1e-6)
        torch.testing.assert_close(out.double(), norm, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def replay(tp, dtype, width):
    """Sums of different sizes in one graph, replayed: each adds both ranks' sum of the one before."""
    device = torch.device("cuda", tp.rank)
    inputs = [torch.full((rows, width), 1.0 + tp.rank, dtype=dtype, device=device) for rows in (1, 5, 1, 64, 2)]
    outputs = [tp.one_shot.sum(x) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [tp.one_shot.sum(x) for x in inputs]
    for i in range(1000):
        if i % 500 == 7:  # as the input of a step changes, and one step runs without a graph in between
            for x in inputs:
                x.fill_(i % 11 + tp.rank)
            assert torch.equal(tp.one_shot.sum(inputs[3]), torch.full_like(inputs[3], 2 * (i % 11) + 1))
        graph.replay()
        if i % 50 == 7:
            for x, out in zip(inputs, outputs, strict=True):
                assert torch.equal(out, 2 * x + 1 - 2 * tp.rank)


def run(tp_of):
    """All of it as one rank; tp_of joins for given states."""
    for dtype, width in SHAPES:
        tp = tp_of(HiddenStates(width, dtype))
        try:
            assert tp.one_shot is not None, "these GPUs share memory"
            compare(tp, dtype, width)
            replay(tp, dtype, width)
            torch.cuda.synchronize()
        finally:
            rendezvous.leave()


def join(index, port, states, listener=None):
    meeting = rendezvous.Meeting(rendezvous.LOOPBACK, port, 60)
    return rendezvous.join("cuda", Seat(index, 2, 1), meeting, index, (index, 2), listener, states).tp


def other(ports):
    """The second rank's process."""
    waiting = iter(ports)
    run(lambda states: join(1, next(waiting), states))


def test_sums_of_rows_are_exact_alone_and_in_graphs():
    listeners = [rendezvous.open_listener() for _ in SHAPES]
    ports = [listener.getsockname()[1] for listener in listeners]
    second = subprocess.Popen(
        [sys.executable, "-c", f"from tests.gpu.test_one_shot import other; other({ports})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    waiting = iter(listeners)

    def first(states):
        with next(waiting) as listener:
            return join(0, listener.getsockname()[1], states, listener)

    try:
        run(first)
        assert second.wait(60) == 0
    finally:
        second.kill()
