"""What models write when they call tools: per parser a text with two calls, and what it says."""

from __future__ import annotations

import json
from typing import Any

from vllm.tool_parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "range": {"type": "array", "items": {"type": "number"}},
                    "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS: dict[str, Any] = {
    "city": 'São "Paulo"\n</x> {[',
    "days": 3,
    "exact": True,
    "range": [1.5, -2],
    "where": {"a": [{"b": "}"}]},
}
CALLS = [("get_weather", ARGUMENTS), ("get_time", {})]


def _json_call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _both(key: str = "arguments") -> list[str]:
    return [_json_call(*call, key) for call in CALLS]


def _kimi() -> str:
    calls = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
        for i, (name, a) in enumerate(CALLS, 4)
    ]
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def _deepseek_v3() -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        for name, a in CALLS
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


def _deepseek_v31() -> str:
    calls = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>" for name, a in CALLS]
    return "<｜tool▁calls▁begin｜>" + "".join(calls) + "<｜tool▁calls▁end｜>"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _xml(block: str, function: tuple[str, str, str], parameter: tuple[str, str, str], line: str) -> str:
    texts = []
    for name, arguments in CALLS:
        inner = "".join(
            f"{parameter[0]}{key}{parameter[1]}{line}{_plain(value)}{line}{parameter[2]}\n"
            for key, value in arguments.items()
        )
        texts.append(f"<{block}>\n{function[0]}{name}{function[1]}\n{inner}{function[2]}\n</{block}>")
    return "\n".join(texts)


def _glm(line: str) -> str:
    texts = []
    for name, arguments in CALLS:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_plain(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        texts.append(f"<tool_call>{name}{line}{pairs}</tool_call>")
    return line.join(texts)


def _python() -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in CALLS) + "]"


def _harmony() -> str:
    name, arguments = CALLS[0]
    return (
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|><|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>"
        "{}<|call|>"
    )


_FUNCTION = ("<function=", ">", "</function>")
_INVOKE = ('<invoke name="', '">', "</invoke>")
_NAMED = ('<parameter name="', '">', "</parameter>")
_PARAMETER = ("<parameter=", ">", "</parameter>")
# Parser -> texts that say CALLS, after the content "I look." where the format allows text before calls.
OUTPUTS: dict[str, list[str]] = {
    "hermes": [
        "I look." + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _both()),
        "I look.<tool_call>" + "<tool_call>".join(_both()),  # without closing tags
    ],
    "longcat": ["I look." + "".join(f"<longcat_tool_call>{call}</longcat_tool_call>" for call in _both())],
    "mistral": [
        "I look.[TOOL_CALLS] [" + ", ".join(_both()) + "]",
        "I look.[TOOL_CALLS] [" + ", ".join(f'{call[:-1]}, "id": "abc123XYZ"}}' for call in _both()) + "]",
        "I look." + "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}" for name, a in CALLS),
        "I look." + "".join(f"[TOOL_CALLS]{name}[CALL_ID]abc123XYZ[ARGS]{json.dumps(a)}" for name, a in CALLS),
        "I look." + "".join(f"[TOOL_CALLS]{name}{json.dumps(a)}" for name, a in CALLS),
    ],
    "llama3_json": ["; ".join(_both("parameters")), "<|python_tag|>" + "; ".join(_both()), "\n" + "\n".join(_both())],
    "pythonic": [_python()],
    "llama4_pythonic": [_python(), f"<|python_start|>{_python()}<|python_end|>"],
    "internlm": [
        "I look." + "\n".join(f"<|action_start|><|plugin|>\n{call}<|action_end|>" for call in _both("parameters"))
    ],
    "jamba": [f"I look.<tool_calls>[\n    {(',' + chr(10)).join(_both())}\n]</tool_calls>"],
    "minimax": ["I look.<tool_calls>\n" + "\n".join(_both()) + "\n</tool_calls>"],
    "granite": [f"I look.<|tool_call|> [{', '.join(_both())}]", f"I look.<tool_call>[{', '.join(_both())}]"],
    "granite-20b-fc": ["I look." + "\n".join(f"<function_call> {call}" for call in _both())],
    "deepseek_v3": ["I look." + _deepseek_v3(), "I look." + _deepseek_v31()],
    "qwen3_coder": [
        "I look." + _xml("tool_call", _FUNCTION, _PARAMETER, "\n"),
        "I look." + _xml("tool_call", _FUNCTION, _PARAMETER, "\n").replace("<tool_call>\n", ""),
    ],
    "seed_oss": ["I look." + _xml("seed:tool_call", _FUNCTION, _PARAMETER, "")],
    "minimax_m2": [
        "I look."
        + _xml(
            "minimax:tool_call", ('<invoke name="', '">', "</invoke>"), ('<parameter name="', '">', "</parameter>"), ""
        )
    ],
    "kimi_k2": ["I look." + _kimi()],
    "glm45": ["I look." + _glm("\n"), "I look." + _glm("")],
    "phi4_mini_json": [f"I look.functools[{', '.join(_both())}]"],
    "openai": [_harmony()],
    "xlam": [
        "[" + ", ".join(_both()) + "]",
        "I look.```json\n[" + ",\n".join(_both()) + "]\n```",
        "I look.<tool_call>[" + ", ".join(_both()) + "]</tool_call>",
    ],
}
CASES = [(name, text) for name, texts in OUTPUTS.items() for text in texts]


def message_of(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str]], list[str]]:
    """(content, reasoning, (name, arguments) of each call, their ids); the order of deltas is checked on the way."""
    content, reasoning, calls, ids = "", "", [], []
    for delta in deltas:
        if isinstance(delta, Content):
            content += delta.text
        elif isinstance(delta, Reasoning):
            reasoning += delta.text
        elif isinstance(delta, CallStart):
            assert delta.number == len(calls) and delta.name and delta.id
            calls.append((delta.name, ""))
            ids.append(delta.id)
        else:
            assert isinstance(delta, CallArguments) and delta.number == len(calls) - 1 and delta.text
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return content, reasoning, calls, ids
