"""The routes as objects, and the parts that other servers are made of: as over HTTP."""

from __future__ import annotations

import asyncio
import json
import signal

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from tests.tiny_llama import model_folder  # noqa: F401 - fixture
from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.chat_utils import apply_hf_chat_template, parse_chat_messages
from vllm.entrypoints.launcher import serve_http
from vllm.entrypoints.logger import RequestLogger
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    ErrorResponse,
    TokenizeRequest,
)
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from vllm.entrypoints.openai.serving_models import BaseModelPath, OpenAIServingModels
from vllm.entrypoints.openai.serving_transcription import OpenAIServingTranscription
from vllm.utils.argparse import FlexibleArgumentParser

GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hello"}]


async def test_an_application_and_its_objects_answer_alike(model_folder, caplog):  # noqa: F811
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", str(model_folder), "--served-model-name", "tiny", "--disable-frontend-multiprocessing"]
    )
    async with api_server.build_async_engine_client(args) as engine:
        assert isinstance(engine, EngineClient)
        app = api_server.build_app(args)
        await api_server.init_app_state(engine, engine.vllm_config, app.state, args)
        state = app.state
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

            async def post(path: str, body: dict) -> dict:
                return (await client.post(path, json=body)).json()

            routed = [
                (await post("/v1/completions", {**GREEDY, "prompt": "Hello"}))["choices"],
                (await post("/v1/chat/completions", {**GREEDY, "messages": MESSAGES}))["choices"],
                await post("/tokenize", {"prompt": "Hello"}),
                (await client.get("/v1/models")).json(),
            ]
        whole = await state.openai_serving_completion.create_completion(CompletionRequest(prompt="Hello", **GREEDY))
        chat = await state.openai_serving_chat.create_chat_completion(
            ChatCompletionRequest(messages=MESSAGES, **GREEDY)
        )
        tokens = await state.openai_serving_tokenization.create_tokenize(TokenizeRequest(prompt="Hello"))
        text = await state.openai_serving_tokenization.create_detokenize(DetokenizeRequest(tokens=tokens.tokens))
        models = await state.openai_serving_models.show_available_models()
        assert isinstance(whole, CompletionResponse) and isinstance(chat, ChatCompletionResponse)
        assert [choice.text for choice in whole.choices] == [choice["text"] for choice in routed[0]]
        assert chat.choices[0].message.content == routed[1][0]["message"]["content"]
        assert (tokens.model_dump(), models.model_dump()) == (routed[2], routed[3])
        assert "Hello" in text.prompt
        assert state.openai_serving_embedding is None

        events = await state.openai_serving_chat.create_chat_completion(
            ChatCompletionRequest(messages=MESSAGES, stream=True, **GREEDY)
        )
        stream = "".join([event async for event in events])
        lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        chunks = [ChatCompletionStreamResponse.model_validate(json.loads(line)) for line in lines]
        said = "".join(chunk.choices[0].delta.get("content") or "" for chunk in chunks)
        assert said == chat.choices[0].message.content

        refused = await state.openai_serving_chat.create_chat_completion(
            ChatCompletionRequest(messages=MESSAGES, **{**GREEDY, "model": "other"})
        )
        assert isinstance(refused, ErrorResponse) and refused.code == 404

        mine = OpenAIServingModels(engine, engine.vllm_config.model_config, [BaseModelPath("mine", "folder")])
        other = OpenAIServingCompletion(engine, None, mine)
        again = await other.create_completion(CompletionRequest(prompt="Hello", **{**GREEDY, "model": "mine"}))
        assert (again.model, again.choices[0].text) == ("mine", whole.choices[0].text)
        template = "{{ messages[0]['content'] }} {{ 'x' * 8 }}"
        shaped = OpenAIServingChat(engine, None, mine, "helper", chat_template=template)
        found = await shaped.create_chat_completion(
            ChatCompletionRequest(messages=MESSAGES, **{**GREEDY, "model": "mine"})
        )
        assert found.choices[0].message.role == "helper"
        assert found.usage.prompt_tokens != chat.usage.prompt_tokens
        logged = OpenAIServingCompletion(engine, None, mine, request_logger=RequestLogger(max_log_len=3))
        caplog.clear()
        await logged.create_completion(CompletionRequest(prompt="Hello", **{**GREEDY, "model": "mine"}))
        (line,) = {record.getMessage() for record in caplog.records if "Received request" in record.getMessage()}
        assert " prompt: 'Hel', " in line
        for make, error, words in [
            (lambda: OpenAIServingChat(engine, None, mine, request_logger=1), TypeError, "must be a RequestLogger"),
            (lambda: OpenAIServingChat(engine, None, mine, colour="red"), TypeError, "no option 'colour'"),
            (lambda: OpenAIServingChat(engine, None, "mine"), TypeError, "must be an OpenAIServingModels"),
            (lambda: OpenAIServingModels(object()), TypeError, "AsyncLLMEngine"),
            (lambda: OpenAIServingTranscription(engine, None, mine), NotImplementedError, "audio"),
        ]:
            with pytest.raises(error, match=words):
                make()


