"""Which parsers there are, by the names that `--tool-call-parser` takes."""

from __future__ import annotations

import os
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.tool_parsers.harmony import MARKERS, HarmonyMessages
from vllm.tool_parsers.header_calls import DeepseekCalls, KimiCalls, MistralCalls
from vllm.tool_parsers.json_calls import JsonCalls, JsonFormat
from vllm.tool_parsers.machine import CallMachine, ChosenCall, MakeId
from vllm.tool_parsers.python_calls import PythonCalls
from vllm.tool_parsers.schema_values import properties_of
from vllm.tool_parsers.xml_calls import MINIMAX_M2, QWEN3_CODER, SEED_OSS, GlmCalls, Properties, XmlCalls, XmlFormat

Tools = Sequence[Any]

_LETTERS = (string.ascii_letters + string.digits).encode()
_LETTER_OF_BYTE = bytes(_LETTERS[byte % len(_LETTERS)] for byte in range(256))


def default_id(number: int, name: str = "") -> str:
    """An id that no other call has."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def mistral_id(number: int, name: str = "") -> str:
    """Mistral's templates take nine letters and digits."""
    return os.urandom(9).translate(_LETTER_OF_BYTE).decode()


def kimi_id(calls_before: int) -> MakeId:
    """Kimi's template shows nothing but the id of a call, which counts the calls of the whole conversation."""
    return lambda number, name: f"functions.{name}:{calls_before + number}"


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls.

    parser: makes what reads one text, from the tools' parameters and from what names calls that the model gives no id.
    markers: those that are special tokens must stay visible in the text.
    ids: what names calls, given how many the conversation has had.
    """

    parser: Callable[[Properties, MakeId], CallMachine]
    markers: tuple[str, ...] = ()
    ids: Callable[[int], MakeId] = lambda calls_before: default_id

    def machine(self, tools: Tools, calls_before: int = 0) -> CallMachine:
        """What reads one text."""
        return self.maker(tools, calls_before)()

    def maker(self, tools: Tools, calls_before: int = 0) -> Callable[[], CallMachine]:
        """Makes what reads one text, for each of several."""
        properties, ids = properties_of(tools), self.ids(calls_before)
        return lambda: self.parser(properties, ids)


def _json(form: JsonFormat) -> ToolFormat:
    return ToolFormat(lambda properties, ids: JsonCalls(form, ids, properties), (*form.starts, *form.ends))


def _xml(form: XmlFormat) -> ToolFormat:
    return ToolFormat(lambda properties, ids: XmlCalls(form, ids, properties), form.block)


def forced_call(name: str, make_id: MakeId) -> Callable[[], CallMachine]:
    """Makes what reads a text that is nothing but the arguments of one function: the user has chosen it."""
    return lambda: ChosenCall(name, make_id)


def forced_calls(tools: Tools, make_id: MakeId) -> Callable[[], CallMachine]:
    """Makes what reads a text that is a JSON list of calls: the user wants at least one."""
    form, names = JsonFormat(opens_with="[{"), properties_of(tools)
    return lambda: JsonCalls(form, make_id, names)


HERMES = _json(JsonFormat(("<tool_call>",), ("</tool_call>",)))
MISTRAL = ToolFormat(
    lambda properties, ids: MistralCalls(ids), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), lambda calls_before: mistral_id
)
LLAMA3 = _json(JsonFormat(("<|python_tag|>", "<|python_start|>"), ("<|python_end|>",), opens_with="{"))
PYTHON = ToolFormat(lambda properties, ids: PythonCalls(ids))
LLAMA4 = ToolFormat(
    lambda properties, ids: PythonCalls(ids, ("<|python_start|>", "<|python_end|>")),
    ("<|python_start|>", "<|python_end|>"),
)
DEEPSEEK = ToolFormat(
    lambda properties, ids: DeepseekCalls(ids),
    (*DeepseekCalls.openers, DeepseekCalls.begin, *DeepseekCalls.separators, DeepseekCalls.end),
)
KIMI = ToolFormat(
    lambda properties, ids: KimiCalls(ids),
    (*KimiCalls.openers, KimiCalls.begin, *KimiCalls.separators, KimiCalls.end),
    kimi_id,
)
GLM = ToolFormat(
    lambda properties, ids: GlmCalls(ids, properties),
    ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
JAMBA = _json(JsonFormat(("<tool_calls>",), ("</tool_calls>",)))
HARMONY = ToolFormat(lambda properties, ids: HarmonyMessages(ids), MARKERS)

FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen25": HERMES,
    "ernie45": HERMES,
    "granite4": HERMES,
    "longcat": _json(JsonFormat(("<longcat_tool_call>",), ("</longcat_tool_call>",))),
    "mistral": MISTRAL,
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "pythonic": PYTHON,
    "llama4_pythonic": LLAMA4,
    "internlm": _json(JsonFormat(("<|action_start|><|plugin|>",), ("<|action_end|>",))),
    "jamba": JAMBA,
    "hunyuan_a13b": JAMBA,
    "minimax": JAMBA,
    "granite": _json(JsonFormat(("<|tool_call|>", "<tool_call>"), ("</tool_call>",))),
    "granite-20b-fc": _json(JsonFormat(("<function_call>",))),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "qwen3_coder": _xml(QWEN3_CODER),
    "qwen3_xml": _xml(QWEN3_CODER),
    "seed_oss": _xml(SEED_OSS),
    "minimax_m2": _xml(MINIMAX_M2),
    "kimi_k2": KIMI,
    "glm45": GLM,
    "glm47": GLM,
    "phi4_mini_json": _json(JsonFormat(("functools[",), in_list=True)),
    "openai": HARMONY,
    "xlam": _json(JsonFormat(("[TOOL_CALLS]", "<tool_call>", "```json"), ("</tool_call>", "```"), opens_with="[{")),
}
FORMATS["phi4_mini"] = FORMATS["phi4_mini_json"]
