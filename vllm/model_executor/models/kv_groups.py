"""Which layers share a block table: from what each layer keeps to the KV groups and every layer's cache tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vllm.model_executor.models.traits import Traits
from vllm.step.kv_need import TOKENS, KVNeed, KVTensor
from vllm.step.kv_policy import CacheTensor, KVGroup, KVKind, KVLayout, KVPolicy

_GROUP_COST = 1 / 32
_ALIGN = 16  # bytes, where tensors of unlike shapes begin
_LARGEST_BLOCK = 256  # tokens
_SNAPSHOT_BYTES, _LEAST_SNAPSHOTS = 4 << 30, 8
_ORDER = (KVKind.FULL, KVKind.SLIDING, KVKind.CROSS)
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
    """Where a layer's keys and values are: the group whose block table holds them, and the cache tensor's index.

    more: the indices of the layer's further tensors.
    """

    group: int
    tensor: int
    more: tuple[int, ...] = ()

    @property
    def tensors(self) -> tuple[int, ...]:
        """The indices of all the layer's tensors, in the order of its `KVNeed`."""
        return (self.tensor, *self.more)


def group_layers(kv: Sequence[KVNeed | None]) -> tuple[KVGroup, ...]:
    """Groups of equally many layers, as far as possible: full attention first, then each window by itself, cross
    attention, and all recurrent layers as the last.

    A kind with more layers than the group size gets several groups; see `group_size`. Layers that keep nothing, or read
    another's blocks, are in no group. Raises ValueError for needs that no cache can be laid out for.
    """
    for layer, need in enumerate(kv):
        _check(layer, need, kv)
    kinds: dict[tuple[KVKind, int], list[int]] = {}
    for layer, need in enumerate(kv):
        if need is not None and need.same_as is None:
            kinds.setdefault((need.kind, need.window or 0), []).append(layer)
    states = kinds.pop((KVKind.RECURRENT, 0), [])
    size = group_size([len(layers) for layers in kinds.values()])
    groups = []
    for kind, window in sorted(kinds, key=lambda k: (_ORDER.index(k[0]), k[1])):
        layers = kinds[kind, window]
        groups += [KVGroup(kind, tuple(layers[i : i + size]), window or None) for i in range(0, len(layers), size)]
    return (*groups, KVGroup(KVKind.RECURRENT, tuple(states))) if states else tuple(groups)


