"""Calls written as JSON objects with a name and arguments: between tags, in a list, or as the whole text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vllm.tool_parsers.machine import CallMachine, MakeId, Markers, Routine


@dataclass(frozen=True)
class JsonFormat:
    """How a model writes its calls.

    starts: markers before calls; `ends`: markers after them, which may be missing.
    opens_with: characters with which a text without any marker may begin, if it consists of calls.
    in_list: whether the marker stands inside the list whose items the calls are.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    opens_with: str = ""
    in_list: bool = False
    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments", "parameters")


class JsonCalls(CallMachine):
    """Calls in a `JsonFormat`. An object is a call once its name and the beginning of its arguments were read; in a
    text without markers, only if the name is one of `names`, since any answer may be JSON.
    """

    def __init__(self, form: JsonFormat, make_id: MakeId, names: Collection[str] = ()) -> None:
        super().__init__(make_id)
        self._form = form
        self._names = names
        self._starts = Markers(*form.starts)

    def _message(self) -> Routine[None]:
        if self._form.opens_with:
            self._attempt_from()
            first = yield from self._skip_space()
            if first and first in self._form.opens_with:
                yield from self._section(is_marked=False)
            self._give_up()
        while True:
            marker = yield from self._until(self._starts, self._content)
            if marker is None:
                return
            self._attempt_from(marker)
            yield from self._section(is_marked=True)
            self._give_up()

    def _section(self, is_marked: bool) -> Routine[None]:
        """Calls one after the other, perhaps in a list, up to their end or to what is no call."""
        in_list = self._form.in_list
        while True:
            character = yield from self._skip_space()
            if character == "[" and not in_list:
                in_list = True
                self._take(self._at + 1)
            elif character == "{":
                if not (yield from self._object(is_marked)):
                    return
            elif character and character in ",;" and self._calls:
                self._take(self._at + 1)
            else:
                if character == "]" and in_list:
                    self._take(self._at + 1)
                    yield from self._skip_space()
                if self._form.ends:
                    yield from self._accept(*self._form.ends)
                return

    def _object(self, is_marked: bool) -> Routine[bool]:
        form = self._form
        return (
            yield from self._json_call(
                form.name_key,
                form.argument_keys,
                lambda name: is_marked or not self._names or name in self._names,
                needs_arguments=not is_marked,
            )
        )
