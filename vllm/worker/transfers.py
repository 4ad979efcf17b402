"""Moves of whole blocks that a plan asks for: within the pools of one rank, and to and from the lower tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm.ops.attention import copy_blocks
from vllm.step.plan import Transfer, TransferKind
from vllm.worker.device import DeviceContext
from vllm.worker.host_tier import HostTier


def run_transfers(
    transfers: Sequence[Transfer],
    pools: Sequence[Sequence[Tensor]],
    context: DeviceContext,
    tier: HostTier | None = None,
) -> None:
    """Save, copy, clear and load blocks, in this order, each kind in one go.

    pools: per pool its tensors, all with the blocks along the first dimension. Raises NotImplementedError for a pool
    that is not there, and for a lower tier if the worker has none.
    """
    kinds: dict[tuple[TransferKind, int], list[Transfer]] = {}
    for transfer in transfers:
        lower = transfer.kind in (TransferKind.SAVE, TransferKind.LOAD)
        if transfer.pool >= len(pools) or (lower and (tier is None or transfer.pool != 0)):
            raise NotImplementedError(f"This worker cannot run a plan with {transfer}.")
        kinds.setdefault((transfer.kind, transfer.pool), []).append(transfer)
    for kind, pool in sorted(kinds, key=lambda key: _TURNS.index(key[0])):
        moved, tensors = kinds[kind, pool], pools[pool]
        src, dst = np.array([t.src for t in moved]), np.array([t.dst for t in moved])
        if kind is TransferKind.SAVE and tier is not None:
            tier.save(tensors, src, dst)
        elif kind is TransferKind.LOAD and tier is not None:
            tier.load(tensors, dst, src)
        elif kind is TransferKind.COPY:
            where = context.upload([src, dst])
            for tensor in tensors:
                copy_blocks(tensor, *where)
        else:
            (cleared,) = context.upload([dst])
            for tensor in tensors:
                tensor.index_fill_(0, cleared, 0)


_TURNS = (TransferKind.SAVE, TransferKind.COPY, TransferKind.ZERO, TransferKind.LOAD)
