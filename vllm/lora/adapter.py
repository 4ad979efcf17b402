"""Reads the matrices of a LoRA adapter in peft's format, by the canonical names of the base model.

Files come from strangers: nothing in them is executed, sizes are bounded, and every tensor must have its place.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm.lora.config import (
    CONFIG,
    MAX_HEADER_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    NEW_EMBEDDINGS,
    AdapterConfig,
    endings,
    find_adapter,
    first_match,
    inside,
    read_config,
)
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.model_loader.checkpoint import iterate_pickle
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors

_NEW_ROWS = {"input_embeddings": "embed", "output_embeddings": "head"}
_PREFIXES = ("base_model.model.", "base_model.", "")
_NAMES_SHOWN = 4
_WRAPPED = ".base_layer"  # of a module several parameters of which are adapted
_STACKS = {"gate_up_proj": "gate_up", "down_proj": "down"}  # parameters of experts
_EXPERTS = "experts"  # the module whose parameters are meant where a name has none
_LONGEST_NUMBER = 6  # digits of a layer's number
_OF_TRAINING = (".lora_velora_embed", ".lora_monteclora_sampler.")  # in names of tensors that only training reads
_AHEAD = 4 << 20  # bytes of a file that are asked for ahead: that takes a moment in which no other thread runs
_FEW = 64  # tensors of a file that is no adapter's main one
_PICKLED = 1024  # bytes that describe a tensor in a file of torch.save
_NUMBERS = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
     torch.uint8, torch.bool)
)  # fmt: skip
_COPIED = ("embed.weight", "head.weight", "head.bias")  # of the base model, canonical names


@dataclass(frozen=True)
class LoRAWeights:
    """One layer's change: x -> scale * b (a x).   a: [rank, in].   b: [out, rank], outputs in canonical order."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class ExpertWeights:
    """Changes of the stacked matrices of a layer's experts, as peft stores them: for each stack that is adapted
    a: [experts * rank, in], the experts one behind the other, and b: [out, rank * experts], the experts' columns
    alternating; or, of a model that stores its matrices transposed, with in and out the other way round.

    kinds: which stacks, in any order, with the rank and the scale of each.   pairs: rows of gate and up alternate.
    """

    stacks: tuple[tuple[Tensor, Tensor], ...]
    kinds: Mapping[str, tuple[int, float]]
    pairs: bool

    def by_expert(self, experts: int, hidden: int, inner: int) -> dict[tuple[int, str], LoRAWeights]:
        """(expert, "gate" | "up" | "down") -> its change. Raises ValueError if the shapes are not these experts'."""
        sizes = {"gate_up": (hidden, 2 * inner), "down": (inner, hidden)}
        for kinds in permutations(self.kinds):
            found: dict[tuple[int, str], LoRAWeights] = {}
            for kind, (a, b) in zip(kinds, self.stacks, strict=True):
                inputs, outputs = sizes[kind]
                rank, scale = self.kinds[kind]
                tall = experts * rank
                if (a.shape, b.shape) == ((tall, inputs), (outputs, tall)):
                    each_a = a.view(experts, rank, inputs)
                    each_b = b.view(outputs, rank, experts).permute(2, 0, 1)
                elif (a.shape, b.shape) == ((tall, outputs), (inputs, tall)):
                    each_a = b.view(inputs, rank, experts).permute(2, 1, 0)
                    each_b = a.view(experts, rank, outputs).transpose(1, 2)
                else:
                    break
                for expert in range(experts):
                    one_a, one_b = each_a[expert].contiguous(), each_b[expert]
                    if kind == "down":
                        found[expert, kind] = LoRAWeights(one_a, one_b.contiguous(), scale)
                        continue
                    halves = (one_b[::2], one_b[1::2]) if self.pairs else one_b.chunk(2)
                    for name, half in zip(("gate", "up"), halves, strict=True):
                        found[expert, name] = LoRAWeights(one_a, half.contiguous(), scale)
            else:
                return found
        shapes = [[list(a.shape), list(b.shape)] for a, b in self.stacks]
        ranks = [rank for rank, _ in self.kinds.values()]
        raise ValueError(
            f"The adapter's matrices for {' and '.join(self.kinds)} of a layer's experts are {shapes}, which does not "
            f"fit ranks {ranks} and {experts} experts of {hidden} inputs and {inner} inner values. Was the adapter "
            "trained for another model?"
        )


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory. `layers` by canonical name: "blocks.0.attn.q", "blocks.0.attn.qkv", "head", ...

    experts: by canonical name of a layer's experts.
    digest: SHA-256 of settings and weights.   copies: shapes of weights of the base model that peft stores beside an
    adapter of the embedding: "embed", "head", "head.bias".   new_tokens: "embed" and "head" -> the rows of tokens that
    it adds to the vocabulary, [tokens, width].
    """

    config: AdapterConfig
    layers: Mapping[str, LoRAWeights]
    digest: bytes
    copies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    new_tokens: Mapping[str, Tensor] = field(default_factory=dict)
    experts: Mapping[str, ExpertWeights] = field(default_factory=dict)


Resolve = Callable[[str], "tuple[str, WeightLayout] | None"]  # a checkpoint's name -> canonical name and layout
Canonical = Callable[[Tensor, WeightLayout, str], Tensor]  # (rows of outputs, their layout, canonical name) -> in order


def read_adapter(
    folder: Path,
    resolve: Resolve,
    canonical: Canonical,
    *,
    max_rank: int,
    max_bytes: int,
    max_tensors: int = MAX_TENSORS,
    vocabulary: int | None = None,
    rest: Callable[[], None] = lambda: None,
) -> Adapter:
    """The adapter in `folder`, for a base model whose names `resolve` knows.

    max_rank: the largest rank that is served.   max_bytes: of the file of weights, and of that of new tokens.
    max_tensors: in the file of weights.
    vocabulary: tokens of the base model; what copies of its embedding and head have behind them is added to it.
    rest: called between two tensors; what it raises ends the reading.
    Raises ValueError if anything about it is damaged, unknown or not supported; nothing of it is left in memory then.
    """
    config_file, weights_file = find_adapter(folder)
    config = read_config(config_file)
    if config.largest_rank > max_rank:
        raise ValueError(
            f"{config_file}: LoRA rank {config.largest_rank} is greater than max_lora_rank {max_rank}. Raise "
            "max_lora_rank."
        )
    size = weights_file.stat().st_size
    if size > max_bytes:
        raise ValueError(
            f"{weights_file} has {size} bytes, more than the {max_bytes} that an adapter of rank {max_rank} for this "
            "model can need. Is it the right file?"
        )
    digest = hashlib.sha256(config_file.read_bytes())
    pairs: dict[str, dict[str, Tensor]] = {}
    copies: dict[str, tuple[int, ...]] = {}
    new_tokens = _new_tokens(folder, max_bytes, digest)
    parameters, unknown, left = _by_owner(config.parameters), list[str](), max_bytes
    for name, tensor in tensors_of(weights_file, max_tensors):
        rest()
        if len(name) > MAX_NAME:
            raise ValueError(f"{weights_file}: {name[:100]!r}... is longer than any name of a tensor of an adapter.")
        left -= tensor.nbytes
        if left < 0:
            raise ValueError(f"{weights_file}: its tensors have more than {max_bytes} bytes. Is it the right file?")
        _update(digest, name, tensor)
        if any(part in name for part in _OF_TRAINING):
            continue
        copy = None if "lora_" in name else resolve(_without_prefix(name).replace(f"{_WRAPPED}.", "."))
        if copy is not None and copy[0] in _COPIED and (copy[0] != "head.bias" or _WRAPPED in name):
            what = copy[0].removesuffix(".weight")
            copies[what] = tuple(tensor.shape)
            if vocabulary is not None and tensor.ndim == 2 and len(tensor) > vocabulary and tensor.is_floating_point():
                new_tokens[what] = tensor[vocabulary:].clone()
            continue
        path, letter = _split(weights_file, name)
        if letter in pairs.setdefault(path, {}):
            raise ValueError(f"{weights_file}: the tensor {name!r} occurs twice.")
        if not pairs[path] and not _parameters_of(_unwrapped(path), parameters) and resolve(f"{path}.weight") is None:
            unknown.append(path)
            if len(unknown) > _NAMES_SHOWN:  # nothing more has to be read
                break
        if tensor.ndim != 2 or not tensor.numel() or not tensor.is_floating_point():
            raise ValueError(
                f"{weights_file}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, expected a matrix."
            )
        pairs[path][letter] = tensor.clone()  # the file may be replaced while we hold views of it
    _refuse_unknown(weights_file, unknown)
    if not pairs:
        raise ValueError(f"{weights_file} holds no LoRA weights.")
    layers: dict[str, LoRAWeights] = {}
    experts = _experts(weights_file, pairs, config, resolve)
    for path, pair in pairs.items():
        rest()
        found = resolve(f"{path}.weight")
        if found is None:
            unknown.append(path)
            continue
        name, layout = found[0].removesuffix(".weight"), found[1]
        if name in layers:
            raise ValueError(f"{weights_file}: the layer {path!r} occurs twice.")
        layers[name] = _checked(weights_file, path, pair, config, layout, name, canonical, max_rank)
    _refuse_unknown(weights_file, unknown)
    return Adapter(config, layers, digest.digest(), copies, new_tokens, experts)


def _refuse_unknown(file: Path, layers: Sequence[str]) -> None:
    """Raise ValueError if there are any layers that the base model does not have."""
    if layers:
        more = " and more" if len(layers) > _NAMES_SHOWN else ""
        raise ValueError(
            f"{file} adapts layers that the base model does not have: {', '.join(layers[:_NAMES_SHOWN])}{more}. Was "
            "the adapter trained for another model?"
        )


def _unwrapped(name: str) -> str:
    """A module's name without the wrappers that peft puts around one of which several parameters are adapted."""
    while name.endswith(_WRAPPED):
        name = name.removesuffix(_WRAPPED)
    return name


