"""A stream says byte for byte what the plain answer says, whatever the options."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.http_server import Server, sse_events

TEXTS = ("Hello, my name is", "The capital of France is", "世界 🙂", "1 2 3 4", "Zwölf große", "a", "{}[]()<>")


def options(rng: random.Random) -> dict[str, Any]:
    """Random options that both routes take."""
    found: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": rng.randint(0, 2**31)}
    if rng.random() < 0.3:
        found["temperature"] = 0.0
    else:
        found["temperature"] = rng.choice((0.3, 0.8, 1.0, 1.7))
        found["n"] = rng.choice((1, 1, 1, 2, 3))
    choices: dict[str, Any] = {
        "top_p": rng.choice((0.5, 0.9, 1.0)),
        "top_k": rng.choice((-1, 0, 1, 5, 50)),
        "min_p": rng.choice((0.0, 0.05)),
        "presence_penalty": rng.choice((-1.0, 0.5, 2.0)),
        "frequency_penalty": rng.choice((-0.5, 1.0)),
        "repetition_penalty": rng.choice((0.9, 1.3)),
        "stop": rng.choice(("e", ["t", "in"], ["is ", "\n"], ["�"])),
        "include_stop_str_in_output": rng.random() < 0.5,
        "stop_token_ids": [rng.randint(5, 300)],
        "ignore_eos": True,
        "min_tokens": rng.randint(0, found["max_tokens"]),
        "logit_bias": {str(rng.randint(0, 300)): rng.choice((-50.0, 5.0))},
        "bad_words": rng.choice((["a"], ["the", "is"])),
        "skip_special_tokens": rng.random() < 0.5,
        "spaces_between_special_tokens": rng.random() < 0.5,
        "truncate_prompt_tokens": rng.randint(1, 10),
        "return_tokens_as_token_ids": rng.random() < 0.5,
        "allowed_token_ids": rng.sample(range(5, 300), 40),
    }
    for name in rng.sample(sorted(choices), rng.randint(0, 5)):
        found[name] = choices[name]
    return found


def completion(rng: random.Random) -> dict[str, Any]:
    prompt: Any = rng.choice(TEXTS)
    if rng.random() < 0.3:
        prompt = [rng.choice(TEXTS) for _ in range(rng.randint(1, 3))]
    elif rng.random() < 0.3:
        prompt = [rng.randint(5, 300) for _ in range(rng.randint(1, 20))]
    elif rng.random() < 0.2:
        prompt = [[rng.randint(5, 300) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 3))]
    body = {"prompt": prompt, **options(rng)}
    if rng.random() < 0.4:
        body["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.3:
        body["echo"] = True
    if rng.random() < 0.15 and body["temperature"]:
        body["best_of"] = body["n"] + rng.randint(0, 2)
    return body


def chat(rng: random.Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": rng.choice(TEXTS)}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(TEXTS)})
    body = {"messages": messages, **options(rng)}
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.2:
        body |= {"echo": True}
    return body


def joined(body: str, is_chat: bool) -> dict[int, dict[str, Any]]:
    """What a stream says about each choice, put together."""
    found: dict[int, dict[str, Any]] = {}
    for event in sse_events(body):
        if "error" in event:
            return {-1: event["error"]}
        for choice in event["choices"]:
            whole = found.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": None, "stop": None})
            assert whole["finish"] is None, "a chunk after the last one"
            whole["text"] += choice["delta"].get("content", "") if is_chat else choice["text"]
            whole["logprobs"] += entries(choice["logprobs"])
            whole["finish"], whole["stop"] = choice["finish_reason"], choice.get("stop_reason")
    return found


def entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """Log probabilities of both routes as one list per token."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(item) for item in zip(*(logprobs[name] for name in names), strict=True)]


def plain(answer: dict[str, Any], is_chat: bool) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if is_chat else choice["text"],
            "logprobs": entries(choice["logprobs"]),
            "finish": choice["finish_reason"],
            "stop": choice["stop_reason"],
        }
        for choice in answer["choices"]
    }


def compare(server: Server, count: int, seed: int) -> None:
    def one(i: int) -> str | None:
        rng = random.Random(seed * 1_000_003 + i)
        is_chat = i % 2 == 1
        body = chat(rng) if is_chat else completion(rng)
        route = "/v1/chat/completions" if is_chat else "/v1/completions"
        whole = server.post(route, body)
        extra: dict[str, Any] = {"stream": True}
        if rng.random() < 0.7:
            extra["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
        streamed = server.post(route, {**body, **extra})
        if whole.status != 200 or streamed.status != 200:
            return f"{i}: {body} -> {whole.text[:300]} | {streamed.text[:300]}"
        expected, found = plain(whole.json, is_chat), joined(streamed.text, is_chat)
        if expected != found:
            return f"{i}: {body}\n  plain    {expected}\n  streamed {found}"
        if "stream_options" in extra:
            usage = {k: v for k, v in whole.json["usage"].items() if v is not None}
            last = sse_events(streamed.text)[-1]
            at_once = body.get("best_of", 1) > body.get("n", 1)  # then all choices come together, with the usage
            said = {k: v for k, v in last["usage"].items() if v is not None}
            if (last["choices"] != []) != at_once or said != usage:
                return f"{i}: {body}\n  usage {usage}, streamed {last}"
        return None

    with ThreadPoolExecutor(6) as pool:
        wrong = [problem for problem in pool.map(one, range(count)) if problem]
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:5])


def test_streams_equal_plain_answers(steady: Server) -> None:
    compare(steady, 200, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_streams_equal_plain_answers(steady: Server) -> None:
    compare(steady, 1000, seed=1)


@pytest.mark.parametrize("interval", [{"stream_interval": 1}, {}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_with_an_interval_of_one_each_token_is_an_event(server: Server, path: str, interval: dict[str, int]) -> None:
    """Also while many others are served, when events have several tokens otherwise. One is meant where log
    probabilities are asked for.
    """
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {**prompt, "max_tokens": 64, "ignore_eos": True, "stream": True}
    body["logprobs"] = 0 if "prompt" in prompt else True
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post(path, {**body, **interval}), range(8)))
    for answer in answers:
        choices = [event["choices"][0] for event in sse_events(answer.text) if event["choices"]]
        tokens = [len(c["logprobs"].get("tokens") or c["logprobs"]["content"]) for c in choices if c["logprobs"]]
        assert tokens == [1] * 64
    refused = server.post(path, {**body, "stream_interval": 2})
    assert refused.status == 400 and refused.json["error"]["param"] == "stream_interval"
