"""The block formats of GGUF, one table: how the bytes of blocks become codes and scales.

Layouts: ggml-common.h of llama.cpp; their bytes are little endian. `raw` below is uint8 [blocks, bytes of a block].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from vllm.gguf.container import TYPES
from vllm.ops.quantized_weights import GroupedWeight

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Blocks:
    """codes: [blocks, values] uint8; scales, offsets: [blocks, values / group] fp32; as `GroupedWeight` has them."""

    codes: Tensor
    scales: Tensor
    bits: Literal[4, 8]
    zero: int = 0
    offsets: Tensor | None = None
    table: tuple[float, ...] | None = None


def _half(raw: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at`, [blocks, 1] fp32."""
    return raw[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _word(raw: Tensor, at: int, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """`count` little-endian integers from byte `at` on, [blocks, count] int64, unsigned."""
    size = dtype.itemsize
    values = raw[:, at : at + count * size].clone(memory_format=torch.contiguous_format).view(dtype).long()
    return values & ((1 << 8 * size) - 1)


def _halves(packed: Tensor) -> Tensor:
    """[blocks, 16 n] bytes -> [blocks, 32 n] codes: of each 16 bytes the low halves, then the high ones."""
    runs = packed.unflatten(1, (-1, 16))
    return torch.cat([runs & 15, runs >> 4], 2).flatten(1)


def _bits(values: Tensor, width: int, count: int) -> Tensor:
    """[blocks, n] -> [blocks, count, n]: the fields of `width` bits from the lowest on."""
    return torch.stack([(values >> width * i) & (2**width - 1) for i in range(count)], 1)


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks(_halves(raw[:, 2:]), _half(raw, 0), 4, 8)


def _q4_1(raw: Tensor) -> Blocks:
    return Blocks(_halves(raw[:, 4:]), _half(raw, 0), 4, offsets=_half(raw, 2))


def _fifth(raw: Tensor, at: int) -> Tensor:
    """Bit l of a 32-bit word for each of 32 values."""
    return (_word(raw, at, 1) >> torch.arange(32, device=raw.device)).to(torch.uint8) & 1


def _q5_0(raw: Tensor) -> Blocks:
    return Blocks(_halves(raw[:, 6:]) | _fifth(raw, 2) << 4, _half(raw, 0), 8, 16)


def _q5_1(raw: Tensor) -> Blocks:
    return Blocks(_halves(raw[:, 8:]) | _fifth(raw, 4) << 4, _half(raw, 0), 8, offsets=_half(raw, 2))


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks(raw[:, 2:] ^ 128, _half(raw, 0), 8, 128)


def _two_bits(packed: Tensor) -> Tensor:
    """[blocks, 64] -> [blocks, 256]: of each 32 bytes the lowest two bits of all, then the next."""
    return torch.cat([_bits(run, 2, 4).flatten(1) for run in packed.split(32, 1)], 1)


def _q2_k(raw: Tensor) -> Blocks:
    fields, d, dmin = raw[:, :16], _half(raw, 80), _half(raw, 82)
    return Blocks(_two_bits(raw[:, 16:80]), d * (fields & 15), 4, offsets=-dmin * (fields >> 4))


def _q3_k(raw: Tensor) -> Blocks:
    high = _bits(raw[:, :32], 1, 8).flatten(1)
    packed = raw[:, 96:108]
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    top = _bits(packed[:, 8:], 2, 4).flatten(1)
    scales = (low | top << 4).float() - 32
    return Blocks(_two_bits(raw[:, 32:96]) | high << 2, _half(raw, 108) * scales, 4, 4)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minima of 6 bits, [blocks, 8] each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([a & 63, c & 15 | (a >> 6) << 4], 1)
    minima = torch.cat([b & 63, c >> 4 | (b >> 6) << 4], 1)
    return scales.float(), minima.float()


def _nibble_runs(packed: Tensor) -> Tensor:
    """[blocks, 128] -> [blocks, 256]: of each 32 bytes the low halves, then the high ones."""
    runs = packed.unflatten(1, (-1, 32))
    return torch.cat([runs & 15, runs >> 4], 2).flatten(1)


def _q4_k(raw: Tensor) -> Blocks:
    scales, minima = _six_bit_pairs(raw[:, 4:16])
    return Blocks(_nibble_runs(raw[:, 16:]), _half(raw, 0) * scales, 4, offsets=-_half(raw, 2) * minima)


def _q5_k(raw: Tensor) -> Blocks:
    scales, minima = _six_bit_pairs(raw[:, 4:16])
    codes = _nibble_runs(raw[:, 48:]) | _bits(raw[:, 16:48], 1, 8).flatten(1) << 4
    return Blocks(codes, _half(raw, 0) * scales, 8, offsets=-_half(raw, 2) * minima)


def _q6_k(raw: Tensor) -> Blocks:
    low, high = raw[:, :128].unflatten(1, (2, 64)), raw[:, 128:192].unflatten(1, (2, 32))
    nibbles = torch.cat([low & 15, low >> 4], 2)
    tops = torch.cat([(high >> 2 * i) & 3 for i in range(4)], 2)
    scales = raw[:, 192:208].view(torch.int8).float()
    return Blocks((nibbles | tops << 4).flatten(1), _half(raw, 208) * scales, 8, 32)


def _iq4_nl(raw: Tensor) -> Blocks:
    return Blocks(_halves(raw[:, 2:]), _half(raw, 0), 4, table=IQ4_VALUES)


def _iq4_xs(raw: Tensor) -> Blocks:
    low = torch.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], 2).flatten(1)
    high = (_word(raw, 2, 1, torch.int16) >> 2 * torch.arange(8, device=raw.device)) & 3
    scales = (low | high << 4).float() - 32
    return Blocks(_halves(raw[:, 8:]), _half(raw, 0) * scales, 4, table=IQ4_VALUES)


