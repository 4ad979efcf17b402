"""What the routes answer, as types: for programs that call the serving classes, or read answers and check them.

The server itself writes JSON. Fields that are not named here are kept.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorResponse(_Answer):
    """What a request that fails is answered with."""

    object: str = "error"
    message: str
    type: str
    param: str | None = None
    code: int


class PromptTokenUsageInfo(_Answer):
    cached_tokens: int | None = None


class UsageInfo(_Answer):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokenUsageInfo | None = None


class ModelPermission(_Answer):
    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(_Answer):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = []


class ModelList(_Answer):
    object: str = "list"
    data: list[ModelCard] = []


class CompletionLogProbs(_Answer):
    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionResponseChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, Any] | None] | None = None


class CompletionResponse(_Answer):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo


class CompletionResponseStreamChoice(CompletionResponseChoice):
    pass


class CompletionStreamResponse(_Answer):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | None = None


class FunctionCall(_Answer):
    name: str
    arguments: str


class ToolCall(_Answer):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Answer):
    role: str
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = []


class ChatCompletionLogProb(_Answer):
    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    top_logprobs: list[ChatCompletionLogProb] = []


class ChatCompletionLogProbs(_Answer):
    content: list[ChatCompletionLogProbsContent] | None = None


class ChatCompletionResponseChoice(_Answer):
    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None


class ChatCompletionResponse(_Answer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[int, Any] | None] | None = None


class ChatCompletionResponseStreamChoice(_Answer):
    index: int
    delta: dict[str, Any]
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionStreamResponse(_Answer):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None


class _Pooled(_Answer):
    id: str
    object: str = "list"
    created: int
    model: str
    usage: UsageInfo


class EmbeddingResponseData(_Answer):
    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(_Pooled):
    data: list[EmbeddingResponseData]


class PoolingResponseData(_Answer):
    index: int
    object: str = "pooling"
    data: list[list[float]] | list[float] | str


class PoolingResponse(_Pooled):
    data: list[PoolingResponseData]


class ScoreResponseData(_Answer):
    index: int
    object: str = "score"
    score: float


class ScoreResponse(_Pooled):
    data: list[ScoreResponseData]


class ClassificationData(_Answer):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(_Pooled):
    data: list[ClassificationData]


class RerankUsage(_Answer):
    total_tokens: int


class RerankDocumentText(_Answer):
    text: str


class RerankResult(_Answer):
    index: int
    document: RerankDocumentText
    relevance_score: float


class RerankResponse(_Answer):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]


class TokenizeResponse(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(_Answer):
    prompt: str
