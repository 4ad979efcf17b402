"""Responses that clients may come back to, within bounds: the oldest are forgotten first."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable

from vllm.entrypoints.openai.errors import bad_request, not_found, overloaded

SWITCH = "VLLM_ENABLE_RESPONSES_API_STORE=1"
MAX_ENTRIES = 1000
MAX_BYTES = 64 << 20  # of all entries, as JSON, and of what those that are computed hold besides
MAX_RUNNING = 64  # in the background


class Stored:
    """A response, the conversation that it ended with, without instructions, and its input: all as JSON, which takes a
    tenth of the memory of objects.

    body: of a status, as an answer.   messages, input_items: lists.   task: what computes it, if that goes on in the
    background.   held: bytes that this holds besides, about.
    """

    def __init__(
        self,
        status: str,
        body: Callable[[str], bytes],
        messages: bytes,
        input_items: bytes,
        task: asyncio.Task[None] | None = None,
        held: int = 0,
    ) -> None:
        self.messages = messages
        self.input_items = input_items
        self.task = task
        self._body = body
        self.set_status(status)
        self.size = len(self.text) + len(messages) + len(input_items) + held

    def set_status(self, status: str) -> None:
        self.status = status
        self.text = self._body(status)


class ResponseStore:
    """Made once per server. `enabled` is False unless the operator wants responses to be kept. Any thread may `put`."""

    def __init__(self, enabled: bool = False, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self.enabled = enabled
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, parameter: str) -> None:
        """Raise a 400 if `parameter` of a request needs stored responses and there are none."""
        if not self.enabled:
            raise bad_request(
                f"{parameter} needs stored responses, which this server does not keep; start it with {SWITCH}.",
                parameter,
            )

    def put(self, response_id: str, entry: Stored, instead_of: Stored | None = None) -> None:
        """Keep a response, or its newer state; with `instead_of`, only if that is there and was not cancelled."""
        with self._lock:
            was = self._entries.get(response_id)
            if instead_of is not None and (was is not instead_of or was.status == "cancelled"):
                return
            self._drop(response_id)
            self._entries[response_id] = entry
            self._bytes += entry.size
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            oldest = next((i for i, one in self._entries.items() if one.task is None or one.task.done()), None)
            if oldest is None:
                break  # all are being computed, and there are few of these
            self._drop(oldest)

    def get(self, response_id: str) -> Stored:
        """Raises a 404 for what is not, or no longer, there."""
        entry = self._entries.get(response_id)
        if entry is None:
            reason = "" if self.enabled else f" This server keeps none; start it with {SWITCH}."
            raise not_found(f"Response with id '{response_id[:100]}' not found.{reason}")
        return entry

    def delete(self, response_id: str) -> None:
        """Forget a response; one that is being computed is ended. Raises a 404."""
        entry = self.get(response_id)
        if entry.task is not None:
            entry.task.cancel()
        self._drop(response_id)

    def check_running(self, size: int) -> None:
        """Raise a 503 if too many responses are computed in the background, or too large ones for a further one of
        `size` bytes; one alone may be of any size.
        """
        running = [one.size for one in self._entries.values() if one.task is not None and not one.task.done()]
        if len(running) >= MAX_RUNNING:
            raise overloaded(f"{MAX_RUNNING} responses are computed in the background. Try again later.")
        if running and sum(running) + size > self._max_bytes:
            raise overloaded(
                f"{len(running)} responses that are computed in the background take {sum(running):,} of "
                f"{self._max_bytes:,} bytes, this one would need {size:,}. Try again later."
            )

    def cancel(self, response_id: str) -> Stored:
        """End a response that is computed in the background. Raises a 404, or a 400 if it is none."""
        with self._lock:
            entry = self.get(response_id)
            if entry.task is None:
                raise bad_request("Cannot cancel a synchronous response: only those with background=true.")
            if entry.status in ("queued", "in_progress"):
                entry.task.cancel()
                entry.set_status("cancelled")
            return entry

    def _drop(self, response_id: str) -> None:
        with self._lock:
            entry = self._entries.pop(response_id, None)
            if entry is not None:
                self._bytes -= entry.size
