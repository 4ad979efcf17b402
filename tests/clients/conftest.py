"""What tests of published clients share. `make test-clients` makes their environments and starts the server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUESTION = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules here import what only their own environments have."""
    if collection_path.name.startswith("test_") and config.option.markexpr != "clients":
        return True
    return None


@pytest.fixture(scope="session")
def server() -> str:
    """The address of a server with the demo model, which knows tools and stores responses."""
    found = os.environ.get("VLLM_TEST_SERVER")
    assert found, "VLLM_TEST_SERVER is not set: these tests are run by `make test-clients`."
    return found


@pytest.fixture(scope="session")
def base_url(server: str) -> str:
    """Where OpenAI's routes begin."""
    return server + "/v1"


@pytest.fixture(scope="session")
def engine_settings() -> dict[str, Any]:
    """Of engines in the test's own process."""
    return {"max_model_len": 512, "num_gpu_blocks_override": 500}


@pytest.fixture(autouse=True)
def without_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A client asks nobody but our server."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "EMPTY")
    yield
