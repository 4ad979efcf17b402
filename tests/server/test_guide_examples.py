"""Each client example of the user guide that no other test makes, as its reader would type it.

The others: listing models, plain and streamed completions and chats, choices and log probabilities are in
`test_http_openai_client.py`; the programs in `examples/` run in `tests/entrypoints/test_client_examples.py`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.http_server import MODEL, Server

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "state": {"type": "string"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "state", "unit"],
            },
        },
    }
]
WEATHER: list[Any] = [
    {"role": "user", "content": "Hi! How are you doing today?"},
    {"role": "assistant", "content": "I'm doing well! How can I help you?"},
    {"role": "user", "content": "Can you tell me what the temperature will be in Dallas, in fahrenheit?"},
]
SENTIMENT: list[Any] = [{"role": "user", "content": "Classify this sentiment: vLLM is wonderful!"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/boardwalk.jpg"}}
AUDIO_URL = {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/winning_call.ogg"}}
AUDIO_DATA = {"type": "audio_url", "audio_url": {"url": "data:audio/ogg;base64,T2dnUw=="}}

# What the guide lists as further parameters, with the defaults it gives; `top_k` and the like come from the model.
SAMPLING_DEFAULTS: dict[str, Any] = {
    "use_beam_search": False,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
}
GUIDED_DEFAULTS: dict[str, Any] = {
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "guided_decoding_backend": None,
    "guided_whitespace_pattern": None,
}
CHAT_DEFAULTS = {
    "best_of": None,
    **SAMPLING_DEFAULTS,
    "echo": False,
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "documents": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    **GUIDED_DEFAULTS,
}
COMPLETION_DEFAULTS = {
    **SAMPLING_DEFAULTS,
    "allowed_token_ids": None,
    "add_special_tokens": True,
    "response_format": {"type": "text"},
    **GUIDED_DEFAULTS,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of configuration files of the server with a key."""
    return tmp_path_factory.mktemp("settings")


@pytest.fixture(scope="module")
def locked(model_folder: Path, settings: Path) -> Iterator[Server]:
    wanted = {"VLLM_USAGE_STATS": "1", "VLLM_CONFIG_ROOT": str(settings), "DO_NOT_TRACK": "0"}
    key = "token-abc123"
    with Server(model_folder, "--dtype", "auto", "--api-key", key, key=key, env=wanted) as running:
        yield running


@pytest.fixture
async def locked_client(locked: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=locked.url + "/v1", api_key="token-abc123", max_retries=0) as opened:
        yield opened


async def test_a_client_with_the_key_gets_answers_and_one_with_another_does_not(locked_client):
    hello: list[Any] = [{"role": "user", "content": "Hello!"}]
    answer = await locked_client.chat.completions.create(model=MODEL, messages=hello, max_tokens=4)
    assert answer.choices[0].message.role == "assistant"
    with pytest.raises(openai.AuthenticationError):
        await locked_client.with_options(api_key="EMPTY").chat.completions.create(model=MODEL, messages=hello)


def test_a_server_that_is_asked_for_statistics_keeps_them_here(locked, settings):
    (line,) = (settings / "usage_stats.json").read_text().splitlines()
    assert json.loads(line)["context"] == "OPENAI_API_SERVER"


def test_the_model_of_the_list_can_be_asked_for(client):
    listed = client.models.list().data[0]
    assert client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist."):
        client.models.retrieve("other")


def test_tools_of_the_example_are_refused_plain_and_streamed(client):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice and --tool-call-parser"):
            client.chat.completions.create(model=MODEL, messages=WEATHER, tools=TOOLS, stream=stream)


def test_answers_of_tools_may_be_part_of_a_conversation(client):
    call = {"id": "1", "type": "function", "function": {"name": "get_current_weather", "arguments": "{}"}}
    messages: list[Any] = [
        *WEATHER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "85 degrees fahrenheit.", "tool_call_id": "1", "name": "get_current_weather"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=4, stream=False
    )
    assert answer.choices[0].message.content is not None


async def test_guided_choice(async_client):
    answer = await async_client.chat.completions.create(
        model=MODEL, messages=SENTIMENT, extra_body={"guided_choice": ["positive", "negative"]}
    )
    assert answer.choices[0].message.content in ("positive", "negative")


