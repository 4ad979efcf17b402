"""`AttentionMetadata`, the type of the `attn_metadata` that models are given: what is known about a step."""

from vllm.step.inputs import StepInputs as AttentionMetadata

__all__ = ["AttentionMetadata"]
