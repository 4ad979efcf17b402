"""Bodies and event streams of the routes that generate are, byte for byte, what they were when they were recorded.

`python -m tests.server.test_recorded_answers` writes the recordings anew, after a change of the wire format that is
wanted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.entrypoints.openai import chat, completions, responses
from vllm.entrypoints.openai.answers import count_entries, count_steps, encode, encode_at_once
from vllm.entrypoints.openai.logprobs import TokenText
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.sequence import Logprob

RECORDINGS = Path(__file__).parent / "recordings" / "answers.json"
PIECES = ["Hel", "lo", "", ' "quoted"\\', "\n\tzweite Zeile ü", " 😀\u2028\x7f", "end"]
TOKENS = [[1], [2, 3], [4], [5], [6, 7, 8], [9], [10]]
MESSAGES = [{"role": "user", "content": "Hi"}]


def logprob(token: int) -> dict[int, Logprob]:
    return {token: Logprob(-0.25 * token, 1, f"<{token}>"), token + 100: Logprob(float("-inf"), 2, f"<{token}+>")}


class Source:
    """In place of a prompt: the outputs of a request, whole or in pieces."""

    def __init__(self, n: int, with_logprobs: bool, with_prompt_logprobs: bool, reason: str, stop: Any) -> None:
        self.params = SamplingParams(n=n, temperature=0.5, top_p=0.9)
        self._n = n
        self._with_logprobs = with_logprobs
        self._with_prompt = with_prompt_logprobs
        self._ending = {"finish_reason": reason, "stop_reason": stop}

    def _completion(self, index: int, text: str, tokens: list[int], last: bool) -> CompletionOutput:
        steps = [logprob(token) for token in tokens] if self._with_logprobs else None
        ending = self._ending if last else {}
        return CompletionOutput(index, text, tokens, None if steps is None else -1.0, steps, **ending)

    def _request(self, outputs: list[CompletionOutput], finished: bool, first: bool) -> RequestOutput:
        prompt_logprobs = [None, logprob(12)] if self._with_prompt and first else None
        return RequestOutput("r", "Hi", [11, 12], prompt_logprobs, outputs, finished, num_cached_tokens=1)

    def whole(self) -> RequestOutput:
        tokens = list(itertools.chain(*TOKENS))
        outputs = [self._completion(i, "".join(PIECES), tokens, True) for i in range(self._n)]
        return self._request(outputs, True, True)

    def pieces(self) -> Iterator[RequestOutput]:
        for i, (text, tokens) in enumerate(zip(PIECES, TOKENS, strict=True)):
            last = i == len(PIECES) - 1
            outputs = [self._completion(index, text, tokens, last) for index in range(self._n)]
            if i % 2:  # what one step brings for several choices comes in one output or in several
                yield self._request(outputs, last, i == 0)
            else:
                for output in outputs:
                    yield self._request([output], last and output is outputs[-1], i == 0 and output is outputs[0])

    async def generate(self) -> AsyncIterator[RequestOutput]:
        yield self.whole()


CONTEXT: Any = SimpleNamespace(
    cached_tokens=lambda outputs: sum(o.num_cached_tokens for o in outputs),
    tokenizer=SimpleNamespace(decode=lambda ids: f"<decoded {ids}>"),
)
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"n": 2},
    "stopped by a string": {"stop": "x"},
    "cut": {"max_tokens": 3},
    "usage": {"stream_options": {"include_usage": True}},
    "usage always": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2},
    "logprobs": {"logprobs": 1},
    "echo": {"echo": True, "logprobs": 2, "prompt_logprobs": 1},
    "echo alone": {"echo": True, "max_tokens": 0},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"n": 2},
    "stopped by a string": {"stop": "x"},
    "cut": {"max_tokens": 3},
    "usage": {"stream_options": {"include_usage": True}},
    "usage always": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "echo": {"echo": True},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"max_output_tokens": 3},
    "logprobs": {"top_logprobs": 2},
    "options": {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u"},
}


def source_of(request: Any, with_logprobs: bool) -> Any:
    cut = request.max_tokens == 3 or getattr(request, "max_output_tokens", None) == 3
    return Source(
        request.n or 1,
        with_logprobs,
        bool(request.prompt_logprobs),
        "length" if cut else "stop",
        "x" if request.stop else None,
    )


def completion_work(fields: dict[str, Any]) -> completions.Completion:
    request = CompletionRequest(prompt="Hi", **fields)
    source = source_of(request, request.logprobs is not None)
    return completions.Completion(request, "cmpl-1", "m", 123, [source], TokenText(None, True))


def chat_work(fields: dict[str, Any]) -> chat.Chat:
    request = ChatCompletionRequest(messages=MESSAGES, **fields)
    source = source_of(request, bool(request.logprobs))
    last = "before" if request.echo else ""
    return chat.Chat(request, "chatcmpl-1", "m", 123, source, TokenText(None, True), "assistant", last)


def response_work(fields: dict[str, Any]) -> responses.Work:
    request = ResponsesRequest(input="Hi", **fields)
    body = ChatCompletionRequest(messages=MESSAGES, logprobs=request.wants_logprobs, top_logprobs=request.top_logprobs)
    source: Any = source_of(request, request.wants_logprobs)
    made = chat.Chat(body, "chatcmpl-1", "m", 123, source, TokenText(None, True), "assistant", "")
    return responses.Work(
        request, "resp_1", "msg_1", made, encode_at_once(responses._echoed(request, source.params, False))
    )


def streamed(events: Any, source: Any) -> str:
    parts = [events.feed(0, output) for output in source.pieces()]
    return b"".join([*parts, events.end()]).decode()


def answers() -> dict[str, str]:
    found = {}
    for name, fields in COMPLETIONS.items():
        alone = {key: value for key, value in fields.items() if key != "stream_options"}
        if fields == alone:
            found[f"completion, {name}"] = json.dumps(
                asyncio.run(completions.complete(CONTEXT, completion_work(alone)))
            )
        if "prompt_logprobs" not in fields:
            work = completion_work({**fields, "stream": True})
            found[f"completion, streamed, {name}"] = streamed(
                completions.CompletionEvents(CONTEXT, work), work.prompts[0]
            )
    for name, fields in CHATS.items():
        alone = {key: value for key, value in fields.items() if key != "stream_options"}
        if fields == alone:
            found[f"chat, {name}"] = json.dumps(asyncio.run(chat.complete(CONTEXT, chat_work(alone))))
        chatted = chat_work({**fields, "stream": True})
        found[f"chat, streamed, {name}"] = streamed(chat.ChatEvents(CONTEXT, chatted), chatted.prompt)
    for name, fields in RESPONSES.items():
        found[f"response, {name}"] = asyncio.run(responses.complete(CONTEXT, response_work(fields))).decode()
        response = response_work({**fields, "stream": True})
        found[f"response, streamed, {name}"] = streamed(responses.ResponseEvents(response), response.chat.prompt)
    return found


RECORDED: dict[str, str] = json.loads(RECORDINGS.read_text()) if RECORDINGS.exists() else {}


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return answers()


@pytest.mark.parametrize("name", RECORDED)
def test_answer_is_what_it_was(made: dict[str, str], name: str) -> None:
    assert made[name] == RECORDED[name]


def test_every_answer_is_recorded(made: dict[str, str]) -> None:
    assert list(made) == list(RECORDED)


@pytest.mark.parametrize("route", ["completion", "chat"])
def test_answers_of_many_choices_are_made_in_several_turns(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    module: Any = completions if route == "completion" else chat
    make_work: Any = completion_work if route == "completion" else chat_work
    make_choice, turn, made_in = module._choice, 0, Counter[int]()

    def choice(*args: Any) -> Any:
        made_in[turn] += 1
        return make_choice(*args)

    async def answer() -> bytes:
        nonlocal turn
        found = await module.encoded(CONTEXT, make_work({"n": 500}))
        making = asyncio.ensure_future(encode(found))
        while not making.done():
            turn += 1
            await asyncio.sleep(0)
        return await making

    whole = asyncio.run(module.complete(CONTEXT, make_work({"n": 500})))
    monkeypatch.setattr(module, "_choice", choice)
    assert asyncio.run(answer()) == json.dumps(whole).encode()
    assert made_in.total() == 500
    assert max(made_in.values()) <= 10


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 2, "prompt_logprobs": 1}])
def test_what_choices_repeat_of_their_prompt_is_made_once(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """And counts for each of them."""
    shown, made, steps_of = 5, Counter[str](), completions.prompt_logprobs

    def counted(steps: Any) -> Any:
        for step in steps_of(steps) or ():
            made["steps"] += 1
            yield step

    monkeypatch.setattr(completions, "prompt_logprobs", counted)
    work = completion_work({"n": shown, **fields})
    whole = asyncio.run(completions.complete(CONTEXT, work))
    assert made.total() == 2
    answer = asyncio.run(completions.encoded(CONTEXT, work))
    assert asyncio.run(encode(answer)) == json.dumps(whole).encode()
    assert made.total() == 4
    final = work.prompts[0].whole()  # type: ignore[attr-defined]
    own = count_entries([final]) - count_steps(final.prompt_logprobs)
    times = shown * (2 if work.echo else 1)
    assert work.entries([final]) == own + times * count_steps(final.prompt_logprobs)


def test_what_choices_echo_counts_among_what_an_output_shows() -> None:
    """So that many log probabilities of a prompt, which each choice repeats, are written beside the event loop."""
    work = completion_work({"echo": True, "logprobs": 2, "n": 3, "stream": True})
    events, source = completions.CompletionEvents(CONTEXT, work), Source(3, True, True, "stop", None)
    own, echoed = 2 * len(TOKENS[0]), 2 * 3  # two log probabilities of each token; of a prompt of two, up to three
    first, second, *_ = source.pieces()
    assert events.entries(0, first) == own + echoed + 2 * 2
    events.feed(0, first)
    assert events.entries(0, first) == own + 2 * 2
    assert events.entries(0, second) == own + echoed  # which says nothing of the prompt itself


if __name__ == "__main__":
    RECORDINGS.write_text(json.dumps(answers(), indent=1) + "\n")