@pytest.mark.parametrize("end", ["signal", "cancel"])
async def test_an_application_with_layers_of_somebody_elses_is_served(end, model_folder):  # noqa: F811
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", str(model_folder), "--served-model-name", "tiny", "--disable-frontend-multiprocessing"]
    )
    listener = api_server.create_server_socket(("127.0.0.1", 0))
    async with api_server.build_async_engine_client(args) as engine:
        app = api_server.build_app(args)

        @app.middleware("http")
        async def mark(request, call_next):
            response = await call_next(request)
            response.headers["x-mark"] = "seen"
            return response

        @app.get("/mine")
        async def mine() -> dict[str, int]:
            return {"answer": 42}

        await api_server.init_app_state(engine, engine.vllm_config, app.state, args)
        serving = asyncio.ensure_future(serve_http(app, sock=listener, log_level="warning", timeout_keep_alive=5))
        url = api_server.url_of(listener, tls=False)
        async with httpx.AsyncClient(base_url=url, transport=httpx.AsyncHTTPTransport(retries=5)) as client:
            answer = await client.post("/v1/completions", json={**GREEDY, "prompt": "Hello"})
            assert answer.json()["usage"]["completion_tokens"] == 5 and answer.headers["x-mark"] == "seen"
            assert (await client.get("/mine")).json() == {"answer": 42}
        if end == "signal":
            signal.raise_signal(signal.SIGTERM)
        else:
            serving.cancel()
        await (await serving)
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(base_url=url).get("/mine")


async def test_an_engine_lives_as_long_as_its_block(model_folder):  # noqa: F811
    made = AsyncEngineArgs(model=str(model_folder), max_model_len=64)
    async with api_server.build_async_engine_client_from_engine_args(made, True) as engine:
        assert engine.is_running and engine.vllm_config.model_config.max_model_len == 64
    assert not engine.is_running


async def test_routes_serve_an_application_of_somebody_elses(model_folder):  # noqa: F811
    """As BentoVLLM's services put them together."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model, args.served_model_name = str(model_folder), ["tiny"]
    args.disable_frontend_multiprocessing = args.disable_log_requests = True
    parts = APIRouter(lifespan=api_server.lifespan)
    parts.add_api_route("/chat/completions", api_server.create_chat_completion, methods=["POST"])
    parts.add_api_route("/models", api_server.show_available_models, methods=["GET"])
    app = FastAPI()
    app.include_router(parts)
    async with api_server.build_async_engine_client(args) as engine, parts.lifespan_context(app):
        tokenizer, config = await engine.get_tokenizer(), await engine.get_model_config()
        await api_server.init_app_state(engine, config, app.state, args)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            whole = (await client.post("/chat/completions", json={**GREEDY, "messages": MESSAGES})).json()
            missing = await client.post("/chat/completions", json={**GREEDY, "messages": MESSAGES, "model": "other"})
            models = (await client.get("/models")).json()
        assert models["data"][0]["id"] == "tiny"
        assert missing.status_code == 404 and missing.json()["error"]["type"] == "NotFoundError"
        parts_of = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        conversation, media = parse_chat_messages(parts_of, config, tokenizer, content_format="string")
        assert media is None
        how = {"chat_template": None, "add_generation_prompt": True, "continue_final_message": False}
        text = apply_hf_chat_template(tokenizer, conversation=conversation, **how)
        ids = apply_hf_chat_template(tokenizer, conversation=conversation, tokenize=True, **how)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        async for output in engine.generate(TokensPrompt(prompt_token_ids=ids), params, "0"):
            last = output
        assert last.outputs[0].text == whole["choices"][0]["message"]["content"]
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="you must provide a chat template"):
            apply_hf_chat_template(tokenizer, conversation)


@pytest.mark.parametrize(
    "wrong", [{"temperature": "hot"}, {"messages": "hi"}, {"tool_choice": "auto"}, {"messages": None}]
)
def test_a_wrong_request_is_a_value_error(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}
    assert ChatCompletionRequest.model_validate(right).tool_choice == "none"
    with pytest.raises(ValueError):
        ChatCompletionRequest.model_validate({**right, **wrong})
