"""Public path of tokenizing's requests and answers. One class has both kinds of request, a text and a conversation."""

from vllm.entrypoints.openai.protocol import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

TokenizeCompletionRequest = TokenizeRequest
TokenizeChatRequest = TokenizeRequest

__all__ = [
    "DetokenizeRequest",
    "DetokenizeResponse",
    "TokenizeChatRequest",
    "TokenizeCompletionRequest",
    "TokenizeRequest",
    "TokenizeResponse",
]
