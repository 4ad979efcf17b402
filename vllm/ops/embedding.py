"""Rows of a table that may be packed for products too, because an output head shares it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.registry import op


@op
def embedding(ids: Tensor, table: Any) -> Tensor:
    """table[ids]. ids: [tokens] int64; table: [rows, dim] or what `pack_table` returned -> [tokens, dim]."""
    return F.embedding(ids, table)


@op
def pack_table(table: Tensor) -> Any:
    """Like `pack_weight`, for a table that is read by `linear` and by `embedding`. The original may be freed."""
    return table


def unpack(table: Any) -> Tensor:
    """What `pack_table` or `pack_weight` was given, as a new tensor; not for the packed forms of quantized weights."""
    rows: Tensor = embedding(torch.arange(table.shape[0]), table)
    return rows
