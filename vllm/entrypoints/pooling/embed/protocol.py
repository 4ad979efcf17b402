"""Public path of embeddings' requests and answers. One class has both kinds of request, a text and a conversation."""

from vllm.entrypoints.openai.protocol import EmbeddingRequest, EmbeddingResponse, EmbeddingResponseData

EmbeddingCompletionRequest = EmbeddingRequest
EmbeddingChatRequest = EmbeddingRequest

__all__ = [
    "EmbeddingChatRequest",
    "EmbeddingCompletionRequest",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "EmbeddingResponseData",
]
