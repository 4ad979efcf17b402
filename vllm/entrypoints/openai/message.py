"""What the texts of an answer become: content, thoughts and calls, whole and streamed by the same machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.chat_utils import form_begins, last_text
from vllm.entrypoints.openai.errors import bad_request
from vllm.outputs import CompletionOutput
from vllm.reasoning import ReasoningEnd, reasoning_end, think_format
from vllm.reasoning.think import Begins
from vllm.structured_output.params import StructuredOutputsParams
from vllm.structured_output.schema import SchemaError, move_references
from vllm.tool_parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from vllm.tool_parsers.harmony import CALL, MARKERS, RETURN, HarmonyMessages
from vllm.tool_parsers.machine import Machine, merged
from vllm.tool_parsers.plugin import PluginMachine, ToolParser, find_format
from vllm.tool_parsers.registry import ToolFormat, default_id, forced_call, forced_calls

if TYPE_CHECKING:
    from vllm.engine.tokenizer import Tokenizer

GUIDED_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
    "structured_outputs",
)
NO_AUTO = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


@dataclass(frozen=True)
class ParsingSettings:
    """What the command line says about the reading of answers."""

    tool_parser: str | None = None
    auto_tools: bool = False
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        if self.tool_parser is not None:
            find_format(self.tool_parser)
        if self.reasoning_parser is not None:
            think_format(self.reasoning_parser)

    @property
    def tool_format(self) -> ToolFormat | type[ToolParser] | None:
        return None if self.tool_parser is None else find_format(self.tool_parser)


@dataclass
class Call:
    """A call of a function, its arguments as JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A whole answer. `content` and `reasoning` are None if there is none of it."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> Message:
        for delta in deltas:
            if isinstance(delta, Content):
                self.content = (self.content or "") + delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning = (self.reasoning or "") + delta.text
            elif isinstance(delta, CallStart):
                self.calls.append(Call(delta.id, delta.name))
            else:
                self.calls[-1].arguments += delta.text
        return self


