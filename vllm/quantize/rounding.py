"""Rounding weights with regard to the inputs they meet: GPTQ, and the scales of AWQ."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_BLOCK = 128
_GRID = 20  # steps of AWQ's search
_RANGES, _LEAST_RANGE = 20, 0.7  # that are tried for a group of GPTQ's


@dataclass
class Inputs:
    """What is known about the inputs of a layer: the sum of x x^T, the sum of |x|, and over how many tokens."""

    size: int
    tokens: int = 0
    _gram: Tensor = field(init=False)
    _magnitude: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._gram, self._magnitude = torch.zeros(self.size, self.size), torch.zeros(self.size)

    def add(self, x: Tensor) -> None:
        """x: [tokens, size], on the device where sums are kept from then on."""
        x = x.float()
        self._gram, self._magnitude = self._gram.to(x.device), self._magnitude.to(x.device)
        self._gram.addmm_(x.T, x)
        self._magnitude += x.abs().sum(0)
        self.tokens += len(x)

    @property
    def gram(self) -> Tensor:
        """The sum of x x^T, in host memory."""
        return self._gram.cpu()

    @property
    def magnitude(self) -> Tensor:
        """The sum of |x|, in host memory."""
        return self._magnitude.cpu()


@dataclass(frozen=True)
class Rounded:
    """codes: [out, in] uint8; scales, zeros: [out, groups], scales as fp16 holds them; index: each input's group."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    index: Tensor
    bits: int

    def numbers(self) -> Tensor:
        """What the codes stand for, [out, in] fp32."""
        return (self.codes.float() - self.zeros[:, self.index]) * self.scales[:, self.index]


def output_error(weight: Tensor, numbers: Tensor, inputs: Inputs) -> float:
    """How far a layer's outputs are from the original's, relative to their size (root mean square)."""
    difference = numbers - weight
    wrong = ((difference @ inputs.gram) * difference).sum()
    size = ((weight @ inputs.gram) * weight).sum()
    return float((wrong / size.clamp(min=1e-30)).clamp(min=0).sqrt())


def group_parameters(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """(scales, zeros) of one group, [out]: the range from its least to its largest number, 0 included."""
    most = 2**bits - 1
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    if symmetric:
        scales = _half(2 * torch.maximum(-low, high) / most)
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    scales = _half((high - low) / most)
    return scales, (-low / scales).round().clamp(1, most)  # GPTQ's files cannot store 0


def searched_parameters(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """`group_parameters` of whichever range, that of the numbers or a smaller one, rounds them with least error
    (squared): few numbers that are cut off are often a price for finer steps.
    """
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for step in range(_RANGES):
        scales, zeros = group_parameters(weight * (1 - (1 - _LEAST_RANGE) * step / (_RANGES - 1)), bits, symmetric)
        numbers = (_codes(weight, scales[:, None], zeros[:, None], bits) - zeros[:, None]) * scales[:, None]
        error = (numbers - weight).square().sum(1)
        if best is None:
            best = error, scales, zeros
        else:
            better = error < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip((error, scales, zeros), best, strict=True))  # type: ignore[assignment]
    assert best is not None
    return best[1], best[2]


def _half(scales: Tensor) -> Tensor:
    return scales.clamp(min=1e-7).half().float()


def _codes(weight: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    return ((weight / scales).round() + zeros).clamp(0, 2**bits - 1)


def round_nearest(weight: Tensor, bits: int, group: int, symmetric: bool) -> Rounded:
    """Each number to the nearest that its group can hold. weight: [out, in]; group divides in."""
    pieces = weight.float().split(group, 1)
    parameters = [group_parameters(piece, bits, symmetric) for piece in pieces]
    codes = [_codes(p, s[:, None], z[:, None], bits) for p, (s, z) in zip(pieces, parameters, strict=True)]
    index = torch.arange(weight.shape[1]) // group
    scales, zeros = (torch.stack(values, 1) for values in zip(*parameters, strict=True))
    return Rounded(torch.cat(codes, 1).to(torch.uint8), scales, zeros, index, bits)


def round_gptq(
    weight: Tensor, inputs: Inputs, bits: int, group: int, symmetric: bool, act_order: bool = False, damp: float = 0.05
) -> Rounded:
    """GPTQ (arXiv 2210.17323): column after column, each one's error made up for by the columns that follow.

    act_order: columns of large inputs first. damp: share of the mean diagonal that is added to it.
    """
    work, gram = weight.float().clone(), inputs.gram / max(1, inputs.tokens)
    k = work.shape[1]
    diagonal = gram.diagonal()
    dead = diagonal == 0
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(k)
    gram = gram + torch.diag(dead.float())
    work[:, dead] = 0
    work, gram = work[:, order], gram[order][:, order]
    upper = _inverse_factor(gram, damp)
    codes, scales, zeros = torch.empty_like(work), [], []
    for start in range(0, k, _BLOCK):
        end = min(k, start + _BLOCK)
        errors = torch.empty_like(work[:, start:end])
        for i in range(start, end):
            if i % group == 0:
                # a group that goes over the block's end has not met all of the block's errors yet, as in the original
                scale, zero = searched_parameters(work[:, i : i + group], bits, symmetric)
                scales.append(scale)
                zeros.append(zero)
            column = work[:, i]
            codes[:, i] = _codes(column, scales[-1], zeros[-1], bits)
            error = (column - (codes[:, i] - zeros[-1]) * scales[-1]) / upper[i, i]
            work[:, i:end] -= error[:, None] * upper[i, i:end]
            errors[:, i - start] = error
        work[:, end:] -= errors @ upper[start:end, end:]
    index, natural = torch.empty(k, dtype=torch.long), torch.empty_like(codes)
    index[order], natural[:, order] = torch.arange(k) // group, codes
    return Rounded(natural.to(torch.uint8), torch.stack(scales, 1), torch.stack(zeros, 1), index, bits)


def _inverse_factor(gram: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor of the inverse; the diagonal is raised until there is one."""
    mean = gram.diagonal().mean().clamp(min=1e-12)
    for attempt in range(1, 21):
        raised = gram + torch.eye(len(gram)) * (damp * attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(raised)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
    raise ValueError("the inputs of a layer are degenerate; give more text with --data")


def awq_scales(weights: list[Tensor], inputs: Inputs, bits: int, group: int) -> Tensor:
    """AWQ (arXiv 2306.00978): factors of the inputs, [in], with which rounding to nearest does least harm.

    The weights are multiplied by them and whatever makes the inputs is divided.
    """
    mean = (inputs.magnitude / max(1, inputs.tokens)).clamp(min=1e-4)
    best, least = torch.ones_like(mean), None
    for step in range(_GRID):
        scales = mean ** (step / _GRID)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(min=1e-4)
        error = 0.0
        for weight in weights:
            difference = round_nearest(weight * scales, bits, group, False).numbers() / scales - weight
            error += float(((difference @ inputs.gram) * difference).sum())
        if least is None or error < least:
            best, least = scales, error
    return best
