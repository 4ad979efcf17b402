"""What a model's own pooler learns about the prompts whose hidden states it gets, which are always complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.pooling_params import PoolingParams


@dataclass(frozen=True)
class PoolingCursor:
    """Where each prompt's tokens begin and end in the hidden states: [prompts] int64, on their device."""

    first_token_indices_gpu: Tensor
    last_token_indices_gpu: Tensor
    prompt_lens_cpu: Tensor

    @property
    def num_scheduled_tokens_cpu(self) -> Tensor:
        """All of a prompt's tokens, since a pooler sees complete prompts."""
        return self.prompt_lens_cpu

    def is_partial_prefill(self) -> bool:
        return False

    def is_finished(self) -> Tensor:
        """[prompts], all of them."""
        return torch.ones_like(self.prompt_lens_cpu, dtype=torch.bool)


@dataclass(frozen=True)
class PoolingMetadata:
    """The prompts behind [tokens, hidden] states, which lie one behind the other.

    prompt_lens: [prompts] int64, on the host.   token_ids: of each prompt, [its tokens] int64.
    pooling_params: of each prompt's request.   device: that of the hidden states.
    """

    prompt_lens: Tensor
    token_ids: Sequence[Tensor]
    pooling_params: Sequence[PoolingParams]
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(
        cls, token_ids: Sequence[Tensor], params: Sequence[PoolingParams], device: torch.device | str = "cpu"
    ) -> PoolingMetadata:
        return cls(torch.tensor([len(ids) for ids in token_ids]), token_ids, params, torch.device(device))

    @property
    def prompt_token_ids(self) -> Tensor:
        """[prompts, longest prompt] int64, padded with zeros."""
        return torch.nn.utils.rnn.pad_sequence(list(self.token_ids), batch_first=True)

    def get_prompt_token_ids(self) -> list[Tensor]:
        return list(self.token_ids)

    def get_pooling_params(self) -> list[PoolingParams]:
        return list(self.pooling_params)

    @property
    def seq_groups(self) -> list[tuple[list[int], PoolingParams]]:
        """(numbers of the sequences, parameters) of each request, as poolers of 0.6 read them: one sequence each."""
        return [([i], params) for i, params in enumerate(self.pooling_params)]

    @property
    def pooling_cursor(self) -> PoolingCursor:
        ends = self.prompt_lens.cumsum(0)
        first, last = (x.to(self.device) for x in (ends - self.prompt_lens, ends - 1))
        return PoolingCursor(first, last, self.prompt_lens)

    def get_pooling_cursor(self) -> PoolingCursor:
        return self.pooling_cursor

    def __getitem__(self, prompts: slice) -> PoolingMetadata:
        return PoolingMetadata(
            self.prompt_lens[prompts], self.token_ids[prompts], self.pooling_params[prompts], self.device
        )


@dataclass(frozen=True)
class PoolingTensors:
    """The lengths of prompts, on the device of their states: what poolers of 0.6 ask for."""

    prompt_lens: Tensor

    @classmethod
    def from_pooling_metadata(cls, pooling_metadata: PoolingMetadata, device: torch.device) -> PoolingTensors:
        return cls(pooling_metadata.prompt_lens.to(device))
