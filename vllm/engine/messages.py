"""Former place of `vllm.step.messages`, kept for code that imports it from here."""

from __future__ import annotations

from vllm.step.messages import CoreOutput, CoreRequest, CoreStats

__all__ = ["CoreOutput", "CoreRequest", "CoreStats"]
