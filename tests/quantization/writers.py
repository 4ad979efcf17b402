"""Independent writers of quantized weights, from the published layouts: (tensors by leaf, the numbers they stand for).

They pack value by value in numpy, so that they share nothing with the readers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def groups_of(weight: Tensor, bits: int, group: int, symmetric: bool, index: np.ndarray) -> tuple[np.ndarray, ...]:
    """(codes [n, k], scales fp16 [n, groups], zeros [n, groups]) of a weight whose input j is in group index[j]."""
    w = weight.numpy().astype(np.float64)
    count, top = int(index.max()) + 1, 2**bits - 1
    scales, zeros = np.zeros((len(w), count), np.float16), np.zeros((len(w), count), np.int64)
    codes = np.zeros(w.shape, np.int64)
    for g in range(count):
        columns = w[:, index == g]
        if symmetric:
            scale, zero = 2 * np.abs(columns).max(1) / top, np.full(len(w), 2 ** (bits - 1))
        else:
            low, high = np.minimum(columns.min(1), 0), np.maximum(columns.max(1), 0)
            scale = (high - low) / top
            zero = np.clip(np.round(-low / scale), 1, top).astype(np.int64)  # version 1 cannot store 0
        scales[:, g] = scale
        zeros[:, g] = zero
        codes[:, index == g] = np.clip(np.round(columns / scales[:, g, None]) + zero[:, None], 0, top)
    return codes, scales, zeros


def numbers(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, index: np.ndarray) -> Tensor:
    return torch.from_numpy((codes - zeros[:, index]) * scales.astype(np.float64)[:, index]).float()


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """[rows, count] -> int32 [rows, count * bits / 32]: one stream of bits, lowest first."""
    out = np.zeros((values.shape[0], values.shape[1] * bits // 32), np.uint64)
    for j in range(values.shape[1]):
        for b in range(bits):
            place = j * bits + b
            out[:, place // 32] |= ((values[:, j].astype(np.uint64) >> np.uint64(b)) & np.uint64(1)) << np.uint64(
                place % 32
            )
    return out.astype(np.uint32).view(np.int32)


def gptq(
    weight: Tensor, bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False, version: int = 1
) -> Written:
    n, k = weight.shape
    size = k if group == -1 else group
    index = np.arange(k) // size
    if act_order:
        index = np.random.default_rng(k + n).permutation(index)
    codes, scales, zeros = groups_of(weight, bits, group, symmetric, index)
    tensors = {
        "qweight": words(codes, bits).T,
        "qzeros": words((zeros - (2 - version)).T, bits),
        "scales": scales.T,
        "g_idx": index.astype(np.int32),
    }
    return _tensors(tensors), numbers(codes, scales, zeros, index)


def awq(weight: Tensor, group: int = 32, version: str = "gemm") -> Written:
    n, k = weight.shape
    index = np.arange(k) // group
    codes, scales, zeros = groups_of(weight, 4, group, False, index)
    value = numbers(codes, scales, zeros, index)
    if version == "gemm":

        def columns(values: np.ndarray) -> np.ndarray:  # [rows, n] -> [rows, n / 8]
            out = np.zeros((len(values), values.shape[1] // 8), np.uint32)
            for nibble, column in enumerate(AWQ_ORDER):
                out |= values[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
            return out.view(np.int32)

        tensors = {"qweight": columns(codes.T), "qzeros": columns(zeros.T), "scales": scales.T}
        return _tensors(tensors), value
    padded = -(-k // group // 8)
    padded = -(-padded // {64: 2, 32: 4}.get(group, 1)) * {64: 2, 32: 4}.get(group, 1)
    wide_scales = np.zeros((n, 8 * padded), np.float16)
    wide_scales[:, : scales.shape[1]] = scales
    wide_zeros = np.zeros((n, 8 * padded), np.int64)
    wide_zeros[:, : scales.shape[1]] = zeros
    if version == "gemv":
        tensors = {"qweight": words(codes, 4), "qzeros": words(wide_zeros, 4), "scales": wide_scales}
        return _tensors(tensors), value
    swapped = codes.reshape(n, k // 32, 4, 4, 2).transpose(0, 1, 3, 2, 4).reshape(n, k // 8, 8)
    ordered = swapped[..., list(AWQ_ORDER)].reshape(n // 4, 4, k // 64, 64).transpose(0, 2, 1, 3).reshape(n // 4, k, 4)
    packed = sum(ordered[..., i].astype(np.uint16) << np.uint16(4 * i) for i in range(4))
    tensors = {
        "qweight": packed.view(np.int16),
        "scales": wide_scales.T,
        "qzeros": (-wide_scales * wide_zeros).astype(np.float16).T,
    }
    rounded = (-wide_scales * wide_zeros).astype(np.float16)[:, : scales.shape[1]].astype(np.float64)
    value = codes * scales.astype(np.float64)[:, index] + rounded[:, index]
    return _tensors(tensors), torch.from_numpy(value).float()


def marlin(weight: Tensor, group: int = 128) -> Written:
    """From the loops of the published packer: lane by lane of a warp."""
    n, k = weight.shape
    size = k if group == -1 else group
    index = np.arange(k) // size
    codes, scales, zeros = groups_of(weight, 4, group, True, index)
    tiles = codes.T.reshape(k // 16, 16, n // 16, 16).transpose(0, 2, 1, 3).reshape(k // 16, n * 16)
    places = []
    for lane in range(32):
        first = []
        column = lane // 4
        for block in (0, 1):
            for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1):
                first.append(16 * row + column + 8 * block)
        for tile in range(4):
            places.extend([place + 256 * tile for place in first])
    order = np.array(places).reshape(-1, 8)[:, list(AWQ_ORDER)].ravel()
    permuted = tiles.reshape(-1, 1024)[:, order].reshape(k // 16, n * 16)
    packed = np.zeros((k // 16, n * 2), np.uint32)
    for i in range(8):
        packed |= permuted[:, i::8].astype(np.uint32) << np.uint32(4 * i)
    if size < k:
        scale_places = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        scale_places = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    stored = scales.T.reshape(-1, len(scale_places))[:, scale_places].reshape(-1, n)
    tensors = {"B": packed.view(np.int32), "s": stored, "workspace": np.zeros(n // 128 * 16 + 1, np.int32)}
    return _tensors(tensors), numbers(codes, scales, zeros, index)


def tiles_of(codes: np.ndarray) -> np.ndarray:
    """Codes [n, k] as rows of 16 x 16 tiles, [k / 16, n * 16]."""
    n, k = codes.shape
    return codes.T.reshape(k // 16, 16, n // 16, 16).transpose(0, 2, 1, 3).reshape(k // 16, n * 16)


def kept_of_four(codes: np.ndarray, zero: int) -> np.ndarray:
    """Codes of which two of each four inputs stay, the largest."""
    size = np.abs(codes - zero).reshape(len(codes), -1, 4)
    rank = np.argsort(np.argsort(-size, -1, kind="stable"), -1, kind="stable")
    return np.where(rank.reshape(codes.shape) < 2, codes, zero)


def marlin_24(
    weight: Tensor, bits: int = 4, group: int = 128, names: tuple[str, str, str] = ("B_24", "B_meta", "s")
) -> Written:
    """From the published packer: lane by lane of a warp, and CUTLASS's loops for the places that are kept."""
    n, k = weight.shape
    size = k if group == -1 else group
    index = np.arange(k) // size
    codes, scales, zeros = groups_of(weight, bits, group if group > 0 else k, True, index)
    codes = kept_of_four(codes, 2 ** (bits - 1))
    half, words_of = np.zeros((n, k // 2), np.int64), np.zeros((n, k // 16), np.int64)
    for row in range(n):
        for quad in range(k // 4):
            four = codes[row, 4 * quad : 4 * quad + 4] - 2 ** (bits - 1)
            places = [i for i in range(4) if four[i]]
            places = sorted((places + [i for i in range(4) if i not in places])[:2])
            half[row, 2 * quad : 2 * quad + 2] = codes[row, [4 * quad + i for i in places]]
            words_of[row, quad // 4] |= (places[0] | places[1] << 2) << 4 * (quad % 4)
    meta = np.zeros(n * (k // 16), np.uint16)
    for row in range(n):
        for column in range(k // 16):
            r = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 32 % 4 // 2 * 32 + row % 64 // 8 * 4
            c = column
            if r % 2 == 0 and c % 2 == 1:
                r, c = r + 1, c - 1
            elif r % 2 == 1 and c % 2 == 0:
                r, c = r - 1, c + 1
            meta[c // 2 * n * 2 + r * 2 + c % 2] = words_of[row, column]
    order = []
    for lane in range(32):
        column = lane // 4
        first = []
        for block in (0, 1):
            for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1):
                first.append(16 * row + column // 2 * 256 + 8 * (column % 2) + 4 * block)
        for step in range(4):
            order.extend(place + step for place in first)
    interleave = list(AWQ_ORDER) if bits == 4 else [0, 2, 1, 3]
    permuted_order = np.array(order).reshape(-1, len(interleave))[:, interleave].ravel()
    permuted = tiles_of(half).reshape(-1, 1024)[:, permuted_order].reshape(k // 32, n * 16)
    stored = scales.T
    if size < k:
        places = [8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]
        stored = stored.reshape(-1, 64)[:, places].reshape(-1, n)
    tensors = {names[0]: words(permuted, bits), names[1]: meta.view(np.int16).reshape(k // 32, 2 * n), names[2]: stored}
    if names[0] == "B_24":
        tensors["workspace"] = np.zeros(n // 128 * 64 + 1, np.int32)
    return _tensors(tensors), numbers(codes, scales, zeros, index)


def qqq(weight: Tensor, group: int = -1) -> Written:
    """From the published packer: Marlin's, with four neighbouring inputs a lane."""
    n, k = weight.shape
    group = -1 if group == k else group
    w = weight.numpy().astype(np.float64)
    interleave = [4, 0, 5, 1, 6, 2, 7, 3] if group == -1 else list(AWQ_ORDER)
    order = []
    for lane in range(32):
        first = [16 * (4 * (lane % 4) + row) + lane // 4 + 8 * block for block in (0, 1) for row in range(4)]
        for tile in range(4):
            order.extend(place + 256 * tile for place in first)
    order = np.array(order).reshape(-1, 8)[:, interleave].ravel()
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    if group == -1:
        scale = (np.abs(w).max(1) / 7).astype(np.float32)
        codes = np.clip(np.round(w / scale[:, None]), -7, 7).astype(np.int64)
        value = codes * scale[:, None].astype(np.float64)
        channel, parts = scale / 16, np.zeros(0, np.float16)
        codes = codes & 15
    else:
        channel = (np.abs(w).max(1) / 127).astype(np.float32)
        grouped = (2 * np.abs(w).reshape(n, -1, group).max(2) / 15 / channel[:, None]).astype(np.float16)
        scale = np.repeat(grouped.astype(np.float64) * channel[:, None], group, 1)
        codes = np.clip(np.round(w / scale) + 8, 0, 15).astype(np.int64)
        steps = (codes - 8) * np.repeat(grouped.astype(np.float64), group, 1)
        value = np.clip(np.round(steps), -128, 127) * channel[:, None]
        parts = grouped.T.reshape(-1, 64)[:, [i + 8 * j for i in range(8) for j in range(8)]].reshape(-1, n)
    permuted = tiles_of(codes).reshape(-1, 1024)[:, order].reshape(k // 16, n * 16)
    tensors = {"B": words(permuted, 4), "s_channel": channel.reshape(-1, 32)[:, single].reshape(1, n), "s_group": parts}
    return _tensors(tensors), torch.from_numpy(value).float()


def sparse(weight: Tensor, kind: str = "plain", every_four: bool = True) -> Written:
    """compressed-tensors without zeros: of plain weights, or of 8-bit ones with a scale for each output."""
    n, k = weight.shape
    if every_four:
        w = kept_of_four(weight.numpy(), 0)
    else:
        w = np.where(np.random.default_rng(n).random((n, k)) < 0.6, weight.numpy(), 0)
    keep = w != 0
    dense = torch.from_numpy(w)
    scale = dense.abs().amax(1, keepdim=True) / {"int8": 127, "fp8": 448, "plain": 1}[kind]
    leaves = {"plain": {}, "int8": {"weight_scale": scale}, "fp8": {"weight_scale": scale}}[kind]
    if kind == "plain":
        codes, value = dense, dense
    elif kind == "int8":
        codes = (dense / scale).round().to(torch.int8)
        value = codes.float() * scale
    else:
        codes = (dense / scale).to(torch.float8_e4m3fn)
        value = codes.float() * scale
    flat = codes.flatten().view(torch.uint8 if kind == "fp8" else codes.dtype)[torch.from_numpy(keep.ravel())]
    flat = flat.view(codes.dtype)
    mask = np.packbits(keep, axis=-1, bitorder="little")
    tensors = {
        "compressed": flat.view(n, -1) if every_four else flat,
        "bitmask": torch.from_numpy(mask),
        "shape": torch.tensor([[n], [k]]),
    }
    if not every_four:
        tensors["row_offsets"] = torch.from_numpy(np.cumsum(keep.sum(1)) - keep.sum(1))
    return {**tensors, **leaves}, value


def fp8(weight: Tensor, scales: str = "tensor", static: bool = False, leaf: str = "weight_scale") -> Written:
    n, k = weight.shape
    if scales == "block":
        rows, columns = -(-n // 128), -(-k // 128)
        scale = (
            torch.stack(
                [
                    torch.stack(
                        [weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].abs().max() for j in range(columns)]
                    )
                    for i in range(rows)
                ]
            )
            / 448
        )
        spread = torch.stack([scale[i // 128] for i in range(n)])
        spread = torch.stack([spread[:, j // 128] for j in range(k)], 1)
    elif scales == "channel":
        scale = weight.abs().amax(1, keepdim=True) / 448
        spread = scale.expand(n, k)
    else:
        scale = weight.abs().max() / 448
        spread = scale.expand(n, k)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, leaf: scale.clone()}
    if static:
        tensors["input_scale"] = torch.tensor(0.02)
    return tensors, codes.float() * spread


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
