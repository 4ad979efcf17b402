"""What errors look like, what flags change, and what the log shows."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.http_server import MODEL, Answer, Server, sse_events
from vllm.entrypoints.openai import pooling
from vllm.entrypoints.openai.errors import safe_text
from vllm.entrypoints.openai.routes import LATER_ROUTES, OTHER_MODELS_ROUTES

USER = [{"role": "user", "content": "Hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("route", "body", "status", "kind", "text"),
    [
        (COMPLETIONS, {"prompt": "x", "model": "y"}, 404, "NotFoundError", "The model `y` does not exist."),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "BadRequestError", "suffix is not currently supported"),
        (COMPLETIONS, {}, 400, "BadRequestError", "please provide at least one prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, "BadRequestError", "The decoder prompt cannot be empty"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, 400, "BadRequestError",
         "Stream options can only be defined when `stream=True`."),
        (COMPLETIONS, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400, "BadRequestError",
         "`prompt_logprobs` are not available when `stream=True`."),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": -1}, 400, "BadRequestError",
         "`prompt_logprobs` must be a positive value."),
        (COMPLETIONS, {"prompt": "x", "logprobs": -1}, 400, "BadRequestError", "`logprobs` must be a positive value."),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, 400, "BadRequestError",
         "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "BadRequestError", "temperature must be non-negative"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "BadRequestError", "top_p must be in (0, 1], got 0"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "BadRequestError", "n must be at least 1, got 0."),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, 400, "BadRequestError",
         "allowed_token_ids is not None and empty!"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "BadRequestError",
         "when using `top_logprobs`, `logprobs` must be set to true."),
        (CHAT, {"messages": USER, "tool_choice": "auto"}, 400, "BadRequestError",
         "When using `tool_choice`, `tools` must be set."),
        (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, 400, "BadRequestError",
         "The tool specified in `tool_choice` does not match any of the specified `tools`"),
        (CHAT, {"messages": USER, "continue_final_message": True}, 400, "BadRequestError",
         "Cannot set both `continue_final_message` and `add_generation_prompt` to True."),
        (CHAT, {"messages": USER, "response_format": {"type": "json"}}, 400, "BadRequestError",
         "response_format must be an object whose type is text, json_object, json_schema or structural_tag."),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "BadRequestError",
         "response_format of type json_schema needs json_schema"),
        (COMPLETIONS, {"prompt": "x", "guided_regex": "a", "guided_decoding_backend": "magic"}, 400, "BadRequestError",
         "Unknown guided decoding backend 'magic'"),
        (COMPLETIONS, {"prompt": "x", "guided_regex": "a", "guided_whitespace_pattern": " "}, 400, "BadRequestError",
         "whitespace_pattern is for JSON"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regexp": "a"}}, 400, "BadRequestError",
         "structured_outputs has no field regexp"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, 400, "BadRequestError",
         "min_tokens must be less than or equal to max_tokens=16, got 17."),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError",
         "max_tokens must be at least 1, got 0."),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 512}, 400, "BadRequestError",
         "maximum context length is 512 tokens"),
        (COMPLETIONS, {"prompt": "x", "n": 2, "best_of": 1}, 400, "BadRequestError",
         "best_of must be greater than or equal to n, got n=2 and best_of=1."),
        (COMPLETIONS, {"prompt": [[]]}, 400, "BadRequestError", "The decoder prompt cannot be empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "BadRequestError",
         "prompt must be a text, a list of token ids, or a list of texts or of lists of token ids"),
        (COMPLETIONS, {"prompt": "x", "stop": [1]}, 400, "BadRequestError", "stop must be a text or a list of texts"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {" 1": 1}}, 400, "BadRequestError", "cannot be converted"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 1, "01": -1}}, 400, "BadRequestError", "cannot be converted"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"+1": 1}}, 400, "BadRequestError", "cannot be converted"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1_0": 1}}, 400, "BadRequestError", "cannot be converted"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"١": 1}}, 400, "BadRequestError", "cannot be converted"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 4, "min_tokens": 3, "allowed_token_ids": [1]}, 400,
         "BadRequestError", "No token may be sampled: allowed_token_ids, min_tokens together leave none"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 4, "allowed_token_ids": [6, 7], "stop_token_ids": [6, 7],
                       "min_tokens": 1}, 400, "BadRequestError", "No token may be sampled"),
        (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, 400, "BadRequestError", "functions is not available"),
        (CHAT, {"messages": USER, "function_call": "auto"}, 400, "BadRequestError", "function_call is not available"),
        (CHAT, {"messages": USER, "modalities": ["audio"]}, 400, "BadRequestError", "modalities other than ['text']"),
        (CHAT, {"messages": USER, "audio": {"voice": "x"}}, 400, "BadRequestError", "audio is not available"),
        (CHAT, {"messages": USER, "web_search_options": {}}, 400, "BadRequestError",
         "web_search_options is not available"),
        (CHAT, {"messages": USER, "tools": ["f"], "tool_choice": "none"}, 400, "BadRequestError",
         "tools[0] must look like"),
        ("/start_profile", {}, 400, "BadRequestError", "Profiler is not enabled. Set VLLM_TORCH_PROFILER_DIR"),
        ("/v1/embeddings", {"input": "x"}, 400, "BadRequestError", "The model does not support Embeddings API"),
        ("/score", {"text_1": "x"}, 400, "BadRequestError", "The model does not support Score API"),
        ("/v1/rerank", {"query": "x"}, 400, "BadRequestError", "The model does not support Rerank (Score) API"),
        ("/sleep", {}, 400, "NotImplementedError", "Sleep mode is not available"),
    ],
)  # fmt: skip
def test_refusals(server: Server, route: str, body: dict[str, Any], status: int, kind: str, text: str) -> None:
    """Old clients read the flat keys, new ones the nested object."""
    answer = server.post(route, body)
    assert answer.status == status
    found = answer.json
    assert text in found["message"]
    assert found["object"] == "error"
    nested = found["error"]
    assert nested == {key: found[key] for key in ("message", "type", "param", "code")}
    assert (nested["type"], nested["code"]) == (kind, status)


def test_routes_methods_and_media_types(server: Server) -> None:
    assert server.get("/nowhere").status == 404
    assert server.get("/nowhere").json["detail"] == "Not Found"
    answer = server.get(COMPLETIONS)
    assert (answer.status, answer.json["detail"]) == (405, "Method Not Allowed")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = server.post(COMPLETIONS, {"prompt": "x"}, headers={"content-type": kind})
        assert answer.status == 415
        assert answer.json["detail"] == "Unsupported Media Type: Only 'application/json' is allowed"
    answer = server.post(COMPLETIONS, {"prompt": "x"}, headers={"content-type": "application/json; charset=utf-8"})
    assert answer.status == 200


def envelope(answer: Answer, status: int) -> dict[str, Any]:
    """The error of an answer, after a look at the form that all errors have."""
    assert answer.status == status, answer.text
    found = answer.json
    assert found["object"] == "error"
    assert found["error"] == {key: found[key] for key in ("message", "type", "param", "code")}
    assert found["error"]["code"] == status
    nested: dict[str, Any] = found["error"]
    return nested


AUDIO = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\x00\xff\r\n--b--\r\n'


UNSUPPORTED = {**OTHER_MODELS_ROUTES, **{path: route.name for path, route in pooling.ROUTES.items()}}


@pytest.mark.parametrize("path", [*UNSUPPORTED, *LATER_ROUTES])
def test_routes_of_later_features_say_so(server: Server, path: str) -> None:
    """Whatever is sent to them: JSON, a file, nothing, nonsense."""
    bodies = [({"model": MODEL, "input": "x"}, "application/json"), (AUDIO, "multipart/form-data; boundary=b")]
    for body, kind in (*bodies, (b"", "application/json"), (b"\xff{", "text/plain")):
        error = envelope(server.post(path, body, headers={"content-type": kind}), 400)
        if path in UNSUPPORTED:
            assert error["message"].startswith(f"The model does not support {UNSUPPORTED[path]}")
            assert ("it is for: generate. To pool with it" in error["message"]) is (path in pooling.ROUTES)
        else:
            assert error["message"] == f"{LATER_ROUTES[path]} is not available in this version of the server."
            assert error["type"] == "NotImplementedError"
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        refused = server.request(method, path)
        assert envelope(refused, 405)["message"] == "Method Not Allowed"
        assert refused.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/v1",
        "/v1/",
        "/v1/files",
        "/v1/images/generations",
        "/invocations",
        "/v1/models/",
        "/v1/completions/",
        "/ui/x",
        "/%00",
    ],
)
def test_unknown_routes_have_the_form_of_all_errors(server: Server, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        exists = path.startswith(("/ui/", "/v1/models/"))
        expected = 405 if exists and method != "GET" else 404
        envelope(server.request(method, path, b"{}" if method == "POST" else None), expected)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("No /home/me/model here.", "No (path) here."),
        ("file:///home/me/model", "file://(path)"),
        ("/some/X VeraConfig/adapter_config.json is missing", "(path) is missing"),
        ("/My Models/a b c/d: not found", "(path): not found"),
        (r"C:\models\x is missing", "(path) is missing"),
        ("models/of/mine", "models(path)"),
        ('unknown "http://json-schema.org/draft-07/schema#" in #/a/b', None),
        ("POST /v1/chat/completions, GET /health or /ping; text/event-stream or application/json", None),
    ],
)
def test_paths_of_the_machine_are_hidden(message: str, shown: str | None) -> None:
    assert safe_text(message) == (message if shown is None else shown)


def test_small_routes(server: Server) -> None:
    assert server.get("/version").json["version"]
    assert server.get("/health").body == b""
    assert server.get("/ping").status == server.request("POST", "/ping").status == 200
    assert server.get("/load").json == {"server_load": 0}
    assert server.get("/is_sleeping").json == {"is_sleeping": False}
    assert server.request("POST", "/reset_prefix_cache").status == 404  # of all clients, see VLLM_SERVER_DEV_MODE
    assert server.get("/tokenizer_info").status == 404
    assert server.get("/server_info").status == 404
    assert server.get("/v1/responses/resp_1").status == 404
    ids = server.post("/tokenize", {"prompt": "Hello 世界", "return_token_strs": True}).json
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    assert ids["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json == {"prompt": "Hello 世界"}
    assert server.post("/detokenize", {"tokens": [0, *ids["tokens"], 1]}).json == {"prompt": "<s>Hello 世界</s>"}
    chat = server.post("/tokenize", {"messages": USER}).json
    answer = server.post(CHAT, {"messages": USER, "max_tokens": 1}).json
    assert chat["count"] == answer["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def flagged(model_folder: Path) -> Iterator[Server]:
    """A server with the flags that change answers. A later value of --served-model-name replaces the fixture's."""
    flags = [
        *("--served-model-name", "one", "two", "--request-timeout", "1.0", "--max-log-len", "12"),
        *("--enable-log-requests", "--enable-request-id-headers", "--enable-prompt-tokens-details"),
        *("--enable-server-load-tracking", "--return-tokens-as-token-ids", "--enable-tokenizer-info-endpoint"),
        *("--trust-request-chat-template", "--response-role", "helper", "--disable-frontend-multiprocessing"),
    ]
    with Server(model_folder, *flags, quiet=False) as running:
        yield running


