"""Loading a decoder of transformers: its modules, this rank's share of them, and a checkpoint under its own names."""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from vllm.config.hf import HFConfig
from vllm.distributed import TensorParallel
from vllm.model_executor.layers.dtypes import dtype_of
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.linear_method import QuantizationConfig
from vllm.model_executor.layers.quantization import format_of
from vllm.model_executor.layers.quantization.method import ModelQuantization
from vllm.model_executor.layers.sharding import REPLICATED, Part, ShardedParameter, ShardSpec, load_weight
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.model_loader import rank_state
from vllm.model_executor.model_loader.filler import WeightFiller
from vllm.model_executor.model_loader.live_weights import unpacked
from vllm.model_executor.model_loader.quantized_weights import (
    QuantizedCheckpoint,
    fill_quantized_with_random_numbers,
)
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.transformers_decoder import TransformersDecoder, build

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.weights import Weights

_BOUND = 0.035  # of random weights
# Buffers that older checkpoints hold and no model reads.
_HARMLESS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias|position_ids)$")
_WHOLE = frozenset({"replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj"})  # on every rank


class _Names(Family):
    """Names as they are: transformers' own."""

    def resolve(self, name: str) -> tuple[str, WeightLayout]:
        return name, WeightLayout.PLAIN

    def checkpoint_names(self, canonical: str) -> Iterable[str]:
        return [canonical]


def _no_decoder(hf: HFConfig) -> Any:
    raise TypeError("A model of transformers has no spec.")


_NAMES = _Names(_no_decoder, ())


def load_transformers(
    vllm_config: VllmConfig,
    device: torch.device,
    tp: TensorParallel,
    weights: Weights,
) -> tuple[TransformersDecoder, int]:
    """The configured model through transformers, and the bytes of its weights.

    Raises ValueError for a model that cannot run so, and for a checkpoint that does not fit.
    """
    settings = vllm_config.model_config
    hf: HFConfig = settings.hf
    name, dtype = " or ".join(hf.architectures), dtype_of(settings.dtype)
    _check_config(hf, name, settings.max_model_len, tp)
    trusted, grouped = settings.trust_remote_code, device.type == "cuda" and tp.world == 1
    module = build(settings.hf_config, dtype, trust_remote_code=trusted, name=name, grouped=grouped)
    quantization = None
    if settings.quantized is not None:
        quantization = ModelQuantization(format_of(settings.quantized), _NAMES, linear_head=_head_of(module))
    _share(module, dtype, tp, quantization, name)
    filler = WeightFiller(module, device)
    if isinstance(weights, rank_state.RankState):
        size = rank_state.fill(module, weights, device, "module.")
    elif weights is None:
        size = _fill_with_random_numbers(filler, device, settings.seed or 0)
        if quantization is not None:
            size += fill_quantized_with_random_numbers(module, quantization, device, settings.seed or 0, _BOUND)
    else:
        size = _fill(module, filler, weights, device, quantization)
    for owner in module.modules():
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(device)
    return TransformersDecoder(module, name, dtype, settings.max_model_len, tp), size


def _check_config(hf: HFConfig, name: str, max_positions: int, tp: TensorParallel) -> None:
    if hf.is_encoder_decoder:
        raise ValueError(f"{name} cannot run through transformers here: it has an encoder.")
    original = hf.rope.params.get("original_max_position_embeddings", hf.max_position_embeddings)
    if hf.rope.kind in ("dynamic", "longrope") and original is not None and max_positions > original:
        raise ValueError(
            f"{name} cannot run through transformers here with max_model_len={max_positions}: its rotary embedding "
            f"({hf.rope.kind}) depends on the longest sequence of a batch. Set max_model_len to at most {original}."
        )
    if hf.num_kv_heads % tp.world:
        raise ValueError(
            f"{name} has {hf.num_kv_heads} key/value heads, which {tp.world} tensor-parallel ranks cannot share "
            f"through transformers. Choose a tensor_parallel_size that divides {hf.num_kv_heads}."
        )


