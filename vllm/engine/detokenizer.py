"""The text of one growing output: incremental decoding, stop strings, and how much of it may be shown yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm.engine.token_streams import TokenStream


class StopMatch(NamedTuple):
    """Stop string `stop` was completed by the `num_tokens`-th of the tokens just pushed (counted from 1)."""

    stop: str
    num_tokens: int


class Detokenizer:
    """Feeds tokens to a stream, watches for stop strings, and hands out text.

    A stop string counts from the token after the first `min_tokens` on: it must end in their text. Of several, the one
    that is complete first wins; of those complete at the same character, the longest.
    `hold_back` characters are not shown before the end, because they may turn out to be the beginning of a stop string.
    """

    __slots__ = (
        "_finished",
        "_held",
        "_hold_back",
        "_include_stop",
        "_longest_stop",
        "_min_tokens",
        "_num_tokens",
        "_pending",
        "_pieces",
        "_stops",
        "_stream",
        "_tail",
    )

    def __init__(
        self,
        stream: TokenStream,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        hold_back: int = 0,
    ) -> None:
        self._stream = stream
        self._stops = tuple(stop)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        # What was shown can not be taken back, so a smaller value than the stop strings need would be wrong.
        self._hold_back = hold_back if include_stop_str_in_output else max(hold_back, self._longest_stop - 1, 0)
        self._num_tokens = 0
        self._pieces: list[str] = []  # the whole text
        self._pending: list[str] = []  # the end of the text that `take_delta` has not returned yet
        self._tail = ""  # the end of the text in which a stop string may have begun
        self._held = 0  # characters that the stream showed us but still holds
        self._finished = False

    @property
    def holds_back(self) -> bool:
        """Whether text may wait for a stop string that it might begin."""
        return bool(self._stops or self._hold_back)

    def push_plain(self, token_ids: Sequence[int]) -> str:
        """`push` and `take_delta` in one, for a text that nothing holds back and that nobody wants as a whole."""
        text = "".join(map(self._stream.feed, token_ids))
        if self._pending:
            text = "".join(self._pending) + text
            self._pending.clear()
        return text

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Append tokens. If a stop string was completed, the text ends there and nothing may be pushed any more."""
        feed = self._stream.feed
        if not self._stops:
            for token_id in token_ids:
                if text := feed(token_id):
                    self._pieces.append(text)
                    self._pending.append(text)
            return None
        for i, token_id in enumerate(token_ids):
            text = feed(token_id)
            self._append(text)
            self._num_tokens += 1
            match = self._find_stop(text)
            if match is not None:
                return StopMatch(match, i + 1)
        return None

    def finish(self) -> StopMatch | None:
        """No token follows: release what was held. Incomplete characters become U+FFFD."""
        if self._finished:
            return None
        text = self._stream.finish()
        self._append(text)
        self._finished = True
        match = self._find_stop(text) if self._stops and text else None
        return None if match is None else StopMatch(match, 0)

    @property
    def text(self) -> str:
        """What may be shown of the whole text."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        text = self._pieces[0] if self._pieces else ""
        return text if self._finished or not self._hold_back else text[: -self._hold_back]

    def take_delta(self) -> str:
        """What may be shown and was not returned yet."""
        pending = "".join(self._pending)
        if self._finished or not self._hold_back:
            self._pending.clear()
            return pending
        self._pending = [pending[-self._hold_back :]]
        return pending[: -self._hold_back]

    def _append(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._pending.append(text)

    def _find_stop(self, new_text: str) -> str | None:
        """Look for a stop string that ends in `new_text`, or in the text that is complete but still held."""
        held = self._stream.peek()
        window = self._tail + new_text + held
        # Up to here the window was looked at before, or belongs to the first min_tokens.
        exempt = len(self._tail) + self._held if self._num_tokens > self._min_tokens else len(window)
        self._held = len(held)
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, exempt - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                found = candidate if found is None else min(found, candidate)
        if found is None:
            keep = self._longest_stop - 1
            self._tail = (self._tail + new_text)[-keep:] if keep else ""
            return None
        end, start, stop = found
        self._append(held)
        self._cut(len(window) - (end if self._include_stop else start))
        return stop

    def _cut(self, count: int) -> None:
        """Drop the last `count` characters and end the text."""
        self._finished = True
        if count:
            self._pieces = ["".join(self._pieces)[:-count]]
            self._pending = ["".join(self._pending)[:-count]]
