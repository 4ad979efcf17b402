"""Public path of `resolve_chat_template`; it lives in `entrypoints/chat_utils.py`."""

from vllm.entrypoints.chat_utils import resolve_hf_chat_template as resolve_chat_template

__all__ = ["resolve_chat_template"]
