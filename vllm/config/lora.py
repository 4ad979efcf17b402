"""Settings of LoRA adapters, and of prompt adapters."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.fields import setting
from vllm.config.kinds import Choice, Flag, Integer, Json, NumberList

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
LORA_EXTRA_VOCAB_SIZES = (0, 256, 512)


@dataclass(frozen=True)
class LoRAConfig:
    """LoRA adapters."""

    enable_lora: bool = setting(False, Flag(), "Serve LoRA adapters.")
    enable_lora_bias: bool = setting(
        False, Flag(), "Adapters have biases.", needs="enable_lora", later="Biases of LoRA adapters"
    )
    max_loras: int = setting(1, Integer(), "The most adapters in one step.", needs="enable_lora")
    max_lora_rank: int = setting(16, Integer(), "The largest rank of an adapter.", needs="enable_lora")
    lora_extra_vocab_size: int = setting(
        256,
        Integer(),
        "The most tokens that an adapter may add to the vocabulary.",
        needs="enable_lora",
    )
    lora_dtype: str = setting(
        "auto",
        Choice(optional=True, values=("auto", "float16", "bfloat16", "float32")),
        'The type of adapters; "auto": the model\'s.',
        needs="enable_lora",
    )
    long_lora_scaling_factors: tuple[float, ...] | None = setting(
        None,
        NumberList(optional=True),
        "Factors by which adapters for longer sequences than the model's may divide positions.",
        needs="enable_lora",
    )
    max_cpu_loras: int | None = setting(
        None, Integer(optional=True), "Adapters kept in host memory. Default: max_loras.", needs="enable_lora"
    )
    fully_sharded_loras: bool = setting(
        False, Flag(), "Divide all of an adapter over the devices.", needs="enable_lora"
    )
    default_mm_loras: dict[str, str] | None = setting(
        None,
        Json(optional=True),
        "Adapters for kinds of input.",
        needs="enable_lora",
        later="Adapters for kinds of input (default_mm_loras)",
    )

    @property
    def host_adapters(self) -> int:
        """Adapters kept in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def __post_init__(self) -> None:
        if not self.enable_lora:
            return
        if self.max_lora_rank not in LORA_RANKS:
            raise ValueError(f"max_lora_rank ({self.max_lora_rank}) must be one of {LORA_RANKS}.")
        if self.lora_extra_vocab_size not in LORA_EXTRA_VOCAB_SIZES:
            raise ValueError(
                f"lora_extra_vocab_size ({self.lora_extra_vocab_size}) must be one of {LORA_EXTRA_VOCAB_SIZES}."
            )
        if any(factor < 1 for factor in self.long_lora_scaling_factors or ()):
            raise ValueError(
                f"long_lora_scaling_factors ({list(self.long_lora_scaling_factors or ())}) must not be below 1: an "
                "adapter for sequences k times as long divides positions by k."
            )
        if self.max_loras < 1:
            raise ValueError(f"max_loras ({self.max_loras}) must be >= 1.")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras ({self.max_cpu_loras}) must be >= max_loras ({self.max_loras})")


@dataclass(frozen=True)
class PromptAdapterConfig:
    """Prompt adapters."""

    enable_prompt_adapter: bool = setting(False, Flag(), "Serve prompt adapters.", flags=("--enable-prompt-adapters",))
    max_prompt_adapters: int = setting(
        1,
        Integer(),
        "Prompt adapters kept in host memory.",
        needs="enable_prompt_adapter",
    )
    max_prompt_adapter_token: int = setting(
        0, Integer(), "The most virtual tokens of a prompt adapter.", needs="enable_prompt_adapter"
    )

    def __post_init__(self) -> None:
        if not self.enable_prompt_adapter:
            return
        if self.max_prompt_adapters < 1:
            raise ValueError(f"max_prompt_adapters ({self.max_prompt_adapters}) must be >= 1.")
        if self.max_prompt_adapter_token == 0:
            raise ValueError("max_prompt_adapter_token must be set.")
