"""Helpers for the `load_weights` of models from outside the tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.sharding import ShardedParameter, load_weight
from vllm.model_executor.model_loader.checkpoint import iterate_pickle
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors


def default_weight_loader(param: Tensor, loaded_weight: Tensor) -> None:
    """Copy a checkpoint's tensor into a parameter, cast to its dtype. Raises ValueError if the shapes differ."""
    if isinstance(param, ShardedParameter):
        load_weight(param, loaded_weight)
        return
    if param.numel() == 1 and loaded_weight.numel() == 1:
        loaded_weight = loaded_weight.reshape(param.shape)
    if param.shape != loaded_weight.shape:
        raise ValueError(f"wrong shape: got {list(loaded_weight.shape)}, expected {list(param.shape)}")
    with torch.no_grad():
        param.data.copy_(loaded_weight)


def safetensors_weights_iterator(hf_weights_files: list[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of some safetensors files."""
    for file in hf_weights_files:
        yield from iterate_tensors(Path(file))


def pt_weights_iterator(hf_weights_files: list[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of some torch.save files that hold tensors only."""
    for file in hf_weights_files:
        yield from iterate_pickle(Path(file))


def maybe_remap_kv_scale_name(name: str, params_dict: dict[str, nn.Parameter]) -> str | None:
    """`name`, or None for a KV-cache scale that the model has no parameter for."""
    is_scale = name.endswith((".k_scale", ".v_scale", ".kv_scale"))
    return None if is_scale and name not in params_dict else name