def test_served_names(flagged: Server) -> None:
    assert [card["id"] for card in flagged.get("/v1/models").json["data"]] == ["one", "two"]
    for name in ("one", "two"):
        assert flagged.get(f"/v1/models/{name}").json["id"] == name
        answer = flagged.post(COMPLETIONS, {"prompt": "x", "model": name, "max_tokens": 1}).json
        assert answer["model"] == "one"  # whichever was asked for, as the guide says of --served-model-name
    assert flagged.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).json["model"] == "one"


def test_request_ids_and_token_ids(flagged: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "logprobs": 1}
    answer = flagged.post(COMPLETIONS, body, headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json["id"] == "cmpl-abc-1"
    assert all(token.startswith("token_id:") for token in answer.json["choices"][0]["logprobs"]["tokens"])
    odd = flagged.post(COMPLETIONS, body, headers={"x-request-id": "a b/../c"})
    assert odd.headers["x-request-id"] != "a b/../c"
    assert "/.." not in odd.json["id"]


def test_an_id_may_be_in_use_by_others_at_the_same_time(flagged: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(8) as pool:
        same = {"x-request-id": "the-same"}
        answers = list(pool.map(lambda _: flagged.post(COMPLETIONS, body, headers=same), range(8)))
    assert [answer.status for answer in answers] == [200] * 8
    assert {event["id"] for answer in answers for event in sse_events(answer.text)} == {"cmpl-the-same"}


def test_unknown_fields_are_named_to_the_client(flagged: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 1, "frobnicate": 1, "a b\r\nx: y": 2, "世": 3}
    for path, more in ((COMPLETIONS, {}), (COMPLETIONS, {"stream": True}), ("/tokenize", {"add_special_tokens": True})):
        sent = {k: v for k, v in body.items() if path == COMPLETIONS or k != "max_tokens"}
        assert flagged.post(path, {**sent, **more}).headers["x-unknown-fields"] == "frobnicate, a?b??x:?y, ?"
    assert "x-unknown-fields" not in flagged.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 1}).headers


