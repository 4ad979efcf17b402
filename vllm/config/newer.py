"""Settings of later API versions for features that do not exist yet. Each is refused unless it is at its default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Choice, Flag, Integer, Json, TextList

_OFFLOAD = "Keeping weights in host memory"


@dataclass(frozen=True)
class NewerSettings:
    """Settings of later versions."""

    offload_group_size: int = setting(0, Integer(), "Layers per group of offloaded weights.", later=_OFFLOAD)
    offload_num_in_group: int = setting(1, Integer(), "Offloaded layers per group.", later=_OFFLOAD)
    offload_prefetch_step: int = setting(1, Integer(), "Layers to fetch ahead.", later=_OFFLOAD)
    offload_params: Any = setting(None, TextList(optional=True), "Names of offloaded weights.", later=_OFFLOAD)
    enable_return_routed_experts: bool = setting(
        False, Flag(), "Return the experts of each token.", later="Returning routed experts"
    )
    return_sampling_mask: bool = setting(
        False, Flag(), "Return which tokens could be sampled.", later="Returning sampling masks"
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        Choice(values=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")),
        "What logprobs are: those of the model, before penalties and temperature.",
        later={name: f"logprobs_mode='{name}'" for name in ("processed_logprobs", "raw_logits", "processed_logits")},
    )
    profiler_config: Any = setting(None, Json(optional=True), "Settings of the profiler.", later="profiler_config")
    attention_config: Any = setting(
        None, Json(optional=True), "Settings of attention; attention_backend chooses it.", later="attention_config"
    )
    quantization_config: Any = setting(
        None,
        Json(optional=True),
        "Settings of quantization; quantization chooses a format.",
        later="Settings of quantization (quantization_config; quantization chooses a format)",
    )
