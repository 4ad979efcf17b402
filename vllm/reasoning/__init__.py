"""What models think before they answer, apart from the answer: `--reasoning-parser`."""

from vllm.reasoning.registry import FORMATS, NAMES, ReasoningEnd, reasoning_end, think_format

__all__ = ["FORMATS", "NAMES", "ReasoningEnd", "reasoning_end", "think_format"]
