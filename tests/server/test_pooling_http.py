"""The routes of models that pool, by the official client and by plain requests: the same numbers as offline."""

from __future__ import annotations

import asyncio
import base64
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import openai
import pytest

from tests.server.http_server import MODEL, Server
from tests.tiny_encoders import save_bert
from vllm import LLM
from vllm.entrypoints.openai import pooling
from vllm.entrypoints.openai.context import Prompt, ServerContext
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.pooling import Pooled, _Held
from vllm.entrypoints.openai.sampling import RequestLimits

TEXTS = ["The capital of France is Paris.", "Hello, my name is Ada.", "Numbers: 0 1 2 3", "世界", "The capital"]
DIMENSIONS = {"matryoshka_dimensions": [8, 16, 64]}  # of 48


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("embedder")
    save_bert(folder, template=True, **DIMENSIONS)
    with Server(folder, "--dtype", "float32") as running:
        yield running, folder


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("scorer")
    save_bert(folder, classes=1, id2label={0: "relevance"})
    with Server(folder, "--dtype", "float32") as running:
        yield running, folder


@pytest.fixture(scope="module")
def vectors(embedder) -> dict[str, list[float]]:
    with LLM(str(embedder[1]), dtype="float32") as llm:
        return {text: output.outputs.embedding for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True)}


def test_the_official_client_embeds(embedder, vectors) -> None:
    client = openai.OpenAI(api_key="none", base_url=embedder[0].url + "/v1")
    answer = client.embeddings.create(model=MODEL, input=TEXTS)  # which asks for base64 by itself
    assert [item.index for item in answer.data] == list(range(len(TEXTS))) and answer.object == "list"
    for text, item in zip(TEXTS, answer.data, strict=True):
        np.testing.assert_allclose(item.embedding, vectors[text], atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    one = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose(one.data[0].embedding, vectors[TEXTS[0]], atol=1e-6)
    short = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8, encoding_format="float")
    head = np.array(vectors[TEXTS[0]][:8])
    np.testing.assert_allclose(short.data[0].embedding, head / np.linalg.norm(head), atol=1e-5)


def test_token_ids_conversations_and_cut_texts(embedder, vectors) -> None:
    server = embedder[0]
    ids = server.post("/tokenize", {"prompt": TEXTS[1]}).json["tokens"]
    for given in (ids, [ids], [TEXTS[1]]):
        answer = server.post("/v1/embeddings", {"input": given}).json
        np.testing.assert_allclose(answer["data"][0]["embedding"], vectors[TEXTS[1]], atol=1e-6)
        assert answer["id"].startswith("embd-") and answer["usage"]["prompt_tokens"] == len(ids)
    chat = server.post("/v1/embeddings", {"messages": [{"role": "user", "content": "Hello"}]}).json
    rendered = server.post("/v1/embeddings", {"input": "<|user|>Hello</s>", "add_special_tokens": False}).json
    assert chat["data"] == rendered["data"]
    cut = server.post("/v1/embeddings", {"input": TEXTS[1], "truncate_prompt_tokens": 5}).json
    same = server.post("/v1/embeddings", {"input": [*ids[:4], ids[-1]]}).json
    assert cut["usage"]["prompt_tokens"] == 5
    np.testing.assert_allclose(cut["data"][0]["embedding"], same["data"][0]["embedding"], atol=1e-6)


