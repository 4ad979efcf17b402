"""Parsers of the user's own: the interface `ToolParser`, and the names under which parsers are found."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from vllm.tool_parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from vllm.tool_parsers.machine import Machine
from vllm.tool_parsers.messages import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers.registry import FORMATS, ToolFormat, default_id

_Class = TypeVar("_Class", bound=type)


class ToolParser:
    """How a model's calls are found in its text. One object serves one choice of one request.

    Derive from it, register the class with `ToolParserManager.register_module`, and name the file with
    `--tool-parser-plugin`. `tokenizer` is the model's, as transformers loads it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id: int = -1
        self.current_tool_name_sent: bool = False
        self.streamed_args_for_tool: list[str] = []
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        vocab: dict[str, int] = self.model_tokenizer.get_vocab()
        return vocab

    def adjust_request(self, request: Any) -> Any:
        """The request with what the parser needs, such as `skip_special_tokens=False`. Called before generation."""
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls in a whole answer."""
        raise NotImplementedError(f"{type(self).__name__} does not say how calls are found in a whole text.")

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """What the newest text adds to the message; None if that cannot be said yet."""
        raise NotImplementedError(f"{type(self).__name__} does not say how calls are found in a stream.")


class FormatToolParser(ToolParser):
    """A parser of ours behind the interface of plug-ins."""

    format_name: ClassVar[str]

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._machine: Machine | None = None

    def adjust_request(self, request: Any) -> Any:
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False
        return request

    def _new(self, request: Any) -> Machine:
        return FORMATS[self.format_name].machine(getattr(request, "tools", None) or ())

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        content: str | None = None
        calls: list[ToolCall] = []
        for delta in self._new(request).whole(model_output):
            if isinstance(delta, Content):
                content = (content or "") + delta.text
            elif isinstance(delta, CallStart):
                calls.append(ToolCall(id=delta.id, function=FunctionCall(name=delta.name, arguments="")))
            elif isinstance(delta, CallArguments):
                calls[-1].function.arguments += delta.text
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        if self._machine is None or not previous_text:
            self._machine = self._new(request)
        deltas = self._machine.feed(delta_text)
        return to_message(deltas) if deltas else None


def to_message(deltas: Iterable[Delta]) -> DeltaMessage:
    """Deltas as one message of the API."""
    message = DeltaMessage()
    for delta in deltas:
        if isinstance(delta, Content):
            message.content = (message.content or "") + delta.text
        elif isinstance(delta, Reasoning):
            message.reasoning_content = message.reasoning = (message.reasoning_content or "") + delta.text
        elif isinstance(delta, CallStart):
            function = DeltaFunctionCall(name=delta.name, arguments="")
            message.tool_calls.append(DeltaToolCall(id=delta.id, index=delta.number, function=function))
        else:
            last = message.tool_calls[-1] if message.tool_calls else None
            if last is not None and last.index == delta.number and last.function is not None:
                last.function.arguments = (last.function.arguments or "") + delta.text
            else:
                function = DeltaFunctionCall(arguments=delta.text)
                message.tool_calls.append(DeltaToolCall(id=None, type=None, index=delta.number, function=function))
    return message


class ToolParserManager:
    """Parsers by name."""

    tool_parsers: ClassVar[dict[str, type[ToolParser]]] = {}

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """The class registered under a name. Raises KeyError for others."""
        if name in cls.tool_parsers:
            return cls.tool_parsers[name]
        raise KeyError(f"tool helper: '{name}' not found in tool_parsers")

    @classmethod
    def register_module(
        cls, name: str | list[str] | None = None, force: bool = True, module: type[ToolParser] | None = None
    ) -> Any:
        """Register a class under a name or several, its own if none is given: as a decorator, or `module` at once.
        Without `force` a name that is taken raises KeyError.
        """

        def register(found: _Class) -> _Class:
            if not (isinstance(found, type) and issubclass(found, ToolParser)):
                raise TypeError(f"module must be subclass of ToolParser, but got {found!r:.200}")
            names = [found.__name__] if name is None else [name] if isinstance(name, str) else list(name)
            for one in names:
                if not force and one in cls.tool_parsers:
                    raise KeyError(f"{one} is already registered at {cls.tool_parsers[one].__module__}")
                cls.tool_parsers[one] = found
            return found

        return register if module is None else register(module)

    @classmethod
    def import_tool_parser(cls, plugin_path: str) -> None:
        """Run the Python file that registers parsers. Raises ValueError if it cannot be read or fails."""
        path = Path(plugin_path)
        if not path.is_file():
            raise ValueError(f"--tool-parser-plugin: there is no file {plugin_path}.")
        name = f"vllm_tool_parser_plugin_{path.stem}"
        if getattr(sys.modules.get(name), "__file__", None) == str(path):
            return  # it has run already
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"--tool-parser-plugin: {plugin_path} is no Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ValueError(f"--tool-parser-plugin: {plugin_path} failed: {type(error).__name__}: {error}") from error


CLASS_NAMES = {
    "hermes": "Hermes2ProToolParser",
    "mistral": "MistralToolParser",
    "llama3_json": "Llama3JsonToolParser",
    "llama4_pythonic": "Llama4PythonicToolParser",
    "pythonic": "PythonicToolParser",
    "internlm": "Internlm2ToolParser",
    "jamba": "JambaToolParser",
    "granite": "GraniteToolParser",
    "granite-20b-fc": "Granite20bFCToolParser",
    "deepseek_v3": "DeepSeekV3ToolParser",
    "qwen3_coder": "Qwen3CoderToolParser",
    "kimi_k2": "KimiK2ToolParser",
    "glm45": "Glm4MoeModelToolParser",
    "phi4_mini_json": "Phi4MiniJsonToolParser",
    "openai": "OpenAIToolParser",
    "xlam": "xLAMToolParser",
    "minimax": "MinimaxToolParser",
    "hunyuan_a13b": "HunyuanA13BToolParser",
}


def _class_of(name: str) -> type[FormatToolParser]:
    class_name = CLASS_NAMES.get(name, f"{''.join(part.title() for part in name.split('_'))}ToolParser")
    made = type(class_name, (FormatToolParser,), {"format_name": name, "__module__": __name__})
    made.__doc__ = f"What `--tool-call-parser {name}` reads."
    return made


BUILT_IN: dict[str, type[FormatToolParser]] = {name: _class_of(name) for name in FORMATS}
ToolParserManager.tool_parsers.update(BUILT_IN)


class PluginMachine:
    """Reads one choice with a `ToolParser`. The texts so far, which it wants each time, are added up here."""

    def __init__(self, parser: ToolParser, request: Any) -> None:
        self._parser = parser
        self._request = request
        self._text = ""
        self._ids: list[int] = []
        self._begun: dict[int, bool] = {}

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """What a piece of a stream adds."""
        before, ids_before = self._text, self._ids
        self._text = before + text
        self._ids = [*ids_before, *token_ids]
        message = self._parser.extract_tool_calls_streaming(
            before, self._text, text, ids_before, self._ids, token_ids, self._request
        )
        return [] if message is None else self._read(message)

    def whole(self, text: str) -> list[Delta]:
        """What a whole text says."""
        found = self._parser.extract_tool_calls(text, self._request)
        deltas: list[Delta] = [Content(found.content)] if found.content else []
        if not found.tools_called:
            return deltas or ([Content(text)] if found.content is None and text else [])
        for number, call in enumerate(found.tool_calls):
            deltas.append(CallStart(number, call.id, call.function.name))
            deltas.append(CallArguments(number, call.function.arguments or "{}"))
        return deltas

    def _read(self, message: DeltaMessage) -> list[Delta]:
        deltas: list[Delta] = []
        if message.content:
            deltas.append(Content(message.content))
        for call in message.tool_calls:
            function = call.function
            if function is not None and function.name and call.index not in self._begun:
                self._begun[call.index] = True
                deltas.append(CallStart(call.index, call.id or default_id(call.index), function.name))
            if function is not None and function.arguments:
                deltas.append(CallArguments(call.index, function.arguments))
        return deltas


def find_format(name: str) -> ToolFormat | type[ToolParser]:
    """What `--tool-call-parser name` stands for: one of our formats, or the class of a plug-in, which comes first.

    Raises ValueError for unknown names.
    """
    registered = ToolParserManager.tool_parsers.get(name)
    if registered is not None and registered is not BUILT_IN.get(name):
        return registered
    if name in FORMATS:
        return FORMATS[name]
    raise ValueError(
        f"invalid tool call parser: {name} (chose from {{ {','.join(sorted(ToolParserManager.tool_parsers))} }})"
    )
