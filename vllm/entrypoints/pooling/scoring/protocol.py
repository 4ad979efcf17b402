"""Public path of scores' and rankings' requests and answers."""

from vllm.entrypoints.openai.protocol import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse

ScoreTextRequest = ScoreRequest

__all__ = [
    "RerankRequest",
    "RerankResponse",
    "ScoreRequest",
    "ScoreResponse",
    "ScoreTextRequest",
]
