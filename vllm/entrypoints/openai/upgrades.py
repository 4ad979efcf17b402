"""Offers to switch to another protocol (HTTP/2, WebSocket): declined, and the request is served as if none was made."""

from __future__ import annotations

from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_OFFER = (b"upgrade", b"http2-settings")


class _Parser(HttpRequestParser):
    """Stops behind a head with an offer, as httptools does; another one goes on, with that head without the offer."""

    def __init__(self, connection: NoUpgrades) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's: pipelined requests
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        connection, parser, left = self._connection, self, memoryview(data)
        while True:
            try:
                super(_Parser, parser).feed_data(left)
            except HttpParserUpgrade as stop:
                if not connection.has_offer:
                    raise  # CONNECT: what follows the head is not HTTP
                head = connection.head_without_offer()
                connection.parser = parser = _Parser(connection)
                super(_Parser, parser).feed_data(head)
                left = left[stop.args[0] :]
            else:
                return


class NoUpgrades(HttpToolsProtocol):
    """uvicorn's protocol for HTTP/1.1, which by itself loses the body of a request that offers HTTP/2 in clear text.
    Java's own HTTP client, for one, does so in its first request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self.has_offer = False

    def on_headers_complete(self) -> None:
        self.has_offer = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if not self.has_offer:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.has_offer:
            super().on_message_complete()

    def head_without_offer(self) -> bytes:
        """The head that was read last, with neither the offer nor what belongs to it."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                kept = [word for word in value.split(b",") if word.strip().lower() not in _OFFER]
                value = b",".join(kept)
            if name not in _OFFER:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: uvicorn would ask the operator to install a library whenever a client makes an offer."""
