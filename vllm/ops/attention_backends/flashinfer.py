"""Attention through the package flashinfer: its wrappers for paged caches, planned once per step and kind of layer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch
from torch import Tensor

from vllm.ops.attention import AttentionParams, HostBatch, OwnKV, Planned
from vllm.ops.attention_backends import Wanted
from vllm.step.inputs import GroupInputs, StepInputs

_WORKSPACE = 256 << 20  # bytes, what the library's documentation advises at least half of
_HEAD_DIMS = (64, 128, 256)


class _Kind(NamedTuple):
    """Layers of one kind share a plan."""

    group: int
    heads: int
    scale: float
    window: int | None
    softcap: float | None


class FlashInfer:
    """The library's "HND" layout is the cache's own: [blocks, 2, kv_heads, block_size, head_dim].

    A plan serves all layers of one kind in one step. Wrappers share a workspace, as they run one after another.
    """

    name = "FLASHINFER"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        self._step: StepInputs | None = None
        self._planned: dict[_Kind, Any] = {}
        self._wrappers: dict[bool, list[Any]] = defaultdict(list)  # by whether they are for decode steps

    def missing(self, wanted: Wanted) -> str | None:
        """What of it the library lacks."""
        if wanted.dtype not in (torch.float16, torch.bfloat16):
            return f"flashinfer computes in float16 and bfloat16 only, not in {wanted.dtype}".replace("torch.", "")
        if wanted.head_dim not in _HEAD_DIMS:
            return f"flashinfer takes heads of 64, 128 and 256, not {wanted.head_dim}"
        if wanted.params.alibi_slopes is not None:
            return "flashinfer takes no ALiBi slopes of a model's own"
        if wanted.params.is_unusual:
            return f"flashinfer is not used for {wanted.params.is_unusual}"
        return None

    def plan(self, batch: HostBatch) -> Planned | None:
        """The library plans by kinds of layers, which `attend` finds out: nothing is planned here."""
        return None

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
        if step is not self._step:
            self._step, self._planned = step, {}
        number = next(i for i, g in enumerate(step.groups) if g is group)
        kind = _Kind(number, q.shape[1], params.scale, params.window, params.softcap)
        wrapper = self._planned.get(kind)
        if wrapper is None:
            wrapper = self._planned[kind] = self._plan(kind, q, kv_cache, step, group)
        scales = {} if kv_cache.dtype == q.dtype else {"k_scale": params.k_scale, "v_scale": params.v_scale}
        out: Tensor = wrapper.run(q.contiguous(), kv_cache, **scales)
        return out

    def _plan(self, kind: _Kind, q: Tensor, kv_cache: Tensor, step: StepInputs, group: GroupInputs) -> Any:
        """A wrapper that knows the batch."""
        kv_heads, block_size, head_dim = kv_cache.shape[2:]
        decode = step.max_query_len == 1
        blocks: np.ndarray = -(-step.host_seq_lens.astype(np.int64) // block_size)
        starts: np.ndarray = np.zeros(len(blocks) + 1, np.int32)
        np.cumsum(blocks, out=starts[1:])
        rows: np.ndarray = np.repeat(np.arange(len(blocks)) * group.block_table.shape[1], blocks)
        columns = np.arange(starts[-1]) - np.repeat(starts[:-1], blocks)
        pages = group.block_table.flatten()[torch.from_numpy(rows + columns).to(self._device)]
        last = (step.host_seq_lens - (blocks - 1) * block_size).astype(np.int32)
        wrapper = self._wrapper(decode, sum(w is not None for w in self._planned.values()))
        common = {
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap or 0.0,
            "q_data_type": q.dtype,
            "kv_data_type": kv_cache.dtype,
        }
        paged = (torch.from_numpy(starts), pages, torch.from_numpy(last))
        sizes = (kind.heads, kv_heads, head_dim, block_size)
        if decode:
            wrapper.plan(*paged, *sizes, **common)
        else:
            wrapper.plan(torch.from_numpy(step.host_query_starts), *paged, *sizes, causal=True, **common)
        return wrapper

    def _wrapper(self, decode: bool, number: int) -> Any:
        """The `number`th wrapper of its sort; a step needs one for each kind of layer."""
        made = self._wrappers[decode]
        while len(made) <= number:
            if decode:
                made.append(
                    flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", use_tensor_cores=True)
                )
            else:
                made.append(flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND"))
        return made[number]
