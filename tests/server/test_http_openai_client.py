"""The official client against a real server process: every call of the guide's examples, sync and async."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.server.http_server import MODEL

GREEDY = {"temperature": 0.0}


def test_models_lists_the_served_name(client):
    models = client.models.list()
    assert [m.id for m in models.data] == [MODEL]
    card = models.data[0].model_dump()
    assert card["owned_by"] == "vllm"
    assert card["max_model_len"] == 512
    assert card["permission"][0]["object"] == "model_permission"


def test_completion(client):
    answer = client.completions.create(model=MODEL, prompt="A robot may not injure a human being", max_tokens=7)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens <= 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_defaults_to_16_tokens(client):
    answer = client.completions.create(model=MODEL, prompt="Hello", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_completion_streams_the_same_text(client):
    plain = client.completions.create(model=MODEL, prompt="Hello", max_tokens=20, **GREEDY)
    chunks = list(client.completions.create(model=MODEL, prompt="Hello", max_tokens=20, stream=True, **GREEDY))
    assert "".join(c.choices[0].text for c in chunks) == plain.choices[0].text
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_prompts_of_all_four_forms_agree(server, client):
    ids = server.post("/tokenize", {"prompt": "Hello, my name is"}).json["tokens"]
    forms = ["Hello, my name is", ["Hello, my name is"], ids, [ids]]
    texts = [client.completions.create(model=MODEL, prompt=p, max_tokens=8, **GREEDY).choices[0].text for p in forms]
    assert len(set(texts)) == 1


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(client):
    answer = client.completions.create(
        model=MODEL, prompt=["Hello", "The capital of"], n=3, max_tokens=4, temperature=0.9, seed=5
    )
    assert [c.index for c in answer.choices] == list(range(6))
    assert len({c.text for c in answer.choices}) > 1
    streamed = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(
        model=MODEL, prompt=["Hello", "The capital of"], n=3, max_tokens=4, temperature=0.9, seed=5, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {c.index: c.text for c in answer.choices}


def test_best_of_returns_the_best_n(client):
    answer = client.completions.create(model=MODEL, prompt="Hello", n=2, best_of=4, max_tokens=4, temperature=1.0)
    assert [c.index for c in answer.choices] == [0, 1]


def test_completion_logprobs(client):
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=5, logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 5
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value == max(top.values())  # greedy takes the most likely
        assert 1 <= len(top) <= 4


def test_echo_with_logprobs_covers_the_prompt(client):
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=2, echo=True, logprobs=1, **GREEDY)
    choice = answer.choices[0]
    assert choice.text.startswith("Hello")
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens + 2


def test_echo_with_no_tokens_gives_the_prompt_alone(client):
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "Hello"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    chunks = client.completions.create(model=MODEL, prompt="Hello", max_tokens=0, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == "Hello"


def test_usage_of_streams(client):
    plain = client.completions.create(model=MODEL, prompt="Hello", max_tokens=6, **GREEDY)
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            **GREEDY,
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude_none=True) == plain.usage.model_dump(exclude_none=True)
    assert all(c.usage is not None for c in chunks)
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)


CHAT = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Who won the world series in 2020?"}]


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=6)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert not answer.choices[0].message.tool_calls
    assert answer.usage.completion_tokens <= 6


def test_chat_without_max_tokens_fills_the_context(client):
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_chat_takes_either_name_of_the_limit(client):
    a = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=3, **GREEDY)
    b = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, **GREEDY)
    assert a.choices[0].message.content == b.choices[0].message.content
    assert a.usage.completion_tokens <= 3


def test_chat_streams_role_then_content_then_reason(client):
    plain = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=20, **GREEDY)
    chunks = list(client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=20, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason


def test_chat_choices(client):
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, n=3, temperature=1.0, seed=3, max_tokens=5)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    streamed = dict.fromkeys(range(3), "")
    for chunk in client.chat.completions.create(
        model=MODEL, messages=CHAT, n=3, temperature=1.0, seed=3, max_tokens=5, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == {c.index: c.message.content for c in answer.choices}


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=5, **GREEDY
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 5
        values = [t.logprob for t in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]
    streamed = [
        entry
        for chunk in client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=5, stream=True, **GREEDY
        )
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [e.model_dump() for e in streamed] == [e.model_dump() for e in content]


def test_chat_content_parts(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    whole = [{"role": "user", "content": "Hello"}]
    texts = [
        client.chat.completions.create(model=MODEL, messages=m, max_tokens=5, **GREEDY).choices[0].message.content
        for m in (parts, whole)
    ]
    assert texts[0] == texts[1]


def test_stop_strings(client):
    free = client.completions.create(model=MODEL, prompt="Hello", max_tokens=24, **GREEDY).choices[0].text
    stop = free[len(free) // 2]
    stopped = client.completions.create(model=MODEL, prompt="Hello", max_tokens=24, stop=[stop], **GREEDY).choices[0]
    assert stopped.text == free[: free.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.model_dump()["stop_reason"] == stop
    kept = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True}, **GREEDY
    )
    assert kept.choices[0].text == free[: free.index(stop) + len(stop)]


def test_responses(client):
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=6, temperature=0.0)
    assert answer.id.startswith("resp")
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 6
    deltas = []
    kinds = []
    for event in client.responses.create(model=MODEL, input="Hello", max_output_tokens=6, temperature=0.0, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
    assert "".join(deltas) == answer.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"


def test_tools_are_refused_with_the_text_clients_know(client):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool], tool_choice="auto")
    assert "requires --enable-auto-tool-choice and --tool-call-parser to be set" in str(caught.value)
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool], tool_choice="none", max_tokens=2)
    assert answer.choices[0].message.content is not None


def test_errors_become_the_classes_of_the_client(client):
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist."):
        client.completions.create(model="other", prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="suffix is not currently supported") as caught:
        client.completions.create(model=MODEL, prompt="Hello", suffix="end")
    assert caught.value.body["code"] == 400
    assert caught.value.type == "BadRequestError"
    assert caught.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match="does not support Embeddings API"):
        client.embeddings.create(model=MODEL, input="Hello")


async def test_async_client_streams_many_at_once(async_client):
    async def one(i: int) -> tuple[str, str]:
        prompt = f"Number {i} says"
        plain = await async_client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, **GREEDY)
        text = ""
        stream = await async_client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, stream=True, **GREEDY)
        async for chunk in stream:
            text += chunk.choices[0].text
        return plain.choices[0].text, text

    pairs = await asyncio.gather(*(one(i) for i in range(16)))
    assert all(plain == streamed for plain, streamed in pairs)


async def test_async_chat(async_client):
    stream = await async_client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=5, stream=True)
    reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert reasons[-1] in ("length", "stop")
