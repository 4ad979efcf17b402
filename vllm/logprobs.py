"""The public path of log probability types, and their compact form: numbers in arrays instead of objects."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from vllm.sequence import Logprob, PromptLogprobs, SampleLogprobs

__all__ = ["FlatLogprobs", "Logprob", "PromptLogprobs", "SampleLogprobs"]

Position = dict[int, Logprob]


def _no_text(token_id: int) -> str | None:
    return None


class FlatLogprobs(Sequence[Position | None]):
    """Log probabilities of many positions, 20 bytes for each: what SamplingParams(flat_logprobs=True) asks for.

    It reads like a list with a dictionary per position (None where there are none), which is made when it is looked at.
    The numbers of position i lie at `start_indices[i]` to `end_indices[i]` of `token_ids`, `logprobs` and `ranks` (0:
    not known). text: of a token id, for `Logprob.decoded_token`.
    """

    __slots__ = ("_text", "end_indices", "logprobs", "ranks", "token_ids")

    def __init__(self, text: Callable[[int], str | None] = _no_text) -> None:
        self._text = text
        self.end_indices = array("q")
        self.token_ids = array("q")
        self.logprobs = array("d")
        self.ranks = array("i")

    @property
    def start_indices(self) -> array[int]:
        return array("q", [0, *self.end_indices[:-1]]) if self.end_indices else array("q")

    @property
    def decoded_tokens(self) -> list[str | None]:
        return [self._text(token_id) for token_id in self.token_ids]

    def append(self, position: Mapping[int, Logprob] | None) -> None:
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank or 0)
        self.end_indices.append(len(self.token_ids))

    def append_fast(self, token_ids: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int]) -> None:
        """A position by its parts: different tokens."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Sequence[Mapping[int, Logprob] | None]) -> None:
        for position in positions:
            self.append(position)

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions."""
        del self.end_indices[length:]
        end = self.end_indices[-1] if self.end_indices else 0
        for numbers in (self.token_ids, self.logprobs, self.ranks):
            del numbers[end:]

    def __len__(self) -> int:
        return len(self.end_indices)

    @overload
    def __getitem__(self, index: int) -> Position | None: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> Position | None | FlatLogprobs:
        if isinstance(index, slice):
            return self._slice(range(len(self))[index])
        place = range(len(self))[index]  # raises IndexError, counts from the end
        return self._position(self.end_indices[place - 1] if place else 0, self.end_indices[place])

    def __iter__(self) -> Iterator[Position | None]:
        start = 0
        for end in self.end_indices:
            yield self._position(start, end)
            start = end

    def __add__(self, later: Sequence[Position | None]) -> FlatLogprobs:
        found = self[:]
        if not isinstance(later, FlatLogprobs):
            found.extend(later)
            return found
        found.end_indices.extend(len(found.token_ids) + end for end in later.end_indices)
        found.token_ids += later.token_ids
        found.logprobs += later.logprobs
        found.ranks += later.ranks
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FlatLogprobs({len(self)} positions, {len(self.token_ids)} log probabilities)"

    def _position(self, start: int, end: int) -> Position | None:
        if start == end:
            return None
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i] or None, self._text(self.token_ids[i]))
            for i in range(start, end)
        }

    def _slice(self, places: range) -> FlatLogprobs:
        found = FlatLogprobs(self._text)
        for place in places if places.step != 1 else ():
            start = self.end_indices[place - 1] if place else 0
            end = self.end_indices[place]
            found.append_fast(self.token_ids[start:end], self.logprobs[start:end], self.ranks[start:end])
        if places.step == 1 and places:
            start = self.end_indices[places.start - 1] if places.start else 0
            end = self.end_indices[places.stop - 1]
            found.append_fast(self.token_ids[start:end], self.logprobs[start:end], self.ranks[start:end])
            found.end_indices = array("q", [e - start for e in self.end_indices[places.start : places.stop]])
        return found
