"""Public path of what all routes have in common; it lives in `protocol.py` and `response_models.py`."""

from vllm.entrypoints.openai.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ErrorResponse,
    ExtractedToolCallInformation,
    FunctionCall,
    ModelCard,
    ModelList,
    ToolCall,
    UsageInfo,
)

__all__ = [
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "ErrorResponse",
    "ExtractedToolCallInformation",
    "FunctionCall",
    "ModelCard",
    "ModelList",
    "ToolCall",
    "UsageInfo",
]