def test_a_request_that_runs_out_of_tokens_on_the_way_is_the_clients_mistake(flagged: Server) -> None:
    """After its first token the only one that is allowed would complete a bad word."""
    first, second = flagged.post("/tokenize", {"prompt": "@@", "add_special_tokens": False}).json["tokens"]
    assert first == second
    body = {"prompt": "a", "max_tokens": 8, "allowed_token_ids": [first], "bad_words": ["@@"], "ignore_eos": True}
    answer = flagged.post(COMPLETIONS, body)
    assert answer.status == 400
    assert "No token is possible" in answer.json["error"]["message"]
    streamed = flagged.post(COMPLETIONS, {**body, "stream": True})
    assert streamed.status == 200 and sse_events(streamed.text)[-1]["error"]["code"] == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 300_000}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"prompt": "x", "bad_words": ["  "]}, "bad_words"),
        ({"prompt": [400], "max_tokens": 1}, "prompt_token_ids"),
        ({"prompt": "x", "model": "another"}, "model"),
        ({"prompt": "x", "logprobs": 999}, "logprobs"),
        ({"prompt": "x", "max_tokens": 5000}, "prompt"),
    ],
)
def test_the_field_at_fault_is_named(flagged: Server, body: dict[str, Any], param: str) -> None:
    answer = flagged.post(COMPLETIONS, body)
    assert answer.status in (400, 404)
    assert answer.json["error"]["param"] == param


