"""T26: valid bodies with one or two fields replaced. Any answer but a 5xx is right; the canary must not notice."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.http_server import Server

LEAK = re.compile(r"0x[0-9a-fA-F]{6,}|Traceback|site-packages|\.py\b|/root/|/tmp/| object at ")
# Values as JSON text, so that what no serializer would write can be sent too.
POOL = [
    *("NaN", "Infinity", "-Infinity", "1e400", "-1", "0", "-0.0", "0.5", "1", "2", "2147483648", "9223372036854775808"),
    *("18446744073709551616", "1" + "0" * 299, "9" * 400, "1e-320", "1e308", "true", "false", "null", '""', '"a"'),
    *('"\\u0000"', '"\\ud800"', '"\\u202e"', '"\\u001b[31m\\r\\nERROR forged"', "[]", "{}", "[[]]", "[null]", "[1, 2]"),
    *('["a", "b"]', '[{"type": "text", "text": "x"}]', '{"a": {"b": [1]}}', "[" * 60 + "]" * 60, "[" * 200 + "]" * 200),
    *('{"a": 1, "a": 2}', '{"type": "json_object"}', '{"include_usage": true}', "[-1]", '["\\u0000"]', '{"5": 1}'),
    *('{"-1": 1e308}', '"tiny"', '"auto"', '"none"', '"A string that is a little longer: {{ 7 * 7 }} %s %n ../../etc"'),
    '"' + "x" * 100_000 + '"',
    "[" + "1," * 20_000 + "1]",
]
COMMON: dict[str, Any] = {
    "model": "tiny", "n": 1, "best_of": None, "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "seed": 1,
    "stop": ["z"], "stop_token_ids": [9], "include_stop_str_in_output": False, "ignore_eos": True, "min_tokens": 1,
    "logit_bias": {"5": 1.0}, "allowed_token_ids": None, "bad_words": [], "prompt_logprobs": None,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None,
    "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "stream": False, "stream_options": None,
    "echo": False, "user": "u", "priority": 0, "return_tokens_as_token_ids": None, "cache_salt": "s",
    "request_id": "r", "response_format": None, "guided_json": None, "guided_regex": None, "guided_choice": None,
    "guided_grammar": None, "structured_outputs": None, "logits_processors": None, "mm_processor_kwargs": None,
    "kv_transfer_params": None, "prompt_embeds": None, "unknown_field": 1,
}  # fmt: skip
MESSAGE = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**COMMON, "prompt": "Hi", "logprobs": 2, "suffix": None, "add_special_tokens": True},
    "/v1/chat/completions": {
        **COMMON,
        "messages": [MESSAGE],
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": None,
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "documents": None,
        "chat_template": None,
        "chat_template_kwargs": None,
    },
    "/v1/responses": {
        "model": "tiny", "input": "Hi", "instructions": "x", "max_output_tokens": 3, "temperature": 0.5, "top_p": 0.9,
        "stream": False, "store": False, "background": False, "previous_response_id": None, "tools": [],
        "tool_choice": "none", "text": {"format": {"type": "text"}}, "reasoning": None, "metadata": {"a": "b"},
        "truncation": "disabled", "top_logprobs": None, "user": "u",
    },
    "/tokenize": {
        "model": "tiny", "prompt": "Hi", "messages": None, "tools": None, "add_special_tokens": True,
        "add_generation_prompt": True, "continue_final_message": False, "return_token_strs": True,
        "chat_template": None, "chat_template_kwargs": None, "mm_processor_kwargs": None,
    },
    "/detokenize": {"model": "tiny", "tokens": [5, 6]},
}  # fmt: skip
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")


def body_of(rng: random.Random, route: str) -> bytes:
    """A valid body in which one or two fields have a value from the pool."""
    fields = {name: json.dumps(value) for name, value in BODIES[route].items()}
    for name in rng.sample(sorted(fields), rng.choice((1, 1, 2))):
        fields[name] = rng.choice(POOL)
    if "messages" in fields and rng.random() < 0.2:
        parts = {name: json.dumps(value) for name, value in MESSAGE.items()}
        parts[rng.choice(MESSAGE_FIELDS)] = rng.choice(POOL)
        fields["messages"] = "[{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}]"
    items = [f'"{name}": {value}' for name, value in fields.items()]
    if rng.random() < 0.02:
        items.append(rng.choice(items))  # the same key twice
    return ("{" + ", ".join(items) + "}").encode("utf-8", errors="surrogatepass")


def throw(server: Server, count: int, seed: int) -> None:
    routes = sorted(BODIES)
    statuses: dict[int, int] = {}

    def send(i: int) -> str | None:
        rng = random.Random(seed * 1_000_003 + i)
        route = routes[i % len(routes)]
        body = body_of(rng, route)
        answer = server.post(route, body)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        if answer.status not in (200, 400, 404):
            return f"{i}: {route} {body[:3000]!r} -> {answer.status} {answer.text[:300]}"
        if answer.status != 200 and (LEAK.search(answer.text) or answer.json["code"] != answer.status):
            return f"{i}: {route} -> {answer.text[:500]}"
        return None

    with ThreadPoolExecutor(4) as pool:
        wrong = [problem for problem in pool.map(send, range(count)) if problem]
    print(f"T26: {len(wrong)} of {count:,} bodies answered wrongly: {statuses}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:10])
    assert statuses[200] > count // 20 and statuses[400] > count // 5, statuses
    assert "\x1b[31m" not in server.log
    assert not re.search(r"^ERROR forged", server.log, re.MULTILINE)


def test_replaced_fields_never_make_a_server_error(steady: Server) -> None:
    throw(steady, 500, seed=0)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_ten_thousand_replaced_fields(steady: Server) -> None:
    throw(steady, 10_000, seed=1)
