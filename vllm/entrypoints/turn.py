"""One call at a time: callers in other threads wait, a call from inside another is refused."""

from __future__ import annotations

import threading


class Turn:
    """A lock that knows its owner, as a context manager. Raises RuntimeError where waiting would never end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # id of the thread whose turn it is

    def __enter__(self) -> None:
        caller = threading.get_ident()
        if self._owner == caller:
            raise RuntimeError(
                "This LLM is in the middle of another call of the same thread (it was called by a logits processor, "
                "for example). Call it after that one has returned, or use a second LLM."
            )
        self._lock.acquire()
        self._owner = caller

    def __exit__(self, *exception: object) -> None:
        self._owner = None
        self._lock.release()
