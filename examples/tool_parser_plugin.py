"""A tool parser of your own: calls written as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

The server runs this file; the demo model writes such calls:

    vllm serve demo --enable-auto-tool-choice --tool-parser-plugin examples/tool_parser_plugin.py \
        --tool-call-parser my_parser
"""

import json
import re
from collections.abc import Sequence

from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

BEGIN, END = "<tool_call>", "</tool_call>"
CALL = re.compile(f"{BEGIN}(.*?){END}", re.DOTALL)


def calls_in(text: str) -> list[FunctionCall]:
    """The complete calls of a text, none if one of them is wrong."""
    try:
        calls = [json.loads(found) for found in CALL.findall(text)]
        return [FunctionCall(name=call["name"], arguments=json.dumps(call["arguments"])) for call in calls]
    except (ValueError, KeyError, TypeError):
        return []


def length_of_text(text: str) -> int:
    """How much of a text certainly stands before its first call: a piece of the marker at its end may begin one."""
    begin = text.find(BEGIN)
    if begin >= 0:
        return begin
    return next(len(text) - n for n in range(len(BEGIN) - 1, -1, -1) if text.endswith(BEGIN[:n]))


@ToolParserManager.register_module(["my_parser"])
class MyParser(ToolParser):
    """One is made for each request."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.num_calls = 0

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """Before generation. The markers may be special tokens, which texts usually leave out."""
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        calls = calls_in(model_output)
        content = model_output[: length_of_text(model_output)] if calls else model_output
        tool_calls = [ToolCall(type="function", function=call) for call in calls]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=tool_calls, content=content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        """What the newest tokens add: text, or calls that are complete now."""
        text = current_text[length_of_text(previous_text) : length_of_text(current_text)]
        calls = calls_in(current_text)
        new = list(enumerate(calls))[self.num_calls :]
        self.num_calls = len(calls)
        tool_calls = [
            DeltaToolCall(index=i, function=DeltaFunctionCall(name=call.name, arguments=call.arguments))
            for i, call in new
        ]
        return DeltaMessage(content=text or None, tool_calls=tool_calls) if text or tool_calls else None
