"""Attention by other means than this package's kernels: the torch reference, or a library that the user has installed.

A backend replaces the op `attend` on one device; the cache keeps its layout, and all else its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vllm.logger import init_logger
from vllm.ops.attention import AttentionParams, HostBatch, OwnKV, Planned, attend, plan_batch
from vllm.step.inputs import GroupInputs, StepInputs

logger = init_logger(__name__)


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


def use(name: str | None, device: torch.device) -> Backend | None:
    """Let backend `name` ("TORCH_SDPA", "FLASH_ATTN", "FLASHINFER") do attention on `device` for this whole process.

    None and "TRITON_ATTN" stand for the kernels that are registered already. Returns the library's backend, if it is
    one. Raises ValueError if the library cannot be imported.
    """
    if name is None or name == "TRITON_ATTN":
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
