"""Dense products, plain and with weights repacked for one machine."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vllm.ops.registry import op


@op
def linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [..., in]; weight: [out, in], or what `pack_weight` returned on this device; bias: [out]."""
    return F.linear(x, weight, bias)


@op
def pack_weight(weight: Tensor) -> Any:
    """Repack [out, in] once at load for this device's `linear`; the identity where nothing is gained. The original may be freed."""
    return weight