@pytest.mark.parametrize("part", [IMAGE, AUDIO_URL, AUDIO_DATA], ids=["image", "audio", "audio-data"])
def test_images_and_sounds_are_refused_without_being_fetched(client, part):
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What's in this?"}, part]}]
    with pytest.raises(openai.BadRequestError, match="the model is not multimodal"):
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=64)


def test_every_further_parameter_of_chats_has_the_default_that_the_guide_names(client):
    def answer(**extra: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=SENTIMENT, max_tokens=12, temperature=0.8, seed=7, **extra
        )

    unset, explicit = answer(), answer(extra_body=CHAT_DEFAULTS)
    assert explicit.choices == unset.choices
    assert explicit.usage == unset.usage


def test_every_further_parameter_of_completions_has_the_default_that_the_guide_names(client):
    def answer(**extra: Any) -> Any:
        return client.completions.create(model=MODEL, prompt="San Francisco is a", temperature=0.8, seed=7, **extra)

    unset, explicit = answer(), answer(extra_body=COMPLETION_DEFAULTS, max_tokens=16, n=1, echo=False)
    assert explicit.choices == unset.choices
    assert explicit.usage == unset.usage


def test_response_format(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=SENTIMENT, response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)


async def test_responses_of_the_async_client(async_client):
    plain = await async_client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=5, temperature=0.0, top_logprobs=2,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    shown = plain.output[0].content[0].logprobs
    assert len(shown) == plain.usage.output_tokens == 5
    assert [len(entry.top_logprobs) for entry in shown] == [2] * 5
    assert plain.output[0].status == plain.status == "incomplete"
    assert plain.temperature == 0.0
    deltas = []
    stream = await async_client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=5, temperature=0.0, top_logprobs=2,
        stream=True,
    )  # fmt: skip
    last = None
    async for event in stream:
        last = event
        if event.type == "response.output_text.delta":
            deltas += event.logprobs
        elif event.type == "response.output_text.done":
            assert event.text == plain.output_text
    assert [entry.model_dump() for entry in deltas] == [entry.model_dump() for entry in shown]
    assert last.response.output == [plain.output[0].model_copy(update={"id": last.response.output[0].id})]
    without = await async_client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)
    assert without.output[0].content[0].logprobs is None


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "c"),
        ("prompt", {"id": "x"}),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("max_tool_calls", 1),
        ("background", True),
        ("reasoning", {"effort": "much"}),
        ("store", True),
        ("truncation", "auto"),
        ("include", ["file_search_call.results"]),
        ("stream_options", {"include_obfuscation": True}),
        ("text", {"format": {"type": "json_schema", "name": "x"}}),
        ("text", {"format": {"type": "xml"}}),
        ("text", {"verbosity": "low"}),
        ("max_output_tokens", 0),
        ("input", []),
    ],
)
def test_what_responses_cannot_do_is_refused_by_name(server, parameter, value):
    answer = server.post("/v1/responses", {"model": MODEL, "input": "Hello", parameter: value})
    assert answer.status == 400
    assert answer.json["error"]["param"] == parameter
    assert parameter in answer.json["error"]["message"]
    assert "(path)" not in answer.json["error"]["message"]


def test_responses_take_what_changes_nothing(server):
    harmless = {
        "store": False, "background": False, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "truncation": "disabled", "include": ["reasoning.encrypted_content"], "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"}, "user": "me", "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 6, "temperature": 0}
    plain, given = (server.post("/v1/responses", {**body, **extra}).json for extra in ({}, harmless))
    assert given["output"][0]["content"] == plain["output"][0]["content"]
    assert given["metadata"] == {"a": "b"} and given["user"] == "me"


def test_best_of_and_beams_stream_as_one_event(client, server):
    """Which candidates are the best is known only at the end."""
    for extra in ({"n": 2, "best_of": 3, "temperature": 1.0, "seed": 3}, {"n": 2, "use_beam_search": True}):
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, **extra}
        plain = server.post("/v1/completions", body).json
        whole, done, rest = server.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        event = openai.types.Completion.model_validate_json(whole.removeprefix("data: "))
        assert [choice.model_dump() for choice in event.choices] == plain["choices"]
        chat = {"messages": SENTIMENT, "model": MODEL, "max_tokens": 5, **extra}
        answer = server.post("/v1/chat/completions", chat).json
        texts = dict.fromkeys(range(2), "")
        for chunk in client.chat.completions.create(
            messages=SENTIMENT, model=MODEL, max_tokens=5, stream=True, extra_body=extra
        ):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
