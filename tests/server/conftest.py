"""Fixtures: one server process with the tiny model for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from tests.server.http_server import Server
from tests.tiny_models import save_llama


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny-server-model"))


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    with Server(model_folder) as running:
        yield running


@pytest.fixture
def steady(server: Server) -> Iterator[Server]:
    """The server, and the check that the test changed nothing: same process, same canary."""
    before = server.canary()
    yield server
    assert server.alive, server.log[-3000:]
    assert server.canary() == before


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0) as opened:
        yield opened


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0) as opened:
        yield opened
