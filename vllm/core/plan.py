"""Former place of `vllm.step.plan`, kept for code that imports it from here."""

from __future__ import annotations

from vllm.step.plan import BlockAppend, Bool, Int32, SlotInit, StepPlan
from vllm.step.result import StepResult, TokenLogprobs

__all__ = ["BlockAppend", "Bool", "Int32", "SlotInit", "StepPlan", "StepResult", "TokenLogprobs"]