def _mxfp4(raw: Tensor) -> Blocks:
    return Blocks(_halves(raw[:, 1:]), torch.exp2(raw[:, :1].float() - 127), 4, table=E2M1_VALUES)


def _nvfp4(raw: Tensor) -> Blocks:
    runs = raw[:, 4:].unflatten(1, (4, 8))
    codes = torch.cat([runs & 15, runs >> 4], 2).flatten(1)
    return Blocks(
        codes,
        raw[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn).float(),
        4,
        table=E2M1_VALUES,
    )


def _tq1_0(raw: Tensor) -> Blocks:
    """Base-3 digits, five to a byte."""

    def digits(packed: Tensor, count: int) -> Tensor:
        powers = [(packed.int() * 3**n & 255) * 3 >> 8 for n in range(count)]
        return torch.cat(powers, 1).to(torch.uint8)

    codes = torch.cat([digits(raw[:, :32], 5), digits(raw[:, 32:48], 5), digits(raw[:, 48:52], 4)], 1)
    return Blocks(codes, _half(raw, 52), 4, 1)


def _tq2_0(raw: Tensor) -> Blocks:
    return Blocks(_two_bits(raw[:, :64]), _half(raw, 64), 4, 1)


# ---- formats whose codes name rows of a grid ---------------------------------------------------------------------


@cache
def _grid(name: str) -> Tensor:
    """The grid of a format, [rows, 4 or 8] int16. The tables are data of the gguf package."""
    from gguf import quants  # its import reads nothing but numpy

    kind = getattr(quants, name)
    kind.init_grid()
    return torch.from_numpy(kind.grid.reshape(kind.grid_shape).astype("int16"))


@cache
def _signs() -> Tensor:
    """[128, 8]: the signs that 7 bits stand for; the eighth makes the number of minus signs even."""
    ids = torch.arange(128)
    bits = (ids[:, None] >> torch.arange(7)) & 1
    bits = torch.cat([bits, bits.sum(1, keepdim=True) % 2], 1)
    return (1 - 2 * bits).to(torch.int16)


def _signed(magnitudes: Tensor, signs: Tensor, scales: Tensor) -> Blocks:
    """Signed integers below 64 in magnitude, [blocks, ...], as codes around 64."""
    values = magnitudes.flatten(1) * signs.flatten(1)
    return Blocks((values + 64).to(torch.uint8), scales, 8, 64)


def _bit_signs(packed: Tensor) -> Tensor:
    return 1 - 2 * _bits(packed, 1, 8).transpose(1, 2).to(torch.int16)


def _iq2_xxs(raw: Tensor) -> Blocks:
    words = _word(raw, 2, 16).unflatten(1, (8, 2))
    ids = raw[:, 2:].unflatten(1, (8, 8))[..., :4].long()
    sign_ids = torch.stack([(words[..., 1] >> 7 * i) & 127 for i in range(4)], 2)
    scales = _half(raw, 0) * (0.5 + (words[..., 1] >> 28)) / 4
    return _signed(_grid("IQ2_XXS")[ids], _signs()[sign_ids], scales)


def _nibble_scales(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1).float()


def _iq2_xs(raw: Tensor) -> Blocks:
    words = _word(raw, 2, 32, torch.int16)
    scales = _half(raw, 0) * (0.5 + _nibble_scales(raw[:, 66:])) / 4
    return _signed(_grid("IQ2_XS")[words & 511], _signs()[words >> 9], scales)