def _head_of(module: nn.Module) -> str | None:
    """The path of the module that makes logits, None if transformers does not say which does."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    return next((path for path, owner in module.named_modules() if owner is head), None)


# -- this rank's share -------------------------------------------------------------------------------------------------


def _each_row(layer: LinearBase, x: Tensor) -> Tensor:
    """transformers' tensors have a batch in front."""
    out = layer.project(x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


class _Whole(ReplicatedLinear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return _each_row(self, x)


class _Column(ColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return _each_row(self, x)


class _Gathered(_Column):
    """Outputs that ranks need not share evenly (a vocabulary): padded, and cut off once they are gathered."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        world = options["tp"].world
        padding = -output_size % world
        part = Part(output_size, output_size + padding, padding=padding)
        super().__init__(input_size, output_size, gather_output=True, parts=(part,), **options)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[..., : self.output_size]


class _Row(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return _each_row(self, x)


def _share(
    module: nn.Module, dtype: torch.dtype, tp: TensorParallel, quantization: QuantizationConfig | None, name: str
) -> None:
    """Make parameters `ShardedParameter`s and linear layers ours, cut as `base_model_tp_plan` says."""
    styles = _styles(module, name) if tp.world > 1 else {}
    shared = _shared(module)
    for path, owner in list(module.named_modules()):
        if type(owner) is nn.Linear and id(owner.weight) not in shared:
            with torch.device("meta"):
                layer = _linear(owner, path, _style(styles, path), dtype, tp, quantization)
            parent, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(parent), leaf, layer)
        elif _style(styles, path) == "moe_tp_experts":
            owner.register_forward_hook(lambda _, __, out: tp.all_reduce(out))
        elif (
            isinstance(owner, nn.Linear)
            and type(owner) is not nn.Linear
            and _style(styles, path) not in (None, *_WHOLE)
        ):
            raise ValueError(f"{name}: {path} is a {type(owner).__name__}, which ranks cannot share. {_ALONE}")
    made: dict[int, ShardedParameter] = {}
    for path, owner in module.named_modules():
        for key, parameter in list(owner.named_parameters(recurse=False)):
            if isinstance(parameter, ShardedParameter):
                continue
            if id(parameter) not in made:
                where = f"{path}.{key}" if path else key
                made[id(parameter)] = _parameter(parameter, where, _style(styles, where), tp)
            setattr(owner, key, made[id(parameter)])


_ALONE = "Use tensor_parallel_size=1."


def _shared(module: nn.Module) -> set[int]:
    """The parameters that several modules have."""
    seen: set[int] = set()
    shared: set[int] = set()
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _styles(module: nn.Module, name: str) -> dict[str, str]:
    """Template of a module's or parameter's path -> how ranks share it."""
    prefix = module.base_model_prefix
    base = getattr(module.config, "base_model_tp_plan", None)
    if not base:
        raise ValueError(
            f"{name}: transformers does not say how ranks share this model (`base_model_tp_plan`). {_ALONE}"
        )
    head = {"lm_head": "colwise_gather_output"} if "lm_head" in module._modules else {}
    return {**head, **{f"{prefix}.{path}": style for path, style in base.items()}}


def _style(styles: dict[str, str], path: str) -> str | None:
    return styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def _linear(
    old: nn.Linear,
    path: str,
    style: str | None,
    dtype: torch.dtype,
    tp: TensorParallel,
    quant: QuantizationConfig | None,
) -> LinearBase:
    options: dict[str, Any] = {
        "bias": old.bias is not None, "params_dtype": dtype, "quant_config": quant, "prefix": path, "tp": tp
    }  # fmt: skip
    size = (old.in_features, old.out_features)
    if style is None or style in _WHOLE:
        return _Whole(*size, **options)
    if style == "colwise":
        return _Column(*size, **options)
    if style in ("colwise_gather_output", "colwise_rep"):
        return _Gathered(*size, **options)
    if style in ("rowwise", "rowwise_split_input", "rowwise_rep"):
        return _Row(*size, input_is_parallel=style == "rowwise", **options)
    raise ValueError(f"{path}: ranks cannot share a linear layer in the style {style!r}. {_ALONE}")


def _parameter(old: nn.Parameter, path: str, style: str | None, tp: TensorParallel) -> ShardedParameter:
    spec = REPLICATED
    if style == "packed_colwise" and old.dim() == 3 and old.shape[1] % 2 == 0:
        half = old.shape[1] // 2
        spec = ShardSpec(1, (Part(half, half), Part(half, half)), stack=1)
    elif style == "rowwise" and old.dim() == 3:
        spec = ShardSpec(2, (Part(old.shape[2], old.shape[2]),), stack=1)
    elif style is not None and style not in _WHOLE:
        raise ValueError(f"{path}: ranks cannot share a tensor {list(old.shape)} in the style {style!r}. {_ALONE}")
    rank, world = (0, 1) if spec is REPLICATED else (tp.rank, tp.world)
    with torch.device("meta"):
        return ShardedParameter.empty(tuple(old.shape), spec, rank, world, old.dtype)


def _fill_with_random_numbers(filler: WeightFiller, device: torch.device, seed: int) -> int:
    """Small random matrices, ones for vectors that scale, zeros for biases; equal on all ranks."""
    generator = torch.Generator(device)
    for path, parameter, _ in list(filler.parameters()):
        generator.manual_seed((zlib.crc32(path.encode()) << 32 | seed & 0xFFFFFFFF) & 0x7FFFFFFFFFFFFFFF)
        if len(parameter.full_shape) == 1:
            filler.fill(path, torch.full(parameter.full_shape, float(not path.endswith("bias")), device=device))
        else:
            weight = torch.empty(parameter.full_shape, dtype=parameter.dtype, device=device)
            filler.fill(path, weight.uniform_(-_BOUND, _BOUND, generator=generator))
    return filler.filled_bytes


# -- weights -----------------------------------------------------------------------------------------------------------


def _fill(
    module: nn.Module,
    filler: WeightFiller,
    tensors: Iterable[tuple[str, Tensor, Path]],
    device: torch.device,
    quantization: ModelQuantization | None,
) -> int:
    """Every weight from its tensors, renamed and joined as transformers says. Tensors are views of files till then."""
    quantized = None
    if quantization is not None:
        quantized = QuantizedCheckpoint(module, quantization, _NAMES, cast(Any, SimpleNamespace(tied=False)))
    wanted = {name for name, _ in module.named_parameters()}
    converted = _Converted(module, wanted)
    for name, tensor, file in sorted(tensors, key=lambda item: _natural(item[0])):
        target = converted.target(name)
        if quantized is not None and quantized.take(target, tensor, file):
            if converted.joins(name):
                raise ValueError(
                    f"{file}: {name!r} is quantized, and transformers joins it with others, which is not supported."
                )
            continue
        converted.add(name, tensor)
    buffers = dict(module.named_buffers())
    problems: list[str] = []
    filled: set[str] = set()
    for name, tensor in converted.tensors():
        shape = filler.expected_shape(name)
        if name in wanted and shape is not None:
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"The checkpoint's {name!r} has the shape {list(tensor.shape)}, but the model's config.json needs "
                    f"{list(shape)}. Do config.json and the weights belong together?"
                )
            filler.fill(name, tensor)
        elif name in buffers:
            buffers[name].copy_(tensor)
            filled.add(name)
        elif not _is_harmless(module, name):
            problems.append(f"unexpected {name!r}")
    size, missing = (0, []) if quantized is None else quantized.finish(filler, device)
    problems += [f"missing {name!r}" for name in (*missing, *filler.missing())]
    persistent = set(module.state_dict()) & set(buffers)
    problems += [f"missing {name!r}" for name in sorted(persistent - filled) if not _may_miss(module, name)]
    if problems:
        shown = "; ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(
            f"The checkpoint does not fit the model of its config.json: {shown}. "
            "Do config.json and the weights belong together, and is the download complete?"
        )
    return size + filler.filled_bytes


def load_again(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Give weights of a loaded module new values; see `TransformersDecoder.load_weights`."""
    loaded = set()
    with unpacked(list(module.modules())), torch.no_grad():
        parameters = dict(module.named_parameters())
        converted = _Converted(module, set(parameters))
        for name, tensor in sorted(weights, key=lambda item: _natural(item[0])):
            converted.add(name, tensor)
        for name, tensor in converted.tensors():
            parameter = parameters.get(name)
            if isinstance(parameter, ShardedParameter):
                try:
                    load_weight(parameter, tensor.to(parameter.device))
                except ValueError as error:
                    raise ValueError(f"The tensor {name!r}: {error}.") from None
                loaded.add(name)
            elif not _is_harmless(module, name):
                raise ValueError(f"The tensor {name!r} cannot be loaded: the model has no such weight, or quantized.")
    return loaded


def _aliases(module: nn.Module) -> dict[str, str]:
    """Further names of parameters that several modules have -> the name that `named_parameters` gives."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = ((name, first[id(parameter)]) for name, parameter in module.named_parameters(remove_duplicate=False))
    return {name: known for name, known in names if name != known}


def _is_harmless(module: nn.Module, name: str) -> bool:
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return _HARMLESS.search(name) is not None or any(re.search(pattern, name) for pattern in patterns)


def _may_miss(module: nn.Module, name: str) -> bool:
    patterns = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    return _HARMLESS.search(name) is not None or any(re.search(pattern, name) for pattern in patterns)


def _natural(name: str) -> list[Any]:
    """Sorts numbers in names as numbers, so that experts are joined in order."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


class _Converted:
    """A checkpoint's tensors under the module's names: renamed, and joined where transformers joins them."""

    def __init__(self, module: nn.Module, wanted: set[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        rules = get_model_conversion_mapping(module) or []
        self._module = module
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._rename = rename_source_key
        names = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
        self._state = dict(names) | dict.fromkeys(wanted, torch.empty(0))
        self._found: dict[str, Any] = {}

    def _key(self, name: str) -> tuple[str, str | None]:
        prefix = self._module.base_model_prefix
        found: tuple[str, str | None] = self._rename(name, self._renamings, self._converters, prefix, self._state)
        if found[0] not in self._state and name in self._state:
            return name, None
        return found

    def target(self, name: str) -> str:
        """What the module calls a checkpoint's tensor."""
        return self._key(name)[0]

    def joins(self, name: str) -> bool:
        """Whether the tensor is a part of what the module has."""
        return self._key(name)[1] is not None

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor."""
        target, pattern = self._key(name)
        if pattern is None:
            if target in self._found:
                raise ValueError(f"The checkpoint holds {target!r} twice.")
            self._found[target] = tensor
            return
        if target not in self._found:
            self._found[target] = copy.deepcopy(self._by_pattern[pattern])
        self._found[target].add_tensor(target, name, pattern, tensor)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """(name, tensor), each joined when its turn comes and let go then; of a parameter with several names, once."""
        aliases, given = _aliases(self._module), set(self._found)
        while self._found:
            name, found = next(iter(self._found.items()))
            del self._found[name]
            if name in aliases:
                name = aliases[name]
                if name in given:
                    continue
                given.add(name)
            if isinstance(found, Tensor):
                yield name, found
                continue
            made = found.convert(name, model=self._module, config=self._module.config)
            for key, value in made.items():
                yield key, value[0] if isinstance(value, list) else value
