"""`serve_http`, for programs that serve an application which they made of the server's parts."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable
from typing import Any


async def serve_http(
    app: Any, sock: socket.socket | None = None, enable_ssl_refresh: bool = False, **uvicorn_kwargs: Any
) -> Awaitable[None]:
    """Serve until SIGINT or SIGTERM comes, the task is cancelled, or the engine of `init_app_state` has died. The
    result, which older programs await when they have put their own things away, has nothing left to do.

    sock: as `create_server_socket` makes it.   uvicorn_kwargs: of `uvicorn.Config`; host and port if there is no sock.
    Raises NotImplementedError for enable_ssl_refresh.
    """
    import uvicorn

    from vllm.entrypoints.openai.api_server import engine_death, without_signals

    if enable_ssl_refresh:
        raise NotImplementedError("Certificates are not read again while the server runs (enable_ssl_refresh).")
    server = uvicorn.Server(uvicorn.Config(app, **uvicorn_kwargs))
    server.capture_signals = without_signals  # type: ignore[method-assign]

    def stop() -> None:
        server.force_exit = server.should_exit  # asked twice: now
        server.should_exit = True

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    serving = asyncio.ensure_future(server.serve(sockets=None if sock is None else [sock]))
    ends = {serving}
    engine = getattr(getattr(app, "state", None), "engine_client", None)
    if engine is not None:
        ends.add(asyncio.ensure_future(engine_death(engine)))
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        pass  # what awaits the server is told by its end
    finally:
        for task in ends - {serving}:
            task.cancel()
        server.should_exit = True
        await serving
        for number in numbers:
            loop.remove_signal_handler(number)
    return asyncio.sleep(0)
