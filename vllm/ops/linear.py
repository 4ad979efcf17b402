"""Dense products, plain and with weights repacked for one machine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.registry import op


@op
def linear(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T + bias. x: [..., in]; weight: [out, in] or what `pack_weight` returned; bias: [out].

    out_dtype: x's dtype by default; float32 spares logits the rounding to x's dtype where the kernel sums in fp32.
    """
    out = F.linear(x, weight, bias)
    return out if out_dtype is None else out.to(out_dtype)


@op
def pack_weight(weight: Tensor) -> Any:
    """Repack [out, in] for `linear`, once at load; may return `weight` itself. The original may be freed."""
    return weight
