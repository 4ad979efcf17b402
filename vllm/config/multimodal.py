"""Settings of multimodal inputs. There are no multimodal models yet: whatever only they could use is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Counts, Flag, Json, Text, TextList

_MM = "Multimodal models"


@dataclass(frozen=True)
class MultiModalConfig:
    """Images, audio and video in prompts."""

    limit_mm_per_prompt: dict[str, int] = setting(
        {}, Counts(optional=True), "The most inputs of each kind in one prompt, e.g. image=16,video=2. Default: 1."
    )
    mm_processor_kwargs: dict[str, Any] | None = setting(
        None, Json(optional=True), "Settings of the model's input processor.", later=f"{_MM} (mm_processor_kwargs)"
    )
    media_io_kwargs: dict[str, Any] = setting(
        {}, Json(optional=True), "Settings of reading media.", later=f"{_MM} (media_io_kwargs)"
    )
    disable_mm_preprocessor_cache: bool = setting(
        False, Flag(), "Keep no processed inputs.", later=f"{_MM} (disable_mm_preprocessor_cache)"
    )
    allowed_local_media_path: str = setting(
        "", Text(), "Folder from which requests may name files.", later=f"{_MM} (allowed_local_media_path)"
    )
    allowed_media_domains: list[str] | None = setting(
        None,
        TextList(optional=True),
        "Hosts from which requests may name files.",
        later=f"{_MM} (allowed_media_domains)",
    )
    disable_chunked_mm_input: bool = setting(
        False, Flag(), "Never divide one input over steps.", later=f"{_MM} (disable_chunked_mm_input)"
    )
    enable_multimodal_encoder_data_parallel: bool = setting(
        False, Flag(), "One encoder copy per device.", later=f"{_MM} (enable_multimodal_encoder_data_parallel)"
    )
    enable_prompt_embeds: bool = setting(
        False, Flag(), "Accept embeddings instead of text.", later="Prompts as embeddings (enable_prompt_embeds)"
    )
