"""The items of a response: those that a client sends as input, and those that an answer becomes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.errors import bad_request
from vllm.tool_parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

Event = tuple[str, dict[str, Any]]  # its type and fields
INPUT_TYPES = ("message", "function_call", "function_call_output", "reasoning")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def to_messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Input items as messages of a chat. Neighbours that are parts of one answer (thoughts, text, calls) become one
    message. Raises a 400 that names the item.
    """
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the assistant's message that may still grow
    names: dict[str, str] = {}  # of functions, by the id of their call
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise bad_request(f"input[{i}] must be an object with role and content.", "input")
        kind = item.get("type", "message")
        if kind not in INPUT_TYPES:
            raise bad_request(f"input[{i}] has a type that is not available in this version.", "input")
        if kind == "function_call_output" or (kind == "message" and item.get("role") != "assistant"):
            messages.append(_result(item, i, names) if kind != "message" else _message(item))
            answer = None
            continue
        part = _part_of_answer(item, i, kind)
        if answer is None or not _fits(answer, part):
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        for call in part.pop("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
            answer.setdefault("tool_calls", []).append(call)
        answer.update(part)
    return messages


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": item.get("role"), "content": item.get("content")}


def _fits(answer: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a part continues the message: thoughts, then text, then calls."""
    if "tool_calls" in part:
        return True
    if "tool_calls" in answer or answer["content"] is not None:
        return False
    return "reasoning_content" not in part or "reasoning_content" not in answer


def _part_of_answer(item: Mapping[str, Any], i: int, kind: str) -> dict[str, Any]:
    if kind == "message":
        return {"content": item.get("content") if item.get("content") is not None else ""}
    if kind == "reasoning":
        parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
        return {"reasoning_content": "\n".join(_text(part, i) for part in parts)}
    call_id, name, arguments = (item.get(key) for key in ("call_id", "name", "arguments"))
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise bad_request(f"input[{i}]: a function_call has call_id, name and arguments, which are strings.", "input")
    return {"tool_calls": [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]}


def _result(item: Mapping[str, Any], i: int, names: Mapping[str, str]) -> dict[str, Any]:
    """What a function has returned, for the call of that id."""
    call_id, output = item.get("call_id"), item.get("output")
    if not isinstance(call_id, str) or not isinstance(output, (str, list)):
        raise bad_request(f"input[{i}]: a function_call_output has a call_id and an output, a text or parts.", "input")
    text = output if isinstance(output, str) else "\n".join(_text(part, i) for part in output)
    message = {"role": "tool", "tool_call_id": call_id, "content": text}
    return {**message, "name": names[call_id]} if call_id in names else message


def _text(part: Any, i: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS else None
    if not isinstance(text, str):
        raise bad_request(f"input[{i}] has a part that is no text.", "input")
    return text


def to_chat_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools of a response, in the form of chats. Raises a 400 for those that only OpenAI's own servers have."""
    if not tools:
        return None
    found = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise bad_request(f'tools[{i}] must look like {{"type": "function", "name": "my_function", ...}}.', "tools")
        if tool["type"] != "function":
            raise bad_request(
                f"tools[{i}] has the type {tool['type'][:40]!r}, which is not available: this server calls no tools "
                "itself, it takes those of type 'function'.",
                "tools",
            )
        fields = {
            key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None
        }
        found.append({"type": "function", "function": fields})
    return found


def to_chat_choice(choice: Any) -> Any:
    """`tool_choice` of a response in the form of chats."""
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            raise bad_request(
                "tool_choice must be none, auto, required or one function: other kinds are not available.",
                "tool_choice",
            )
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


class OutputItems:
    """Turns the deltas of an answer into items, and tells the events of a stream on the way."""

    def __init__(self, message_id: str, role: str, shows_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []  # the finished ones
        self._message_id: str | None = message_id  # of the first message
        self._role = role
        self._shows_logprobs = shows_logprobs
        self._kind: type | None = None
        self._item: dict[str, Any] = {}
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def add(self, delta: Delta, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """A piece of the answer, with the log probabilities of its tokens if it is content."""
        kind = CallStart if isinstance(delta, CallArguments) else type(delta)
        if kind is not self._kind or isinstance(delta, CallStart):
            yield from self.close("completed")
            self._kind = kind
            yield from self._open(delta)
        if isinstance(delta, CallStart):
            return
        self._texts.append(delta.text)
        if isinstance(delta, CallArguments):
            yield "response.function_call_arguments.delta", {**self._place, "delta": delta.text}
        elif isinstance(delta, Reasoning):
            yield "response.reasoning_text.delta", {**self._place, "content_index": 0, "delta": delta.text}
        else:
            self._logprobs += logprobs
            fields = {"content_index": 0, "delta": delta.text, "logprobs": list(logprobs)}
            yield "response.output_text.delta", {**self._place, **fields}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.items)}

    def _open(self, delta: Delta) -> Iterator[Event]:
        self._texts, self._logprobs = [], []
        if isinstance(delta, CallStart):
            self._item = {
                "id": _new_id("fc"), "type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": "",
            }  # fmt: skip
        elif isinstance(delta, Reasoning):
            self._item = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        else:
            message_id, self._message_id = self._message_id or _new_id("msg"), None
            self._item = {"id": message_id, "type": "message", "role": self._role, "content": []}
        item = {**self._item, "status": "in_progress"}
        yield "response.output_item.added", {"output_index": len(self.items), "item": item}
        if not isinstance(delta, CallStart):
            yield "response.content_part.added", {**self._place, "content_index": 0, "part": self._part("", None)}

    def _part(self, text: str, logprobs: list[Any] | None) -> dict[str, Any]:
        if self._kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def close(self, status: str) -> Iterator[Event]:
        """The item that is open, if one is, has ended."""
        if self._kind is None:
            return
        kind, text, place = self._kind, "".join(self._texts), self._place
        if kind is CallStart:
            self._item["arguments"] = text
            name = self._item["name"]
            yield "response.function_call_arguments.done", {**place, "name": name, "arguments": text}
        else:
            part = self._part(text, self._logprobs if self._shows_logprobs else None)
            self._item["content"] = [part]
            place["content_index"] = 0
            if kind is Content:
                yield "response.output_text.done", {**place, "text": text, "logprobs": self._logprobs}
            else:
                yield "response.reasoning_text.done", {**place, "text": text}
            yield "response.content_part.done", {**place, "part": part}
        item = {**self._item, "status": status}
        yield "response.output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)
        self._kind = None


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