def _experts(
    file: Path, pairs: dict[str, dict[str, Tensor]], config: AdapterConfig, resolve: Resolve
) -> dict[str, ExpertWeights]:
    """What `pairs` has of stacked experts, which is taken out. Raises ValueError for other parameters."""
    by_path: dict[str, list[tuple[int, str]]] = {}  # of a layer's experts: how deep its wrapper is, and its name
    parameters = _by_owner(config.parameters)
    for name in pairs if parameters else ():
        owner = _unwrapped(name)
        if wanted := _parameters_of(owner, parameters):
            if unknown := wanted - _STACKS.keys():
                raise ValueError(
                    f"{file}: the adapter changes {owner}.{min(unknown)}, a parameter that is no layer; of these only "
                    f"{' and '.join(_STACKS)} of experts can be adapted. Merge the adapter into its base model."
                )
            by_path.setdefault(owner, []).append((name.count(_WRAPPED), name))
    if parameters and not by_path:
        raise ValueError(
            f"{file}: {CONFIG} says that the parameters {list(config.parameters)!r:.200} are adapted, which are no "
            "layers, but there is nothing of them."
        )
    found = {}
    for owner, names in by_path.items():
        number = next((part for part in owner.split(".") if part.isdecimal() and len(part) < _LONGEST_NUMBER), None)
        adapted = {f"{owner}.{name}": _STACKS[name] for name in sorted(_parameters_of(owner, parameters))}
        kinds = {
            kind: (first_match(config.rank_pattern, path, config.rank), config.scale(path))
            for path, kind in adapted.items()
        }
        if number is None or len(names) != len(kinds):
            raise ValueError(f"{file}: the adapter has {len(names)} of the {len(kinds)} parameters of {owner}.")
        stored = resolve(f"{owner}.gate_up_proj")
        pairs_of_rows = stored is not None and stored[1] in (
            WeightLayout.EXPERTS_PAIRS,
            WeightLayout.EXPERTS_TRANSPOSED_PAIRS,
        )
        stacks = []
        for _, name in sorted(names, reverse=True):
            pair = pairs.pop(name)
            if set(pair) != {"A", "B"}:
                raise ValueError(f"{file}: {name!r} has lora_{'/'.join(pair)} only, expected lora_A and lora_B.")
            if not (pair["A"].isfinite().all() and pair["B"].isfinite().all()):
                raise ValueError(f"{file}: {name!r} has numbers that are not finite.")
            stacks.append((pair["A"], pair["B"]))
        layer = f"blocks.{int(number)}.ffn.experts"
        if layer in found:
            raise ValueError(f"{file}: the experts of layer {number} occur twice.")
        found[layer] = ExpertWeights(tuple(stacks), kinds, pairs_of_rows)
    return found


