"""What one layer of a model keeps for each request between steps, as data and without torch."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.step.kv_policy import KVKind

TOKENS = -1  # in a shape: the tokens of a block


@dataclass(frozen=True, slots=True)
class KVTensor:
    """One tensor of a layer.   shape: of one block, TOKENS in it once, or of one state.   dtype: None: the cache's."""

    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class KVNeed:
    """What one layer of one rank needs.

    kind: how its blocks live.   tensors: on one block table.   window: tokens each query sees, for SLIDING only.
    same_as: an earlier layer whose blocks this one reads and does not write; then it has no tensors of its own, and a
        window no wider than that layer's.
    encoder_tokens: the most tokens of an encoder whose keys are kept, for CROSS only.
    """

    kind: KVKind
    tensors: tuple[KVTensor, ...]
    window: int | None = None
    same_as: int | None = None
    encoder_tokens: int = 0


def attention_need(kv_heads: int, head_dim: int, window: int | None = None) -> KVNeed:
    """Keys and values of one attention layer: a block is [2, kv_heads, tokens, head_dim]."""
    kind = KVKind.FULL if window is None else KVKind.SLIDING
    return KVNeed(kind, (KVTensor((2, kv_heads, TOKENS, head_dim)),), window)
