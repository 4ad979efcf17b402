"""What front ends have sent and the core has not read yet: whose turn it is, and how a request is read then."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from vllm.engine import wire
from vllm.step.messages import CoreRequest


class _Behind:
    """Something to be handed out after what its owner had here before."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Unread:
    """Requests of several owners, in rounds over accounts: each turn is the next request of the next account, so that
    one waits for as many as there are accounts, whatever these have here. One without an account is by itself.
    """

    def __init__(self) -> None:
        # whose turn it is -> its requests by name
        self._lines: OrderedDict[tuple[str, ...], OrderedDict[str, Any]] = OrderedDict()
        # by owner, in the order in which they have come: names of requests, with their lines, and what is behind them
        self._owned: dict[str, OrderedDict[str | _Behind, tuple[str, ...]]] = {}
        self._due: deque[tuple[str, Any]] = deque()  # was behind something that is gone
        self._size = 0

    def __len__(self) -> int:
        """How many requests there are."""
        return self._size

    def __bool__(self) -> bool:
        return bool(self._lines or self._due)

    def add(self, owner: str, name: str, account: str | None, content: Any) -> bool:
        """A request has come; False if the owner has one of this name here already."""
        owned = self._owned.setdefault(owner, OrderedDict())
        if name in owned:
            return False
        line = (owner, account) if account is not None else (owner, "", name)
        self._lines.setdefault(line, OrderedDict())[name] = content
        owned[name] = line
        self._size += 1
        return True

    def put_behind(self, owner: str, content: Any) -> None:
        """Hand this out when all that the owner has here has been read, or is not wanted any more."""
        if owner in self._owned:
            self._owned[owner][_Behind(content)] = ()
        else:
            self._due.append((owner, content))

    def take(self) -> tuple[str, Any] | None:
        """Whose turn it is, and what has come from there; None if nothing is left."""
        if self._due:
            return self._due.popleft()
        if not self._lines:
            return None
        key, line = next(iter(self._lines.items()))
        self._lines.move_to_end(key)
        owner, name = key[0], next(iter(line))
        return owner, self._remove(owner, name)

    def discard(self, owner: str, names: Iterable[str]) -> None:
        """These requests are not wanted any more; others may be among them."""
        for name in names:
            if name in self._owned.get(owner, ()):
                self._remove(owner, name)

    def forget(self, owner: str) -> None:
        """Nothing of this owner is wanted any more."""
        self.discard(owner, [name for name in self._owned.get(owner, ()) if isinstance(name, str)])
        self._due = deque(due for due in self._due if due[0] != owner)

    def _remove(self, owner: str, name: str) -> Any:
        owned = self._owned[owner]
        key = owned.pop(name)
        line = self._lines[key]
        content = line.pop(name)
        self._size -= 1
        if not line:
            del self._lines[key]
        while owned and isinstance(first := next(iter(owned)), _Behind):
            del owned[first]
            self._due.append((owner, first.content))
        if not owned:
            del self._owned[owner]
        return content


class Common:
    """What several requests have as their parameters or grammar. It is read once, when the first of them is."""

    def __init__(self, raw: msgspec.Raw) -> None:
        self._raw, self._value, self._is_read = raw, None, False

    def read(self, decode: Callable[[msgspec.Raw], Any]) -> Any:
        if not self._is_read:
            self._value, self._is_read = decode(self._raw), True
        return self._value


def look_at(raw: msgspec.Raw, common: Mapping[int, Common]) -> wire.UnreadRequest:
    """What is short of a request. Raises msgspec.DecodeError or UnicodeDecodeError.

    common: by number, what requests may have in common that come now.
    """
    request = wire.decode_unread(raw)
    for name in ("params", "grammar"):
        number = memoryview(getattr(request, name))[0]
        if number < 0x80:  # in msgpack, neither an object, a list nor nothing begins so
            if number not in common:
                raise msgspec.ValidationError(f"Nobody knows number {number} - at `$.{name}`")
            setattr(request, name, common[number])
    return request


def read(request: wire.UnreadRequest) -> CoreRequest:
    """All of a request. Raises msgspec.DecodeError or UnicodeDecodeError."""
    values = msgspec.structs.asdict(request)
    for name, decode in _DECODERS:
        value = values[name]
        values[name] = value.read(decode) if isinstance(value, Common) else decode(value)
    return CoreRequest(**values)


_DECODERS: tuple[tuple[str, Callable[[msgspec.Raw], Any]], ...] = (
    ("prompt_token_ids", wire.decode_token_ids),
    ("params", wire.decode_params),
    ("grammar", wire.decode_grammar),
)
