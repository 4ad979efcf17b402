"""Triton products of a mixture of experts whose weights are 4 or 8 bits: grouped products of sorted rows, and the two
launches of one row of a decode step. Weights are laid out as in `packed_linear`, one expert behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.quantized_weights import GroupedWeight
from vllm.ops.triton.activation import KINDS, gated
from vllm.ops.triton.decode_parts import finish_rows, has_warp_roles, inverse_rms, leave_share, take_shares
from vllm.ops.triton.packed_linear import (
    ASSEMBLY,
    FORMATS,
    PackedWords,
    dequantize,
    packed_sums,
    packs,
    sliced_sums,
)

if TYPE_CHECKING:
    from vllm.ops.triton.moe import Sorted

_MOST_ROWS = 256  # of each expert on average; with more, the weights are written as numbers first
# Where `packed_few` and `packed_many` multiply: up to so many rows of each expert, tiles of so many. From times on an
# H200 of the shapes of Mixtral, Qwen3-30B-A3B and OLMoE (`h200_packed_experts.json`), but for the last bound, which is
# reckoned from them.
_ORDERED = (14, 16), (36, 32), (72, 64), (768, 128)
_GATHERED = 2048  # numbers of a row that a program copies
_TOGETHER = 16  # tiles of rows that go through the weights together, so that both stay in the cache
_ROW = 8  # rows of a tile of which one is real
# from times on an H200, of Mixtral's shapes
_GROUPED = 64, 4, 3  # outputs, warps, stages of up to 32 rows, of gate and up
_GROUPED_DOWN = 64, 4, 4
_GROUPED_MANY = 64, 8, 2  # of more
_RISE_WIDE = 64, 2, 2  # outputs, slices, stages of one row where there are many outputs
_RISE = 16, 4, 3
_FALL_WIDE = 64, 2, 3
_FALL = 16, 4, 3
_PROGRAMS = 256  # that the second product of one row should be cut into


class PackedStack:
    """The weights [experts, out, in] of all experts, packed alike.

    words: int16 [experts, blocks, out, W].   scales, offsets: [experts, groups, out].   dtype: of its numbers.
    """

    __slots__ = ("dtype", "format", "group", "num_bytes", "offsets", "scales", "shape", "words")

    def __init__(self, weights: Sequence[GroupedWeight], device: torch.device, dtype: torch.dtype) -> None:
        packed = PackedWords(weights[0].to(device))
        self.format, self.group, self.dtype = packed.format, packed.group, dtype
        self.shape = torch.Size((len(weights), *packed.shape))
        self.words = torch.empty(len(weights), *packed.words.shape, dtype=torch.int16, device=device)
        scales, offsets = [], []
        for expert, weight in enumerate(weights):
            if expert:
                packed = PackedWords(weight.to(device))
            self.words[expert] = packed.words
            scales.append(packed.scales)
            offsets.append(packed.offsets)
        self.scales, self.offsets = _stacked(scales), None
        if any(offset is not None for offset in offsets):
            self.offsets = _stacked([torch.zeros_like(scales[0]) if o is None else o for o in offsets])
        tensors = (self.words, self.scales, self.offsets)
        self.num_bytes = sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def device(self) -> torch.device:
        return self.words.device

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, expert: int) -> Tensor:
        """One expert's weight as numbers, [out, in]."""
        packed = object.__new__(PackedWords)
        packed.format, packed.group, packed.order, packed.num_bytes = self.format, self.group, None, 0
        packed.shape, packed.words, packed.scales = self.shape[1:], self.words[expert], self.scales[expert]
        packed.offsets = None if self.offsets is None else self.offsets[expert]
        return dequantize(packed, self.dtype)

    def numbers(self) -> Tensor:
        """All of them as numbers, [experts, out, in]."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for expert in range(len(self)):
            out[expert] = self[expert]
        return out


def _stacked(values: list[Tensor]) -> Tensor:
    wide = any(value.dtype == torch.float32 for value in values)
    return torch.stack([value.float() if wide else value for value in values])


def pack_experts(weights: Sequence[GroupedWeight | Tensor], device: torch.device, dtype: torch.dtype) -> object:
    """`vllm.ops.quantized.pack_experts` for CUDA: packed if all are of one kind that the kernels take, else numbers."""
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    first = grouped[0] if grouped else None
    alike = first is not None and len(grouped) == len(weights)
    if first is None or not alike or not all(_fits(first, weight) for weight in grouped):
        out = torch.empty(len(weights), *weights[0].shape, dtype=dtype, device=device)
        for expert, weight in enumerate(weights):
            numbers = weight.to(device)
            out[expert] = numbers if isinstance(numbers, Tensor) else numbers.dequantize(dtype)
        return out
    return PackedStack(grouped, device, dtype)


def _fits(first: GroupedWeight, weight: GroupedWeight) -> bool:
    same = (weight.codes.dtype, weight.bits, weight.group) == (first.codes.dtype, first.bits, first.group)
    return same and weight.order is None and packs(weight)


@triton.jit(do_not_specialize=["most", "together"])
def _grouped_kernel(
    x, words, scales, offsets, out, order, tiles, most, together, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, W: tl.constexpr, TOP_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    OFFSETS: tl.constexpr, PDL: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """One tile of sorted rows times one tile of its expert's outputs; names and tiles as in `moe._grouped_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCKS: tl.constexpr = (K + W * PER - 1) // (W * PER)
    ROWS: tl.constexpr = 2 * N if GATED else N
    TILES_N: tl.constexpr = (N + BN - 1) // BN
    band = tl.program_id(0) // (together * TILES_N)
    inside = tl.program_id(0) % (together * TILES_N)
    tile = band * together + inside % together
    if tile >= tl.load(tiles + 3 * most):
        return
    expert = tl.load(tiles + tile).to(tl.int64)
    row = tl.load(tiles + most + tile) + tl.arange(0, BM)
    in_m = row < tl.load(tiles + 2 * most + tile)
    n = (inside // together) * BN + tl.arange(0, BN)
    in_n = n < N
    source = row
    if GATED:
        source = tl.load(order + row, mask=in_m, other=0) // TOP_K
    acc, up = packed_sums(
        x, words + expert * (BLOCKS * ROWS * W), scales + expert * (GROUPS * ROWS), offsets + expert * (GROUPS * ROWS),
        source.to(tl.int64), in_m, n, in_n, 0, BLOCKS, N, K, GROUP, FORMAT, W, ROWS, BM, BN, STAGES, GATED, OFFSETS,
        ASSEMBLY,
    )  # fmt: skip
    dtype = out.dtype.element_ty
    y = acc.to(dtype)
    if GATED:
        y = gated(y, up.to(dtype), 0.0, KIND, False)
    tl.store(out + row[None, :].to(tl.int64) * N + n[:, None], y, mask=in_m[None, :] & in_n[:, None])


@triton.jit(do_not_specialize=["tiles"])
def _rise_kernel(
    x, words, scales, offsets, squares, tiles, eps, experts, out, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, W: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr,
    OFFSETS: tl.constexpr, PDL: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Grid (N / BN, choices): act(gate) * up of the row x [K], as `decode_experts._rise_kernel`."""
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCKS: tl.constexpr = (K + W * PER - 1) // (W * PER)
    choice = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    in_n = n < N
    in_m = m < 1
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(experts + choice).to(tl.int64)
    group = expert * (GROUPS * 2 * N)
    y, u = sliced_sums(
        x, words + expert * (BLOCKS * 2 * N * W), scales + group, offsets + group, m, in_m, n, in_n, 0, BLOCKS, N, K,
        GROUP, FORMAT, W, 2 * N, BM, BN, SLICES, STAGES, True, OFFSETS, ASSEMBLY,
    )  # fmt: skip
    if NORM:
        factor = inverse_rms(squares, m, in_m, tiles, K, eps)[None, :]
        y *= factor
        u *= factor
    dtype = out.dtype.element_ty
    at = choice * N + n[:, None] + m[None, :]
    tl.store(out + at, gated(y.to(dtype), u.to(dtype), 0.0, KIND, False), mask=in_m[None, :] & in_n[:, None])


@triton.jit
def _fall_kernel(
    x, words, scales, offsets, experts, weights, part, arrived, out, h, next_weight, scaled, squares_out,
    scale: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr, W: tl.constexpr, TOP_K: tl.constexpr, SHARES: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr, NEXT: tl.constexpr,
    OFFSETS: tl.constexpr, PDL: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Grid (N / BN, TOP_K * SHARES): a share of one choice's inputs x [TOP_K * K]; the last to arrive adds them up."""
    PER: tl.constexpr = 4 if FORMAT == 0 else 2
    BLOCKS: tl.constexpr = (K + W * PER - 1) // (W * PER)
    SHARE: tl.constexpr = (BLOCKS + SHARES * SLICES - 1) // (SHARES * SLICES) * SLICES
    SPLIT: tl.constexpr = TOP_K * SHARES
    pid = tl.program_id(0)
    share = tl.program_id(1)
    choice = share // SHARES
    first = share % SHARES * SHARE
    n = pid * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    in_n = n < N
    in_m = m < 1
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(experts + choice).to(tl.int64)
    y, u = sliced_sums(
        x + choice * K, words + expert * (BLOCKS * N * W), scales + expert * (GROUPS * N),
        offsets + expert * (GROUPS * N), m, in_m, n, in_n, first, tl.minimum(first + SHARE, BLOCKS), N, K, GROUP,
        FORMAT, W, N, BM, BN, SLICES, STAGES, False, OFFSETS, ASSEMBLY,
    )  # fmt: skip
    y *= tl.load(weights + choice)
    keep = in_m[None, :] & in_n[:, None]
    at = m[None, :] * N + n[:, None]
    if SPLIT > 1:
        if not leave_share(y, u, part, arrived + pid, at, keep, share, BM * N, SPLIT, False):
            return
        y, u = take_shares(y, u, part, at, keep, BM * N, SPLIT, False)
    finish_rows(
        y, y, m, n, in_m, in_n, pid, out, out, squares_out, 1, 0.0, h, next_weight, scaled, squares_out, out, out, out,
        scale, N, N, BN, MODE, -1, False, NEXT, False,
    )  # fmt: skip


def tile_rows(pairs: int, gate_up: PackedStack, down: PackedStack, dtype: torch.dtype) -> int:
    """Rows of a tile of the grouped products; 0: the weights should be numbers."""
    each = pairs / len(gate_up)
    if _takes_ordered(gate_up, down, dtype):
        return next((rows for most, rows in _ORDERED if each <= most), 0)
    return 0 if each > _MOST_ROWS else 16 if each <= 16 else 32 if each <= 32 else 64


def _takes_ordered(gate_up: PackedStack, down: PackedStack, dtype: torch.dtype) -> bool:
    """Whether kernels for Hopper GPUs multiply, which want the rows in the order of their experts."""
    if not has_warp_roles():
        return False
    from vllm.ops.triton import packed_many  # whose language not every Triton has

    return packed_many.takes_experts(gate_up, down, dtype)


@triton.jit(do_not_specialize=["most"])
def _gather_kernel(
    x, order, tiles, out, most, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid (pairs, blocks): the rows of x [tokens, K] in sorted order; pairs of other ranks' experts have no row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # what comes behind reads `tiles` before it waits
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(tiles + 3 * most) - 1
    if row >= tl.load(tiles + 2 * most + last, mask=last >= 0, other=0):
        return
    token = tl.load(order + row).to(tl.int64) // TOP_K
    tl.store(out + row * K + k, tl.load(x + token * K + k, mask=k < K), mask=k < K)


def grouped_mlp(
    x: Tensor, s: Sorted, rows: int, gate_up: PackedStack, down: PackedStack, top_k: int, act: str, pdl: bool
) -> Tensor:
    """[pairs, hidden]: the outputs of the experts, in sorted order. rows: of a tile, by which `s` was sorted."""
    pairs, inputs = len(x) * top_k, x.shape[1]
    h, outputs = x.new_empty(pairs, down.shape[2]), x.new_empty(pairs, down.shape[1])
    if _takes_ordered(gate_up, down, x.dtype):
        from vllm.ops.triton import packed_few, packed_many

        multiply = packed_many.experts_product if rows > packed_few.MOST_ROWS else packed_few.experts_product
        ordered = x.new_empty(pairs, inputs)
        _gather_kernel[(pairs, triton.cdiv(inputs, _GATHERED))](
            x, s.order, s.tiles, ordered, s.most, K=inputs, TOP_K=top_k, BLOCK=_GATHERED, PDL=pdl, num_warps=4,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
        multiply(ordered, gate_up, s, rows, h, act, pdl)
        multiply(h, down, s, rows, outputs, None, pdl)
        return outputs
    _grouped(x, gate_up, s, h, rows, top_k, KINDS[act], pdl)
    _grouped(h, down, s, outputs, rows, top_k, -1, pdl)
    return outputs


def _grouped(x: Tensor, w: PackedStack, s: Sorted, out: Tensor, rows: int, top_k: int, kind: int, pdl: bool) -> None:
    together = min(_TOGETHER, triton.next_power_of_2(s.most))
    n = out.shape[1]
    width, warps, stages = _GROUPED_MANY if rows > 32 else _GROUPED if kind >= 0 else _GROUPED_DOWN
    _grouped_kernel[(triton.cdiv(s.most, together) * together * triton.cdiv(n, width),)](
        x, w.words, w.scales, w.scales if w.offsets is None else w.offsets, out, s.order, s.tiles, s.most, together,
        N=n, TOP_K=top_k, BM=rows, BN=width, STAGES=stages, GATED=kind >= 0, KIND=max(kind, 0), PDL=pdl,
        num_warps=warps, **_constants(w, x.dtype), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _constants(w: PackedStack, dtype: torch.dtype) -> dict[str, object]:
    return {
        "K": w.shape[2],
        "GROUP": w.group,
        "GROUPS": w.scales.shape[1],
        "FORMAT": FORMATS[w.format],
        "W": w.words.shape[3],
        "OFFSETS": w.offsets is not None,
        "ASSEMBLY": ASSEMBLY and dtype != torch.float32,
    }


def rise(
    x: Tensor, norm: tuple[Tensor, int, float] | None, w: PackedStack, act: str, experts: Tensor, out: Tensor, pdl: bool
) -> None:
    """The first products of one row's chosen experts. norm: squares, their parts and eps, of a row behind a norm.

    experts: [top_k] int32.   out: [top_k * inter].
    """
    if ASSEMBLY and x.dtype != torch.float32 and has_warp_roles():
        from vllm.ops.triton import packed_chosen  # whose language not every Triton has

        if packed_chosen.takes_chosen(w, 1):
            packed_chosen.launch_chosen(x, norm, w, KINDS[act], experts, None, out, (None,) * 4, 1.0, pdl)
            return
    inter = w.shape[1] // 2
    width, slices, stages = _RISE_WIDE if inter >= 8192 else _RISE
    squares, tiles, eps = (x, 1, 0.0) if norm is None else norm
    _rise_kernel[(triton.cdiv(inter, width), len(experts))](
        x, w.words, w.scales, w.scales if w.offsets is None else w.offsets, squares, tiles, eps, experts, out,
        N=inter, BM=_ROW, BN=width, SLICES=slices, STAGES=stages, KIND=KINDS[act], NORM=norm is not None, PDL=pdl,
        num_warps=slices, **_constants(w, x.dtype), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _fall_cut(hidden: int) -> tuple[int, int, int]:
    return _FALL_WIDE if hidden >= 2048 else _FALL


def fall_tiles(hidden: int) -> int:
    """Programs that leave a part of the squares each."""
    return -(-hidden // _fall_cut(hidden)[0])


def _shares(w: PackedStack, top_k: int) -> int:
    shares, programs, blocks = 1, fall_tiles(w.shape[1]) * top_k, w.words.shape[1]
    while shares < 4 and programs * shares <= _PROGRAMS and blocks >= 16 * shares:
        shares *= 2
    return shares


def fall_room(w: PackedStack, top_k: int) -> tuple[Tensor, Tensor]:
    """(part, arrived) for `fall`."""
    size = top_k * _shares(w, top_k) * _ROW * w.shape[1]
    part = torch.empty(size, dtype=torch.float32, device=w.device)
    return part, torch.zeros(fall_tiles(w.shape[1]), dtype=torch.int32, device=w.device)


def fall(
    x: Tensor, w: PackedStack, experts: Tensor, weights: Tensor, room: tuple[Tensor, Tensor], out: Tensor | None,
    stream: tuple[Tensor, Tensor, Tensor], scale: float, next_weight: Tensor | None, pdl: bool,
) -> int:  # fmt: skip
    """The second products of one row, as `decode_experts.fall`. x: [top_k * inter].   stream: h, scaled and squares."""
    h, scaled, squares = stream
    top_k, hidden = len(experts), w.shape[1]
    if ASSEMBLY and x.dtype != torch.float32 and has_warp_roles():
        from vllm.ops.triton import packed_chosen  # whose language not every Triton has

        if packed_chosen.takes_chosen(w, top_k):
            behind = (h, None, None, None) if next_weight is None else (h, next_weight, scaled, squares)
            return packed_chosen.launch_chosen(x, None, w, -1, experts, weights, out, behind, scale, pdl)
    width, slices, stages = _fall_cut(hidden)
    _fall_kernel[(fall_tiles(hidden), top_k * _shares(w, top_k))](
        x, w.words, w.scales, w.scales if w.offsets is None else w.offsets, experts, weights, *room,
        h if out is None else out, h, h if next_weight is None else next_weight, scaled, squares, scale,
        N=hidden, TOP_K=top_k, SHARES=_shares(w, top_k), BM=_ROW, BN=width, SLICES=slices, STAGES=stages,
        MODE=2 if out is None else 0, NEXT=next_weight is not None, PDL=pdl, num_warps=slices,
        **_constants(w, x.dtype), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return fall_tiles(hidden)