def test_pooling_and_scores_of_an_embedder(embedder, vectors) -> None:
    server = embedder[0]
    pooled = server.post("/pooling", {"input": TEXTS, "encoding_format": "base64"}).json
    for text, item in zip(TEXTS, pooled["data"], strict=True):
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(item["data"]), "<f4"), vectors[text], atol=1e-6)
    scores = [float(np.dot(vectors[TEXTS[0]], vectors[text])) for text in TEXTS[1:]]
    for path in ("/score", "/v1/score"):
        found = server.post(path, {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json
        np.testing.assert_allclose([item["score"] for item in found["data"]], scores, atol=1e-5)
    ranked = server.post("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2}).json
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:2]
    assert [item["index"] for item in ranked["results"]] == best
    assert ranked["results"][0]["document"] == {"text": TEXTS[1:][best[0]]}


def test_a_cross_encoder_scores_ranks_and_classifies(scorer) -> None:
    server, folder = scorer
    with LLM(str(folder), dtype="float32") as llm:
        offline = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:])]
        pairs = [output.outputs.score for output in llm.score(TEXTS[1:3], TEXTS[3:])]
        probabilities = llm.classify(TEXTS)
    found = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json
    np.testing.assert_allclose([item["score"] for item in found["data"]], offline, atol=1e-6)
    found = server.post("/score", {"text_1": TEXTS[1:3], "text_2": TEXTS[3:]}).json
    np.testing.assert_allclose([item["score"] for item in found["data"]], pairs, atol=1e-6)
    documents: list[Any] = [{"text": TEXTS[1]}, *TEXTS[2:]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = server.post(path, {"query": TEXTS[0], "documents": documents}).json
        scores = [item["relevance_score"] for item in ranked["results"]]
        assert scores == sorted(scores, reverse=True)
        np.testing.assert_allclose(sorted(scores), sorted(offline), atol=1e-6)
        assert ranked["usage"]["total_tokens"] > 0 and ranked["id"].startswith("rerank-")
    classes = server.post("/classify", {"input": TEXTS}).json["data"]
    for item, output in zip(classes, probabilities, strict=True):
        np.testing.assert_allclose(item["probs"], output.outputs.probs, atol=1e-6)
        assert item["label"] == "relevance" and item["num_classes"] == 1


def test_without_the_last_step(embedder, scorer) -> None:
    """use_activation=false: vectors of any length, and scores whose sigmoid is what comes otherwise."""
    raw = {"use_activation": False}
    (vector,) = embedder[0].post("/v1/embeddings", {"input": "a", **raw}).json["data"]
    assert np.linalg.norm(vector["embedding"]) > 2
    pair = {"text_1": TEXTS[0], "text_2": TEXTS[1]}
    ranking = {"query": TEXTS[0], "documents": [TEXTS[1]]}
    (score,) = scorer[0].post("/score", pair).json["data"]
    (logit,) = scorer[0].post("/score", {**pair, **raw}).json["data"]
    (ranked,) = scorer[0].post("/rerank", {**ranking, **raw}).json["results"]
    assert 1 / (1 + np.exp(-logit["score"])) == pytest.approx(score["score"], abs=1e-5)
    assert ranked["relevance_score"] == pytest.approx(logit["score"], abs=1e-5)


def test_classes_of_each_token_are_not_one_of_the_prompt(tmp_path: Path) -> None:
    save_bert(tmp_path, classes=2)
    with Server(tmp_path, "--override-pooler-config", '{"pooling_type": "ALL"}') as server:
        refused = server.post("/classify", {"input": "a"})
        assert refused.status == 400 and "answer for each token" in refused.text
        assert np.shape(server.post("/pooling", {"input": "a"}).json["data"][0]["data"]) == (3, 2)


def test_classes_without_names_have_those_of_transformers(tmp_path: Path) -> None:
    """Of two classes with their usual names transformers writes neither names nor number to config.json."""
    save_bert(tmp_path, classes=2)
    assert "id2label" not in (tmp_path / "config.json").read_text()
    with Server(tmp_path, "--dtype", "float32") as server:
        for item in server.post("/classify", {"input": TEXTS}).json["data"]:
            assert item["label"] == f"LABEL_{np.argmax(item['probs'])}"


WRONG = [
    ("/v1/embeddings", {"input": "a", "dimensions": 7}, "only supports [8, 16, 64] matryoshka dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 64}, 'Model "tiny" has embeddings of 48 dimensions'),
    ("/pooling", {"input": "a", "dimensions": 64}, 'Model "tiny" has embeddings of 48 dimensions'),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "Dimensions must be greater than 0"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": []}, "must not be empty"),
    ("/v1/embeddings", {"input": [[]]}, "must not be empty"),
    ("/v1/embeddings", {}, "either `input` or `messages`"),
    ("/v1/embeddings", {"input": "a " * 300}, "maximum context length"),
    ("/v1/embeddings", {"input": "a " * 100_000}, "maximum context length"),
    ("/v1/embeddings", {"input": [5] * 200}, "maximum context length"),
    ("/v1/embeddings", {"input": [100_000]}, "out of vocabulary"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "At most 2048 texts"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "additional_data": 1}, "additional_data is not available"),
    ("/pooling", {"input": "a", "task": "classify"}, "not for 'classify'"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "1:1, 1:N or N:N"),
    ("/score", {"text_1": "a", "text_2": []}, "At least one text_pair element must be given"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/classify", {"input": "a"}, "The model does not support Classification API"),
    ("/v1/completions", {"prompt": "a"}, "does not support Completions API; it is for: encode, embed, score."),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "does not support Chat Completions API"),
]


@pytest.mark.parametrize(("path", "body", "message"), WRONG)
def test_what_is_wrong_is_said(embedder, path: str, body: dict[str, Any], message: str) -> None:
    answer = embedder[0].post(path, body)
    assert answer.status == 400 and message in answer.json["error"]["message"]


def test_answers_have_room_for_so_many_numbers(monkeypatch) -> None:
    """Of one request's texts, and of all requests; what a request took is free when it is gone, however it ended."""
    engine: Any = None
    context = ServerContext(engine, ("m",), "m", 1, {}, limits=RequestLimits(max_pooled_numbers=20))

    async def merge(prompts: list[Any]) -> Any:
        for i in range(len(prompts)):
            yield i, SimpleNamespace(outputs=SimpleNamespace(array=np.zeros((2, 4), "f4")), finished=True)

    def answer(prompts: int) -> tuple[Pooled, Any]:
        work = Pooled("id", "m", 0, [cast("Prompt", None)] * prompts, _Held(context))
        return work, asyncio.run(work.outputs())

    monkeypatch.setattr(pooling, "merge", merge)
    monkeypatch.setattr(pooling, "FEW_NUMBERS", 8)
    kept = answer(2)
    assert context.pooled_numbers == 16
    with pytest.raises(APIError, match="more than 20 numbers") as error:
        answer(3)
    assert error.value.status == 400
    error = None
    gc.collect()
    assert context.pooled_numbers == 16
    others = [answer(2)]
    with pytest.raises(APIError, match="Try again later") as error:
        others.append(answer(2))
    assert error.value.status == 503
    others.append(answer(1))  # for which there is always room
    del kept, others, error
    gc.collect()
    assert context.pooled_numbers == 0
    monkeypatch.setattr(context, "limits", RequestLimits(max_pooled_numbers=3))
    assert len(answer(1)[1]) == 1  # of one text, as many as it has
