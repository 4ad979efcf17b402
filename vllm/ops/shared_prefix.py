"""Requests whose block tables begin with the same blocks: which they are, and how the work on their common keys is cut.

In a decode step a kernel may read keys that several requests share once for all of them: it multiplies them with a tile
that holds the queries of up to `members` requests. Long prefixes are cut into parts for several programs; what a
request's parts give is merged with its own keys' result in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

ALIGN = 64  # common keys are counted in steps of this, so that every tile of keys is whole
_LEAST = 256  # keys; shorter prefixes are left to their requests
_PASS = 2  # a tile's pass over a key takes about as long as this many requests' own
_LEVELS = 8  # how deep groups within groups are looked for
_WORTH = 64 << 20  # bytes of a layer's cache that need not be read; for fewer, sharing costs as much as it saves
ITEM, ROW = 4, 4  # numbers per item and per row of a Cut


class Group(NamedTuple):
    """Rows of a batch, two or more, whose first `keys` cached tokens are the same blocks."""

    rows: np.ndarray
    keys: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """How groups are cut. members: requests a tile holds.   items: the most tiles x parts.   wanted: so many fill the
    device.
    """

    members: int
    items: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Work on shared keys, for the kernels.

    rows: [rows, 4] int32: keys that are taken care of, parts they come in, the item of the first part, place in its
        tile.
    members: [n] int32, rows of the batch, tile after tile.
    items: [items, 4] int32: first of `members`, how many, first key, end key. A tile's parts follow each other.
    """

    rows: np.ndarray
    members: np.ndarray
    items: np.ndarray


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A `Cut` on the device, and room for the parts. Items with no members are none.

    part: [items, kv_heads, tile rows, head_dim] fp32, softmax-weighted means of values; lse: without the last
        dimension, the logarithms (base 2) of the weights. A tile row is one query head of one member.
    """

    rows: Tensor
    members: Tensor
    items: Tensor
    part: Tensor
    lse: Tensor


def find_groups(table: np.ndarray, slots: np.ndarray, cached: np.ndarray, block_size: int, members: int) -> list[Group]:
    """The groups of a batch of which sharing gains most, best first.

    table: [slots, blocks] block ids.   slots: [rows].   cached: [rows] tokens in the cache.   members: requests a tile.
    """
    blocks: np.ndarray = cached // block_size
    _, inverse, counts = np.unique(table[slots, 0], return_inverse=True, return_counts=True)
    rows = np.flatnonzero((counts[inverse.reshape(-1)] > _PASS) & (blocks * block_size >= _LEAST))
    if len(rows) <= _PASS:
        return []
    width = int(blocks[rows].max())
    # what a row has not filled yet is unlike everything
    ids = np.where(np.arange(width) < blocks[rows, None], table[slots[rows], :width], -1 - rows[:, None])
    order = sorted(range(len(rows)), key=[row.tobytes() for row in ids].__getitem__)
    ids, rows = ids[order], rows[order]
    differ = ids[1:] != ids[:-1]
    same = np.where(differ.any(1), differ.argmax(1), width)
    _, found = _partition(same * block_size // ALIGN * ALIGN, 0, len(rows), members, _LEVELS)
    groups = [Group(np.sort(rows[lo:hi]).astype(np.int32), keys) for lo, hi, keys in found]
    return sorted(groups, key=lambda group: (-_gain(len(group.rows), group.keys, members), int(group.rows[0])))


def _gain(count: int, keys: int, members: int) -> int:
    """Keys that `count` requests need not read for themselves, less what reading them in tiles costs."""
    return keys * (count - _PASS * -(-count // members)) if keys >= _LEAST else 0


def _partition(same: np.ndarray, lo: int, hi: int, members: int, levels: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Sorted rows lo..hi as groups (lo, hi, keys) with the largest gain; row i has same[i] keys in common with row i +
    1.
    """
    keys = int(same[lo : hi - 1].min())
    whole = _gain(hi - lo, keys, members)
    gain, groups = 0, []
    if levels:
        cuts: np.ndarray = np.flatnonzero(same[lo : hi - 1] == keys) + lo + 1
        for a, b in pairwise([lo, *cuts.tolist(), hi]):
            if b - a > _PASS:
                more, inner = _partition(same, a, b, members, levels - 1)
                gain += more
                groups += inner
    if whole and whole >= gain:
        return whole, [(lo, hi, keys)]
    return gain, groups


def worthwhile(groups: list[Group], members: int, bytes_per_key: int) -> bool:
    """Whether sharing saves more than it costs. bytes_per_key: of one layer's keys and values, all heads."""
    return sum(_gain(len(group.rows), group.keys, members) for group in groups) * bytes_per_key > _WORTH


def cut(groups: list[Group], rows: int, tiles: Tiles) -> Cut:
    """Cut the groups, as many of them as there are items for, into about `tiles.wanted` equal items."""
    per_row: np.ndarray = np.zeros((rows, ROW), np.int32)
    members: list[int] = []
    items: list[tuple[int, int, int, int]] = []
    work = sum(group.keys * -(-len(group.rows) // tiles.members) for group in groups)
    length = max(_LEAST, _aligned(-(-work // tiles.wanted)))
    for group in groups:
        parts = -(-group.keys // length)
        each = _aligned(-(-group.keys // parts))
        parts = -(-group.keys // each)
        if len(items) + parts * -(-len(group.rows) // tiles.members) > tiles.items:
            continue
        for first in range(0, len(group.rows), tiles.members):
            tile = group.rows[first : first + tiles.members]
            per_row[tile] = [group.keys, parts, len(items), 0]
            per_row[tile, 3] = np.arange(len(tile))
            items += [
                (len(members), len(tile), lo, min(lo + each, group.keys)) for lo in range(0, group.keys, each)
            ]  # fmt: skip
            members += tile.tolist()
    return Cut(per_row, np.array(members, np.int32), np.array(items, np.int32).reshape(-1, ITEM))


def _aligned(keys: int) -> int:
    return -(-keys // ALIGN) * ALIGN