def test_an_empty_name_is_the_model_that_is_served(flagged: Server) -> None:
    assert flagged.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "model": ""}).json["model"] == "one"


def test_cached_tokens_are_shown(flagged: Server) -> None:
    body = {"prompt": "The capital of France is Paris. The capital of Japan is Tokyo. " * 3, "max_tokens": 2}
    assert flagged.post(COMPLETIONS, body).json["usage"]["prompt_tokens_details"] is None
    details = flagged.post(COMPLETIONS, body).json["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0
    salted = flagged.post(COMPLETIONS, {**body, "cache_salt": "mine"}).json["usage"]
    assert salted["prompt_tokens_details"] is None


def test_templates_of_requests_when_trusted(flagged: Server) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ extra }}{% endfor %}"
    extra = {"chat_template": template, "chat_template_kwargs": {"extra": "!"}}
    tokens = flagged.post("/tokenize", {"messages": USER, **extra}).json["tokens"]
    assert flagged.post("/detokenize", {"tokens": tokens}).json["prompt"] == "Hi!"
    answer = flagged.post(CHAT, {"messages": USER, "max_tokens": 1, **extra}).json
    assert answer["choices"][0]["message"]["role"] == "helper"
    for bad in ("{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}", "{{", "{{ 1/0 }}"):
        answer = flagged.post(CHAT, {"messages": USER, "max_tokens": 1, "chat_template": bad})
        assert answer.status in (200, 400), answer.text
        assert "__mro__" not in answer.text
    for path in ("/etc/hostname", "README.md", "/dev/zero"):  # a template is a text, never a file of the server
        tokens = flagged.post("/tokenize", {"messages": USER, "chat_template": path}).json["tokens"]
        assert flagged.post("/detokenize", {"tokens": tokens}).json["prompt"] == path
    info = flagged.get("/tokenizer_info").json
    assert info["vocab_size"] == 320


