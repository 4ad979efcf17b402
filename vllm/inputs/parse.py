"""Telling the forms of a prompt apart."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, cast

from vllm.inputs.data import EmbedsPrompt, SingletonPrompt, TextPrompt, TokensPrompt

_WRONG_BATCH = "prompt must be a string, array of strings, array of tokens, or array of token arrays"
_WRONG_PROMPT = "inputs must be a string, TextPrompt, or TokensPrompt"


class ParsedText(TypedDict):
    """One prompt of a batch, as text."""

    content: str
    is_tokens: Literal[False]


class ParsedTokens(TypedDict):
    """One prompt of a batch, as token ids."""

    content: list[int]
    is_tokens: Literal[True]


class ParsedStrPrompt(TypedDict):
    type: Literal["str"]
    content: str


class ParsedTextPrompt(TypedDict):
    type: Literal["text"]
    content: TextPrompt


class ParsedTokensPrompt(TypedDict):
    type: Literal["tokens"]
    content: TokensPrompt


class ParsedEmbedsPrompt(TypedDict):
    type: Literal["embeds"]
    content: EmbedsPrompt


ParsedSingletonPrompt = ParsedStrPrompt | ParsedTextPrompt | ParsedTokensPrompt | ParsedEmbedsPrompt


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_and_batch_prompt(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> list[ParsedText] | list[ParsedTokens]:
    """The prompts of a request that may hold one or several, as text or as token ids.

    Raises ValueError for no prompt at all and TypeError for anything else than these four forms.
    """
    if isinstance(prompt, str):
        return [ParsedText(content=prompt, is_tokens=False)]
    if not isinstance(prompt, list):
        raise TypeError(_WRONG_BATCH)
    if not prompt:
        raise ValueError("please provide at least one prompt")
    if all(isinstance(item, str) for item in prompt):
        return [ParsedText(content=item, is_tokens=False) for item in cast("list[str]", prompt)]
    if all(_is_token(item) for item in prompt):
        return [ParsedTokens(content=cast("list[int]", prompt), is_tokens=True)]
    if all(isinstance(item, list) for item in prompt):
        lists = cast("list[list[int]]", prompt)
        if not all(lists):
            raise ValueError("please provide at least one prompt")
        if all(_is_token(token) for item in lists for token in item):
            return [ParsedTokens(content=item, is_tokens=True) for item in lists]
    raise TypeError(_WRONG_BATCH)


def parse_singleton_prompt(prompt: SingletonPrompt) -> ParsedSingletonPrompt:
    """Which form a single prompt (of an encoder or a decoder) has. Raises TypeError if none."""
    if isinstance(prompt, str):
        return ParsedStrPrompt(type="str", content=prompt)
    if isinstance(prompt, dict):
        if "prompt_embeds" in prompt:
            return ParsedEmbedsPrompt(type="embeds", content=cast("EmbedsPrompt", prompt))
        if "prompt_token_ids" in prompt:
            return ParsedTokensPrompt(type="tokens", content=cast("TokensPrompt", prompt))
        if "prompt" in prompt:
            return ParsedTextPrompt(type="text", content=prompt)
    got = f"a dict with the keys {list(prompt)}" if isinstance(prompt, dict) else type(prompt).__name__
    raise TypeError(f"{_WRONG_PROMPT}, got {got}. Several prompts make a list.")
