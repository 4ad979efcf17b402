"""Building the model that a config names and filling its weights: strictly from a checkpoint, or at random."""

from __future__ import annotations

import importlib
import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm.config.hf import HFConfig
from vllm.distributed import TensorParallel
from vllm.logger import init_logger
from vllm.model_executor.layers.dtypes import dtype_of
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.linear_method import QuantizationConfig
from vllm.model_executor.layers.quantization import format_of
from vllm.model_executor.layers.quantization.method import ModelQuantization
from vllm.model_executor.layers.sharding import ShardedParameter
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.model_loader import rank_state
from vllm.model_executor.model_loader.cache_scales import CheckpointScales
from vllm.model_executor.model_loader.dense_modules import NAMES as DENSE_NAMES
from vllm.model_executor.model_loader.dense_modules import DenseModule
from vllm.model_executor.model_loader.filler import WeightFiller
from vllm.model_executor.model_loader.fitting import fitted
from vllm.model_executor.model_loader.live_weights import LiveWeights
from vllm.model_executor.model_loader.quantized_weights import (
    QuantizedCheckpoint,
    fill_quantized_with_random_numbers,
)
from vllm.model_executor.model_loader.rank_state import RankState
from vllm.model_executor.model_loader.weights import Weights, open_weights
from vllm.model_executor.models.blocks import MODULES as BLOCK_MODULES
from vllm.model_executor.models.blocks import BlockModule
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.out_of_tree import OutOfTreeModel, load_out_of_tree
from vllm.model_executor.models.pooling import converted
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.spec import BlockSpec, Decoder, PoolHead

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.architecture_classes import DerivedModel
    from vllm.model_executor.models.transformers_decoder import TransformersDecoder

logger = init_logger(__name__)

_NAMES_SHOWN = 8
_DUMMY_SCALE = 0.02


def load_model(
    vllm_config: VllmConfig,
    device: torch.device | str,
    tp: TensorParallel | None = None,
    stage: int = 0,
) -> DecoderModel | OutOfTreeModel | DerivedModel | TransformersDecoder:
    """The model of `vllm_config`, this rank's weights on `device`, as the engine knows models (`traits.Model`).

    stage: of the pipeline, whose layers are all that is loaded; only families of ours can be divided.

    Raises ValueError for an unknown architecture, and for a checkpoint that does not fit the model.
    """
    device, tp = torch.device(device), TensorParallel() if tp is None else tp
    started = time.perf_counter()
    with open_weights(vllm_config, device, tp, stage) as weights:
        if isinstance(weights, RankState):
            rank_state.check(weights, vllm_config, tp, stage)
        model, size = _load(vllm_config, device, tp, stage, weights)
    logger.info("Loading weights took %.2f s, %.2f GiB", time.perf_counter() - started, size / 2**30)
    return model.eval()


def _load(
    vllm_config: VllmConfig, device: torch.device, tp: TensorParallel, stage: int, weights: Weights
) -> tuple[DecoderModel | OutOfTreeModel | DerivedModel | TransformersDecoder, int]:
    config = vllm_config.model_config
    if config.model_impl == "transformers":
        from vllm.model_executor.model_loader.transformers_weights import load_transformers

        return load_transformers(vllm_config, device, tp, weights)
    family = ModelRegistry.resolve(config.hf.architectures)
    if not isinstance(family, Family):
        if config.quantized is not None:
            raise ValueError(
                f"quantization={config.quantized.name!r} works with the built-in families of models; "
                f"{', '.join(config.hf.architectures)} is a class of your own. Use unquantized weights with it."
            )
        return load_out_of_tree(family, vllm_config, device, tp, weights)
    in_file = device.type == "cpu" and weights is not None and not isinstance(weights, RankState)
    new = new_decoder(vllm_config, family, device, tp, stage, keeps_table=in_file)
    new.model.open_weights = lambda: live_weights(new, vllm_config, device, tp, stage)
    if isinstance(weights, RankState):
        return new.model, rank_state.fill(new.model, weights, device)
    if weights is not None:
        return new.model, new.fill(weights, device)
    size = fill_with_random_numbers(new.model, device, config.seed or 0)
    if new.quantization is not None:
        scale = _DUMMY_SCALE * 3**0.5
        size += fill_quantized_with_random_numbers(new.model, new.quantization, device, config.seed or 0, scale)
    return new.model, size


