"""Former place of `vllm.step.kv_policy`, kept for code that imports it from here."""

from __future__ import annotations

from vllm.step.kv_policy import KVGroup, KVKind, KVLayout

__all__ = ["KVGroup", "KVKind", "KVLayout"]
