"""Splits what a model thinks from what it says: text between tags, wherever the stream is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from vllm.tool_parsers.deltas import Content, Delta, Reasoning
from vllm.tool_parsers.machine import NOTHING, Machine, Markers, Routine


class Begins(Enum):
    """Where a model's output begins, as far as its prompt tells."""

    THINKING = "thinking"  # the prompt has opened the block of thoughts
    SPEAKING = "speaking"  # the prompt has closed it: there will be no thoughts
    UNKNOWN = "unknown"  # the model opens it, or does not


@dataclass(frozen=True)
class ThinkFormat:
    """The tags of a model's thoughts.

    opens_itself: an output whose prompt does not say begins with thoughts, even without the opening tag.
    other_ends: markers that end the thoughts without belonging to them, such as the beginning of a call.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    opens_itself: bool = False
    other_ends: tuple[str, ...] = ()

    def begins(self, prompt: str, answer: str | None = None) -> Begins:
        """Where the output begins after a prompt. `answer`: what the prompt ends with is the beginning of the answer,
        and this is its text; tags before it count only where they end the prompt up to there.
        """
        if answer is not None:
            start = max(map(answer.rfind, self.starts), default=-1)
            end = max(map(answer.rfind, self.ends), default=-1)
            if max(start, end) >= 0:
                return Begins.THINKING if start > end else Begins.SPEAKING
            before = prompt.rstrip().removesuffix(answer.strip())
            return Begins.THINKING if self.begins(before) is Begins.THINKING else Begins.SPEAKING
        tail = prompt[-256:].rstrip()
        if tail.endswith(self.starts):
            return Begins.THINKING
        return Begins.SPEAKING if tail.endswith(self.ends) else Begins.UNKNOWN

    def machine(self, begins: Begins) -> Machine:
        """What splits an output that begins there."""
        return ThinkMachine(self, begins)


class _Lines:
    """Passes text on without line ends at its beginning and, if it `strips_end`, at its end."""

    def __init__(self, make: Callable[[str], Delta], deltas: Callable[[], list[Delta]], strips_end: bool) -> None:
        self._make = make
        self._deltas = deltas
        self._strips_end = strips_end
        self._is_first = True
        self._held: list[str] = []  # line ends

    def add(self, text: str) -> None:
        if self._is_first:
            text = text.lstrip("\n")
            if not text:
                return
            self._is_first = False
        if self._strips_end:
            kept = text.rstrip("\n")
            line_ends = text[len(kept) :]
            if not kept:
                self._held.append(line_ends)
                return
            text = "".join([*self._held, kept])
            self._held = [line_ends]
        self._deltas().append(self._make(text))


class ThinkMachine(Machine):
    """Thoughts, then content; or content alone. Line ends next to the tags belong to neither."""

    def __init__(self, form: ThinkFormat, begins: Begins) -> None:
        super().__init__()
        self._form = form
        self._begins = begins
        self._ends = Markers(*form.ends, *form.other_ends)

    def _run(self) -> Routine[None]:
        is_thinking = self._begins is Begins.THINKING or (self._begins is Begins.UNKNOWN and self._form.opens_itself)
        if self._begins is not Begins.SPEAKING and self._form.starts:
            self._attempt = []
            yield from self._skip_space()
            taken, self._attempt = "".join(self._attempt), None
            if (yield from self._accept(*self._form.starts)):
                is_thinking = True
            elif not is_thinking and taken:
                self._deltas.append(Content(taken))
        if not is_thinking:
            yield from self._until(NOTHING, self._say)
            return
        marker = yield from self._until(self._ends, _Lines(Reasoning, lambda: self._deltas, True).add)
        speech = _Lines(Content, lambda: self._deltas, False)
        if marker in self._form.other_ends:
            speech.add(str(marker))
        if marker is not None:
            yield from self._until(NOTHING, speech.add)

    def _say(self, text: str) -> None:
        self._deltas.append(Content(text))
