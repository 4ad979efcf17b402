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
