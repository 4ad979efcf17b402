"""The modality "image"."""

from __future__ import annotations

from vllm.multimodal.base import MultiModalPlugin


class ImagePlugin(MultiModalPlugin):
    """Images: one PIL image or a list of them."""

    def get_data_key(self) -> str:
        return "image"
