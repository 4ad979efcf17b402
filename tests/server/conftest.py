"""Fixtures: one server process with the tiny model for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