def _by_owner(parameters: tuple[str, ...]) -> dict[str, set[str]]:
    """The last names of the parameters that are no weight of a layer, by the end of their module's name."""
    found: dict[str, set[str]] = {}
    for parameter in parameters:
        prefix, _, last = parameter.rpartition(".")
        if last != "weight":
            found.setdefault(prefix or _EXPERTS, set()).add(last)
    return found


def _parameters_of(owner: str, parameters: Mapping[str, set[str]]) -> set[str]:
    """The last names of those of `_by_owner` that belong to the module `owner`."""
    return set().union(*(parameters.get(end, ()) for end in endings(owner)))


def _checked(
    file: Path,
    path: str,
    pair: Mapping[str, Tensor],
    config: AdapterConfig,
    layout: WeightLayout,
    name: str,
    canonical: Canonical,
    max_rank: int,
) -> LoRAWeights:
    if set(pair) != {"A", "B"}:
        raise ValueError(f"{file}: the layer {path!r} has lora_{'/'.join(pair)} only, expected lora_A and lora_B.")
    a, b = pair["A"], pair["B"]
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(f"{file}: the layer {path!r} has numbers that are not finite.")
    if a.shape[0] != b.shape[1] or not 1 <= a.shape[0] <= max_rank:
        raise ValueError(
            f"{file}: the layer {path!r} has A {list(a.shape)} and B {list(b.shape)}, expected [rank, in] and "
            f"[out, rank] with a rank of at most {max_rank}."
        )
    rank = first_match(config.rank_pattern, path, config.rank)
    if a.shape[0] != rank:
        raise ValueError(f"{file}: the layer {path!r} has the rank {a.shape[0]}, but {CONFIG} says {rank}.")
    if layout not in (WeightLayout.PLAIN, WeightLayout.TRANSPOSED):  # A and B are never stored transposed
        b = canonical(b, layout, name)
    return LoRAWeights(a, b, config.scale(path))


