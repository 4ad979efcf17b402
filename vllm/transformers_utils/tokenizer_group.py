"""The older interface around a tokenizer: one for all requests, since adapters bring none of their own yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


class TokenizerGroup:
    """`tokenizer` is a transformers object."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

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
        if lora_request is not None:
            raise ValueError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        return self.tokenizer

    async def get_lora_tokenizer_async(self, lora_request: LoRARequest | None = None) -> Any:
        return self.get_lora_tokenizer(lora_request)
