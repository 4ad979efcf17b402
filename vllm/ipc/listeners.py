"""Sockets that wait for processes of other hosts, or of this one."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def open_listener(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A listening socket on one interface of this host; port 0: any that is free."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
