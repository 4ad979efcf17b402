"""Log probabilities in the two forms of the API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.engine.tokenizer import Tokenizer
from vllm.sequence import Logprob

SMALLEST = -9999.0  # JSON has no -inf

Step = dict[int, Logprob]


class TokenText:
    """How a token is shown: as its text, or as `token_id:<id>` where texts could not be told apart."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def __call__(self, token_id: int, logprob: Logprob | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        assert self._tokenizer is not None
        return self._tokenizer.token_text(token_id)

    def raw_bytes(self, token_id: int, text: str) -> list[int]:
        """The bytes of a token's text."""
        return list(text.encode("utf-8", errors="replace"))


def completion_logprobs(
    token_ids: Sequence[int],
    steps: Iterable[Step | None],
    top: int,
    text_of: TokenText,
    offset: int = 0,
) -> dict[str, Any]:
    """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset` of choices; `offset` is where the text begins."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, step in zip(token_ids, steps, strict=True):
        if step is None:
            text = text_of(token_id)
            values.append(None)
            tops.append(None)
        else:
            text = text_of(token_id, step[token_id])
            values.append(max(step[token_id].logprob, SMALLEST))
            shown: dict[str, float] = {}
            for i, p in list(step.items())[: top + 1]:  # the token itself, then by rank; the first of a text counts
                shown.setdefault(text_of(i, p), max(p.logprob, SMALLEST))
            tops.append(shown)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def chat_logprobs(token_ids: Sequence[int], steps: Sequence[Step], top: int, text_of: TokenText) -> dict[str, Any]:
    """`content` of chat logprobs: each token with its bytes, and the `top` most likely ones by rank."""
    content = []
    for token_id, step in zip(token_ids, steps, strict=True):
        item = _chat_entry(token_id, step[token_id], text_of)
        ranked = [(i, p) for i, p in step.items() if p.rank is not None and p.rank <= top]
        item["top_logprobs"] = [
            _chat_entry(i, p, text_of) for i, p in sorted(ranked, key=lambda pair: pair[1].rank or 0)
        ]
        content.append(item)
    return {"content": content}


def _chat_entry(token_id: int, logprob: Logprob, text_of: TokenText) -> dict[str, Any]:
    text = text_of(token_id, logprob)
    return {"token": text, "logprob": max(logprob.logprob, SMALLEST), "bytes": text_of.raw_bytes(token_id, text)}


def prompt_logprobs(steps: Sequence[Step | None] | None) -> Iterator[dict[str, Any] | None] | None:
    """The `prompt_logprobs` extension: per position, token id -> logprob, rank and text; null for the first."""
    if steps is None:
        return None
    return (
        None
        if step is None
        else {
            str(i): {"logprob": max(p.logprob, SMALLEST), "rank": p.rank, "decoded_token": p.decoded_token}
            for i, p in step.items()
        }
        for step in steps
    )