@dataclass(frozen=True)
class NewDecoder:
    """A decoder without weights, and what it takes to fill it.

    dense: layers behind its pooler, which have files of their own; `first_dense` is the first one's number.
    source: the family before it was converted.
    """

    model: DecoderModel
    family: Family
    spec: Decoder
    quantization: ModelQuantization | None
    dense: Sequence[DenseModule]
    first_dense: int
    source: Family

    def fill(self, weights: Iterable[tuple[str, Tensor, Path]], device: torch.device) -> int:
        """Fill it from a checkpoint; the bytes that the weights take."""
        own = (module.tensors(i) for i, module in enumerate(self.dense, self.first_dense))
        tensors = itertools.chain(weights, *own)
        return fill_from_checkpoint(self.model, self.family, self.spec, tensors, device, self.quantization)


def new_decoder(
    vllm_config: VllmConfig,
    family: Family,
    device: torch.device,
    tp: TensorParallel,
    stage: int,
    hf: HFConfig | None = None,
    keeps_table: bool = False,
) -> NewDecoder:
    """The decoder of `vllm_config`, or of another config.json, on "meta". keeps_table: as of `ModelQuantization`."""
    config = vllm_config.model_config
    hf = config.hf if hf is None else hf
    quantized, own = config.quantized, vllm_config.quant_config
    quantization = None
    if quantized is not None:
        packs = not vllm_config.parallel_config.enable_eplb  # who may change places does so as numbers
        quantization = ModelQuantization(format_of(quantized), family, packs_experts=packs, keeps_table=keeps_table)
    source, family = family, converted(family, config.convert_type)
    spec, pool = family.decoder_of(hf), None if family.pool is None else family.pool(hf)
    dense: list[DenseModule] = []
    if config.pooling is not None and pool is not None:
        dense = [DenseModule.read(config.path / folder) for folder in config.pooling.dense]
        pool = replace(pool, layers=pool.layers + tuple(module.layer for module in dense))
        family = replace(family, names=family.names + DENSE_NAMES) if dense else family
    _warn_of_long_factors(hf, config.max_model_len)
    chosen = quantization if own is None else own
    model = build_decoder(
        spec, dtype_of(config.dtype), config.max_model_len, device, tp, chosen, family.modules,
        vllm_config.parallel_config.layers_of(stage, len(spec.blocks)), pool,
        vllm_config.parallel_config.enable_expert_parallel,
    )  # fmt: skip
    first_dense = 0 if pool is None else len(pool.layers) - len(dense)
    return NewDecoder(model, family, spec, quantization, dense, first_dense, source)


def live_weights(
    new: NewDecoder,
    vllm_config: VllmConfig,
    device: torch.device,
    tp: TensorParallel,
    stage: int,
    hf: HFConfig | None = None,
) -> LiveWeights:
    """What writes tensors into a loaded decoder that `new_decoder` has made of the same arguments."""
    if new.model.pool is not None and new.model.pool.spec.token_rows:
        raise ValueError("The weights of a model whose head is made of rows of its table cannot be replaced.")
    shell = new_decoder(vllm_config, new.source, device, tp, stage, hf).model
    return LiveWeights(new.model, shell, new.family, new.spec)


def save_tensors(
    model: nn.Module, vllm_config: VllmConfig, device: torch.device, tp: TensorParallel, stage: int
) -> Iterator[tuple[str, Tensor]]:
    """What `sharded_state` and tensorizer files hold of this rank's model, whose weights are as `apply_model` shows
    them. Layers with a format of their own cannot be turned back, and are read from the model's checkpoint once more.
    """
    config = vllm_config.model_config
    family = None if config.model_impl == "transformers" else ModelRegistry.resolve(config.hf.architectures)

    def read_quantized(take: Callable[..., None]) -> None:
        if config.quantized is None:
            return
        if not isinstance(family, Family):
            raise ValueError("A quantized model that runs through transformers cannot be saved in this form.")
        if vllm_config.load_config.load_format == "dummy":
            raise ValueError("A quantized model of random weights (load_format='dummy') cannot be saved.")
        # on "meta" all else takes no memory; experts are stored as they will be on this device
        meta = torch.device("meta")
        shell = new_decoder(vllm_config, family, device, tp, stage)
        rank_state.record_quantized(shell.model, take)
        with open_weights(vllm_config, torch.device("cpu"), tp, stage) as weights:
            if weights is None or isinstance(weights, RankState):
                raise ValueError("A quantized model that was loaded in this form is in this form already: copy it.")
            shell.fill(weights, meta)

    return rank_state.tensors_of(model, vllm_config, tp, stage, read_quantized)


