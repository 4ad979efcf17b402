"""T28: a token id is taken only if the model can produce it, wherever a request may name one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.server.http_server import Server
from tests.tiny_models import save_tokenizer

BAD: tuple[Any, ...] = (-(2**64), -(2**63), -(2**31), -320, -2, -1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**299)
NO_IDS: tuple[Any, ...] = (True, False, 1.0, 1e300, "1", "", None, [], [1], {}, {"a": 1})


def places(token: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every field of every route that takes token ids, with `token` in it."""
    text = {"prompt": "Hi", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    completions, chats = "/v1/completions", "/v1/chat/completions"
    found = {
        "prompt": (completions, {"prompt": [5, token], "max_tokens": 2}),
        "prompt, alone": (completions, {"prompt": [token], "max_tokens": 2}),
        "prompts": (completions, {"prompt": [[5], [5, token]], "max_tokens": 2}),
        "detokenize": ("/detokenize", {"tokens": [5, token]}),
    }
    for route, body in ((completions, text), (chats, chat)):
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


def test_only_ids_of_the_model_are_taken(steady: Server, tmp_path) -> None:
    width = save_tokenizer(tmp_path)  # the model's logits are as wide as its tokenizer
    good = (0, 2, 5, width // 2, width - 2, width - 1)
    beyond = (width, width + 1, width + 2, 2 * width, 151_936)
    todo = [(name, *place, 200) for token in good for name, place in places(token).items()]
    todo += [
        (name, *place, 400)
        for token in (*BAD, *beyond, *NO_IDS)
        for name, place in places(token).items()
        if name != "prompt, alone" or token not in ("1", [1])  # a text, and a list of ids in a list
    ]
    assert len(todo) > 350

    def send(case: tuple[str, str, dict[str, Any], int]) -> str | None:
        name, route, body, status = case
        answer = steady.post(route, body)
        return None if answer.status == status else f"{name}: {body!r:.200} -> {answer.status} {answer.text[:200]}"

    with ThreadPoolExecutor(4) as pool:
        wrong = [problem for problem in pool.map(send, todo) if problem]
    print(f"T28: {len(wrong)} of {len(todo)} requests taken or refused wrongly")
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
