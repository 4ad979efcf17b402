"""Marlin on disk: symmetric 4-bit codes in the order in which a GPU kernel's threads read them.

Layout (IST-DASLab/marlin): `B` int32 [in / 16, 2 * out]: tiles of 16 x 16, four of them permuted together; `s` float16
[in / group or 1, out], permuted too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import Reader, Tensors, take
from vllm.model_executor.layers.quantization.packing import unpack
from vllm.ops.quantized_weights import GroupedWeight, round_to_groups


@dataclass(frozen=True)
class MarlinReader(Reader):
    """group: -1 for one of all inputs."""

    group: int

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        if k % 16 or n % 64:
            raise ValueError(f"a weight of {n} x {k} cannot be in the Marlin layout")
        packed = take(tensors, "B", (k // 16, 2 * n), torch.int32)
        codes = torch.empty(k // 16, n * 16 // 1024, 1024, dtype=torch.uint8)
        codes[..., code_order()] = unpack(packed, 4, 1).view(k // 16, -1, 1024)
        # [row block, column block, 16, 16] -> [in, out]
        codes = codes.view(k // 16, n // 16, 16, 16).transpose(1, 2).reshape(k, n)
        group = k if self.group == -1 else self.group
        groups = -(-k // group)
        order = scale_order(single=groups == 1)
        stored = take(tensors, "s", (groups, n), torch.float16).float().view(groups, -1, len(order))
        scales = torch.empty_like(stored)
        scales[..., order] = stored
        return GroupedWeight(codes.t().contiguous(), scales.view(groups, n).t().contiguous(), min(group, k), 4, zero=8)

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_groups(weight, 4, self.group)


@cache
def code_order() -> Tensor:
    """Which of the 1,024 codes of four tiles, in row order tile after tile, stands at each place."""
    places = []
    for lane in range(32):
        for tile in range(4):
            eight = []
            for half in (0, 1):
                column = lane // 4 + 8 * half
                for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4) + 8, 2 * (lane % 4) + 9):
                    eight.append(256 * tile + 16 * row + column)
            places += [eight[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    return torch.tensor(places)


@cache
def scale_order(*, single: bool) -> Tensor:
    """Which column's scale stands at each place of 64, or of 32 where there is one scale for all inputs."""
    if single:
        return torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    return torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
