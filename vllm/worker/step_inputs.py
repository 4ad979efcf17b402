"""Former place of `vllm.step.inputs`, kept for code that imports it from here."""

from __future__ import annotations

from vllm.step.inputs import GroupInputs, StepInputs

__all__ = ["GroupInputs", "StepInputs"]
