"""A real server process for tests: started on a free port, watched by a canary request, stopped with its children."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "tiny"
MAX_MODEL_LEN = 512
CANARY = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
START_SECONDS = 90.0


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, read whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")


class Server:
    """`python -m vllm.entrypoints.openai.api_server` with a tiny model; use it as a context manager."""

    def __init__(
        self,
        model: Path,
        *args: str,
        env: dict[str, str] | None = None,
        key: str | None = None,
        module: str = "vllm.entrypoints.openai.api_server",
        quiet: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._module = module
        self._tls = tls
        self._args = [
            *("--model", str(model), "--served-model-name", MODEL, "--port", "0"),
            *(("--disable-uvicorn-access-log", "--disable-log-requests") if quiet else ()),
            *args,
        ]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._key = key
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Server:
        self._log = tempfile.NamedTemporaryFile(prefix="server-", suffix=".log")  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            [sys.executable, "-m", self._module, *self._args],
            env=self._env,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            self._await_start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)  # the second signal stops at once
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def _await_start(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r"Serving on https?://\S+:(\d+)", self.log)
            if found:
                self.port = int(found.group(1))
                if self.request("GET", "/health").status == 200:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"The server did not start:\n{self.log}")

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60.0
    ) -> Answer:
        """One request on a connection of its own. `body`: bytes as they are, anything else as JSON."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        if self._key is not None:
            sent.setdefault("authorization", f"Bearer {self._key}")
        request = urllib.request.Request(self.url + path, data=data, headers=sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=self._tls) as reply:
                return Answer(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())

    def post(self, path: str, body: Any, **kwargs: Any) -> Answer:
        return self.request("POST", path, body, **kwargs)

    def get(self, path: str, **kwargs: Any) -> Answer:
        return self.request("GET", path, **kwargs)

    def canary(self) -> str:
        """The text of a fixed greedy request: the same bytes before, during and after any attack."""
        answer = self.post("/v1/completions", CANARY)
        assert answer.status == 200, answer.text
        return answer.json["choices"][0]["text"]

    def metric(self, name: str) -> float:
        """The value of a metric without labels other than the model's."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + "{") or line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def raw(self, data: bytes, *, timeout: float = 30.0, half_close: bool = False) -> bytes:
        """Send bytes, return everything until the server closes or is silent for `timeout` seconds."""
        return self.pieces([data], timeout=timeout, half_close=half_close)

    def pieces(self, datas: list[bytes], *, timeout: float = 30.0, half_close: bool = False) -> bytes:
        """As `raw`; the pieces arrive one by one."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            received = bytearray()
            try:
                for i, data in enumerate(datas):
                    time.sleep(0.05 if i else 0.0)
                    connection.sendall(data)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(65536):
                    received += chunk
            except (ConnectionError, TimeoutError):
                pass
            return bytes(received)


def sse_events(body: str) -> list[Any]:
    """The JSON of each `data:` event; the last must be [DONE], which is left out."""
    datas = [line[6:] for line in body.split("\n\n") if line.startswith("data: ")]
    assert datas and datas[-1].strip() == "[DONE]", body[-300:]
    return [json.loads(data) for data in datas[:-1]]
