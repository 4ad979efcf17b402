"""T25: schemathesis reads the OpenAPI document and throws right and wrong data at every route. No filters."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.server.http_server import Server


def run_schemathesis(server: Server, phases: str, examples: int, timeout: float) -> int:
    """Returns the number of test cases; fails on any server error."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"),
        *("--checks", "not_a_server_error", "--mode", "all", "--generation-allow-x00", "true"),
        *("--phases", phases, "--max-examples", str(examples), "--generation-database", "none"),
        *("--seed", "1", "--continue-on-failure", "--request-timeout", "60"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found and found.group(1) == found.group(2), done.stdout[-3000:]
    assert server.get("/health").status == 200
    print(f"T25: {found.group(1)} generated requests, none of them a server error")
    return int(found.group(1))


def test_the_document_has_every_route_and_its_body(server: Server) -> None:
    paths = server.get("/openapi.json").json["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"]["model"]
        assert "$ref" not in str(schema)
    assert {"/v1/models", "/health", "/metrics", "/version", "/v1/embeddings", "/score"} <= set(paths)


def test_generated_requests_never_make_a_server_error(steady: Server) -> None:
    assert run_schemathesis(steady, "examples,fuzzing", 5, 110) > 50


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_a_thousand_generated_requests_per_route(steady: Server) -> None:
    assert run_schemathesis(steady, "examples,coverage,fuzzing,stateful", 1000, 3500) > 5000
