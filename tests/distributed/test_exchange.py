"""The two ways in which copies of an engine bring tokens to experts, on ranks of gloo: both give the same sums."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from vllm.distributed import TensorParallel
from vllm.distributed.exchange import Exchange
from vllm.model_executor.layers.expert_method import DealtExpertMethod, ExpertShape
from vllm.ops.moe import expert_mlp

COPIES, SHARES, EXPERTS, TOP_K, HIDDEN, INNER = 2, 2, 7, 3, 16, 12
TOKENS = 5, 0  # of each copy; a step was agreed on for 6


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(EXPERTS, *s, generator=generator) for s in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))  # type: ignore[return-value]


def tokens(copy: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and experts of a copy's tokens."""
    generator, n = torch.Generator().manual_seed(2 + copy), TOKENS[copy]
    chosen = [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(n)]
    experts = torch.stack(chosen) if n else torch.empty(0, TOP_K, dtype=torch.int64)
    return torch.randn(n, HIDDEN, generator=generator), torch.rand(n, TOP_K, generator=generator), experts


def rank(number: int, folder: str) -> None:
    """A rank of one of the copies: the layer's results by both ways, with experts where they were and elsewhere."""
    torch.set_num_threads(1)
    world = COPIES * SHARES
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=world, timeout=timedelta(seconds=60)
    )
    copy, share = divmod(number, SHARES)
    sharing = [dist.new_group([c * SHARES + s for s in range(SHARES)]) for c in range(COPIES)]
    across = [dist.new_group([c * SHARES + s for c in range(COPIES)]) for s in range(SHARES)]
    exchange = Exchange(copy, COPIES, across[share])
    tp = TensorParallel(share, SHARES, sharing[copy], exchange=exchange)
    shape = ExpertShape(EXPERTS, HIDDEN, INNER, "silu", choices=TOP_K)
    found: dict[str, Any] = {}
    for moved in (False, True):
        method = DealtExpertMethod()
        layer: Any = SimpleNamespace(shape=shape, tp=tp, reduce=True, lora=None)
        method.create_weights(layer, shape, torch.float32, tp)
        places = torch.arange(EXPERTS)
        if moved:
            places = places.flip(0)
            method.count(layer)
            method.move(places)
        at = places.argsort()[method.mine.start : method.mine.stop]
        for target, whole in zip((layer.gate_up, layer.down), weights(), strict=True):
            target.data.copy_(whole[at])
        for deals in (False, True):
            exchange._worth = 0 if deals else 1 << 40
            exchange.expect(6)
            x, chosen_weights, experts = tokens(copy)
            with torch.no_grad():
                dispatched = method.dispatch(layer, x, chosen_weights, experts)
                assert exchange.is_dealt == deals
                sums = method.combine(layer, method.compute(layer, *dispatched), len(x))
            counted = None
            if moved:
                counted = method.counted().clone()
                dist.all_reduce(counted)
                method.counted().zero_()
            found[f"{moved}-{deals}"] = sums, len(dispatched[0]), counted
    torch.save(found, f"{folder}/{number}.pt")
    dist.destroy_process_group()


def test_rows_that_are_dealt_and_rows_that_are_gathered_give_the_same_sums() -> None:
    """Two copies of two ranks, one of which has no token; experts that do not divide evenly, and some elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank, (folder,), COPIES * SHARES, start_method="fork")
        results = [torch.load(Path(folder) / f"{n}.pt") for n in range(COPIES * SHARES)]
    for number, found in enumerate(results):
        expected = expert_mlp.reference(*tokens(number // SHARES), *weights(), "silu")
        for sums, _, _ in found.values():
            torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5)
        assert found["False-False"][1] == COPIES * 6
        assert torch.equal(found["True-False"][2], found["True-True"][2]), "choices count alike"
    dealt = [found["False-True"][1] for found in results]
    owner = [n for n, size in enumerate((2, 2, 2, 1)) for _ in range(size)]
    for number, rows in enumerate(dealt):
        copy, share = divmod(number, SHARES)
        choices = torch.tensor(owner)[tokens(0)[2]]
        assert rows == int((choices == number).any(1).sum()), (copy, share)


@pytest.mark.parametrize(
    ("backend", "copies", "choices", "rows", "deals"),
    [
        ("nccl", 2, 8, 4096, False),
        ("nccl", 2, 1, 4096, False),
        ("nccl", 8, 2, 16, False),
        ("nccl", 8, 2, 4096, True),
        ("nccl", 64, 8, 512, True),
        ("gloo", 2, 2, 2, True),
        ("gloo", 2, 8, 4, False),
    ],
)
def test_rows_are_dealt_where_that_saves_more_than_it_costs(
    backend: str, copies: int, choices: int, rows: int, deals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    exchange = Exchange(0, copies, None)  # type: ignore[arg-type]
    exchange.expect(rows)
    assert exchange.deals(choices, 8192, 1) == deals