def get_model(*, vllm_config: VllmConfig) -> nn.Module:
    """`load_model` on the device that the config names, under the name out-of-tree code imports."""
    return load_model(vllm_config, vllm_config.device_config.device)


def _warn_of_long_factors(hf: HFConfig, max_positions: int) -> None:
    if hf.rope.kind != "longrope":
        return
    original = hf.rope.params["original_max_position_embeddings"]
    if max_positions > original:
        logger.warning(
            "max_model_len is %d, so LongRoPE's factors for long sequences are used for every sequence. If none of "
            "yours is longer than %d tokens, set max_model_len to %d for better answers.",
            max_positions,
            original,
            original,
        )


def build_decoder(
    spec: Decoder,
    dtype: torch.dtype,
    max_positions: int,
    device: torch.device,
    tp: TensorParallel,
    quant_config: QuantizationConfig | None = None,
    modules: str | None = None,
    layers: range | None = None,
    pool: PoolHead | None = None,
    deals_experts: bool = False,
) -> DecoderModel:
    """The modules of `spec` without weights; only rotary tables are on `device` yet. modules: `Family.modules`.

    layers: of this pipeline stage, None for all.   pool: the head of a model that pools.   deals_experts: see
    `blocks.BuildContext`.
    """
    table = {} if modules is None else _modules_of(modules, spec)
    with torch.device("meta"):
        return DecoderModel(
            spec,
            dtype=dtype,
            max_positions=max_positions,
            device=device,
            tp=tp,
            quant_config=quant_config,
            modules=table,
            layers=layers,
            deals_experts=deals_experts,
            pool=pool,
        )


def _modules_of(where: str, spec: Decoder) -> Mapping[type[BlockSpec], BlockModule]:
    """What `Family.modules` names. Raises ValueError if it is not there."""
    kinds = {type(block) for block in spec.blocks}
    kinds = kinds - BLOCK_MODULES.keys() or kinds
    named = ", ".join(sorted(f"{kind.__module__}.{kind.__name__}" for kind in kinds))
    field = f"`modules` of the family with blocks of {named} is {where!r}"
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{field}, but importing it says: {error}. Expected the dotted name of a file on Python's path that has "
            "the table MODULES."
        ) from error
    table = getattr(module, "MODULES", None)
    if not isinstance(table, Mapping):
        raise ValueError(
            f"{field}, which has no table MODULES. Expected MODULES = {{<class of a block's spec>: <its module>}}."
        )
    return table


_Stored = tuple[str, Tensor, Path, WeightLayout]  # a checkpoint's tensor: its name there, itself, its file, its layout


