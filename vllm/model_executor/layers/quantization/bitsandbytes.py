"""bitsandbytes: 4-bit codes of a table (nf4, fp4) in blocks of the flattened weight, or 8-bit integers by rows.

4-bit: `weight` uint8, two codes to a byte, the first in the high half; `weight.absmax`, one scale for each block (8-bit
with `weight.nested_absmax` and `weight.nested_quant_map` if they were quantized too); `weight.quant_map`, the table;
`weight.quant_state.bitsandbytes__nf4` or `__fp4`, JSON.   8-bit: `weight` int8 [out, in], `SCB` [out], row maxima.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import (
    Format,
    Reader,
    Tensors,
    is_plain,
    names_of,
    plain_weight,
    setting,
    take,
)
from vllm.model_executor.layers.quantization.packing import nibbles
from vllm.ops.quantized_weights import GroupedWeight, round_to_groups

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_HALF = (0.0, 0.005208333333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
FP4 = (*_FP4_HALF, *(-value for value in _FP4_HALF))
TABLES = {"nf4": NF4, "fp4": FP4}
BLOCK = 64
TARGETS = "target_modules"  # of plain weights that are quantized in flight, if not all are: those of a QLoRA adapter
_STATE_BYTES = 1 << 16
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in TABLES)


def round_to_table(weight: Tensor, kind: str, block: int = BLOCK) -> GroupedWeight:
    """A weight [out, in] in 4 bits: each block of the flattened weight is divided by its largest magnitude."""
    n, k = weight.shape
    table = torch.tensor(TABLES[kind], device=weight.device)
    flat = torch.nn.functional.pad(weight.float().flatten(), (0, -n * k % block)).view(-1, block)
    absmax = flat.abs().amax(1)
    values, places = table.sort()
    middles = (values[1:] + values[:-1]) / 2
    scaled = flat / absmax.clamp(min=1e-30)[:, None]
    codes = places[torch.bucketize(scaled, middles)].to(torch.uint8).flatten()[: n * k]
    return _of_blocks(codes.view(n, k), absmax, block, table)


def _of_blocks(codes: Tensor, absmax: Tensor, block: int, table: Tensor) -> GroupedWeight:
    """Blocks of the flattened weight as groups of each row, smaller where a block goes over the end of a row."""
    n, k = codes.shape
    group = math.gcd(block, k)
    scales = absmax.repeat_interleave(block // group)[: n * k // group].view(n, k // group)
    return GroupedWeight(codes, scales.contiguous(), group, 4, table=table)


@dataclass(frozen=True)
class FourBit(Reader):
    """kind: the table of weights quantized here."""

    kind: str
    reads_plain: bool

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight | Tensor:
        if is_plain(tensors):
            weight = plain_weight(tensors, n, k)
            return round_to_table(weight, self.kind) if self.reads_plain else weight
        state = _state(tensors)
        if state.get("shape") != [n, k]:
            raise ValueError(f"the quantization state says the shape {state.get('shape')}, expected {[n, k]}")
        block = setting(state, "blocksize", int)
        if not (1 <= block <= 1 << 16 and block & (block - 1) == 0):
            raise ValueError(f"the quantization state says blocks of {block}, expected a power of two")
        packed = tensors["weight"].flatten().view(torch.uint8) if "weight" in tensors else torch.empty(0)
        if packed.numel() != -(-n * k // 2):
            raise ValueError(f"'weight' has {packed.numel()} bytes, expected {-(-n * k // 2)}")
        table = take(tensors, "weight.quant_map", (16,), torch.float32)
        blocks = -(-n * k // block)
        if "weight.nested_absmax" in tensors:
            nested_block = setting(state, "nested_blocksize", int)
            if nested_block < 1:
                raise ValueError(f"the quantization state says nested blocks of {nested_block}")
            codes = take(tensors, "weight.absmax", (blocks,), torch.uint8)
            nested_table = take(tensors, "weight.nested_quant_map", (256,), torch.float32)
            nested = take(tensors, "weight.nested_absmax", (-(-blocks // nested_block),), torch.float32)
            spread = nested.repeat_interleave(min(nested_block, blocks))[:blocks]
            absmax = nested_table[codes.long()] * spread + setting(state, "nested_offset", float)
        else:
            absmax = take(tensors, "weight.absmax", (blocks,), torch.float32)
        codes = nibbles(packed, high_first=True)[: n * k].view(n, k)
        return _of_blocks(codes, absmax, block, table)

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_table(weight, self.kind)


def _state(tensors: Tensors) -> dict[str, Any]:
    """The JSON that describes a 4-bit weight."""
    leaf = next((leaf for leaf in _STATES if leaf in tensors), None)
    if leaf is None:
        there = ", ".join(sorted(tensors))
        raise ValueError(f"the tensor {_STATES[0]!r} is missing; there is {there}")
    raw = tensors[leaf]
    if raw.dtype != torch.uint8 or raw.dim() != 1 or len(raw) > _STATE_BYTES:
        raise ValueError(f"{leaf!r} is not a text of at most {_STATE_BYTES} bytes")
    try:
        state = json.loads(bytes(raw.tolist()))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"{leaf!r} is not valid JSON") from None
    if not isinstance(state, dict):
        raise ValueError(f"{leaf!r} is not a JSON object")
    return state


@dataclass(frozen=True)
class EightBit(Reader):
    """Signed codes with a scale for each output."""

    reads_plain: bool

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight | Tensor:
        if is_plain(tensors):
            weight = plain_weight(tensors, n, k)
            return round_to_groups(weight, 8, -1) if self.reads_plain else weight
        if "weight_format" in tensors and bool(tensors["weight_format"].any()):
            raise ValueError("'weight_format' is not 0: the codes are in an order for older GPUs")
        codes = take(tensors, "weight", (n, k), torch.int8)
        scales = take(tensors, "SCB", (n,), torch.float32, torch.float16)
        return GroupedWeight(
            (codes.to(torch.int16) + 128).to(torch.uint8), (scales.float() / 127)[:, None].contiguous(), k, 8, 128
        )


class BitsAndBytes(Format):
    """Checkpoints, and plain weights in flight: nf4, or what the settings say.

    `llm_int8_skip_modules` is not read: releases of transformers understand it differently, and tensors tell.
    """

    name = "bitsandbytes"
    leaves = (
        "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *_STATES, "SCB",
        "weight_format",
    )  # fmt: skip

    def __init__(self, settings: Mapping[str, Any]) -> None:
        kind = setting(
            settings, "bnb_4bit_quant_type", str, "nf4" if settings.keys() <= {TARGETS} else "fp4", among=tuple(TABLES)
        )
        eight = setting(settings, "load_in_8bit", bool, False)
        reads_plain = settings.keys() <= {TARGETS}
        self._reader: Reader = EightBit(reads_plain) if eight else FourBit(kind, reads_plain)
        self._only = names_of(settings, TARGETS)

    def reader(self, names: Sequence[str]) -> Reader | None:
        if self._only and not any(name == only or name.endswith(f".{only}") for only in self._only for name in names):
            return None
        return self._reader
