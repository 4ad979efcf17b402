"""The parts of an answer that a parser plug-in returns, as types of the HTTP API."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm.tool_parsers.registry import default_id


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FunctionCall(_Part):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(_Part):
    """A whole call."""

    id: str = Field(default_factory=lambda: default_id(0))
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaFunctionCall(_Part):
    """What is new of a function call."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(_Part):
    """What is new of call number `index`. The name comes once, with the id."""

    id: str | None = Field(default_factory=lambda: default_id(0))
    type: Literal["function"] | None = "function"
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(_Part):
    """What is new of a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ExtractedToolCallInformation(_Part):
    """The calls in a whole text, and the text without them."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None
