"""From hidden states to logits over the whole vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.step.inputs import RowView

if TYPE_CHECKING:
    from vllm.model_executor.sampling_metadata import SamplingMetadata

NEVER_SAMPLED = -1e30  # a logit that is never drawn, and still a number


class LogitsProcessor(nn.Module):
    """Project, gather the ranks' vocabulary shards, cut the padding, scale, soft-cap; in fp32 from the gather on.

    vocab_size: width of the head.   org_vocab_size: logits that come out, by default the same.
    soft_cap: logits become soft_cap * tanh(logits / soft_cap).   logits_as_input: the argument already is logits.
    """

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = vocab_size if org_vocab_size is None else org_vocab_size
        self.scale, self.soft_cap, self.logits_as_input = scale, soft_cap, logits_as_input

    def forward(
        self,
        lm_head: VocabParallelEmbedding | None,
        hidden_states: Tensor,
        sampling_metadata: SamplingMetadata | None = None,
        embedding_bias: Tensor | None = None,
        view: RowView | None = None,
    ) -> Tensor:
        """hidden_states: [rows, hidden] -> [rows, org_vocab_size] fp32, or more columns where adapters of these rows
        add tokens. view: of the rows, None without adapters.
        """
        if sampling_metadata is not None and sampling_metadata.selected_token_indices is not None:
            hidden_states = hidden_states[sampling_metadata.selected_token_indices]
        if self.logits_as_input or lm_head is None:
            logits = hidden_states
        else:
            logits = lm_head.tp.all_gather(lm_head.project(hidden_states, view))
        logits, absent = logits[..., : self.org_vocab_size].float(), None
        if embedding_bias is not None:
            logits = logits + embedding_bias
        if view is not None and lm_head is not None and lm_head.lora is not None and lm_head.lora.added is not None:
            logits, absent = lm_head.lora.added.behind(logits, hidden_states, view)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits if absent is None else logits.masked_fill(absent, NEVER_SAMPLED)
