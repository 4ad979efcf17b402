"""The Responses API with tools, thoughts, structured text and stored responses, through the official client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import openai
import psutil
import pytest

from tests.server.http_server import MODEL, Server
from tests.server.test_messages import CALL_TEXT, DEMO, Answer
from tests.tool_parsers.outputs import CALLS, TOOLS
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.entrypoints.openai import chat, responses
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.logprobs import TokenText
from vllm.entrypoints.openai.message import ParsingSettings, wanted_of
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from vllm.entrypoints.openai.response_items import to_messages
from vllm.entrypoints.openai.response_store import MAX_BYTES, ResponseStore, Stored
from vllm.sampling_params import SamplingParams

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
}
ASKED: dict[str, Any] = {"model": MODEL, "input": "What is the weather in Paris?", "tools": [TOOL], "temperature": 0}


@pytest.fixture(scope="module")
def stored() -> Iterator[Server]:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with Server(Path("demo"), *flags, env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"}) as running:
        yield running


@pytest.fixture
def client(stored: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stored.url + "/v1", api_key="EMPTY", max_retries=0) as opened:
        yield opened


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def test_call_result_and_answer(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED)
    (call,) = first.output
    assert call.type == "function_call" and call.name == "get_weather" and call.status == "completed"
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert first.tool_choice == "auto" and first.tools[0].name == "get_weather" and first.parallel_tool_calls
    result = json.dumps({"temperature": 21, "condition": "sunny"})
    items: list[Any] = [
        {"role": "user", "content": ASKED["input"]},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": result},
    ]
    second = client.responses.create(**{**ASKED, "input": items})
    assert "21" in second.output_text and second.output[0].type == "message"
    # The same from the store: only what is new is sent.
    again = client.responses.create(**{**ASKED, "input": items[2:], "previous_response_id": first.id})
    assert again.output_text == second.output_text and again.previous_response_id == first.id


def test_stream_of_a_call(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED).output[0]
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    assert "".join(event.delta for event in events[3:-3]) == events[-3].arguments == whole.arguments
    assert events[-1].response.output == [events[-2].item]
    assert client.responses.retrieve(events[-1].response.id).output == [events[-2].item]


def test_structured_text(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    made = client.responses.create(model=MODEL, input="Where?", text=form, temperature=0, max_output_tokens=100)
    found = json.loads(made.output_text)
    assert found["city"] in ("Paris", "Rome") and 0 <= found["size"] <= 9
    assert made.text.format.type == "json_schema"  # type: ignore[union-attr]


def test_stored_responses(client: openai.OpenAI, stored: Server) -> None:
    made = client.responses.create(model=MODEL, input="What is the capital of France?", temperature=0)
    assert client.responses.retrieve(made.id) == made
    items = client.responses.input_items.list(made.id).data
    (item,) = items
    assert item.type == "message" and item.id.startswith("msg_")
    assert item.content[0].type == "input_text" and item.content[0].text == "What is the capital of France?"
    client.responses.delete(made.id)
    for method in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=made.id):
            method(made.id)
    unkept = client.responses.create(model=MODEL, input="Hi", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="Hi", previous_response_id=unkept.id)
    # Nobody can guess the id of a stored response from the id that its client has sent.
    answer = stored.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2}, headers={"x-request-id": "mine"})
    assert "mine" not in answer.json["id"]


def test_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(model=MODEL, input="What is the capital of France?", temperature=0, background=True)
    assert begun.status == "queued"
    deadline = time.monotonic() + 30
    while (now := client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert now.status == "completed" and "Paris" in now.output_text
    endless: Any = {"ignore_eos": True, "max_output_tokens": 900}
    long = client.responses.create(model=MODEL, input="Hi", background=True, extra_body=endless)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(client.responses.create(model=MODEL, input="Hi", max_output_tokens=1).id)
    with pytest.raises(openai.BadRequestError, match="background needs store"):
        client.responses.create(model=MODEL, input="Hi", background=True, store=False)


@contextmanager
def frozen_core(server: Server) -> Iterator[None]:
    """So that no response ends meanwhile."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    (core,) = [child for child in children if "vllm.engine.core_process" in child.cmdline()]
    core.suspend()
    try:
        yield
    finally:
        core.resume()


def test_what_background_responses_hold_is_bounded(stored: Server) -> None:
    """Whatever part of a request it is; when one has ended, another has its room."""
    long = {"input": "a", "ignore_eos": True, "max_output_tokens": 1900, "background": True}
    large = {**long, "of_no_use": "x" * 15_000_000}
    begun = []
    try:
        with frozen_core(stored):
            while (answer := stored.post("/v1/responses", large)).status == 200:
                begun.append(answer.json["id"])
            assert len(begun) == MAX_BYTES // 15_000_000
            error = answer.json["error"]
            assert answer.status == 503 and "4 responses that are computed in the background take" in error["message"]
            begun.append(stored.post("/v1/responses", long).json["id"])  # a small one has room
            stored.post(f"/v1/responses/{begun[0]}/cancel", {})
            begun.append(stored.post("/v1/responses", large).json["id"])
    finally:
        for one in begun:
            stored.post(f"/v1/responses/{one}/cancel", {})