def group_size(counts: Sequence[int]) -> int:
    """Layers per group, for kinds of so many layers each: where the layers that blocks have room for in vain, as a
    share of all, and the cost of the groups come to least. A group costs as much as this share of all layers does: its
    table is grown, sent and mapped in every step.
    """

    def cost(size: int) -> tuple[float, int]:
        groups = sum(-(-count // size) for count in counts)
        return groups * size / sum(counts) + groups * _GROUP_COST, groups

    return min(range(1, max(counts) + 1), key=cost) if counts else 0


def kv_places(
    groups: Sequence[KVGroup], kv: Sequence[KVNeed | None], layers: Container[int] | None = None
) -> Mapping[int, KVPlace]:
    """layer -> its place, for layers that keep something; one that reads another's blocks has that one's place.

    Layers that are alike share tensors, the j-th of every group those of the others; else each has its own.
    layers: those of this rank, None for all. Groups are those of the whole model, tensors are counted on the rank.
    """
    alike, places, next_tensor = _alike(groups, kv), {}, 0
    for index, group in enumerate(groups):
        for turn, layer in enumerate(_on(layers, group)):
            first = next_tensor
            if alike:
                first = turn * len(_need(kv, layer).tensors)
            indices = range(first, first + len(_need(kv, layer).tensors))
            places[layer] = KVPlace(index, indices[0], tuple(indices[1:]))
            next_tensor = indices[-1] + 1
    shared = {layer: need.same_as for layer, need in enumerate(kv) if need is not None and need.same_as is not None}
    if layers is not None:
        shared = {layer: owner for layer, owner in shared.items() if layer in layers}
        for layer, owner in shared.items():
            if owner not in layers:
                raise ValueError(
                    f"Layer {layer} reads the keys and values of layer {owner}, so both must be in one pipeline stage. "
                    "Set VLLM_PP_LAYER_PARTITION so that they are, or pipeline_parallel_size=1."
                )
    return places | {layer: places[owner] for layer, owner in shared.items()}


def _on(layers: Container[int] | None, group: KVGroup) -> tuple[int, ...]:
    """Those of a group's layers that a rank with `layers` has; None: all."""
    return group.layers if layers is None else tuple(layer for layer in group.layers if layer in layers)


def _need(kv: Sequence[KVNeed | None], layer: int) -> KVNeed:
    need = kv[layer]
    if need is None or need.same_as is not None or not need.tensors:
        raise ValueError(f"Layer {layer} has blocks of its own, but names no tensor in them: {need}.")
    return need


def _tensors(kv: Sequence[KVNeed | None]) -> Iterator[KVTensor]:
    return (tensor for need in kv if need is not None for tensor in need.tensors)


def _alike(groups: Sequence[KVGroup], kv: Sequence[KVNeed | None]) -> bool:
    """Whether every layer of every group keeps tensors of the same shapes on blocks of tokens."""
    tensors = {_need(kv, layer).tensors for group in groups for layer in group.layers}
    return len(tensors) == 1 and all(group.kind is not KVKind.RECURRENT for group in groups)


def layout_of(
    traits: Traits,
    block_size: int,
    cache_dtype: str | torch.dtype = "auto",
    *,
    snapshots: int = 0,
    num_drafts: int = 0,
) -> KVLayout:
    """The cache that a rank's model needs, for hash units of `block_size` tokens.

    snapshots: the most recurrent states kept for prefixes beyond those of running requests; so many as fit into
    4 GiB, but eight in any case.   num_drafts: the most that one step of a request verifies.
    Layers of one group may keep tensors of any shapes. Layer j of every group lies in the same bytes, so that blocks
    of all groups are as large; groups with less per token have more tokens in a block, and what is left is padding.
    Raises ValueError for layers that no cache can be laid out for.
    """
    kv, element_bytes = traits.kv, cache_element_bytes(cache_dtype, traits.dtype)
    groups = group_layers(kv)
    states = [need for need in kv if need is not None and need.kind is KVKind.RECURRENT]  # of all stages of a pipeline
    state_size = sum(_bytes_of(tensor, 0, element_bytes) for need in states for tensor in need.tensors)

    def sizes(need: KVNeed, tokens: int) -> list[int]:
        return [_bytes_of(tensor, tokens, element_bytes) for tensor in need.tensors]

    # what has one dtype throughout needs no padding
    align = 1 if _alike(groups, kv) and len({tensor.dtype for tensor in _tensors(kv)}) < 2 else _ALIGN

    def pages(groups: Sequence[KVGroup], layers: Container[int] | None = None) -> tuple[int, ...]:
        """Bytes of a block in each memory, for these layers."""
        found = [
            [_packed(sizes(_need(kv, n), block_size * g.units), align)[1] for n in _on(layers, g)]
            for g in groups
            if _paged(g)
        ]
        return tuple(max(row) for row in itertools.zip_longest(*found, fillvalue=0))

    whole = pages(groups)
    final = [replace(g, units=_units(g, kv, whole, sizes, block_size)) if _paged(g) else g for g in groups]
    page_bytes = pages(final, traits.layers)
    places, placed = kv_places(groups, kv, traits.layers), {}
    state_bytes: list[int] = []
    for group in final:
        for turn, layer in enumerate(_on(traits.layers, group)):
            need, tokens = _need(kv, layer), block_size * group.units
            offsets, size = _packed(sizes(need, tokens), align)
            if not _paged(group):
                state_bytes.append(size)
            for index, tensor, offset in zip(places[layer].tensors, need.tensors, offsets, strict=True):
                shape = tuple(tokens if n == TOKENS else n for n in tensor.shape)
                placed[index] = CacheTensor(0 if _paged(group) else 1, turn, offset, shape, tensor.dtype)
    policy = KVPolicy(
        tuple(final),
        block_size,
        max_encoder_tokens=max((need.encoder_tokens for need in kv if need is not None), default=0),
        states_per_slot=1 + num_drafts,
        snapshots=min(snapshots, max(_LEAST_SNAPSHOTS, _SNAPSHOT_BYTES // max(1, state_size))),
    )
    tensors = tuple(placed[index] for index in sorted(placed))
    return KVLayout(policy, tensors, page_bytes, tuple(state_bytes), element_bytes)


def _paged(group: KVGroup) -> bool:
    return group.kind is not KVKind.RECURRENT


def _check(layer: int, need: KVNeed | None, kv: Sequence[KVNeed | None]) -> None:
    """Raise ValueError for a layer's need that contradicts itself or the others'."""
    if need is None:
        return
    if not isinstance(need, KVNeed):
        raise ValueError(f"Layer {layer} says that it keeps {need!r}, expected a KVNeed, or None if it keeps nothing.")
    if need.same_as is not None:
        owner = kv[need.same_as] if 0 <= need.same_as < layer else None
        if need.tensors or owner is None or owner.same_as is not None or owner.kind is not need.kind:
            raise ValueError(
                f"Layer {layer} reads the blocks of layer {need.same_as}, so it has no tensors, and that layer must "
                f"come before it and have blocks of the same kind, got {need} and {owner}."
            )
        if (need.window or 0) > (owner.window or 0):
            raise ValueError(
                f"Layer {layer} has a window of {need.window} tokens in the blocks of layer {need.same_as}, which are "
                f"given back as that layer's window of {owner.window} passes: it can be no wider."
            )
        return
    if (need.encoder_tokens > 0) != (need.kind is KVKind.CROSS):
        raise ValueError(f"Layer {layer}: cross attention, and nothing else, has encoder_tokens, got {need}.")
    if (need.window is not None) != (need.kind is KVKind.SLIDING) or (need.window is not None and need.window < 1):
        raise ValueError(
            f"Layer {layer}: a sliding KV group, and no other, has a window of at least one token, got {need}."
        )
    for tensor in _need(kv, layer).tensors:
        if any(n < 1 and n != TOKENS for n in tensor.shape):
            raise ValueError(f"Layer {layer} keeps {tensor}: every dimension must be at least 1.")
        wanted = 0 if need.kind is KVKind.RECURRENT else 1
        if tensor.shape.count(TOKENS) != wanted:
            what = "a recurrent state has no dimension of tokens" if wanted == 0 else "one dimension must be TOKENS"
            raise ValueError(f"Layer {layer} keeps {tensor} as {need.kind.value}: {what}.")
        if tensor.dtype is not None and tensor.dtype not in _CACHE_BYTES:
            raise ValueError(f"Layer {layer} keeps {tensor}: its dtype must be one of {', '.join(_CACHE_BYTES)}.")


def _bytes_of(tensor: KVTensor, tokens: int, element_bytes: int) -> int:
    """Of one block of `tokens` tokens, or of one state."""
    size = element_bytes if tensor.dtype is None else _CACHE_BYTES[tensor.dtype]
    return math.prod(tokens if n == TOKENS else n for n in tensor.shape) * size


def _packed(sizes: Sequence[int], align: int) -> tuple[list[int], int]:
    """Where each of so many bytes begins if they lie one behind the other, and where the next block does."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // align) * align
    return offsets, end


def _units(
    group: KVGroup,
    kv: Sequence[KVNeed | None],
    page_bytes: Sequence[int],
    sizes: Callable[[KVNeed, int], list[int]],
    block_size: int,
) -> int:
    """How many hash units a block of this group has room for: a power of two."""
    units = 1
    while 2 * units * block_size <= _LARGEST_BLOCK and all(
        _packed(sizes(_need(kv, layer), 2 * units * block_size), _ALIGN)[1] <= page_bytes[turn]
        for turn, layer in enumerate(group.layers)
    ):
        units *= 2
    return units


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
