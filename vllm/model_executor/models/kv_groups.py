"""Which layers share a block table: from each layer's window to the KV groups and every layer's cache tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm.core.kv_spec import KVGroup, KVKind

_CACHE_BYTES = {
    "float32": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where a layer's keys and values are: the group whose block table holds them, and the cache tensor's index."""

    group: int
    tensor: int


def group_layers(windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Groups of equally many layers, as far as possible: full attention first, then each window by itself.

    windows: per layer, None for full attention. The group size is the smallest number of layers of one kind, so that no
    kind wastes tensors; a kind with more layers gets several groups.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    groups = []
    for window in sorted(kinds, key=lambda w: (w is not None, w or 0)):
        layers = kinds[window]
        kind = KVKind.FULL if window is None else KVKind.SLIDING
        groups += [KVGroup(kind, tuple(layers[i : i + size]), window) for i in range(0, len(layers), size)]
    return tuple(groups)


def kv_places(groups: Sequence[KVGroup]) -> dict[int, KVPlace]:
    """layer -> its place."""
    return {
        layer: KVPlace(index, tensor) for index, group in enumerate(groups) for tensor, layer in enumerate(group.layers)
    }


def cache_element_bytes(cache_dtype: str | torch.dtype, model_dtype: torch.dtype) -> int:
    """Bytes of one element of the cache; "auto" is the model's dtype."""
    if isinstance(cache_dtype, torch.dtype):
        return cache_dtype.itemsize
    if cache_dtype == "auto":
        return model_dtype.itemsize
    try:
        return _CACHE_BYTES[cache_dtype]
    except KeyError:
        known = ", ".join(["auto", *_CACHE_BYTES])
        raise ValueError(f"Unknown KV cache dtype {cache_dtype!r}. Expected one of {known}.") from None
