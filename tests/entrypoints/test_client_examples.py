"""The examples that talk to a server run against one; the dashboard draws metrics that exist."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from tests.server.http_server import MODEL, Server

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def demo_server() -> Iterator[Server]:
    with Server(Path("demo")) as running:
        yield running


def run(name: str, monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_completion_client(demo_server, monkeypatch, capsys):
    out = run("openai_completion_client.py", monkeypatch, capsys, "--base-url", demo_server.url + "/v1")
    assert out.startswith("Completion results:\nCompletion(id='cmpl-")
    assert out.count("CompletionChoice(") == 2 and out.count("top_logprobs=[{") == 2


def test_completion_client_streams(demo_server, monkeypatch, capsys):
    out = run("openai_completion_client.py", monkeypatch, capsys, "--base-url", demo_server.url + "/v1", "--stream")
    assert out.count("Completion(id='cmpl-") > 4
    assert out.count("finish_reason='") == 2


def test_chat_client(demo_server, monkeypatch, capsys):
    out = run("openai_chat_completion_client.py", monkeypatch, capsys, "--base-url", demo_server.url + "/v1")
    assert "role='assistant'" in out and "Rome" in out


def test_structured_output_client(demo_server, monkeypatch, capsys):
    out = run("openai_structured_output_client.py", monkeypatch, capsys, "--base-url", demo_server.url + "/v1")
    assert re.search(r"^choice: (positive|negative)$", out, re.MULTILINE)
    assert re.search(r"^regex: [a-z]+\.[a-z]+@[a-z]+\.com$", out, re.MULTILINE)
    assert "parsed: CarDescription(" in out
    assert re.search(r"^grammar: SELECT col_[12] FROM table_[12] WHERE col_[12] = [0-9]+$", out, re.MULTILINE)
    assert "refused: " in out and "uniqueItems" in out


def test_chatbot_page_streams_the_answer_so_far(demo_server):
    import openai

    page = runpy.run_path(str(EXAMPLES / "gradio_openai_chatbot_webserver.py"))
    with openai.OpenAI(api_key="EMPTY", base_url=demo_server.url + "/v1") as client:
        texts = list(page["answers"](client, MODEL, 0.0, [], "What is the capital of Italy?", []))
    assert len(texts) > 1 and all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    assert "Rome" in texts[-1]


def test_chatbot_page_understands_both_forms_of_history():
    page = runpy.run_path(str(EXAMPLES / "gradio_openai_chatbot_webserver.py"))
    pairs = page["to_messages"]("c", [["a", "b"]])
    named = page["to_messages"]("c", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert pairs == named
    assert [m["content"] for m in pairs[1:]] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["gradio_webserver.py", "gradio_openai_chatbot_webserver.py"])
def test_pages_say_what_they_need(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr("sys.argv", [name, "--model", "m"] if "chatbot" in name else [name])
    with pytest.raises(SystemExit, match="pip install gradio"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


# -- the demonstration server's clients, against its wire format -------------------------------------------------------


@pytest.fixture
def generate_url() -> Iterator[str]:
    """A server of POST /generate that splits its NUL-delimited stream in the middle of objects."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            texts = [[f"{body['prompt']} {word}" for _ in range(body.get("n", 1))] for word in ("p", "prö", "pröd")]
            self.send_response(200)
            self.end_headers()
            if not body["stream"]:
                self.wfile.write(json.dumps({"text": texts[-1]}).encode())
                return
            data = b"".join(json.dumps({"text": t}, ensure_ascii=False).encode() + b"\0" for t in texts)
            for i in range(0, len(data), 11):
                self.wfile.write(data[i : i + 11])
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/generate"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_api_client_shows_every_candidate(generate_url, monkeypatch, capsys, flags):
    port = re.search(r":(\d+)/", generate_url)
    assert port is not None
    out = run("api_client.py", monkeypatch, capsys, "--host", "127.0.0.1", "--port", port[1], "--n", "3", *flags)
    for i in range(3):
        assert f"Beam candidate {i}: 'San Francisco is a pröd'" in out
    assert out.count("\x1b[2K") == (6 if flags else 0)  # three lines are taken back before the second and third time


def test_api_client_and_text_page_against_the_demonstration_server(monkeypatch, capsys):
    """The packaged model recommends a top_p, which must not get in the way of the beams that the client asks for."""
    with Server(Path("demo"), module="vllm.entrypoints.api_server") as server:
        where = ("--host", "127.0.0.1", "--port", str(server.port), "--prompt", "The capital of France is", "--n", "2")
        plain = run("api_client.py", monkeypatch, capsys, *where)
        streamed = run("api_client.py", monkeypatch, capsys, *where, "--stream")
        page = runpy.run_path(str(EXAMPLES / "gradio_webserver.py"))
        texts = list(page["continuations"](server.url + "/generate", "The capital of France is"))
    assert "Beam candidate 0: 'The capital of France is Paris" in plain and "Beam candidate 1: " in plain
    assert streamed.endswith(plain.partition("\n\n")[2])
    assert len(texts) > 2 and texts[-1].startswith("The capital of France is")


def test_text_page_streams_the_text_so_far(generate_url):
    page = runpy.run_path(str(EXAMPLES / "gradio_webserver.py"))
    assert list(page["continuations"](generate_url, "x")) == ["x p", "x prö", "x pröd"]


# -- what cannot run here ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py")))
def test_every_example_says_what_it_is_and_compiles(name):
    tree = ast.parse((EXAMPLES / name).read_text())
    assert ast.get_docstring(tree)


def test_the_dashboard_draws_metrics_that_exist(demo_server):
    demo_server.canary()
    names = set(re.findall(r"^(vllm:\w+)[{ ]", demo_server.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((EXAMPLES / "monitoring" / "grafana.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    used = {name for e in expressions for name in re.findall(r"vllm:\w+", e)}
    assert len(used) > 12
    assert used <= names
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["description"]


def test_prometheus_asks_where_the_server_listens():
    config = yaml.safe_load((EXAMPLES / "monitoring" / "prometheus.yaml").read_text())
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["host.docker.internal:8000"]
    services = yaml.safe_load((EXAMPLES / "monitoring" / "docker-compose.yaml").read_text())["services"]
    for service in services.values():  # nothing is open to the network without being asked for
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for volume in services["prometheus"]["volumes"]:
        assert (EXAMPLES / "monitoring" / volume.split(":")[0]).is_file()
