"""Scales of a float8 KV cache, two for each attention layer: from the checkpoint, from a file, or computed; what is
stored is a number divided by its scale."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.model_executor.model_loader.cache_scales import is_scale
from vllm.model_executor.models.kv_groups import layout_of
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.step.kv_policy import KVKind
from vllm.worker import kv_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed import TensorParallel
    from vllm.model_executor.models.traits import Model
    from vllm.worker.device import DeviceContext

logger = init_logger(__name__)

Scales = Mapping[int, tuple[float, float]]  # of a layer's keys and values

_MOST_BYTES = 16 << 20  # of a file
_TOKENS, _REQUESTS = 1024, 4  # of the made-up prompts
_KEY_RANGE, _VALUE_RANGE = 200.0, 100.0  # what the largest numbers met become: far below 448, as others will be larger


def scales_of_file(config: VllmConfig, tp: TensorParallel) -> Scales | None:
    """What the file that the configuration names has for a rank. Raises ValueError that says what is wrong with it."""
    cache = config.cache_config
    if cache.quantization_param_path is None or not _is_float8(config):
        return None
    return read_scales(Path(cache.quantization_param_path), config.model_config.hf.model_type, tp.rank, tp.world)


def _is_float8(config: VllmConfig) -> bool:
    return kv_memory.cache_dtype(config.cache_config.cache_dtype, config.model_config.dtype).itemsize == 1


def use_cache_scales(model: Model, config: VllmConfig, context: DeviceContext, of_file: Scales | None) -> None:
    """Give the model's attention layers the scales that the configuration asks for, if the cache is a float8 one.

    of_file: what `scales_of_file` has found.   Raises ValueError if they do not fit the model.
    """
    cache = config.cache_config
    if not _is_float8(config):
        return
    layers = model.paged_attention()
    given: Scales
    if of_file is not None:
        path = str(cache.quantization_param_path)
        given, source = of_file, path
        absent = sorted(set(layers) - set(given))
        if absent:
            raise ValueError(f"quantization_param_path: {path} has no scaling factors for the layers {absent}.")
        count = len(model.traits.kv)
        if max(given, default=0) >= count:
            raise ValueError(
                f"quantization_param_path: {path} has scaling factors for layer {max(given)}: it is for another model "
                f"than this one of {count} layers."
            )
    elif cache.calculate_kv_scales:
        given, source = computed_scales(model, config, context), "made-up prompts"
    else:
        given, source = model.cache_scales, "the checkpoint"
    applied = {number: given[number] for number in layers if number in given}
    for number, (k_scale, v_scale) in applied.items():
        layers[number].params = replace(layers[number].params, k_scale=k_scale, v_scale=v_scale)
    if not layers:
        logger.warning("This model's cache has no scales: its numbers are stored in 8 bits as they are.")
    elif len(applied) < len(layers):
        logger.warning(
            "The KV cache is one of 8-bit floats and %d of %d attention layers have no scales: their numbers are "
            "stored as they are (scale 1). Use calculate_kv_scales=True, or a checkpoint with scales, if quality "
            "suffers.",
            len(layers) - len(applied),
            len(layers),
        )
    else:
        logger.info("The scales of the KV cache of all %d layers come from %s.", len(layers), source)


def read_scales(path: Path, model_type: str, rank: int, world: int) -> Scales:
    """The scales of one rank from a file of `quantization_param_path`. Raises ValueError that says what is wrong.

    {"model_type": ..., "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {rank: {layer: number}}}}; a number
    serves keys and values.
    """

    def wrong(what: str) -> ValueError:
        return ValueError(f"quantization_param_path: {path} {what}.")

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise wrong(f"is larger than {_MOST_BYTES >> 20} MiB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(f"cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise wrong(f"is not JSON: {error}") from None
    named = data.get("model_type") if isinstance(data, dict) else None
    if named is not None and named != model_type:
        raise wrong(f"is for models of the type {named!r}, this one's is {model_type!r}")
    cache = data.get("kv_cache") if isinstance(data, dict) else None
    factors = cache.get("scaling_factor") if isinstance(cache, dict) else None
    if not isinstance(cache, dict) or not isinstance(factors, dict):
        raise wrong('has no {"kv_cache": {"scaling_factor": {rank: {layer: number}}}}')
    if cache.get("dtype") != "float8_e4m3fn":
        raise wrong(f"has scales for the dtype {cache.get('dtype')!r}, expected 'float8_e4m3fn'")
    if set(factors) != {str(i) for i in range(world)}:
        raise wrong(f"has the ranks {sorted(factors)}, expected those of tensor_parallel_size={world}")
    mine, scales = factors[str(rank)], {}
    if not isinstance(mine, dict):
        raise wrong(f"has no layers for rank {rank}")
    for key, value in mine.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (key.isascii() and key.isdigit()) or not number or not is_scale(value):
            raise wrong(f"has {value!r} for layer {key!r} of rank {rank}, expected a positive number")
        scales[int(key)] = (float(value), float(value))
    return scales


def computed_scales(model: Model, config: VllmConfig, context: DeviceContext) -> Scales:
    """Scales from the keys and values of a few made-up prompts, which the model computes with a cache of its dtype."""
    traits = model.traits
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("calculate_kv_scales=True is not supported with stages (pipeline_parallel_size > 1).")
    if any(need is not None and need.kind is KVKind.CROSS for need in traits.kv):
        raise ValueError("calculate_kv_scales=True is not supported for models with an encoder.")
    size, scheduler = config.model_config, config.scheduler_config
    length = min(_TOKENS // _REQUESTS, size.max_model_len, scheduler.max_num_batched_tokens)
    requests = max(1, min(_REQUESTS, scheduler.max_num_batched_tokens // length))
    layout = layout_of(traits, config.cache_config.block_size, size.dtype)
    step, tables = _step(requests, length, size.hf.vocab_size, layout, context)
    dtype, blocks = kv_memory.cache_dtype("auto", size.dtype), 1 + sum(table.size for table in tables)
    tensors = kv_memory.allocate(layout, blocks, 1 + requests, dtype, context.device).tensors
    with torch.inference_mode():
        model(step, tensors)
        found = {}
        for number, layer in model.paged_attention().items():
            place = layer.place
            assert place is not None
            written = tensors[place.tensor][torch.from_numpy(tables[place.group].ravel()).to(context.device)]
            largest = written.float().abs().amax((0, 2, 3, 4)).tolist()
            found[number] = (_scale(largest[0], _KEY_RANGE), _scale(largest[1], _VALUE_RANGE))
    return found


def _scale(largest: float, wanted: float) -> float:
    return largest / wanted if 0.0 < largest < math.inf else 1.0


def _step(
    requests: int, length: int, vocab_size: int, layout: Any, context: DeviceContext
) -> tuple[StepInputs, list[np.ndarray]]:
    """Prompts of random tokens, each with blocks of its own in every group, and these blocks."""
    tokens = requests * length
    ids = np.random.default_rng(0).integers(0, vocab_size, tokens)
    positions = np.tile(np.arange(length, dtype=np.int64), requests)
    starts: np.ndarray = np.arange(requests + 1, dtype=np.int32) * length
    lens: np.ndarray = np.full(requests, length, np.int32)
    request: np.ndarray = np.repeat(np.arange(requests), length)
    tables: list[np.ndarray] = []
    mappings: list[np.ndarray] = []
    first = 1
    for group in layout.groups:
        if group.kind is KVKind.RECURRENT:
            tables.append(np.arange(1, requests + 1, dtype=np.int32)[:, None])
            mappings.append(np.zeros(tokens, np.int64))
            continue
        block_size = layout.block_size * group.units
        count = -(-length // block_size)
        table: np.ndarray = np.arange(first, first + requests * count, dtype=np.int32).reshape(requests, count)
        first += table.size
        tables.append(table)
        blocks = table[request, positions // block_size].astype(np.int64)
        mappings.append(blocks * block_size + positions % block_size)
    d_ids, d_positions, d_starts, d_lens, *rest = context.upload(
        [ids.astype(np.int64), positions, starts, lens, *mappings, *tables]
    )
    groups = [
        GroupInputs(slot_mapping=mapping, block_table=table)
        for mapping, table in zip(rest[: len(tables)], rest[len(tables) :], strict=True)
    ]
    inputs = StepInputs.of(
        d_ids, d_positions, d_starts, d_lens, groups, host_query_starts=starts, host_seq_lens=lens
    )  # fmt: skip
    return inputs, tables
