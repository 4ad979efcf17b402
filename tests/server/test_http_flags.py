"""Flags of the server, each seen from outside: TLS, CORS, middleware, root path, keys, config file, chat templates."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import vllm
from tests.server.http_server import MODEL, Server
from tests.tiny_models import save_llama
from vllm.entrypoints.openai.api_server import check_files, make_context
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse import FlexibleArgumentParser

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
ORIGIN = "https://app.example"
SECONDS = 2.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority of our own, and a server's and a client's certificate from it, for an hour or so."""
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
        openssl("x509", *signed, "-extfile", f"{name}.ext", "-out", f"{name}.pem")
    return folder


def trusting(certificates: Path, client: bool) -> ssl.SSLContext:
    """What a client needs that trusts our authority, and shows its own certificate or not."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if client:
        context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    return context


@pytest.fixture(scope="module")
def several_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with chat templates that have names."""
    folder = save_llama(tmp_path_factory.mktemp("tiny-named-templates"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    named = {"default": "default:", "short": "{% for m in messages %}<{{ m.content }}>{% endfor %}"}
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def dressed(several_templates: Path, certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with all of these flags, most of them from a file; the command line wins where both say something."""
    file = tmp_path_factory.mktemp("config") / "server.yaml"
    file.write_text(
        f"""
served-model-name: [{MODEL}, second]
max_model_len: 100
max-num-seqs: 8
api-key: [first-key, second-key]
allowed-origins: ["{ORIGIN}"]
allowed-methods: [GET, POST]
allowed-headers: [x-custom, authorization]
allow-credentials: true
disable-fastapi-docs: true
middleware: [tests.server.operator_middleware.Stamp, tests.server.operator_middleware.mark]
response-role: bot
header-timeout: {SECONDS}
"""
    )
    flags = [
        *("--config", str(file), "--max-model-len", "200", "--root-path", "/api/", "--chat-template", "short"),
        *("--ssl-keyfile", str(certificates / "server.key"), "--ssl-certfile", str(certificates / "server.pem")),
        *("--ssl-ca-certs", str(certificates / "ca.pem"), "--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED))),
        *("--served-model-name", "one", "two"),
    ]
    with Server(several_templates, *flags, key="second-key", tls=trusting(certificates, client=True)) as running:
        yield running


def answer_over(port: int, context: ssl.SSLContext) -> bytes:
    """The first bytes of the server's answer. Raises OSError if there is none."""
    with (
        socket.create_connection(("127.0.0.1", port), 5) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as secure,
    ):
        secure.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        received = secure.recv(100)
        if not received:
            raise ConnectionError("closed without an answer")
        return received


def test_tls_with_certificates_of_both_sides(dressed: Server, certificates: Path) -> None:
    answer = dressed.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2})
    assert answer.status == 200
    for words in ("Serving on", "Uvicorn running on"):
        assert f"{words} https://0.0.0.0:{dressed.port}" in dressed.log
    assert answer_over(dressed.port, trusting(certificates, client=True)).startswith(b"HTTP/1.1 200")
    streamed = dressed.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 20, "stream": True, "ignore_eos": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    for context in (trusting(certificates, client=False), ssl.create_default_context()):
        with pytest.raises(OSError):
            answer_over(dressed.port, context)
    assert not dressed.raw(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", timeout=5).startswith(b"HTTP/1.1 200")


def test_clients_that_say_no_hello_make_room(model_folder: Path, certificates: Path) -> None:
    """Until they speak TLS they are no connections, of which there may be so many, but open files all the same."""
    tls = trusting(certificates, client=False)
    files = ("--ssl-keyfile", str(certificates / "server.key"), "--ssl-certfile", str(certificates / "server.pem"))
    with Server(model_folder, *files, "--max-connections", "20", tls=tls) as server:
        assert server.process is not None
        before = psutil.Process(server.process.pid).num_fds()
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        assert server.request("GET", "/health").status == 200
        assert psutil.Process(server.process.pid).num_fds() < before + 50
        # one that comes byte by byte, its request at once behind the handshake
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = tls.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    for byte in outgoing.read():
                        connection.sendall(bytes([byte]))
                    incoming.write(connection.recv(65536))
            client.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            connection.sendall(outgoing.read())
            answer = b""
            while b"200 OK" not in answer:
                incoming.write(connection.recv(65536))
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer += client.read(65536)
        for each in silent:
            each.close()


def test_a_client_that_says_no_hello_is_cut(dressed: Server) -> None:
    started = time.monotonic()
    assert dressed.raw(b"", timeout=20) == b""
    assert time.monotonic() - started < SECONDS + 8


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(dressed: Server) -> None:
    cards = dressed.get("/v1/models").json["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("one", 200), ("two", 200)]
    assert dressed.get("/v1/models", headers={"authorization": "Bearer first-key"}).status == 200
    assert dressed.get("/v1/models", headers={"authorization": "Bearer third-key"}).status == 401
    assert dressed.get("/openapi.json").status == 404


def test_cors(dressed: Server) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-custom"}
    allowed = dressed.request("OPTIONS", COMPLETIONS, headers={**asked, "authorization": ""})
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert allowed.headers["access-control-allow-credentials"] == "true"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "DELETE" not in allowed.headers["access-control-allow-methods"]
    assert "x-custom" in allowed.headers["access-control-allow-headers"].lower()
    for change in (
        {"origin": "https://other.example"},
        {"access-control-request-method": "DELETE"},
        {"access-control-request-headers": "x-other"},
    ):
        assert dressed.request("OPTIONS", COMPLETIONS, headers={**asked, **change}).status == 400
    assert "access-control-allow-origin" not in dressed.get("/version", headers={"origin": "https://other"}).headers


def test_figures_need_no_key_and_everything_else_does(dressed: Server) -> None:
    nobody = {"authorization": ""}
    assert b"vllm:num_requests_running" in dressed.get("/metrics", headers=nobody).body
    for path in ("/load", "/v1/models", "/server_info", "/tokenizer_info", "/openapi.json", "/is_sleeping"):
        assert dressed.get(path, headers=nobody).status == 401, path
    assert dressed.post("/tokenize", {"prompt": "x"}, headers=nobody).status == 401


def test_a_page_can_read_refusals_too(dressed: Server) -> None:
    for headers, path, status in (({"authorization": ""}, "/v1/models", 401), ({}, "/nowhere", 404)):
        answer = dressed.get(path, headers={"origin": ORIGIN, **headers})
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_middleware_of_the_operator(dressed: Server) -> None:
    for path in ("/version", "/v1/models", "/nowhere"):
        headers = dressed.get(path).headers
        assert (headers["x-stamp"], headers["x-mark"]) == ("class", "function")
    assert "x-stamp" not in dressed.get("/v1/models", headers={"authorization": ""}).headers  # the key comes first
    body = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True}
    streamed = dressed.post(COMPLETIONS, {**body, "stream": True})
    assert streamed.headers["x-mark"] == "function"
    assert streamed.text.count("data: ") >= 2


def test_root_path(dressed: Server) -> None:
    """A proxy may leave the prefix in place or take it away; what is open stays open, the rest stays closed."""
    for prefix in ("", "/api"):
        assert dressed.get(prefix + "/v1/models").status == 200
        assert dressed.get(prefix + "/v1/models", headers={"authorization": ""}).status == 401
        assert dressed.get(prefix + "/health", headers={"authorization": ""}).status == 200
    assert dressed.get("/api/api/health", headers={"authorization": ""}).status == 401
    assert dressed.get("/apihealth", headers={"authorization": ""}).status == 401


def test_the_role_and_the_named_template(dressed: Server) -> None:
    ids = dressed.post("/tokenize", {"messages": USER}).json["tokens"]
    assert dressed.post("/detokenize", {"tokens": ids}).json["prompt"] == "<Hi>"
    message = dressed.post(CHAT, {"messages": USER, "max_tokens": 1}).json["choices"][0]["message"]
    assert message["role"] == "bot"


# -- without a server --------------------------------------------------------------------------------------------------


GUIDE_FLAGS = """
    allow-credentials allowed-headers allowed-methods allowed-origins api-key block-size chat-template code-revision
    collect-detailed-traces cpu-offload-gb device disable-async-output-proc disable-custom-all-reduce
    disable-frontend-multiprocessing disable-log-requests disable-log-stats disable-logprobs-during-spec-decoding
    disable-sliding-window distributed-executor-backend download-dir dtype enable-auto-tool-choice
    enable-chunked-prefill enable-lora enable-prefix-caching enable-prompt-adapter enforce-eager engine-use-ray
    fully-sharded-loras gpu-memory-utilization guided-decoding-backend host ignore-patterns kv-cache-dtype
    limit-mm-per-prompt load-format long-lora-scaling-factors lora-dtype lora-extra-vocab-size lora-modules
    max-context-len-to-capture max-cpu-loras max-log-len max-logprobs max-lora-rank max-loras max-model-len
    max-num-batched-tokens max-num-seqs max-parallel-loading-workers max-prompt-adapter-token max-prompt-adapters
    max-seq-len-to-capture middleware model model-loader-extra-config ngram-prompt-lookup-max
    ngram-prompt-lookup-min num-gpu-blocks-override num-lookahead-slots num-scheduler-steps num-speculative-tokens
    otlp-traces-endpoint override-neuron-config pipeline-parallel-size port preemption-mode prompt-adapters
    qlora-adapter-name-or-path quantization quantization-param-path ray-workers-use-nsight response-role
    return-tokens-as-token-ids revision root-path rope-scaling rope-theta scheduler-delay-factor seed
    served-model-name skip-tokenizer-init spec-decoding-acceptance-method speculative-disable-by-batch-size
    speculative-draft-tensor-parallel-size speculative-max-model-len speculative-model
    speculative-model-quantization ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-keyfile swap-space
    tensor-parallel-size tokenizer tokenizer-mode tokenizer-pool-extra-config tokenizer-pool-size
    tokenizer-pool-type tokenizer-revision tool-call-parser trust-remote-code
    typical-acceptance-sampler-posterior-alpha typical-acceptance-sampler-posterior-threshold use-v2-block-manager
    uvicorn-log-level worker-use-ray
"""


def test_help_lists_every_flag_of_the_guide() -> None:
    text = make_arg_parser(FlexibleArgumentParser()).format_help()
    found = {name for line in text.splitlines() if line.startswith("  -") for name in re.findall(r"--([\w-]+)", line)}
    assert sorted(set(GUIDE_FLAGS.split()) - found) == []
    assert "config" in found


@pytest.mark.parametrize("value", ["*", '"*"', "[1]", "{}"])
def test_lists_of_cors_are_json_and_the_error_says_so(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("--allowed-origins", value)
    error = capsys.readouterr().err
    assert f"""argument --allowed-origins: expected a JSON list of strings such as '["*"]', got {value!r}""" in error


def arguments(*words: str) -> argparse.Namespace:
    return make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "demo", *words])


@pytest.mark.parametrize("form", ["text", "file", "name"])
def test_a_chat_template_is_a_text_a_file_or_a_name(form: str, tmp_path: Path) -> None:
    file = tmp_path / "of.jinja"
    file.write_text("from the file")
    given, expected = {
        "text": ("{{ messages }}", "{{ messages }}"),
        "file": (str(file), "from the file"),
        "name": ("short", "short"),
    }[form]
    tokenizer = SimpleNamespace(chat_template={"short": "a", "default": "b"})
    model: Any = SimpleNamespace(
        served_model_names=[],
        served_model_name="m",
        model="m",
        max_model_len=5,
        max_logprobs=20,
        get_diff_sampling_param=dict,
    )
    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model, lora_config=None),
        input_processor=SimpleNamespace(tokenizer=tokenizer),
        output_processor=SimpleNamespace(),
    )
    assert make_context(arguments("--chat-template", given), engine).chat_template == expected
    with pytest.raises(ValueError, match="appears path-like"):
        make_context(arguments("--chat-template", str(file) + "x"), engine)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", ""], "--api-key must not be empty"),
        (["--api-key", "good", "--api-key", " spaced"], "--api-key must not be empty or have spaces"),
        (["--root-path", "api"], "--root-path must begin with '/'"),
        (["--ssl-keyfile", "x"], "TLS needs both"),
        (["--ssl-ca-certs", "x"], "--ssl-ca-certs is for TLS"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs needs --ssl-ca-certs"),
        (["--ssl-cert-reqs", "5"], "--ssl-cert-reqs must be 0"),
        (["--ssl-keyfile", "/nowhere/k", "--ssl-certfile", "/nowhere/c"], "No such file"),
        (["--middleware", "nothing"], "takes an import path"),
        (["--middleware", "no.such.module"], "--middleware no.such.module: No module named 'no'"),
        (["--middleware", "tests.server.operator_middleware.absent"], "has no attribute 'absent'"),
        (["--middleware", "tests.server.operator_middleware.NEITHER"], "Must be a function or a class"),
        (["--chat-template", "/nowhere/x.jinja"], "--chat-template: The supplied chat template string"),
        (["--chat-template", "{{ messages"], "--chat-template: The chat template is not valid Jinja"),
        (["--chat-template", "/"], "--chat-template: .*[Dd]irectory"),
        (["--port", "70000"], "--port must be between"),
        (["--max-log-len", "-1"], "--max-log-len must not be negative"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be 0 or more"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout must be 0 or more"),
        (["--request-timeout", "0"], "--request-timeout must be positive"),
        (["--write-timeout", "nan"], "--write-timeout must be positive"),
        (["--max-body-size", "0"], "--max-body-size must be positive"),
        (["--lora-modules", "a=b"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "expected name=path"),
        (["--enable-lora", "--lora-modules", "demo=b"], "the name 'demo' stands for the base model"),
        (
            ["--enable-lora", "--lora-modules", "b=b", "--served-model-name", "a", "b"],
            "the name 'b' stands for the base model",
        ),
        (["--lora-root", "/"], "--lora-root needs --enable-lora"),
        (
            ["--enable-lora", "--lora-root", "/", "--lora-root", "/nowhere"],
            "--lora-root: there is no folder '/nowhere'",
        ),
        (["--enable-lora", "--lora-root", ""], "--lora-root: there is no folder ''"),
        (["--prompt-adapters", "a=b"], "--prompt-adapters needs --enable-prompt-adapter"),
        (["--enable-auto-tool-choice"], "requires --tool-call-parser"),
        (["--tool-call-parser", "nobody"], "invalid tool call parser: nobody"),
        (["--tool-parser-plugin", "nowhere.py"], "there is no file nowhere.py"),
        (["--reasoning-parser", "nobody"], "Unknown reasoning parser 'nobody': expected one of deepseek_r1"),
        (["--enable-reasoning"], "--enable-reasoning requires --reasoning-parser"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_the_model_is_loaded(words: list[str], message: str) -> None:
    args = arguments(*words)
    with pytest.raises((ValueError, TypeError), match=message):
        validate_parsed_serve_args(args)
        check_files(args)


def test_a_server_that_cannot_begin_ends_also_after_the_model_was_loaded(model_folder: Path) -> None:
    """Which names of templates there are is known only then."""
    words = ["--model", str(model_folder), "--port", "0", "--chat-template", "no_such_name"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert re.search(r"ERROR .*\(no_such_name\)", done.stdout + done.stderr)


def test_a_damaged_model_is_one_line_and_a_status(tmp_path: Path) -> None:
    """Also where it is the core that finds the damage."""
    for file in (Path(vllm.__file__).parent / "assets" / "demo").iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:100_000] if file.suffix == ".safetensors" else content)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert re.search(r"ERROR .*is not a complete safetensors file", done.stdout + done.stderr)


def test_a_refused_flag_is_one_line_and_a_status(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    words = ["--ssl-keyfile", str(tmp_path / "x.pem"), "--ssl-certfile", str(tmp_path / "x.pem")]
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "demo", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"ERROR .*--ssl-certfile .*x\.pem", done.stdout + done.stderr)
