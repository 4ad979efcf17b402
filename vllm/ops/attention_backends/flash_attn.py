"""Attention through the package flash-attn (2.6 or newer): one variable-length call for any mix of requests."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from vllm.ops.attention import AttentionParams, HostBatch, OwnKV, Planned
from vllm.ops.attention_backends import Wanted
from vllm.step.inputs import GroupInputs, StepInputs

_PAGE = 256  # flash-attn reads paged caches whose blocks have a multiple of so many tokens


class FlashAttention:
    """The cache is read in place if its blocks are large enough, else the keys of the batch are copied together."""

    name = "FLASH_ATTN"

    def missing(self, wanted: Wanted) -> str | None:
        """What of it the library lacks."""
        if wanted.dtype not in (torch.float16, torch.bfloat16):
            return f"flash-attn computes in float16 and bfloat16 only, not in {_short(wanted.dtype)}"
        if wanted.cache_dtype != wanted.dtype:
            return f"flash-attn reads a cache of the model's dtype only, not {_short(wanted.cache_dtype)}"
        if wanted.head_dim > 256 or wanted.head_dim % 8:
            return f"flash-attn takes head sizes that 8 divides, up to 256, not {wanted.head_dim}"
        if wanted.params.is_unusual:
            return f"flash-attn is not used for {wanted.params.is_unusual}"
        return None

    def plan(self, batch: HostBatch) -> Planned | None:
        """One call does all: there is nothing to plan."""
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
        # blocks behind a window hold anything, NaN included, which the library may multiply by zero
        in_place = kv_cache.shape[3] % _PAGE == 0 and params.window is None
        if in_place:
            k, v = (side.transpose(1, 2) for side in kv_cache.unbind(1))  # [blocks, block_size, kv_heads, head_dim]
        else:
            k, v = _gather(kv_cache, step, group, params.window)
        window = (-1, -1) if params.window is None else (params.window - 1, 0)
        out: Tensor = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=step.query_starts,
            cu_seqlens_k=F.pad(step.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=int(step.host_seq_lens.max()),
            softmax_scale=params.scale,
            causal=True,
            window_size=window,
            softcap=params.softcap or 0.0,
            alibi_slopes=None if params.alibi_slopes is None else params.alibi_slopes.float(),
            block_table=group.block_table if in_place else None,
        )
        return out


def _gather(kv_cache: Tensor, step: StepInputs, group: GroupInputs, window: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values of all requests, one after another: [sum of seq_lens, kv_heads, head_dim]."""
    block_size = kv_cache.shape[3]
    lens: np.ndarray = step.host_seq_lens.astype(np.int64)
    requests: np.ndarray = np.repeat(np.arange(len(lens)), lens)
    positions = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    where = torch.from_numpy(requests * group.block_table.shape[1] + positions // block_size).to(kv_cache.device)
    offset = torch.from_numpy(positions % block_size).to(kv_cache.device)
    block = group.block_table.flatten()[where].long()
    k, v = (side[block, :, offset] for side in kv_cache.unbind(1))
    if window is None:
        return k, v
    unused = (block == 0)[:, None, None]  # the null block stands where the window has passed
    return k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