def fill_from_checkpoint(
    model: DecoderModel,
    family: Family,
    spec: Decoder,
    tensors: Iterable[tuple[str, Tensor, Path]],
    device: torch.device,
    quantization: ModelQuantization | None = None,
) -> int:
    """Stream a checkpoint's tensors into a model, each to its place, and every weight filled; the bytes they take."""
    filler = WeightFiller(model, device)
    quantized = (
        None if quantization is None else QuantizedCheckpoint(model, quantization, family, spec, model.is_elsewhere)
    )
    unexpected: list[str] = []
    absent: list[tuple[str, str]] = []  # those of them that the family has a name for, and that name
    scales = CheckpointScales()
    copy: _Stored | None = None
    head = None if model.pool is None else model.pool.spec
    table = "embed" if spec.tied else "head"  # whose rows a pooling head's may be
    for name, tensor, file in tensors:
        if family.is_beyond(name, len(spec.blocks)):
            continue
        if head is not None and head.token_rows:
            read = None if quantized is None else quantized.reader_of_rows(name, table)
            if read is not None or (family.resolve(name) or ("",))[0] == f"{table}.weight":
                filler.fill("pool.0.weight", _token_rows(tensor, head, read or Tensor.float))
        if scales.take(name, tensor, file) or (quantized is not None and quantized.take(name, tensor, file)):
            continue
        found = family.resolve(name)
        if found is not None and found[0] == "head.weight" and _is_copy_of_embedding(model, spec):
            copy = (name, tensor, file, found[1])
            continue
        if found is not None and model.is_elsewhere(found[0]):
            continue
        shape = None if found is None else filler.expected_shape(found[0])
        if found is None or shape is None:
            if not family.is_harmless(name):
                unexpected.append(name)
                if found is not None:
                    absent.append((name, found[0]))
            continue
        _fill_one(filler, spec, (name, tensor, file, found[1]), found[0], shape)
    if copy is not None and "embed.weight" in filler.missing():  # what `safetensors.torch.save_model` keeps of the two
        shape = filler.expected_shape("embed.weight")
        assert shape is not None
        _fill_one(filler, spec, copy, "embed.weight", shape)
    model.cache_scales = scales.layers()
    quantized_bytes, missing = (0, []) if quantized is None else quantized.finish(filler, device)
    missing += [" or ".join(family.checkpoint_names(name)) or name for name in filler.missing()]
    if rank_state.DESCRIPTION in unexpected:
        raise ValueError('The weights are those of LLM.save_sharded_state. Load them with load_format="sharded_state".')
    if missing or unexpected:
        problems = []
        if missing:
            problems.append(f"missing {_some(missing)}")
        if unexpected:
            problems.append(f"unexpected {_some(unexpected)}")
        if absent:
            problems.append("{!r} is {!r} by the family's names, which this model does not have".format(*absent[0]))
        doubt = "are the family's names right" if absent else "is the download complete"
        raise ValueError(
            f"The checkpoint does not fit the model of its config.json: {'; '.join(problems)}. "
            f"Do config.json and the weights belong together, and {doubt}?"
        )
    return filler.filled_bytes + quantized_bytes


def _is_copy_of_embedding(model: DecoderModel, spec: Decoder) -> bool:
    """Whether a checkpoint's head is the embedding once more; of a head on another rank, what config.json says."""
    return spec.tied and not model.pools and (model.is_elsewhere("head.weight") or model.head.tied)


def _fill_one(filler: WeightFiller, spec: Decoder, stored: _Stored, target: str, shape: tuple[int, ...]) -> None:
    name, tensor, file, layout = stored
    try:
        value = fitted(tensor, layout, shape, target, spec)
    except ValueError as error:
        raise ValueError(f"{file}: tensor {name!r} {error}. Do config.json and the weights belong together?") from None
    try:
        filler.fill(target, value)
    except ValueError as error:
        raise ValueError(f"{file}: tensor {name!r}: {error}.") from None


def _token_rows(tensor: Tensor, head: PoolHead, read: Callable[[Tensor], Tensor]) -> Tensor:
    """The weight of a head that scores tokens, out of [vocabulary, hidden], of whose rows `read` makes numbers."""
    if max(head.token_rows) >= len(tensor):
        raise ValueError(f"Token {max(head.token_rows)} scores prompts, but the model has {len(tensor)} tokens.")
    rows = read(tensor[list(head.token_rows)])
    return rows[1:] - rows[:1] if head.difference else rows


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return shown if rest <= 0 else f"{shown} and {rest} more"


def fill_with_random_numbers(model: nn.Module, device: torch.device, seed: int) -> int:
    """Random weights that depend on the seed, their name and the kind of device only, not on the number of ranks.

    Matrices are uniform with standard deviation 0.02, biases 0, norms the identity. Returns the bytes they take.
    """
    filler = WeightFiller(model, device)
    generator = torch.Generator(device)
    for path, parameter, owner in list(filler.parameters()):
        generator.manual_seed((zlib.crc32(path.encode()) << 32 | seed & 0xFFFFFFFF) & 0x7FFFFFFFFFFFFFFF)
        filler.fill(path, _random(parameter, path, owner, generator))
    return filler.filled_bytes


def _random(parameter: ShardedParameter, path: str, owner: nn.Module, generator: torch.Generator) -> Tensor:
    shape, device = parameter.full_shape, generator.device
    if path.endswith(".weight") and isinstance(owner, RMSNorm | LayerNorm):
        return torch.full(shape, 1.0 - owner.offset, device=device)
    if len(shape) == 1:
        return torch.zeros(shape, device=device)
    bound = _DUMMY_SCALE * 3**0.5
    return torch.empty(shape, dtype=parameter.dtype, device=device).uniform_(-bound, bound, generator=generator)
