"""The lines that a server writes about requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)


class RequestLogger:
    """Writes one line about each request. max_log_len: how much of its prompt that shows, in characters or tokens;
    None: nothing.

    Representations escape line ends and terminal codes, so no line can be forged.
    """

    def __init__(self, *, max_log_len: int | None = None) -> None:
        self.max_log_len = max_log_len

    def log(self, request_id: str, text: str | None, prompts: Sequence[Sequence[int]], params: object) -> None:
        """One line about a request, with the beginning of its first prompt, `text` or ids."""
        shown = ""
        if self.max_log_len is not None:
            length = self.max_log_len
            shown = f" prompt: {text[:length]!r}," if text is not None else f" prompt ids: {list(prompts[0][:length])},"
        if len(prompts) > 1:
            shown += f" {len(prompts)} prompts,"
        tokens = sum(map(len, prompts))
        logger.info("Received request %s:%s %d prompt tokens, params: %s", request_id, shown, tokens, params)

    def log_inputs(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int] | None, params: object, *further: Any
    ) -> None:
        """As `log`, of one prompt, in vLLM's words. What `further` says is not shown."""
        self.log(request_id, prompt, [prompt_token_ids or []], params)
