"""Calls written as a Python list of function calls with literals as arguments: `[f(a="x"), g(n=1)]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from vllm.tool_parsers.machine import CallMachine, MakeId, Routine

MAX_DEPTH = 32  # of brackets in a call
MAX_CHARACTERS = 64 * 1024  # of a call, which is read by Python's own parser as a whole
_NAME = re.compile(r"[A-Za-z_][\w.]{0,255}")
_PLAIN = re.compile(r"[^\"'()\[\]{}]*")
_QUOTED = {'"': re.compile(r'[^"\\\n]*'), "'": re.compile(r"[^'\\\n]*")}
_NAMES = {"true": True, "false": False, "null": None}


class PythonCalls(CallMachine):
    """The whole text is the list, perhaps between `wrap`; each call is read, never run, when it is complete."""

    def __init__(self, make_id: MakeId, wrap: tuple[str, str] | None = None) -> None:
        super().__init__(make_id)
        self._wrap = wrap

    def _message(self) -> Routine[None]:
        self._attempt_from()
        character = yield from self._skip_space()
        if self._wrap is not None and character == self._wrap[0][0] and (yield from self._accept(self._wrap[0])):
            character = yield from self._skip_space()
        if character == "[":
            self._take(self._at + 1)
            while (yield from self._call()):
                if (yield from self._skip_space()) != ",":
                    break
                self._take(self._at + 1)

    def _call(self) -> Routine[bool]:
        """One call. False if this is none."""
        if not re.match(r"[A-Za-z_]", (yield from self._skip_space())):
            return False
        parts: list[str] = []
        while not (yield from self._name_is_over()):
            parts.append(self._take(self._at + 1))
            if len(parts) > 256:
                return False
        name = "".join(parts)
        if not _NAME.fullmatch(name) or (yield from self._skip_space()) != "(":
            return False
        body: list[str] = []
        if not (yield from self._brackets(body.append)):
            return False
        arguments = read_arguments("".join(body))
        if arguments is None:
            return False
        self._begin(name)
        self._arguments(arguments)
        return True

    def _name_is_over(self) -> Routine[bool]:
        character = yield from self._peek()
        return not (character.isalnum() or character in "_." and character != "")

    def _brackets(self, sink: Callable[[str], None]) -> Routine[bool]:
        """Hand everything from a bracket to the one that closes it to `sink`. False if that never comes."""
        depth, quote, left = 0, "", MAX_CHARACTERS
        while True:
            text, at = self._text, self._at
            is_over = False
            while at < len(text) and not is_over:
                found = (_QUOTED[quote] if quote else _PLAIN).match(text, at)
                assert found is not None
                at = found.end()
                if at == len(text):
                    break
                character = text[at]
                if character == "\\":
                    if at + 1 == len(text) and not self._ended:
                        break
                    at = min(at + 2, len(text))
                    continue
                at += 1
                if quote:
                    is_over = character == "\n"  # no string goes on in the next line
                    quote = ""
                elif character in "\"'":
                    quote = character
                else:
                    depth += 1 if character in "([{" else -1
                    is_over = depth in (0, MAX_DEPTH + 1)
            at = min(at, self._at + left)  # wherever the text is cut
            left -= at - self._at
            if at > self._at:
                sink(self._take(at))
            if is_over or self._ended or left == 0:
                return is_over and depth == 0 and left > 0
            yield


def read_arguments(text: str) -> str | None:
    """The keyword arguments of `(a=1, b="x")` as a JSON object; None if there is anything but literals."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _literal(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    raise ValueError("not a literal")
