"""The older interface around a model's tokenizer and those of its adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.tokenizer import Tokenizer
    from vllm.lora.request import LoRARequest


class TokenizerGroup:
    """`tokenizer` is a transformers object. of_adapter: gives the engine's tokenizer for requests of an adapter."""

    def __init__(self, tokenizer: Any, of_adapter: Callable[[LoRARequest], Tokenizer | None] | None = None) -> None:
        self.tokenizer, self._of_adapter = tokenizer, of_adapter

    def ping(self) -> bool:
        return True

    def get_max_input_len(self, lora_request: LoRARequest | None = None) -> int | None:
        return None

    def encode(self, prompt: str, request_id: str | None = None, lora_request: LoRARequest | None = None) -> list[int]:
        return self.get_lora_tokenizer(lora_request).encode(prompt)

    async def encode_async(
        self, prompt: str, request_id: str | None = None, lora_request: LoRARequest | None = None
    ) -> list[int]:
        return self.encode(prompt, request_id, lora_request)

    def get_lora_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        if lora_request is None:
            return self.tokenizer
        if self._of_adapter is None:
            raise ValueError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        found = self._of_adapter(lora_request)
        return self.tokenizer if found is None else found.hf_tokenizer

    async def get_lora_tokenizer_async(self, lora_request: LoRARequest | None = None) -> Any:
        return self.get_lora_tokenizer(lora_request)


class _Grouped:
    """What a group has, for a class of tokenizers."""

    _group: TokenizerGroup

    @property
    def tokenizer(self) -> Any:
        return self._group.tokenizer

    def get_lora_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        return self._group.get_lora_tokenizer(lora_request)

    async def get_lora_tokenizer_async(self, lora_request: LoRARequest | None = None) -> Any:
        return self._group.get_lora_tokenizer(lora_request)


@cache
def _grouped(of: type) -> type:
    return type(of.__name__, (_Grouped, of), {})


def grouped(group: TokenizerGroup) -> Any:
    """A copy of the group's tokenizer that answers as a group, too: `engine.tokenizer` was the one, then the other."""
    both, kind = copy.copy(group.tokenizer), group.tokenizer.__class__
    both.__class__ = _grouped(kind)
    both._group = group
    return both
