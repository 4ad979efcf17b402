"""The exceptions that callers may catch. A wrong value is a `ValueError` too, as in older versions."""

from __future__ import annotations

from typing import Any


class VLLMError(Exception):
    """Base of all errors that are raised on purpose."""


class VLLMClientError(VLLMError):
    """The request is at fault; sending it again unchanged fails again."""


class VLLMServerError(VLLMError):
    """The engine is at fault; the request was acceptable."""


class VLLMValidationError(VLLMClientError, ValueError):
    """A value is out of its range or of the wrong kind.

    `parameter` names the field at fault and `value` is what was given, so that a server can report them.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class VLLMNotFoundError(VLLMClientError):
    """Something that the request names does not exist (a model, an adapter)."""


class VLLMUnprocessableEntityError(VLLMClientError):
    """The request is well formed, but cannot be processed."""


class LoRAAdapterNotFoundError(VLLMNotFoundError):
    """The LoRA adapter that a request names is not loaded and not in its folder."""

    def __init__(self, lora_name: str, lora_path: str) -> None:
        super().__init__(f"Loading lora {lora_name} failed: No adapter found for {lora_path}")
        self.lora_name = lora_name
        self.lora_path = lora_path


class GenerationError(VLLMServerError):
    """The engine failed while it generated; the request alone is lost."""


class RetryableRequestError(VLLMServerError):
    """The request was not processed and may be sent again."""


class GracefulHTTPError(VLLMError):
    """An error with its own HTTP status, to be sent as it is."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class QueueOverflowError(RetryableRequestError):
    """The waiting queue is full."""


class MaxQueuedTokensError(QueueOverflowError):
    """The tokens of all waiting requests exceed the limit."""


# How a request ends, in the middle, that has forbidden every token; most such requests are refused beforehand.
NO_TOKEN_POSSIBLE = (
    "No token is possible: a grammar, allowed_token_ids, bad_words, min_tokens or logits_processors exclude the whole "
    "vocabulary (or a processor returned NaN)."
)


class EngineGenerateError(GenerationError):
    """A request failed inside the engine, which goes on."""


class EngineDeadError(VLLMServerError, RuntimeError):
    """The engine core is gone, and serves nothing until it is started again. `reason` says what is known."""

    def __init__(self, reason: str = "") -> None:
        text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        super().__init__(f"{text} {reason}" if reason else text)
        self.reason = reason


def told(error: BaseException) -> str:
    """What an error says, for the message of another: what EngineDeadError begins with is said once."""
    return (isinstance(error, EngineDeadError) and error.reason) or f"{type(error).__name__}: {error}"
