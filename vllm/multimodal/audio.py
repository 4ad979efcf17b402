"""The modality "audio"."""

from __future__ import annotations

from vllm.multimodal.base import MultiModalPlugin


class AudioPlugin(MultiModalPlugin):
    """Audio: one (samples, sampling rate) or a list of them."""

    def get_data_key(self) -> str:
        return "audio"
