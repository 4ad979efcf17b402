"""Moves of whole blocks that a plan asks for, within the pools of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm.ops.attention import copy_blocks
from vllm.step.plan import Transfer, TransferKind
from vllm.worker.device import DeviceContext


def run_transfers(transfers: Sequence[Transfer], pools: Sequence[Sequence[Tensor]], context: DeviceContext) -> None:
    """Copy, then clear blocks. pools: per pool its tensors, all with the blocks along the first dimension.

    Raises NotImplementedError for pools that are not there, and for a lower tier, which this worker does not have.
    """
    for transfer in transfers:
        if transfer.pool >= len(pools) or transfer.kind not in (TransferKind.COPY, TransferKind.ZERO):
            raise NotImplementedError(f"This worker cannot run a plan with {transfer}.")
    for pool, tensors in enumerate(pools):
        copied = [t for t in transfers if t.pool == pool and t.kind is TransferKind.COPY]
        cleared = [t.dst for t in transfers if t.pool == pool and t.kind is TransferKind.ZERO]
        if copied:
            src, dst = context.upload([np.array([t.src for t in copied]), np.array([t.dst for t in copied])])
            for tensor in tensors:
                copy_blocks(tensor, src, dst)
        if cleared:
            (where,) = context.upload([np.array(cleared)])
            for tensor in tensors:
                tensor.index_fill_(0, where, 0)
