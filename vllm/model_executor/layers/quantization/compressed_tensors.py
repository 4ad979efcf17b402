"""compressed-tensors (llm-compressor): schemes for groups of modules, integers and 8-bit floats, packed or not.

pack-quantized: `weight_packed` int32 [out, in * bits / 32], `weight_scale`, `weight_zero_point`, `weight_g_idx`,
`weight_shape`.   int-quantized, float-quantized, naive-quantized: `weight`, `weight_scale`, `input_scale`,
`input_zero_point`.   nvfp4- and mxfp4-pack-quantized: `weight_packed` uint8 [out, in / 2] with 8-bit scales; mxfp6:
uint8 [out, 3 * in / 4]; mxfp8-quantized: `weight`.   marlin-24: `weight_packed`, `meta`, `scale_packed` (Marlin 2:4).

Where `sparsity_config` says so, a weight, quantized or not, is stored without its zeros: `compressed`, those that are
kept, row after row ([out, in / 2] if 2 of 4 are); `bitmask` uint8 [out, ceil(in / 8)], lowest bit first; `shape`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.base_config import (
    Format,
    Patterns,
    Reader,
    Tensors,
    by_index,
    is_plain,
    names_of,
    plain_weight,
    setting,
    take,
    word_bits,
)
from vllm.model_executor.layers.quantization.fp8 import FLOATS, block_shape, fp8_scales, input_scale
from vllm.model_executor.layers.quantization.marlin import SparseMarlinReader
from vllm.model_executor.layers.quantization.packing import WORD, nibbles, unpack
from vllm.ops.quantized_weights import GroupedWeight, InputQuant, round_to_fp8, round_to_groups

# The values of 4-bit floats (e2m1) by code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "marlin-24", "dense",
)  # fmt: skip
_SPARSE = ("sparse-24-bitmask", "sparse-bitmask")
_ZEROS = (torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn, *FLOATS)  # kinds of an input's zero point
_LINEAR, _EMBEDDING = "Linear", "Embedding"  # classes of modules that a target may name


@dataclass(frozen=True)
class WeightArgs:
    """What a scheme says about weights. group: inputs that share a scale, -1: all.   per_tensor: one scale in all."""

    bits: int
    float: bool
    symmetric: bool
    group: int
    per_tensor: bool
    block: tuple[int, int] | None
    by_group: bool  # groups of any inputs, named by an index

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> WeightArgs:
        strategy = setting(fields, "strategy", str, "")
        size = setting(fields, "group_size", int, 0)
        block = block_shape(fields.get("block_structure"), "block_structure") if strategy == "block" else None
        if strategy == "block" and block is None:
            block = (128, 128)
        if not strategy:
            strategy = "tensor" if size == 0 else "channel" if size == -1 else "group"
        if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
            expected = "tensor, channel, group, tensor_group or block"
            raise ValueError(f"The quantization config's `strategy` of weights is {strategy!r}, expected {expected}.")
        return cls(
            setting(fields, "num_bits", int, 8, among=(2, 3, 4, 5, 6, 7, 8)),
            setting(fields, "type", str, "int", among=("int", "float")) == "float",
            setting(fields, "symmetric", bool, True),
            size if strategy in ("group", "tensor_group") and size > 0 else -1,
            strategy == "tensor",
            block,
            fields.get("actorder") in ("group", "dynamic", True),
        )

    def inputs_per_scale(self, k: int) -> int:
        """How many of `k` inputs share a scale of integers."""
        size = self.group if self.block is None else self.block[1]
        return k if size == -1 else min(size, k)

    def spread(self, tensors: Tensors, leaf: str, n: int, k: int, *dtypes: torch.dtype) -> Tensor:
        """The tensor called `leaf`, with a number for each scale, in fp32 and in the scales' full shape [n, groups]."""
        groups = -(-k // self.inputs_per_scale(k))
        if self.per_tensor:
            return take(tensors, leaf, (), *dtypes).float().expand(n, groups)
        if self.block is None:
            return take(tensors, leaf, (n, groups), *dtypes).float()
        rows = self.block[0]
        return take(tensors, leaf, (-(-n // rows), groups), *dtypes).float().repeat_interleave(rows, 0)[:n]


def _inputs_of(fields: Any) -> InputQuant | None:
    """How a scheme wants inputs rounded; a fixed scale is in the checkpoint."""
    if not isinstance(fields, Mapping) or setting(fields, "num_bits", int, 8) != 8:
        return None
    kind = "fp8" if fields.get("type") == "float" else "int8"
    strategy = fields.get("strategy")
    per = "token" if strategy == "token" else "group" if strategy in ("group", "block") else "tensor"
    return InputQuant(kind, per)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PackedIntegers(Reader):
    """Codes around 2 ** (bits - 1) in words along the inputs."""

    args: WeightArgs
    inputs: InputQuant | None

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        args = self.args
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [n, k]:
            raise ValueError(f"'weight_shape' says {tensors['weight_shape'].tolist()}, expected {[n, k]}")
        stored = tensors.get("weight_packed")
        apart = stored is not None and stored.shape == (n, self._words(k, apart=True))
        codes = self._unpack(take(tensors, "weight_packed", (n, self._words(k, apart)), torch.int32), k, apart)
        group = args.inputs_per_scale(k)
        scales = args.spread(tensors, "weight_scale", n, k, *FLOATS)
        offsets, zero = None, 2 ** (args.bits - 1)
        given = tensors.get("weight_zero_point")
        signed = args.per_tensor or args.block is not None or (given is not None and given.dtype == torch.int8)
        # whatever the settings say, zero points count; those of symmetric codes may be there as zeros
        if not args.symmetric or (given is not None and (not signed or bool(given.any()))):
            if signed:  # only the others are packed
                zeros = args.spread(tensors, "weight_zero_point", n, k, torch.int8) + zero
            else:
                shape = (self._words(n, apart), -(-k // group))
                zeros = self._unpack(take(tensors, "weight_zero_point", shape, torch.int32).t(), n, apart).t().float()
            offsets, zero = -zeros * scales, 0
        codes, scales, bits = codes.contiguous(), scales.contiguous(), word_bits(args.bits)
        weight = GroupedWeight(codes, scales, group, bits, zero, offsets, inputs=self.inputs)
        return by_index(weight, tensors, "weight_g_idx", needed=args.by_group)

    def _words(self, count: int, apart: bool) -> int:
        """How many hold `count` codes. apart: as in older files, where of 3, 5, 6 or 7 bits none is in two words."""
        bits = self.args.bits
        return -(-count // (WORD // bits)) if apart else -(-count * bits // WORD)

    def _unpack(self, words: Tensor, count: int, apart: bool) -> Tensor:
        """[rows, words] -> [rows, count]."""
        bits = self.args.bits
        if not apart:
            return unpack(words.contiguous(), bits, 1)[:, :count]
        shifts = torch.arange(0, WORD // bits * bits, bits, dtype=torch.int32)
        codes = (words[..., None] >> shifts) & (2**bits - 1)
        found: Tensor = codes.flatten(1)[:, :count].to(torch.uint8)
        return found

    def example(self, weight: Tensor) -> GroupedWeight:
        group = self.args.inputs_per_scale(weight.shape[1])
        return round_to_groups(weight, word_bits(self.args.bits), group, symmetric=self.args.symmetric)


@dataclass(frozen=True)
class Integers(Reader):
    """Unpacked signed 8-bit codes (or fewer bits in 8)."""

    args: WeightArgs
    inputs: InputQuant | None

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        codes = take(tensors, "weight", (n, k), torch.int8)
        scales, zeros = self._spread(tensors, "weight_scale", n, k, *FLOATS), None
        if not self.args.symmetric or "weight_zero_point" in tensors:
            zeros = self._spread(tensors, "weight_zero_point", n, k, torch.int8, torch.int32)
        weight = GroupedWeight(
            (codes.to(torch.int16) + 128).to(torch.uint8), scales.contiguous(), self.args.inputs_per_scale(k), 8, 128,
            None if zeros is None or not bool(zeros.any()) else -zeros * scales, inputs=_fixed(self.inputs, tensors),
        )  # fmt: skip
        return by_index(weight, tensors, "weight_g_idx", needed=self.args.by_group)

    def _spread(self, tensors: Tensors, leaf: str, n: int, k: int, *dtypes: torch.dtype) -> Tensor:
        """As of WeightArgs; one number may stand for all, and one for each output may have no second dimension."""
        stored = tensors.get(leaf)
        if stored is not None and stored.numel() == 1:
            return take(tensors, leaf, (), *dtypes).float().expand(n, -(-k // self.args.inputs_per_scale(k)))
        if stored is not None and stored.dim() == 1:
            tensors = {**tensors, leaf: stored[:, None]}
        return self.args.spread(tensors, leaf, n, k, *dtypes)

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_groups(weight, 8, self.args.inputs_per_scale(weight.shape[1]))


@dataclass(frozen=True)
class Floats(Reader):
    """8-bit floats with a scale for the weight, for each output or for each block."""

    args: WeightArgs
    inputs: InputQuant | None

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        codes = take(tensors, "weight", (n, k), torch.float8_e4m3fn)
        block = self.args.block or ((1, self.args.group) if self.args.group > 0 else None)
        if tensors.get("weight_scale", codes).dtype == torch.uint8:
            scales, group = _powers(tensors, n, k), _MX_GROUP
        else:
            scales, group = fp8_scales(tensors, n, k, block)
        weight = GroupedWeight(codes, scales, group, 8, inputs=_fixed(self.inputs, tensors))
        return by_index(weight, tensors, "weight_g_idx", needed=self.args.by_group)

    def example(self, weight: Tensor) -> GroupedWeight:
        return round_to_fp8(weight, "channel", self.inputs)


def _fixed(inputs: InputQuant | None, tensors: Tensors) -> InputQuant | None:
    """`inputs` with the scale that the checkpoint holds, if it does."""
    if inputs is None or "input_scale" not in tensors:
        return inputs
    scale = input_scale(tensors, "input_scale")
    zero = float(take(tensors, "input_zero_point", (), *_ZEROS)) if "input_zero_point" in tensors else 0.0
    if not -128 <= zero <= 127:
        raise ValueError(f"'input_zero_point' is {zero}, expected a number of 8 bits")
    return InputQuant(inputs.kind, "tensor", scale, int(zero))


@dataclass(frozen=True)
class FourBitFloats(Reader):
    """e2m1 codes, the even input in the low half of a byte; scales are e4m3 with a global divisor, or powers of two."""

    powers: bool

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        group = _MX_GROUP if self.powers else 16
        if k % group:
            raise ValueError(f"{k} inputs are not whole groups of {group}")
        codes = nibbles(take(tensors, "weight_packed", (n, k // 2), torch.uint8))
        if self.powers:
            scales = _powers(tensors, n, k)
        else:
            divisor = float(take(tensors, "weight_global_scale", (), *FLOATS))
            if not 0 < divisor < float("inf"):
                raise ValueError(f"'weight_global_scale' is {divisor}, expected a positive number")
            scales = take(tensors, "weight_scale", (n, k // group), torch.float8_e4m3fn).float() / divisor
        return GroupedWeight(codes, scales, group, 4, table=torch.tensor(E2M1))


class SixBitFloats(Reader):
    """e2m3 codes, four in three bytes, lowest bits first; scales are powers of two. e4m3 holds their values."""

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight:
        if k % _MX_GROUP:
            raise ValueError(f"{k} inputs are not whole groups of {_MX_GROUP}")
        stored = take(tensors, "weight_packed", (n, 3 * k // 4), torch.uint8).view(n, k // 4, 3).int()
        words = stored[..., 0] | stored[..., 1] << 8 | stored[..., 2] << 16
        codes = ((words[..., None] >> torch.arange(0, 24, 6, dtype=torch.int32)) & 63).view(n, k)
        exponents, fractions = codes >> 3 & 3, (codes & 7).float() / 8
        sizes = torch.where(exponents == 0, fractions, (1 + fractions) * torch.exp2(exponents - 1.0))
        values = torch.where(codes < 32, sizes, -sizes).to(torch.float8_e4m3fn)
        return GroupedWeight(values, _powers(tensors, n, k), _MX_GROUP, 8)


_MX_GROUP = 32  # inputs that share a power of two, by the OCP's microscaling formats


def _powers(tensors: Tensors, n: int, k: int) -> Tensor:
    """Scales [n, groups] that are stored as exponents."""
    stored = take(tensors, "weight_scale", (n, -(-k // _MX_GROUP)), torch.uint8)
    if bool((stored == 255).any()):
        raise ValueError("a scale in 'weight_scale' is no number")
    return torch.exp2(stored.float() - 127)


@dataclass(frozen=True)
class Sparse(Reader):
    """Weights without their zeros, if they are stored so; `inner` reads what they are then, None if plain numbers."""

    inner: Reader | None

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight | Tensor:
        if "compressed" in tensors:
            rest = {name: t for name, t in tensors.items() if name not in ("compressed", "bitmask", "row_offsets")}
            tensors = {**{name: t for name, t in rest.items() if name != "shape"}, "weight": _with_zeros(tensors, n, k)}
        return plain_weight(tensors, n, k) if self.inner is None else self.inner.read(tensors, n, k)

    def example(self, weight: Tensor) -> GroupedWeight | Tensor:
        return weight if self.inner is None else self.inner.example(weight)


def _with_zeros(tensors: Tensors, n: int, k: int) -> Tensor:
    if "shape" in tensors and tensors["shape"].flatten().tolist() != [n, k]:
        raise ValueError(f"'shape' says {tensors['shape'].flatten().tolist()}, expected {[n, k]}")
    mask = take(tensors, "bitmask", (n, -(-k // 8)), torch.uint8)
    kept = ((mask[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)[:, :k].bool()
    stored, count = tensors["compressed"], int(kept.sum())
    if not is_plain({"weight": stored}) and stored.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"'compressed' holds {stored.dtype}, expected floating-point numbers or codes of 8 bits")
    if stored.numel() != count:
        raise ValueError(f"'compressed' holds {stored.numel()} weights, but 'bitmask' names {count}")
    if stored.dtype == torch.float8_e4m3fn:  # which cannot be put in place as they are
        values = torch.zeros(n, k, dtype=torch.uint8)
        return values.masked_scatter_(kept, stored.reshape(-1).view(torch.uint8)).view(stored.dtype)
    return torch.zeros(n, k, dtype=stored.dtype).masked_scatter_(kept, stored.reshape(-1))


class CompressedTensors(Format):
    """What llm-compressor writes."""

    name = "compressed-tensors"
    leaves = (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale",
        "input_scale", "input_zero_point", "meta", "scale_packed", "compressed", "bitmask", "shape", "row_offsets",
    )  # fmt: skip
    ignored = ("input_global_scale", "output_scale", "output_zero_point")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        layout = setting(settings, "format", str, "dense")
        sparsity = settings.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping):
            raise ValueError("The quantization config's `sparsity_config` must be an object.")
        self._sparse = setting(sparsity, "format", str, "dense", among=(*_SPARSE, "dense")) != "dense"
        _check_rotations(settings)
        readers: dict[str, Reader] = {}
        groups = setting(settings, "config_groups", dict, {})
        for name, group in groups.items():
            if not isinstance(group, Mapping):
                raise ValueError(f"The quantization config's group {name!r} is not an object.")
            reader = reader_of(group, layout)
            if reader is not None:
                readers.update(dict.fromkeys(names_of(group, "targets"), reader))
        self._linear = readers.pop(_LINEAR, None)
        self._embedding = readers.pop(_EMBEDDING, self._linear)
        # names decide before patterns, and these in their order, before the class
        patterns = Patterns()
        self._patterns = [(patterns.of(t[3:]), r) for t, r in sorted(readers.items()) if t.startswith("re:")]
        self._named = {target: reader for target, reader in readers.items() if not target.startswith("re:")}
        ignored = names_of(settings, "ignore")
        self._plain, self._plain_patterns = set(ignored), [patterns.of(t[3:]) for t in ignored if t.startswith("re:")]

    def reader(self, names: Sequence[str]) -> Reader | None:
        found = self._dense_reader(names, self._linear)
        return Sparse(found) if self._sparse else found

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        found = self._dense_reader(names, None)
        return Sparse(found) if self._sparse and found is not None else found

    def table_reader(self, names: Sequence[str]) -> Reader | None:
        return self._dense_reader(names, self._embedding)

    def _dense_reader(self, names: Sequence[str], by_class: Reader | None) -> Reader | None:
        """by_class: for modules that no target names."""
        if not self._plain.isdisjoint(names) or any(p.matches(name) for p in self._plain_patterns for name in names):
            return None
        named = next((self._named[name] for name in names if name in self._named), None)
        if named is not None:
            return named
        return next((r for pattern, r in self._patterns if any(pattern.matches(name) for name in names)), by_class)


def reader_of(group: Mapping[str, Any], layout: str) -> Reader | None:
    """How the modules of a config group are stored, by its own layout or `layout`; None: plainly.

    Raises ValueError that names the setting which is wrong or not supported.
    """
    weights = group.get("weights")
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise ValueError("The quantization config's `weights` must be an object.")
    layout = setting(group, "format", str, layout)
    args, inputs = WeightArgs.of(weights), _inputs_of(group.get("input_activations"))
    if layout not in _FORMATS:
        raise ValueError(
            f"compressed-tensors of the layout {layout!r} are not supported, expected {', '.join(_FORMATS)}."
        )
    if layout == "dense":
        return None
    if layout == "pack-quantized":
        return PackedIntegers(args, inputs)
    if layout == "marlin-24":
        if args.bits not in (4, 8) or not args.symmetric:
            raise ValueError("compressed-tensors of the layout 'marlin-24' hold symmetric codes of 4 or 8 bits.")
        return SparseMarlinReader(word_bits(args.bits), args.group, ("weight_packed", "meta", "scale_packed"))
    if layout.endswith("fp4-pack-quantized"):
        return FourBitFloats(powers=layout.startswith("mx"))
    if layout == "mxfp6-pack-quantized":
        return SixBitFloats()
    if args.float:
        if args.bits != 8:
            raise ValueError(f"Floats of {args.bits} bits in the layout {layout!r} are not supported, expected 8.")
        return Floats(args, inputs)
    return Integers(args, inputs)


def _check_rotations(settings: Mapping[str, Any]) -> None:
    """Rotations that weights contain already are nothing to the reader; those of activations are not computed here."""
    for name, group in setting(setting(settings, "transform_config", dict, {}), "config_groups", dict, {}).items():
        for part in setting(group, "apply", list, []) if isinstance(group, Mapping) else ():
            location = part.get("location") if isinstance(part, Mapping) else None
            if location not in ("weight_input", "weight_output"):
                raise ValueError(
                    f"The quantization config's `transform_config` rotates activations ({name!r}, at {location!r}), "
                    "which is not supported; rotations of weights (weight_input, weight_output) are."
                )
