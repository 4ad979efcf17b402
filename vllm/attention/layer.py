"""The public attention layer: paged, causal self-attention for models from outside the tree.

Such models call `self.attn(q, k, v)` (or, of an older age, with `kv_cache` and `attn_metadata` too) and expect the
layer to know its cache and the batch. `models/out_of_tree.py` tells it both before each forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm.model_executor.models.kv_groups import KVPlace
from vllm.ops.attention import AttentionParams, attend, write_kv
from vllm.step.inputs import StepInputs

if TYPE_CHECKING:
    from collections.abc import Iterator

# What `attn_metadata` is in this engine; models pass it on and do not look inside.
AttentionMetadata = StepInputs


class AttentionType:
    """Kinds of attention. Only decoder self-attention runs today."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class Attention(nn.Module):
    """Attention of this rank's `num_heads` query heads over its `num_kv_heads` key/value heads.

    scale: of the scores.   alibi_slopes: one for each head.   logits_soft_cap: scores become cap * tanh(scores / cap).
    per_layer_sliding_window: tokens each query sees, itself included; by default the window of the model's config.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        blocksparse_params: dict[str, Any] | None = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        use_mla: bool = False,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
    ) -> None:
        super().__init__()
        if blocksparse_params is not None:
            raise ValueError("Attention: block-sparse attention (blocksparse_params) is not supported.")
        if use_mla:
            raise ValueError("Attention: multi-head latent attention (use_mla) is not supported.")
        if attn_type != AttentionType.DECODER:
            raise ValueError(
                f"Attention: attn_type={attn_type!r} is not supported, expected {AttentionType.DECODER!r}."
            )
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"Attention: {num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly.")
        self.prefix, self.sliding_window = prefix, per_layer_sliding_window
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.params = AttentionParams(scale, per_layer_sliding_window, logits_soft_cap or None, slopes)
        self.place: KVPlace | None = None
        self._bound: tuple[Tensor, StepInputs] | None = None
        self._called = False

    @contextmanager
    def bound(self, kv_caches: Sequence[Tensor], step: StepInputs) -> Iterator[None]:
        """Inside, the layer's one call works on this cache and batch."""
        if self.place is None:
            raise RuntimeError(f"Attention layer {self.prefix!r} has no place in the cache; the loader assigns it.")
        self._bound, self._called = (kv_caches[self.place.tensor], step), False
        try:
            yield
        finally:
            self._bound = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor | None = None,
        attn_metadata: AttentionMetadata | None = None,
    ) -> Tensor:
        """query: [tokens, num_heads * head_size], key and value: [tokens, num_kv_heads * head_size] -> like query.

        `kv_cache` and `attn_metadata` are what the layer is bound to already. Raises RuntimeError for a second call in
        one step, and ValueError for other tokens than the step's.
        """
        if self._bound is None or self.place is None:
            raise RuntimeError(f"Attention layer {self.prefix!r} was called outside of a step of the engine.")
        if self._called:
            raise RuntimeError(
                f"Attention layer {self.prefix!r} was called twice in one step. It has one cache, in which the second "
                "call would replace the keys of the first: make one Attention for each place in the model."
            )
        self._called = True
        cache, step = self._bound
        group = step.groups[self.place.group]
        if len(key) != len(step.positions):
            raise ValueError(
                f"Attention layer {self.prefix!r} was given keys of shape {tuple(key.shape)}, expected a row for each "
                f"of the step's {len(step.positions)} tokens."
            )
        k = key.reshape(-1, self.num_kv_heads, self.head_size)
        v = value.reshape(-1, self.num_kv_heads, self.head_size)
        write_kv(k, v, cache, group.slot_mapping, self.params.k_scale, self.params.v_scale)
        q = query.reshape(-1, self.num_heads, self.head_size)
        out: Tensor = attend(q, cache, self.params, step, group)
        return out.view(query.shape)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_size={self.head_size}"
