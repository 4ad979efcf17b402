"""The one writer of event streams: what completions, chats and responses share, specialised once per stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as json_text

from vllm.entrypoints.openai.errors import APIError, stream_error
from vllm.entrypoints.openai.sse import Events
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tool_parsers.deltas import Content, Delta

DONE = b"data: [DONE]\n\n"

# What an output adds to the message of a choice (its number in the answer): `deltas(choice, output)`.
Deltas = Callable[[int, CompletionOutput], Sequence[Delta]]


class AnswerEvents(Events):
    """Writes the outputs of `prompts` prompts with `count` choices each.

    A stream of texts and nothing else (`is_plain`, no `deltas`) is put together from constant parts: `_before` the text
    of a choice, encoded once, and `_after` it. With `deltas`, texts are parsed: that function says what an output adds
    to the message, and each piece is written by itself.
    """

    _after = ""  # what follows the text in a plain event
    _writes_empty = False  # whether tokens without text are worth an event

    def __init__(self, prompts: int, count: int, is_plain: bool, deltas: Deltas | None = None) -> None:
        self._count = count
        self._deltas = deltas
        self._sent = [0] * (prompts * count)  # tokens of each choice
        self._last: dict[int, RequestOutput] = {}  # of each prompt
        self._parts: list[str | None] = [None] * (prompts * count)
        self._opened = False
        self._is_plain = is_plain
        self._write = self._plain if is_plain and deltas is None else self._full

    def feed(self, index: int, result: RequestOutput) -> bytes:
        """The events of one output of prompt number `index`."""
        self._last[index] = result
        opening = ""
        if not self._opened:
            # It comes with the first output, so that early errors are plain HTTP errors.
            self._opened = True
            opening = self._opening(result)
        if len(result.outputs) == 1:
            return (opening + self._write(index, result, result.outputs[0])).encode()
        return "".join([opening, *(self._write(index, result, output) for output in result.outputs)]).encode()

    def _plain(self, prompt: int, result: RequestOutput, output: CompletionOutput) -> str:
        """What `_full` makes of an output without extras."""
        if output.finish_reason is not None:
            return self._full(prompt, result, output)
        choice = prompt * self._count + output.index
        tokens = len(output.token_ids)
        self._sent[choice] += tokens
        text = output.text
        if not text and not (tokens and self._writes_empty):
            return ""
        return self._plain_event(choice, text)

    def _plain_event(self, choice: int, text: str) -> str:
        """The event of a text and nothing else."""
        before = self._parts[choice]
        if before is None:
            before = self._parts[choice] = self._before(choice)
        return before + json_text(text) + self._after

    def _full(self, prompt: int, result: RequestOutput, output: CompletionOutput) -> str:
        choice = prompt * self._count + output.index
        self._sent[choice] += len(output.token_ids)
        if output.finish_reason == "error":  # which the last event says, in words for clients
            output = replace(output, stop_reason=None)
        if self._deltas is not None:
            return self._events(choice, result, output, self._deltas(choice, output))
        return self._events(choice, result, output, (Content(output.text),) if output.text else ())

    def _opening(self, result: RequestOutput) -> str:
        """The events before those of the first output."""
        return ""

    def _before(self, choice: int) -> str:
        """A plain event up to its text."""
        raise NotImplementedError

    @abstractmethod
    def _events(self, choice: int, result: RequestOutput, output: CompletionOutput, deltas: Sequence[Delta]) -> str:
        """The events of what an output adds to a choice."""

    @abstractmethod
    def end(self) -> bytes:
        """The events after the last output."""

    def failure(self, error: APIError) -> bytes:
        """The events of an error, which are the last ones."""
        return failed(error)


def failed(error: APIError) -> bytes:
    """An error inside a stream, as most of the API's clients read it."""
    return stream_error(error.message, error.type, error.status) + DONE


def prompt_length(result: RequestOutput) -> int:
    """In tokens."""
    return len(result.prompt_token_ids or ())
