"""`PromptAdapterRequest`: which prompt adapter (trained virtual tokens) a request uses."""

from __future__ import annotations

import msgspec

from vllm.exceptions import VLLMValidationError
from vllm.validation import INT32_MAX, INT64_MAX, integer_in, text


class PromptAdapterRequest(msgspec.Struct, array_like=True, omit_defaults=True, eq=False):
    """A prompt adapter: its name, a number above 0 that is unique to it, its folder, its number of virtual tokens."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int

    def __post_init__(self) -> None:
        text("prompt_adapter_name", self.prompt_adapter_name)
        text("prompt_adapter_local_path", self.prompt_adapter_local_path)
        self.prompt_adapter_id = integer_in(-(2**63), INT64_MAX)("prompt_adapter_id", self.prompt_adapter_id)
        if self.prompt_adapter_id < 1:
            raise VLLMValidationError(
                f"id must be > 0, got {self.prompt_adapter_id}",
                parameter="prompt_adapter_id",
                value=self.prompt_adapter_id,
            )
        self.prompt_adapter_num_virtual_tokens = integer_in(0, INT32_MAX)(
            "prompt_adapter_num_virtual_tokens", self.prompt_adapter_num_virtual_tokens
        )

    @property
    def adapter_id(self) -> int:
        return self.prompt_adapter_id

    @property
    def name(self) -> str:
        return self.prompt_adapter_name

    @property
    def local_path(self) -> str:
        return self.prompt_adapter_local_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptAdapterRequest) and self.prompt_adapter_id == other.prompt_adapter_id

    def __hash__(self) -> int:
        return hash(self.prompt_adapter_id)
