"""T28: a token id is taken only if the model can produce it, wherever a request may name one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.http_server import MAX_MODEL_LEN, Server
from tests.tiny_models import save_llama, save_tokenizer

COMPLETIONS, CHATS, DETOKENIZE, GENERATE = "/v1/completions", "/v1/chat/completions", "/detokenize", "/generate"
DIGITS = "9" * 5000  # stands for a number that Python itself will not read
BAD: tuple[Any, ...] = (-(2**64), -(2**63), -(2**31), -320, -2, -1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**299)
NO_IDS: tuple[Any, ...] = (True, False, 1.0, 1e300, "1", "", None, [], [1], {}, {"a": 1})
Case = tuple[str, str, dict[str, Any], int]  # name, route, body, the status it must have


def places(token: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every field of every route that takes token ids, with `token` in it."""
    text = {"prompt": "Hi", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    found = {
        "prompt": (COMPLETIONS, {"prompt": [5, token], "max_tokens": 2}),
        "prompt, alone": (COMPLETIONS, {"prompt": [token], "max_tokens": 2}),
        "prompt, cut off": (COMPLETIONS, {"prompt": [token, 5], "max_tokens": 2, "truncate_prompt_tokens": 1}),
        "prompts": (COMPLETIONS, {"prompt": [[5], [5, token]], "max_tokens": 2}),
        "detokenize": (DETOKENIZE, {"tokens": [5, token]}),
    }
    for route, body in ((COMPLETIONS, text), (CHATS, chat)):
        found |= {
            f"stop of {route}": (route, {**body, "stop_token_ids": [token]}),
            f"stop with min_tokens of {route}": (route, {**body, "stop_token_ids": [5, token], "min_tokens": 2}),
            f"allowed of {route}": (route, {**body, "allowed_token_ids": [token]}),
            f"allowed with penalty of {route}": (
                route,
                {**body, "allowed_token_ids": [5, token], "presence_penalty": 1.0, "repetition_penalty": 1.2},
            ),
        }
        if isinstance(token, int) and not isinstance(token, bool):
            found[f"bias of {route}"] = (route, {**body, "logit_bias": {str(token): 5.0}})
    return found


def wrongly_answered(server: Server, cases: list[Case]) -> list[str]:
    """What the server takes although it should not, or the other way round."""

    def send(case: Case) -> str | None:
        name, route, body, status = case
        sent = json.dumps(body).replace(f'"{DIGITS}"', DIGITS).encode()
        answer = server.post(route, sent)
        return None if answer.status == status else f"{name}: {body!r:.300} -> {answer.status} {answer.text[:200]}"

    with ThreadPoolExecutor(4) as pool:
        return [problem for problem in pool.map(send, cases) if problem]


def test_only_ids_of_the_model_are_taken(steady: Server, tmp_path: Path) -> None:
    width = save_tokenizer(tmp_path)  # the model's logits are as wide as its tokenizer
    good = (0, 2, 5, width // 2, width - 2, width - 1)
    beyond = (width, width + 1, width + 2, 2 * width, 151_936)
    todo: list[Case] = [(name, *place, 200) for token in good for name, place in places(token).items()]
    todo += [
        (name, *place, 400)
        for token in (*BAD, *beyond, *NO_IDS)
        for name, place in places(token).items()
        if name != "prompt, alone" or token not in ("1", [1])  # a text, and a list of ids in a list
    ]
    assert len(todo) > 350
    wrong = wrongly_answered(steady, todo)
    print(f"T28: {len(wrong)} of {len(todo)} requests taken or refused wrongly")
    assert not wrong, f"{len(wrong)} of {len(todo)}:\n" + "\n".join(wrong[:40])


# Where in a list of ids the one in question stands; `rng` fills up with ids that every model here has.
ARRANGEMENTS: tuple[Callable[[Any, random.Random], list[Any]], ...] = (
    lambda token, rng: [token, 5],
    lambda token, rng: [5, token],
    lambda token, rng: [token, token],
    lambda token, rng: [*rng.choices(range(2, 300), k=3), token, *rng.choices(range(2, 300), k=4)],
    lambda token, rng: [*rng.choices(range(2, 300), k=60), token, *rng.choices(range(2, 300), k=60)],
)
# Other ways of answering, which the ids take other paths through.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 3, "temperature": 1.0, "seed": 4},
    {"best_of": 3, "temperature": 1.0},
    {"use_beam_search": True, "n": 2, "temperature": 0},
    {"prompt_logprobs": 2},
    {"truncate_prompt_tokens": 300},
    {"min_tokens": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"bad_words": ["the", "Ada"], "ignore_eos": True},
)
LONE_FIELDS = ("stop_token_ids", "allowed_token_ids", "logit_bias")


def fields(token: Any, rng: random.Random, routes: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests with `token` in every field of `routes` that may name one, each in a way of its own."""
    for route in (r for r in routes if r != DETOKENIZE):
        base: dict[str, Any] = {"prompt": "Hi"} if route != CHATS else {"messages": [{"role": "user", "content": "Hi"}]}
        for name in LONE_FIELDS:
            way = rng.choice(WAYS)
            while "use_beam_search" in way and name != "stop_token_ids":  # a beam search refuses all biases
                way = rng.choice(WAYS)
            body = {**base, "max_tokens": rng.randint(2, 4), **way}
            if name == "logit_bias":
                yield route, body | {name: {str(token): rng.choice((-100, -0.5, 0, 1, 100)), "7": 1.0}}
            else:
                yield route, body | {name: rng.choice(ARRANGEMENTS)(token, rng)}
    if COMPLETIONS in routes:
        ids = rng.choice(ARRANGEMENTS)(token, rng)
        for prompt in (ids, [ids], [[5, 6], ids], [[5, 6], [7], ids, [8]]):
            yield COMPLETIONS, {"prompt": prompt, "max_tokens": 2, **rng.choice(WAYS)}
        yield COMPLETIONS, {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
        yield COMPLETIONS, {"prompt": [token, *[5] * 9], "max_tokens": 1, "truncate_prompt_tokens": 3}
        yield COMPLETIONS, {"prompt": [*[5] * (MAX_MODEL_LEN - 3), token], "max_tokens": 1}
    if DETOKENIZE in routes:
        for arrange in ARRANGEMENTS:
            yield DETOKENIZE, {"tokens": arrange(token, rng)}


def boundaries(width: int, rng: random.Random) -> tuple[list[Any], list[Any]]:
    """Ids that a model with logits of this width has, and values that are none of its ids."""
    good = [0, 1, 2, 3, 4, width // 2, width - 2, width - 1, *(rng.randrange(width) for _ in range(4))]
    powers = [2**k + d for k in (9, 10, 15, 16, 17, 24, 31, 32, 53, 62, 63, 64, 65, 127) for d in (-1, 0, 1)]
    wide = [width + d for d in (0, 1, 2, 7, 63, 64)] + [2 * width, width * width, 32_000, 128_256, 151_936, 200_000]
    ids = [i for i in (*powers, *wide) if i >= width]
    drawn = [rng.randrange(width, 2**62) for _ in range(6)]
    below = [-1, -2, -100, -width, -(width + 1), *(-i for i in rng.sample(ids, 8))]
    floats = [0.0, 5.0, -0.5, 1e9, 1e300, float("nan"), float("inf"), -float("inf")]
    others = [True, False, None, "", "5", " 5", "5.0", "nan", "\x00", "\ud800", [], [5], [[5]], {}, {"5": 5}, DIGITS]
    return good, [*ids, *drawn, *below, *floats, *others]


def is_in_order(body: dict[str, Any], token: Any) -> bool:
    """Whether what stands in for an id makes the field one that may be sent after all."""
    if "logit_bias" in body:  # keys are texts anyway
        try:
            return 0 <= int(str(token)) < 2**31 and not isinstance(token, int)
        except ValueError:
            return False
    prompt = body.get("prompt")
    return isinstance(prompt, list) and (all(isinstance(p, str) for p in prompt) or all(p == [5] for p in prompt))


def widen(folder: Path, extra: int) -> int:
    """Give the folder's tokenizer `extra` tokens that its model does not have. Returns the tokenizer's size."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([f"<|extra_{i}|>" for i in range(extra)])
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["as wide", "model wider", "tokenizer wider", "demonstration server"])
def test_ids_in_every_field_and_way(kind: str, tmp_path: Path) -> None:
    """About 2,500 requests in all, to models whose logits are as wide as the tokenizer, wider, and narrower."""
    rng = random.Random(kind)
    size = width = save_tokenizer(tmp_path)
    if kind == "model wider":
        width += 13
        save_llama(tmp_path, vocab_size=width)
    else:
        save_llama(tmp_path)
    if kind == "tokenizer wider":
        size = widen(tmp_path, 9)
    demonstration = kind == "demonstration server"
    routes = (GENERATE,) if demonstration else (COMPLETIONS, CHATS, DETOKENIZE)
    module = "vllm.entrypoints.api_server" if demonstration else "vllm.entrypoints.openai.api_server"
    good, bad = boundaries(width, rng)
    cases: dict[int, list[Case]] = {200: [], 400: []}
    for token, expected in [(g, 200) for g in good] + [(b, 400) for b in bad]:
        for route, body in fields(token, rng, routes):
            status = expected
            if route == DETOKENIZE and expected == 200 and token >= size:
                status = 400  # the tokenizer is asked, not the model
            elif route == DETOKENIZE and type(token) is int and 0 <= token < size:
                status = 200
            if status == 200 or not is_in_order(body, token):
                cases[status].append((kind, route, body, status))
    todo = cases[200] + rng.sample(cases[400], min(500, len(cases[400])))
    rng.shuffle(todo)
    with Server(tmp_path, env={"VLLM_STRICT": "1"}, module=module) as server:

        def canary() -> str:
            body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answer = server.post(GENERATE if demonstration else COMPLETIONS, body)
            assert answer.status == 200, answer.text
            return str(answer.json["text"] if demonstration else answer.json["choices"][0]["text"])

        before, wrong = canary(), []
        for start in range(0, len(todo), 50):
            wrong += wrongly_answered(server, todo[start : start + 50])
            assert canary() == before, todo[start : start + 50]
        print(
            f"T28: {kind}: {len(wrong)} of {len(todo)} requests ({len(cases[200])} in order) taken or refused wrongly"
        )
        assert not wrong, f"{len(wrong)} of {len(todo)}:\n" + "\n".join(wrong[:40])


def test_odd_words_and_biases_leave_the_neighbours_alone(steady: Server) -> None:
    words: tuple[list[Any], ...] = ([""], ["\t"], ["</s>"], ["<|user|>"], ["世界"], ["x"] * 500, ["a" * 5000])
    for bad_words in words:
        answer = steady.post("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "bad_words": bad_words})
        assert answer.status in (200, 400), answer.text
    keys: tuple[str, ...] = ("", " 5", "5 ", "+5", "5.0", "a", "0x5", "१", "5_0", "1e1", "-0")
    for key in keys:
        answer = steady.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "logit_bias": {key: 1.0}})
        assert answer.status in (200, 400), answer.text
    for value in (1e308, -1e308, 101, -101, True, "1", None, [1]):
        answer = steady.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "logit_bias": {"5": value}})
        assert answer.status in (200, 400), answer.text
