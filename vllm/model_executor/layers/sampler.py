"""Sampling as models from outside the tree name it. The engine samples itself; these names let such models be built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm.model_executor.sampling_metadata import SamplingMetadata


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Sampled token ids, [rows] int64."""

    sampled_token_ids: Tensor


class Sampler(nn.Module):
    """Takes the most likely token of each row.

    A request's own sampling parameters are applied by the engine, which works on `compute_logits` and never calls this.
    """

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata | None = None) -> SamplerOutput:
        """logits: [rows, vocabulary]."""
        return SamplerOutput(logits.argmax(-1))


def get_sampler() -> Sampler:
    """A sampler."""
    return Sampler()
