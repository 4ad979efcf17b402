"""`LoRARequest`: which LoRA adapter a request uses."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.validation import INT64_MAX, integer_in, not_yet, text


class LoRARequest(msgspec.Struct, omit_defaults=True, array_like=True, eq=False):
    """A LoRA adapter: its name, a number above 0 that is unique to it, and its folder or Hub name. long_lora_max_len:
    the longest sequence of its requests, if that is less than the engine allows.

    Two requests are equal if they name the same adapter, whatever else they say.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: str | None = None
    long_lora_max_len: int | None = None
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        text("lora_name", self.lora_name)
        self.lora_int_id = integer_in(-(2**63), INT64_MAX)("lora_int_id", self.lora_int_id)
        if self.lora_int_id < 1:
            raise VLLMValidationError(
                f"id must be > 0, got {self.lora_int_id}", parameter="lora_int_id", value=self.lora_int_id
            )
        if self.lora_local_path is not None:
            text("lora_local_path", self.lora_local_path)
            if not envs.VLLM_NO_DEPRECATED_WARNING:
                warnings.warn(
                    "The 'lora_local_path' attribute is deprecated. Please use 'lora_path' instead.",
                    DeprecationWarning,
                    stacklevel=2,
                )
            self.lora_path = self.lora_path or self.lora_local_path
        if not text("lora_path", self.lora_path):
            raise VLLMValidationError("lora_path cannot be empty", parameter="lora_path")
        if self.base_model_name is not None:
            text("base_model_name", self.base_model_name)
        if self.long_lora_max_len is not None:
            self.long_lora_max_len = integer_in(1, INT64_MAX)("long_lora_max_len", self.long_lora_max_len)
        not_yet(None)("tensorizer_config_dict", self.tensorizer_config_dict)
        for name in ("load_inplace", "is_3d_lora_weight"):
            not_yet(False)(name, getattr(self, name))

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def local_path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