def tensors_of(file: Path, max_tensors: int = _FEW) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a file of weights, of either kind. Raises ValueError, for too many tensors before the first."""
    if file.suffix == ".safetensors":
        found = iterate_tensors(file, _AHEAD, max_header=MAX_HEADER_BYTES, max_tensors=max_tensors)
    else:
        found = _pickled(file, max_tensors)
    for name, tensor in found:
        if tensor.dtype not in _NUMBERS:
            raise ValueError(f"{file}: the tensor {name!r:.200} is {tensor.dtype}, which is not supported.")
        yield name, tensor


def _pickled(file: Path, max_tensors: int) -> Iterator[tuple[str, Tensor]]:
    """Of a file of torch.save: tensors that are as large as what is stored of them."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            sizes = [info.file_size for info in archive.infolist() if info.filename.endswith("data.pkl")]
        if sum(sizes) > (most := _PICKLED * (max_tensors + _FEW)):
            raise ValueError(f"{file} describes its tensors in {sum(sizes)} bytes, expected at most {most}.")
    tensors = list(iterate_pickle(file))
    if len(tensors) > max_tensors:
        raise ValueError(f"{file} has more than {max_tensors} tensors. Is it the right file?")
    for name, tensor in tensors:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            kind = "a quantized" if tensor.is_quantized else f"a {tensor.layout}, {tensor.device.type}"
            raise ValueError(f"{file}: {name!r:.200} is {kind} tensor, expected a plain one.")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{file}: the tensor {name!r:.200} {list(tensor.shape)!r:.100} repeats what is stored; save it as a "
                "contiguous one."
            )
        yield name, tensor.detach()


def _update(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _split(file: Path, name: str) -> tuple[str, str]:
    """(name of the layer in the base model, "A" or "B") of a tensor. Raises ValueError for what is neither."""
    for letter, suffixes in (
        ("A", (".lora_A.weight", ".lora_A.default.weight", ".lora_embedding_A", ".lora_embedding_A.default")),
        ("B", (".lora_B.weight", ".lora_B.default.weight", ".lora_embedding_B", ".lora_embedding_B.default")),
    ):
        for suffix in suffixes:
            if name.endswith(suffix):
                return _without_prefix(name.removesuffix(suffix)), letter
    what = {
        "lora_magnitude_vector": "weight-decomposed adapters (DoRA)",
        "modules_to_save": "retrained modules (modules_to_save)",
        "trainable_tokens_delta": "retrained tokens",
        "bias": "biases",
    }
    reason = next((text for word, text in what.items() if word in name), None)
    if reason is None:
        raise ValueError(f"{file}: the tensor {name!r:.200} is no part of a LoRA adapter.")
    raise ValueError(f"{file}: the tensor {name!r:.200} belongs to {reason}, which are not supported.")


def _without_prefix(name: str) -> str:
    return name.removeprefix(next(prefix for prefix in _PREFIXES if name.startswith(prefix)))


def _new_tokens(folder: Path, max_bytes: int, digest: Any) -> dict[str, Tensor]:
    """The rows of `Adapter.new_tokens` that have a file of their own; {} if there is none."""
    for name in NEW_EMBEDDINGS:
        file = inside(folder, name)
        if file is None:
            continue
        if file.stat().st_size > max_bytes:
            raise ValueError(f"{file} has more than {max_bytes} bytes. Is it the right file?")
        found: dict[str, Tensor] = {}
        for key, tensor in tensors_of(file):
            if key not in _NEW_ROWS or key in found or tensor.ndim != 2 or not tensor.is_floating_point():
                raise ValueError(f"{file}: expected the matrices input_embeddings and output_embeddings alone.")
            _update(digest, key, tensor)
            found[_NEW_ROWS[key]] = tensor.clone()
        return found
    return {}