class MessageParser:
    """Reads the text of one choice: first the thoughts, then the calls in the rest."""

    def __init__(
        self,
        reasoning: Machine | None,
        tools: Machine | PluginMachine | None,
        *,
        one_call: bool = False,
        hides_thoughts: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self._hides_thoughts = hides_thoughts
        self.calls = 0
        self._is_bare = False  # the last call has no arguments yet

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """What a piece of the text adds to the message."""
        if self._reasoning is None:
            return self._checked(self._after(text, token_ids))
        return self._checked(self._pass_on(self._reasoning.feed(text), token_ids))

    def finish(self) -> list[Delta]:
        """What the end of the text adds."""
        deltas = [] if self._reasoning is None else self._pass_on(self._reasoning.finish(), ())
        if isinstance(self._tools, Machine):
            deltas += self._tools.finish()
        checked = self._checked(deltas)
        if self._is_bare:
            self._is_bare = False
            checked.append(CallArguments(self.calls - 1, "{}"))
        return checked

    def whole(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """The message of a whole text."""
        if not isinstance(self._tools, PluginMachine):
            return merged([*self.feed(text, token_ids), *self.finish()])
        thoughts: list[Delta] = [] if self._reasoning is None else self._reasoning.whole(text)
        rest = text if self._reasoning is None else "".join(d.text for d in thoughts if isinstance(d, Content))
        kept = [delta for delta in thoughts if isinstance(delta, Reasoning)]
        return self._checked([*kept, *self._tools.whole(rest)])

    def _pass_on(self, deltas: list[Delta], token_ids: Sequence[int]) -> list[Delta]:
        """What the thoughts leave over goes to the calls."""
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content):
                found += self._after(delta.text, token_ids)
            else:
                found.append(delta)
        return found

    def _after(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        if not text:
            return []
        if self._tools is None:
            return [Content(text)]
        if isinstance(self._tools, PluginMachine):
            return self._tools.feed(text, token_ids)
        return self._tools.feed(text)

    def _checked(self, deltas: list[Delta]) -> list[Delta]:
        """The same without calls and thoughts that are not wanted, and with arguments for each call."""
        found: list[Delta] = []
        for delta in deltas:
            number = getattr(delta, "number", 0)
            if (self._one_call and number > 0) or (self._hides_thoughts and isinstance(delta, Reasoning)):
                continue
            if isinstance(delta, CallStart):
                if self._is_bare:
                    found.append(CallArguments(self.calls - 1, "{}"))
                self.calls += 1
                self._is_bare = True
            elif isinstance(delta, CallArguments):
                self._is_bare = False
            found.append(delta)
        return found


class AnswerParsing:
    """Reads the choices of one request. may_speak: they have thoughts only if they open them."""

    def __init__(
        self,
        make: Callable[[], MessageParser],
        is_named: bool,
        thoughts_end: ReasoningEnd | None = None,
        may_speak: bool = False,
    ) -> None:
        self._make = make
        self._is_named = is_named
        self._thoughts_end = thoughts_end
        self._may_speak = may_speak
        self._parsers: dict[int, MessageParser] = {}

    def deltas(self, choice: int, output: CompletionOutput) -> list[Delta]:
        """What an output of a stream adds to the message of a choice."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._make()
        deltas = parser.feed(output.text, output.token_ids)
        return deltas if output.finish_reason is None else merged([*deltas, *parser.finish()])

    def whole_deltas(self, output: CompletionOutput) -> list[Delta]:
        """The message of a finished choice, in its order."""
        return self._make().whole(output.text, output.token_ids)

    def whole(self, output: CompletionOutput) -> Message:
        """The message of a finished choice."""
        return Message().add(self.whole_deltas(output))

    def thought_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens of an output are thoughts, with the tags around them."""
        if self._thoughts_end is None or (self._may_speak and not self._thoughts_end.opens(token_ids)):
            return 0
        end = self._thoughts_end.find(token_ids, 0)
        return len(token_ids) if end < 0 else end

    def finish_reason(self, choice: int, reason: str | None) -> str | None:
        """Why a streamed choice ended, as the API says it."""
        parser = self._parsers.get(choice)
        return self.reason_of(reason, 0 if parser is None else parser.calls)

    def reason_of(self, reason: str | None, calls: int) -> str | None:
        """ "tool_calls" if the model chose to call; a call that the user has chosen is no reason to stop."""
        return "tool_calls" if reason == "stop" and calls and not self._is_named else reason


@dataclass(frozen=True)
class Wanted:
    """What a request wants of its answer besides text.

    parsing: reads the answer, None if all of it is content. form: what the text must look like, None if it is free.
    shows_special: whether special tokens must stay visible, since some of them are markers.
    stop_token_ids: what ends an answer besides the model's own ends.   begins: where its answer begins, None if that is
    not known.
    """

    parsing: AnswerParsing | None = None
    form: StructuredOutputsParams | None = None
    shows_special: bool = False
    stop_token_ids: tuple[int, ...] = ()
    begins: Begins | None = None


def tool_choice_of(request: Any) -> Any:
    """none, auto, required, or the name of a function in a tuple."""
    choice = request.tool_choice
    if not request.tools:
        return "none"
    return (choice["function"]["name"],) if isinstance(choice, dict) else choice


def check_tool_choice(settings: ParsingSettings, request: Any) -> None:
    """Raise a 400 for a choice that the server cannot leave to the model, or that another form contradicts."""
    choice = tool_choice_of(request)
    if choice not in ("none", "auto") and any(getattr(request, name, None) is not None for name in GUIDED_FIELDS):
        raise bad_request("You can only either use guided decoding or tools, not both.", "tool_choice")
    if choice == "auto" and not (settings.auto_tools and settings.tool_parser):
        message = NO_AUTO
        if "tool_choice" not in request.model_fields_set:
            message += '; tools without tool_choice mean "auto". Or set tool_choice to "none" or "required".'
        raise bad_request(message, "tool_choice")


def wanted_of(settings: ParsingSettings, tokenizer: Tokenizer | None, request: Any, prompt: str) -> Wanted:
    """What a chat request wants of its answer. Raises a 400 for what the server's settings do not allow."""
    choice = tool_choice_of(request)
    if choice == "none" and settings.reasoning_parser is None:
        return Wanted()
    tools = request.tools or ()
    calls_before = sum(len(m.get("tool_calls") or ()) for m in request.messages if isinstance(m, Mapping))
    form = settings.tool_format
    ids = form.ids(calls_before) if isinstance(form, ToolFormat) else default_id
    is_harmony = settings.reasoning_parser == "openai_gptoss" or settings.tool_parser == "openai"
    one_call = request.parallel_tool_calls is False
    markers: tuple[str, ...] = MARKERS if is_harmony else ()
    thoughts: Callable[[], Machine] | None = None
    begins, may_speak = None, False
    if settings.reasoning_parser is not None and not is_harmony:
        think = think_format(settings.reasoning_parser)
        assert think is not None
        begins = found = think.begins(prompt, last_text(request.messages) if request.continue_final_message else None)
        may_speak = begins is Begins.UNKNOWN and not think.opens_itself
        if begins is not Begins.SPEAKING:
            thoughts = lambda: think.machine(found)  # noqa: E731
            markers += (*think.starts, *think.ends, *think.other_ends)
        if tokenizer is not None:
            begins = form_begins(begins, think, tokenizer, prompt, request.messages)
    calls: Callable[[], Machine | PluginMachine] | None = None
    if is_harmony:
        takes_calls = choice == "auto" and settings.tool_parser == "openai"
        thoughts = lambda: HarmonyMessages(ids, takes_calls=takes_calls)  # noqa: E731
    if isinstance(choice, tuple):
        calls = forced_call(choice[0], ids)
    elif choice == "required":
        calls = forced_calls(tools, ids)
    elif choice == "auto" and isinstance(form, ToolFormat):
        markers += form.markers
        if not is_harmony:
            calls = form.maker(tools, calls_before)
    elif choice == "auto" and isinstance(form, type):
        calls = _plugin(form, tokenizer, request)
    if thoughts is None and calls is None:
        return Wanted(begins=begins)
    special = tokenizer.special_ids if tokenizer is not None else frozenset()
    shows = tokenizer is not None and any(tokenizer.token_to_id(marker) in special for marker in markers)

    def make() -> MessageParser:
        return MessageParser(
            thoughts() if thoughts else None,
            calls() if calls else None,
            one_call=one_call,
            hides_thoughts=not request.include_reasoning,
        )

    end = None
    if thoughts is not None and settings.reasoning_parser is not None and tokenizer is not None:
        end = reasoning_end(settings.reasoning_parser, tokenizer)
    parsing = AnswerParsing(make, isinstance(choice, tuple), end, may_speak)
    stops: tuple[int, ...] = ()
    if is_harmony and tokenizer is not None and not request.ignore_eos:
        stops = tuple(i for i in map(tokenizer.token_to_id, (RETURN, CALL)) if i is not None)
    return Wanted(parsing, _form(choice, tools, one_call), shows, stops, begins)


def _plugin(
    parser: type[ToolParser], tokenizer: Tokenizer | None, request: Any
) -> Callable[[], Machine | PluginMachine]:
    if tokenizer is None:
        raise bad_request("This server has no tokenizer (--skip-tokenizer-init), which tool parsers need.")
    hf_tokenizer = tokenizer.hf_tokenizer
    parser(hf_tokenizer).adjust_request(request)
    return lambda: PluginMachine(parser(hf_tokenizer), request)


def _form(choice: Any, tools: Sequence[Any], one_call: bool) -> StructuredOutputsParams | None:
    """The JSON schema of the text, where the user has chosen that it be a call."""
    if isinstance(choice, tuple):
        function = next(tool["function"] for tool in tools if tool["function"]["name"] == choice[0])
        return StructuredOutputsParams(json=_parameters(function))
    if choice != "required":
        return None
    shared: dict[str, Any] = {}
    items = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        parameters = json.loads(json.dumps(_parameters(function)))
        place = f"#/$defs/tool{i}"
        try:
            if move_references(parameters, place):
                shared[f"tool{i}"] = parameters
                parameters = {"$ref": place}
        except SchemaError as error:
            raise bad_request(f"tools[{i}].function.parameters is no JSON schema: {error}.", "tools") from None
        properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
        items.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    call = items[0] if len(items) == 1 else {"anyOf": items}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": call}
    if shared:
        schema["$defs"] = shared
    if one_call:
        schema["maxItems"] = 1
    return StructuredOutputsParams(json=schema)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    return function.get("parameters") or {"type": "object", "properties": {}}
