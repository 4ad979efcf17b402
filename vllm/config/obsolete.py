"""Settings of earlier versions that change nothing here. They are accepted, and said to be obsolete in the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Flag, Integer, Json, Text

_POOL = "prompts are tokenized in the front end, there is no pool of tokenizers"


@dataclass(frozen=True)
class ObsoleteSettings:
    """Settings of earlier versions that change nothing."""

    use_v2_block_manager: bool = setting(
        True, Flag(), "Use the second block manager.", obsolete="there is one block manager"
    )
    tokenizer_pool_size: int = setting(0, Integer(low=0), "Number of tokenizer processes.", obsolete=_POOL)
    tokenizer_pool_type: str = setting("ray", Text(), "Kind of tokenizer processes.", obsolete=_POOL)
    tokenizer_pool_extra_config: dict[str, Any] = setting(
        {}, Json(optional=True), "Settings of tokenizer processes.", obsolete=_POOL
    )
    disable_cascade_attn: bool | None = setting(
        False, Flag(optional=True), "Never use cascade attention.", obsolete="there is no cascade attention"
    )
    max_context_len_to_capture: int | None = setting(
        None, Integer(low=1, optional=True), "Deprecated: use max_seq_len_to_capture."
    )