def test_what_is_wrong_is_named(client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "web_search"}]}, "tools\\[0\\] has the type 'web_search', which is not available"),
        ({"tools": [{"name": "f"}]}, "tools\\[0\\] must look like"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "does not match any of the specified `tools`"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice must be none, auto, required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input\\[0\\] has a type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "a function_call has call_id, name and arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "has a call_id and an output"),
        ({"user": "u" * 513}, "user may have 512 characters"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort must be one of"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary is not available"),
    ]
    for fields, message in cases:
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.create(**{**ASKED, **fields})


# -- items -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata", [{str(i): "" for i in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}], ids=["pairs", "key", "value"]
)
def test_metadata_is_a_few_short_notes(stored: Server, metadata: dict[str, str]) -> None:
    answer = stored.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "metadata": metadata})
    assert (answer.status, answer.json["error"]["param"]) == (400, "metadata")
    most = {"k" * 64 if i == 0 else str(i): "v" * 512 for i in range(16)}
    answer = stored.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "metadata": most})
    assert (answer.status, answer.json["metadata"]) == (200, most)


def test_many_log_probabilities_are_those_of_few(stored: Server) -> None:
    """However the answer is written: each token's, in order."""
    body = {"input": "a", "temperature": 0, "top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    few, many = (stored.post("/v1/responses", {**body, "max_output_tokens": n, "ignore_eos": True}) for n in (5, 200))
    (text,) = many.json["output"][0]["content"]
    assert len(text["logprobs"]) == 200 and all(len(one["top_logprobs"]) == 20 for one in text["logprobs"])
    (short,) = few.json["output"][0]["content"]
    assert [one["token"] for one in text["logprobs"][:5]] == [one["token"] for one in short["logprobs"]]


def test_items_of_one_answer_become_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    items: list[Any] = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    found = to_messages(items)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant", "assistant"]
    assert found[1]["reasoning_content"] == "hm"
    assert [made["id"] for made in found[1]["tool_calls"]] == ["c1", "c2"]
    assert found[2] == {"role": "tool", "tool_call_id": "c2", "content": "two", "name": "f"}


def answered(text: str, settings: ParsingSettings, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The body of an answer with this text, and the events of a stream of it."""
    context: Any = SimpleNamespace(cached_tokens=lambda outputs: None, responses=ResponseStore())
    tokenizer = load_tokenizer(DEMO)
    source: Any = Answer(text, "stop", lambda text: tokenizer.encode(text, False))
    source.params = SamplingParams()

    def work() -> responses.Work:
        body = ChatCompletionRequest(messages=[{"role": "user", "content": "q"}], tools=TOOLS, **fields)
        parsing = wanted_of(settings, tokenizer, body, "").parsing
        made = chat.Chat(body, "c", "m", 1, source, TokenText(None, True), "assistant", "", parsing)
        return responses.Work(ResponsesRequest(input="q"), "resp_1", "msg_1", made, b'{"tools": []}')

    whole = json.loads(asyncio.run(responses.complete(context, work())))
    writer = responses.ResponseEvents(work(), context)
    stream = b"".join([*(writer.feed(0, output) for output in source.pieces(random.Random(0))), writer.end()]).decode()
    return whole, [json.loads(part.partition("data: ")[2]) for part in stream.split("\n\n") if part]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def test_thoughts_text_and_calls_are_items_in_order() -> None:
    text = f"<think>Hm.</think>I look.{CALL_TEXT}"
    whole, events = answered(text, ParsingSettings("hermes", True, "qwen3"))
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert whole["output"][1]["content"][0]["text"] == "I look." and whole["output"][1]["id"] == "msg_1"
    assert [(c["name"], json.loads(c["arguments"])) for c in whole["output"][2:]] == CALLS
    usage = whole["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert all(event["item"]["status"] == "in_progress" for event in added)
    for kind, field, expected in (
        ("response.reasoning_text", "text", "Hm."),
        ("response.output_text", "text", "I look."),
    ):
        assert "".join(event["delta"] for event in events if event["type"] == f"{kind}.delta") == expected
        (done,) = [event for event in events if event["type"] == f"{kind}.done"]
        assert done[field] == expected
    done_items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"] == done_items
    assert without_ids(done_items) == without_ids(whole["output"])


def test_a_conversation_goes_on_without_the_log_probabilities_of_its_answers(stored: Server) -> None:
    ask = {"input": "Where is Oslo?", "temperature": 0, "max_output_tokens": 20}
    known = {**ask, "include": ["message.output_text.logprobs"], "top_logprobs": 5}
    followed = []
    for body in (ask, known, {**known, "background": True}):
        first = stored.post("/v1/responses", body).json
        for _ in range(200):
            if first["status"] not in ("queued", "in_progress"):
                break
            time.sleep(0.05)
            first = stored.get(f"/v1/responses/{first['id']}").json
        assert bool(first["output"][0]["content"][0]["logprobs"]) == ("include" in body)
        further = {**ask, "input": "And Rome?", "previous_response_id": first["id"]}
        followed.append(stored.post("/v1/responses", further).json)
    assert {made["output"][0]["content"][0]["text"] for made in followed} == {
        followed[0]["output"][0]["content"][0]["text"]
    }
    assert len({made["usage"]["input_tokens"] for made in followed}) == 1


def stored_of(size: int) -> Stored:
    """A response of so many bytes."""
    return Stored("completed", lambda status: b"x" * (size - 4), b"[]", b"[]")


def test_store_forgets_the_oldest() -> None:
    store = ResponseStore(enabled=True, max_entries=3, max_bytes=1200)
    for i in range(5):
        store.put(f"r{i}", stored_of(20))
    assert len(store) == 3
    with pytest.raises(APIError, match="not found"):
        store.get("r1")
    store.put("large", stored_of(900))
    assert len(store) == 3  # within both bounds
    store.put("large too", stored_of(900))
    assert len(store) == 1
    store.put("too large", stored_of(2000))
    assert len(store) == 0


def test_a_conversation_has_no_more_values_than_a_body(stored: Server) -> None:
    """Each response adds those of its body, and reading them holds up everybody else."""
    part = {"type": "input_text", "text": "a", "more": [1] * 600_000}
    ask: dict[str, Any] = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1}
    first = stored.post("/v1/responses", ask).json
    second = stored.post("/v1/responses", {**ask, "previous_response_id": first["id"]}).json
    refused = stored.post("/v1/responses", {"input": "a", "previous_response_id": second["id"]})
    assert refused.status == 400 and refused.json["error"]["param"] == "previous_response_id", refused
    assert "more than 1000000 values and cannot be continued" in refused.json["error"]["message"]


def test_a_large_response_in_the_background_is_there_until_it_is_done(stored: Server) -> None:
    """Also where it takes more room than all stored responses may: what is computed is counted, and not forgotten."""
    form = {"format": {"type": "text", "name": "\u4e16" * 4_800_000}}
    large = {"input": "a", "ignore_eos": True, "max_output_tokens": 1900, "background": True, "text": form}
    with frozen_core(stored):
        begun = stored.post("/v1/responses", json.dumps(large, ensure_ascii=False).encode())
        assert begun.status == 200
        assert stored.post("/v1/responses", {**large, "text": None}).status == 503
        path = "/v1/responses/" + begun.json["id"]
        assert stored.get(path).status == 200
    assert stored.request("DELETE", path).status == 200


async def test_one_response_in_the_background_may_be_of_any_size_but_no_second() -> None:
    store = ResponseStore(enabled=True, max_bytes=1000)
    store.check_running(2000)
    entry = Stored("queued", lambda status: b"{}", b"[]", b"[]", held=900)
    entry.task = asyncio.ensure_future(asyncio.sleep(60))
    store.put("running", entry)
    store.check_running(90)
    with pytest.raises(APIError, match="1 responses that are computed in the background take 906 of 1,000 bytes") as no:
        store.check_running(100)
    assert no.value.status == 503
    store.delete("running")
    store.check_running(1000)


def test_what_was_deleted_or_cancelled_while_it_was_written_does_not_come_back() -> None:
    store = ResponseStore(enabled=True)
    for name, end in (("deleted", store.delete), ("cancelled", store.cancel), ("kept", store.get)):
        begun = stored_of(20)
        begun.set_status("in_progress")
        begun.task = MagicMock()
        store.put(name, begun)
        end(name)
        store.put(name, stored_of(30), instead_of=begun)
    with pytest.raises(APIError, match="not found"):
        store.get("deleted")
    assert [store.get(name).status for name in ("cancelled", "kept")] == ["cancelled", "completed"]


def test_store_that_is_off_says_how_to_switch_it_on() -> None:
    for parameter in ("store", "background", "previous_response_id"):
        with pytest.raises(APIError, match="start it with VLLM_ENABLE_RESPONSES_API_STORE=1") as caught:
            ResponseStore().check(parameter)
        assert caught.value.param == parameter
