"""What out-of-tree models see of sampling when they compute logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """`selected_token_indices`: [rows] int64, the hidden states whose logits are wanted; None: all that are passed."""

    selected_token_indices: Tensor | None = None
