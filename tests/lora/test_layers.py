"""Slots on the device: what an adapter leaves there, whatever was there before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lora.adapters import save_adapter
from tests.lora.test_adapter import read
from tests.models.harness import load
from tests.tiny_models import save_llama
from vllm.lora import layers
from vllm.lora.layers import EmbeddingStack, HostAdapter, LinearStack, LoRALayers

CPU = torch.device("cpu")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_slot_holds_what_it_would_hold_if_nothing_had_been_there(
    tmp_path: Path, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large and small ranks, adapters of some layers only, none: each after every other, in either order of `b`."""
    monkeypatch.setattr(layers, "_PIECE", 5000)  # so that there are several
    if transposed:
        monkeypatch.setattr(layers, "lay_out_b", lambda b: b.transpose(1, 2).contiguous().transpose(1, 2))
    base = save_llama(tmp_path / "base")
    model, rooms, rests = load(base), list[int](), list[None]()

    def room(size: int) -> torch.Tensor:
        rooms.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def prepared(name: str, **settings: object) -> HostAdapter:
        save_adapter(base, tmp_path / name, seed=len(name), **settings)
        adapter = stacks.prepare(read(base, tmp_path / name), rest=lambda: rests.append(None))
        rooms.clear()
        found = adapter.moved(room, lambda: rests.append(None))
        assert len(rooms) > 1
        assert len(rests) >= len(rooms) + len(adapter.matrices)
        for name, pair in adapter.matrices.items():
            assert all(torch.equal(a, b) for a, b in zip(pair, found.matrices[name], strict=True))
        return found

    def stacks_of() -> LoRALayers:
        return LoRALayers(model.adaptable(), 2, 8, torch.float32, CPU)

    stacks = stacks_of()
    adapters = [
        prepared("eight", rank=8),
        prepared("three", rank=3),
        prepared("some", rank=5, target_modules=["q_proj", "down_proj"]),
        HostAdapter({}, b""),
    ]
    for first in adapters:
        for second in adapters:
            fresh = stacks_of()
            fresh.load(1, second)
            stacks.load(1, first)
            stacks.load(1, second)
            for path, stack in stacks._stacks.items():
                other = fresh._stacks[path]
                assert isinstance(stack, LinearStack | EmbeddingStack)
                assert isinstance(other, LinearStack | EmbeddingStack)
                for tensor in ("a", "b", "ranks"):
                    assert torch.equal(getattr(stack, tensor), getattr(other, tensor)), (path, tensor)