def test_tools_that_must_not_be_called_are_shown_to_the_template(flagged: Server) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {"messages": USER, "tools": tools, "chat_template": "{{ tools[0].function.name }}"}
    shown = flagged.post("/tokenize", {"prompt": "weather", "add_special_tokens": False}).json
    answer = flagged.post(CHAT, {**body, "tool_choice": "none", "max_tokens": 1})
    assert answer.json["usage"]["prompt_tokens"] == shown["count"] > 1


def test_the_load_counts_a_stream_until_its_end(flagged: Server) -> None:
    body = {"prompt": ["Hi"] * 48, "max_tokens": 500, "n": 4, "ignore_eos": True, "stream": True}
    assert flagged.get("/load").json == {"server_load": 0}
    asked = urllib.request.Request(
        flagged.url + COMPLETIONS, json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as reply:
        reply.readline()
        assert flagged.get("/load").json == {"server_load": 1}
        reply.read()
    assert flagged.post(COMPLETIONS, {**body, "n": 0}).status == 400  # and one that is refused leaves nothing
    assert flagged.get("/load").json == {"server_load": 0}


def test_a_request_that_takes_too_long_ends_with_an_error(flagged: Server) -> None:
    """Before the first byte it is a status, in a stream an event and [DONE]."""
    body = {"prompt": ["Hi"] * 48, "max_tokens": 500, "n": 4, "ignore_eos": True, "temperature": 1.0}
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(flagged.post, COMPLETIONS, body)
        streamed = pool.submit(flagged.post, COMPLETIONS, {**body, "stream": True}).result()
        assert plain.result().status == 504
    assert streamed.status == 200
    last = sse_events(streamed.text)[-1]
    assert last["error"]["type"] == "TimeoutError"
    assert "not finished" in last["error"]["message"]


def test_every_line_of_the_log_says_how_bad_and_when(flagged: Server) -> None:
    """Also those of the HTTP server: one per request."""
    flagged.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    flagged.get("/nowhere?a=b")
    lines = flagged.log.splitlines()
    start = re.compile(r"(DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \S+\] ")
    assert [line for line in lines if not start.match(line)] == []
    access = [line.partition("] ")[2] for line in lines if " access] " in line]
    assert re.fullmatch(r'127.0.0.1:\d+ - "GET /nowhere\?a=b HTTP/1.1" 404 Not Found', access[-1])
    assert re.fullmatch(r'127.0.0.1:\d+ - "POST /v1/completions HTTP/1.1" 200 OK', access[-2])


def test_the_log_cannot_be_forged(flagged: Server) -> None:
    hostile = "\r\nERROR 01-01 00:00:00 forged\x1b[31m"
    for body in ({"prompt": hostile, "max_tokens": 1, "stop": [hostile]}, {"prompt": "x", "model": hostile}):
        flagged.post(COMPLETIONS, {**body, hostile: hostile})
    flagged.get("/a%0d%0aERROR%20forged%1b[31m")
    flagged.post(COMPLETIONS, json.dumps({"prompt": "x" * 100, "max_tokens": 1, "user": "y" * 3000}).encode())
    flagged.post(COMPLETIONS, {"prompt": list(range(20, 60)), "max_tokens": 1})
    flagged.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "guided_choice": ["q" * 6000]})
    before = flagged.log.count("Received request")
    flagged.post(COMPLETIONS, {"prompt": ["ab"] * 30, "max_tokens": 1})
    assert flagged.log.count("Received request") == before + 1 and " 30 prompts, " in flagged.log
    assert "Received request cmpl-" in flagged.log
    assert "q" * 3000 in flagged.log and "q" * 4097 not in flagged.log
    assert f"prompt ids: {list(range(20, 32))}, 40 prompt tokens" in flagged.log  # --max-log-len 12
    assert "\x1b" not in flagged.log
    assert not any(line.startswith(("ERROR 01-01", "ERROR forged")) for line in flagged.log.split("\n"))
    assert "x" * 13 not in flagged.log
    assert "x" * 12 in flagged.log