def _iq2_s(raw: Tensor) -> Blocks:
    high = _bits(raw[:, 66:74], 2, 4).transpose(1, 2).flatten(1).long()
    ids = raw[:, 2:34].long() | high << 8
    scales = _half(raw, 0) * (0.5 + _nibble_scales(raw[:, 74:])) / 4
    return _signed(_grid("IQ2_S")[ids], _bit_signs(raw[:, 34:66]), scales)


def _iq3_xxs(raw: Tensor) -> Blocks:
    words = _word(raw, 66, 8)
    sign_ids = torch.stack([(words >> 7 * i) & 127 for i in range(4)], 2)
    scales = _half(raw, 0) * (0.5 + (words >> 28)) / 2
    return _signed(_grid("IQ3_XXS")[raw[:, 2:66].long()], _signs()[sign_ids], scales)


def _iq3_s(raw: Tensor) -> Blocks:
    high = _bits(raw[:, 66:74], 1, 8).transpose(1, 2).flatten(1).long()
    ids = raw[:, 2:66].long() | high << 8
    scales = _half(raw, 0) * (1 + 2 * _nibble_scales(raw[:, 106:]))
    return _signed(_grid("IQ3_S")[ids], _bit_signs(raw[:, 74:106]), scales)


def _iq1(ids: Tensor, minus: Tensor, scales: Tensor) -> Blocks:
    """Values grid + 1/8 or grid - 1/8, as eighths."""
    eighths = _grid("IQ1_S")[ids] * 8 + (1 - 2 * minus)[..., None].to(torch.int16)
    return Blocks((eighths.flatten(1) + 16).to(torch.uint8), scales / 8, 8, 16)


def _iq1_s(raw: Tensor) -> Blocks:
    words = _word(raw, 34, 8, torch.int16)
    high = torch.stack([(words >> 3 * i) & 7 for i in range(4)], 2).flatten(1)
    ids = raw[:, 2:34].long() | high << 8
    minus = (words >> 15).repeat_interleave(4, 1)
    return _iq1(ids, minus, _half(raw, 0) * (2 * ((words >> 12) & 7) + 1))


def _iq1_m(raw: Tensor) -> Blocks:
    words = _word(raw, 48, 4, torch.int16)
    d = sum((words[:, i] >> 12) << 4 * i for i in range(4))
    assert isinstance(d, Tensor)
    d = (d - ((d >> 15) << 16)).to(torch.int16).view(torch.float16).float()[:, None]
    fields = torch.stack([(words >> 3 * i) & 7 for i in range(4)], 2).flatten(1)
    high = torch.stack([raw[:, 32:48] & 15, raw[:, 32:48] >> 4], 2).flatten(1).long()
    return _iq1(raw[:, :32].long() | (high & 7) << 8, high >> 3, d * (2 * fields + 1))


_READERS: dict[str, Callable[[Tensor], Blocks]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4,
    "nvfp4": _nvfp4, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq1_s": _iq1_s, "iq1_m": _iq1_m,
}  # fmt: skip
_SIZES = {name: (values, size) for name, values, size in TYPES.values()}
BLOCK_TYPES = tuple(_READERS)
_ROWS_AT_ONCE = 1 << 22  # bytes of blocks that are read together, so that what lies between stays small


def check_blocks(kind: str, raw: Tensor, k: int) -> None:
    """Raise ValueError unless `raw`, uint8 [out, bytes of a row], is rows of k values."""
    values, size = _SIZES[kind]
    if raw.dtype != torch.uint8 or raw.dim() != 2 or k % values or raw.shape[1] != k // values * size:
        raise ValueError(f"{list(raw.shape)} bytes are not rows of {k} values of the type {kind}")


def read_blocks(kind: str, raw: Tensor, k: int) -> GroupedWeight:
    """A weight [out, k] from its rows' bytes, uint8 [out, bytes of a row]."""
    check_blocks(kind, raw, k)
    values, size = _SIZES[kind]
    n = len(raw)
    rows = max(1, _ROWS_AT_ONCE // raw.shape[1])
    parts = [_READERS[kind](piece.reshape(-1, size)) for piece in raw.split(rows)]
    first = parts[0]
    groups = first.scales.shape[1]
    offsets = None
    if first.offsets is not None:
        offsets = torch.cat([part.offsets for part in parts if part.offsets is not None]).view(n, -1)
    return GroupedWeight(
        torch.cat([part.codes for part in parts]).view(n, k),
        torch.cat([part.scales for part in parts]).view(n, -1),
        values // groups,
        first.bits,
        first.zero,
        offsets,
        None if first.table is None else torch.tensor(first.table, dtype=torch.float32),
    )
