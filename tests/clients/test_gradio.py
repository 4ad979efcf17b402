"""The Gradio pages of the examples: started as users start them, asked through Gradio's own client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gradio_client import Client

from tests.clients.conftest import QUESTION

pytestmark = [pytest.mark.clients, pytest.mark.timeout(180)]
EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def page(name: str, *arguments: str) -> Iterator[Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / name), "--host", "127.0.0.1", "--port", str(port), *arguments]
    environment = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, process.stdout and process.stdout.read()
            try:
                with socket.create_connection(("127.0.0.1", port), 1):
                    break
            except OSError:
                assert time.monotonic() < deadline, "The page did not start."
                time.sleep(0.2)
        yield Client(f"http://127.0.0.1:{port}", verbose=False)
    finally:
        process.terminate()
        process.wait(20)


def test_the_chat_page(base_url: str) -> None:
    with page(
        "gradio_openai_chatbot_webserver.py", "--model", "demo", "--model-url", base_url, "--temp", "0"
    ) as client:
        (name,) = client.view_api(return_format="dict")["named_endpoints"]
        assert "Paris" in str(client.predict(QUESTION, api_name=name))
