"""The short way to the routes that generate: from the limits to their functions, past the application's own layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.limits import Receive, Scope, Send
from vllm.logger import init_logger

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

logger = init_logger(__name__)


def error_response(error: APIError) -> Response:
    """What a client gets to see of an error."""
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def crash_response(error: Exception) -> Response:
    """What a client gets to see of an error that should not exist; the log says more."""
    logger.error("Unexpected error in a route", exc_info=error)
    return error_response(APIError(500, "The server failed to process the request.", "InternalServerError"))


class DirectRoutes:
    """Hands requests for some of an application's routes to their functions, everything else to the application, and
    all if somebody has given it middleware.

    The routes must be those of functions that take the request and return the response: for them, what the application
    does on the way (routing, dependencies, its layers for errors) comes to nothing, and takes longer than reading
    the request.
    """

    def __init__(self, app: FastAPI, router: APIRouter, paths: Collection[str]) -> None:
        self._app, self._middleware = app, app.user_middleware
        routes = [route for route in router.routes if isinstance(route, APIRoute) and route.path in paths]
        self._routes = {(route.path, method): route for route in routes for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["path"], scope["method"])) if scope["type"] == "http" else None
        if route is None or self._middleware:
            await self._app(scope, receive, send)
            return
        scope["app"], scope["route"] = self._app, route
        try:
            response = await route.endpoint(Request(scope, receive, send))
        except APIError as error:
            response = error_response(error)
        except Exception as error:
            response = crash_response(error)
        await response(scope, receive, send)
