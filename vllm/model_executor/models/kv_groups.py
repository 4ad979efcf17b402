"""Which layers share a block table: from what each layer keeps to the KV groups and every layer's cache tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.model_executor.models.traits import Traits
from vllm.step.kv_need import TOKENS, KVNeed
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout

_GROUP_COST = 1 / 32
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


def group_layers(kv: Sequence[KVNeed | None]) -> tuple[KVGroup, ...]:
    """Groups of equally many layers, as far as possible: full attention first, then each window by itself.

    A kind with more layers than the group size gets several groups; see `group_size`. Layers that keep nothing, or read
    another's blocks, are in no group.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, need in enumerate(kv):
        if need is not None and need.same_as is None:
            kinds.setdefault(need.window, []).append(layer)
    size = group_size([len(layers) for layers in kinds.values()])
    groups = []
    for window in sorted(kinds, key=lambda w: (w is not None, w or 0)):
        layers = kinds[window]
        kind = KVKind.FULL if window is None else KVKind.SLIDING
        groups += [KVGroup(kind, tuple(layers[i : i + size]), window) for i in range(0, len(layers), size)]
    return tuple(groups)


def group_size(counts: Sequence[int]) -> int:
    """Layers per group, for kinds of so many layers each: where the layers that blocks have room for in vain, as a
    share of all, and the cost of the groups come to least. A group costs as much as this share of all layers does: its
    table is grown, sent and mapped in every step.
    """

    def cost(size: int) -> tuple[float, int]:
        groups = sum(-(-count // size) for count in counts)
        return groups * size / sum(counts) + groups * _GROUP_COST, groups

    return min(range(1, max(counts) + 1), key=cost) if counts else 0


def kv_places(groups: Sequence[KVGroup], kv: Sequence[KVNeed | None] = ()) -> Mapping[int, KVPlace]:
    """layer -> its place, for layers that keep something; one that reads another's blocks has that one's place."""
    places = {
        layer: KVPlace(index, tensor) for index, group in enumerate(groups) for tensor, layer in enumerate(group.layers)
    }
    shared = {layer: need.same_as for layer, need in enumerate(kv) if need is not None and need.same_as is not None}
    return places | {layer: places[owner] for layer, owner in shared.items()}


def layout_of(traits: Traits, block_size: int, cache_dtype: str | torch.dtype = "auto") -> KVLayout:
    """The cache that a rank's model needs, for blocks of `block_size` tokens.

    Raises ValueError if its layers' blocks are not keys and values of one shape, which is all that one pool can hold.
    """
    owned = [need for need in traits.kv if need is not None and need.same_as is None]
    element_bytes = cache_element_bytes(cache_dtype, traits.dtype)
    shapes = {tuple(tensor.shape for tensor in need.tensors) for need in owned}
    for need in owned:
        usual = need.kind in (KVKind.FULL, KVKind.SLIDING) and len(need.tensors) == 1
        shape = need.tensors[0].shape if usual else ()
        if len(shape) != 4 or shape[0] != 2 or shape[2] != TOKENS or need.tensors[0].dtype is not None:
            raise ValueError(f"A layer that keeps {need} is not supported: expected keys and values of its tokens.")
    if len(shapes) > 1:
        raise ValueError(f"Layers with unlike key/value heads or head sizes are not supported, got {sorted(shapes)}.")
    kv_heads, head_dim = (owned[0].tensors[0].shape[1], owned[0].tensors[0].shape[3]) if owned else (0, 0)
    return KVLayout(group_layers(traits.kv), block_size, kv_heads, head_dim, element_bytes)


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
