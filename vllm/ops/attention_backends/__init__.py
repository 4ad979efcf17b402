"""Attention by other means than this package's kernels: the torch reference, or a library that the user has installed.

A backend replaces the op `attend` on one device; the cache keeps its layout, and all else its kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from vllm.logger import init_logger
from vllm.ops.attention import AttentionParams, HostBatch, OwnKV, Planned, attend, plan_batch
from vllm.step.inputs import GroupInputs, StepInputs

logger = init_logger(__name__)

DEFAULT = "TRITON_ATTN"  # on every device: the kernels of this package


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a model asks of its attention: one layer's parameters, the size of its heads, and two dtypes."""

    params: AttentionParams
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


class Backend(Protocol):
    """One library."""

    name: str

    def missing(self, wanted: Wanted) -> str | None:
        """What of it the library lacks, in words; None if nothing."""

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        params: AttentionParams,
        step: StepInputs,
        group: GroupInputs,
        own: OwnKV | None = None,
    ) -> Tensor:
        """As `ops.attention.attend`."""

    def plan(self, batch: HostBatch) -> Planned | None:
        """As `ops.attention.plan_batch`."""


_users: dict[str, tuple[str, WeakSet[object]]] = {}  # by type of device: what all engines of this process use, and who


def claim(name: str | None, device: torch.device, owner: object) -> None:
    """Let `owner` rely on backend `name` for as long as it lives: the ops are this process's, and captured steps hold
    what they were captured with. Raises ValueError if another lives that relies on another backend.
    """
    name = name or DEFAULT
    used, owners = _users.get(device.type, (name, WeakSet()))
    if used != name:
        gc.collect()
        if owners:
            raise ValueError(
                f"An engine in this process does attention on {device.type!r} through {used}: one that does it through "
                f"{name} needs a process of its own, or has to wait until that engine is gone (`del llm`)."
            )
        owners = WeakSet()
    owners.add(owner)
    _users[device.type] = name, owners


def use(name: str | None, device: torch.device) -> Backend | None:
    """Let backend `name` ("TORCH_SDPA", "FLASH_ATTN", "FLASHINFER") do attention on `device` for this whole process.

    None and "TRITON_ATTN" stand for the kernels that are registered already. Returns the library's backend, if it is
    one. Raises ValueError if the library cannot be imported.
    """
    if name in (None, DEFAULT):
        return None
    if name == "TORCH_SDPA":
        logger.info("Attention runs as plain torch operations (TORCH_SDPA): exact, and slower than the default.")
        attend.unregister(device.type)
        plan_batch.unregister(device.type)
        return None
    try:
        backend = _load(name, device)
    except ImportError as error:
        raise ValueError(
            f"The attention backend {name} cannot be used: importing its package failed: {error}"
        ) from error
    attend.register(device.type, backend.attend)
    plan_batch.register(device.type, backend.plan)
    logger.info("Attention runs through %s.", backend.name)
    return backend


def _load(name: str, device: torch.device) -> Backend:
    if name == "FLASH_ATTN":
        from vllm.ops.attention_backends.flash_attn import FlashAttention

        return FlashAttention()
    if name == "FLASHINFER":
        from vllm.ops.attention_backends.flashinfer import FlashInfer

        return FlashInfer(device)
    raise ValueError(f"Unknown attention backend {name!r}: expected TRITON_ATTN, TORCH_SDPA, FLASH_ATTN or FLASHINFER.")


def check(backend: Backend, model: nn.Module, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Raise ValueError if some attention layer of `model` needs what the backend lacks."""
    for params in _attention_params(model.modules()):
        missing = backend.missing(Wanted(params, head_dim, dtype, cache_dtype))
        if missing is not None:
            raise ValueError(
                f"The attention backend {backend.name} cannot run this model: {missing}. Leave attention_backend and "
                "VLLM_ATTENTION_BACKEND unset, or choose TORCH_SDPA."
            )


def _attention_params(modules: Iterable[Any]) -> Iterable[AttentionParams]:
    for module in modules:
        params = getattr(module, "params", None)
        if isinstance(params, AttentionParams):
            yield params
