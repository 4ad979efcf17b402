"""`vllm run-batch`: one answer per line in order, bad lines do no harm, answers are the engine's own."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_encoders import save_bert
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai import run_batch
from vllm.entrypoints.openai.protocol import CompletionRequest, checked
from vllm.entrypoints.openai.run_batch import LongLine, main, read_lines, serve_metrics
from vllm.metrics.registry import EngineMetrics

PROMPT = "The capital of France is"


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "demo", **body}})


GREEDY = {"temperature": 0, "max_tokens": 8}
CHAT = [{"role": "user", "content": "What is 7 + 5?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the current weather", "parameters": PARAMETERS},
}
GOOD = [line(f"c{i}", "/v1/completions", prompt=PROMPT, **GREEDY) for i in range(40)]
LINES = [
    (line("chat", "/v1/chat/completions", messages=CHAT, **GREEDY), 200, ""),
    (line("plain", "/v1/completions", prompt=PROMPT, stream=False, **GREEDY), 200, ""),
    (line("stream", "/v1/completions", prompt=PROMPT, stream=True, **GREEDY), 400, "stream mode"),
    (line("tools", "/v1/chat/completions", messages=WEATHER, tools=[TOOL], temperature=0), 200, ""),
    (line("x", "/v1/completions", prompt=PROMPT).replace('"x"', "7"), 400, "custom_id must be a string"),
    (line("other-model", "/v1/completions", prompt=PROMPT).replace('"demo"', '"gpt-9"'), 404, "does not exist"),
    (line("embed", "/v1/embeddings", input="x"), 400, "The model does not support Embeddings API"),
    (line("route", "/v1/moderations", input="x"), 400, "url must be one of /v1/chat/completions, /v1/completions, "),
    (line("hot", "/v1/completions", prompt=PROMPT, temperature=-1), 400, "temperature"),
    (line("typed", "/v1/completions", prompt=PROMPT, max_tokens="many"), 400, "max_tokens"),
    (line("long", "/v1/completions", prompt=[5] * 5000), 400, "maximum context length"),
    ('{"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}', 400, "POST"),
    ('{"custom_id": "bare", "url": "/v1/completions"}', 400, "body must be an object"),
    (line("nan", "/v1/completions", prompt=PROMPT, temperature=float("nan")), 400, "NaN is not JSON"),
    (line('c"\\ut', "/v1/completions", prompt='"custom_id": "prompt"')[:-5], 400, "not valid JSON"),
    ('{"custom_id": "one", "body": {"custom_id": "other"}', 400, "not valid JSON"),
    ("{not json", 400, "JSON"),
    ("[1, 2]", 400, "object"),
]


def texts(answer: dict[str, Any]) -> str:
    choice = answer["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_good_and_bad_lines_each_get_their_answer(tmp_path: Path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*GOOD, *(text for text, _, _ in LINES)]) + "\n\n")
    # Two running and a queue of three: the others must wait, not fail.
    small = ["--max-num-seqs", "2", "--max-num-queued-reqs", "3", "--max-model-len", "512"]
    small += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    # One line has a name that is none, another is no JSON: whose answers these are cannot be told.
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--model", "demo", *small]) == 1
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    assert len(answers) == len(GOOD) + len(LINES)
    assert len({a["id"] for a in answers}) == len(answers)

    params = SamplingParams(**GREEDY)
    llm = LLM(model="demo", max_model_len=512)
    completed = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text
    chatted = llm.chat(CHAT, params, use_tqdm=False)[0].outputs[0].text  # type: ignore[arg-type]
    for i, answer in enumerate(answers[: len(GOOD)]):
        assert answer["custom_id"] == f"c{i}" and answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert texts(answer) == completed
    bad = answers[len(GOOD) :]
    assert texts(bad[0]) == chatted and texts(bad[1]) == completed
    (call,) = bad[3]["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and "Paris" in call["function"]["arguments"]
    for answer, (text, status, message) in zip(bad, LINES, strict=True):
        assert answer["response"]["status_code"] == status, text
        if status != 200:
            assert message in answer["error"], text
            assert answer["response"]["body"]["error"]["code"] == status
    assert [a["custom_id"] for a in bad] == [
        *(
            "chat",
            "plain",
            "stream",
            "tools",
            7,
            "other-model",
            "embed",
            "route",
            "hot",
            "typed",
            "long",
            "get",
            "bare",
            "nan",
            'c"\\ut',
            None,
            None,
            None,
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "https://example.com/in.jsonl", "-o", "out"], "URLs are not fetched"),
        (["-i", "{tmp}/in.jsonl", "-o", "s3://bucket/out"], "URLs are not fetched"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/out", "--tool-call-parser", "nobody"], "invalid tool call parser"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/out", "--enable-auto-tool-choice"], "requires --tool-call-parser"),
        (["-i", "{tmp}/nowhere.jsonl", "-o", "{tmp}/out"], "There is no file"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/no/folder/out"], "There is no folder"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}"], "--output-file must be a file, but"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/../{tmp.name}/in.jsonl"], "--output-file is the input file"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/out", "--max-in-progress", "0"], "1 or more"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(arguments, message, tmp_path, capsys, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("the engine was made")

    monkeypatch.setattr("vllm.entrypoints.openai.api_server.make_engine", never)
    (tmp_path / "in.jsonl").write_text("{}\n")
    assert main(["run-batch", *(a.format(tmp=tmp_path) for a in arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("vllm run-batch: ") and message in error


def test_empty_lines_are_no_requests():
    assert list(read_lines(io.BytesIO(b"\n  \n{}\r\n\n[]"))) == [b"{}", b"[]"]
    marked = io.BytesIO(b"\xef\xbb\xbf{}\r\n[]\r\n")
    assert list(read_lines(marked)) == [b"{}", b"[]"], "a byte order mark is none either"
    assert list(read_lines(io.BytesIO())) == []


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (b'{"custom_id": "a", %s}', {b'"a"'}),
        (b'{%s, "custom_id" : "a\\"b"}', {b'"a\\"b"'}),
        (b'{"custom_id": "a", %s, "custom_id": "b"}', {b'"a"', b'"b"'}),
        (b'{%s, "custom_id": 7}', set()),
    ],
)
@pytest.mark.parametrize("length", range(500, 600, 7))
def test_of_a_line_beyond_the_limit_the_names_are_kept(text: bytes, ids: set[bytes], length: int, monkeypatch):
    """Wherever it is cut while it is read."""
    monkeypatch.setattr(run_batch, "MAX_LINE_BYTES", 60)
    monkeypatch.setattr(run_batch, "_MAX_ID_BYTES", 40)
    longest = b"1" * 60
    lines = [longest, text % (b"x" * length), longest + b"\r", b" " * 200, longest]
    assert list(read_lines(io.BytesIO(b"\n".join(lines)))) == [
        *(longest, LongLine(frozenset(ids)), longest, LongLine(frozenset()), longest)
    ]


def test_a_line_beyond_the_limit_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch, "MAX_LINE_BYTES", 1000)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = [line(f"long{i}", "/v1/completions", prompt="x" * size, **GREEDY) for i, size in enumerate((1000, 50_000))]
    source.write_text("\n".join([GOOD[0], *long, GOOD[1]]))
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--model", "demo", "--max-model-len", "512"]) == 0
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    assert [a["custom_id"] for a in answers] == ["c0", "long0", "long1", "c1"]
    assert [a["response"]["status_code"] for a in answers] == [200, 413, 413, 200]
    assert answers[1]["error"] == "The line is longer than 1000 bytes."


def idle_engine(ended: list[float]) -> Any:
    """An engine that is only asked for its model and to end."""

    async def shutdown(timeout: float) -> None:
        ended.append(timeout)

    model = SimpleNamespace(
        served_model_names=[], served_model_name="m", model="m", max_model_len=5, get_diff_sampling_param=dict
    )
    return SimpleNamespace(vllm_config=SimpleNamespace(model_config=model), shutdown=shutdown)


def test_what_was_answered_is_kept_when_the_run_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are written in order as they come, not all at the end."""

    async def answer(context: Any, text: bytes) -> dict[str, Any]:
        if text == b"2":
            raise RuntimeError("The engine is gone.")
        await asyncio.sleep(0.02 if text == b"0" else 0)
        return {"custom_id": text.decode(), "error": None}

    ended: list[float] = []
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(run_batch, "answer_line", answer)
    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(run_batch.run(idle_engine(ended), [b"0", b"1", b"2", b"3"], "assistant", 2, written.append))
    assert [item["custom_id"] for item in written] == ["0", "1"]
    assert ended == [0.0]


def test_lines_are_read_as_their_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are, and however long the first takes."""
    read, written, in_progress = 0, [], set()
    bound = 3 * run_batch.AHEAD

    def lines() -> Iterator[bytes]:
        nonlocal read
        for read in range(1, 1001):
            assert read - len(written) <= bound + 1 and len(in_progress) < 3
            yield b"%d" % read

    async def answer(context: Any, text: bytes) -> dict[str, Any]:
        in_progress.add(text)
        while text == b"1" and read < bound:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        in_progress.remove(text)
        return {"custom_id": text.decode(), "error": None}

    monkeypatch.setattr(run_batch, "answer_line", answer)
    asyncio.run(run_batch.run(idle_engine([]), lines(), "assistant", 3, written.append))
    assert [item["custom_id"] for item in written] == [str(i) for i in range(1, 1001)]


def test_an_answer_file_that_cannot_be_written_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(GOOD[0])
    monkeypatch.setattr("vllm.entrypoints.openai.api_server.make_engine", lambda args: pytest.fail("too late"))
    assert main(["run-batch", "-i", str(source), "-o", "/proc/answers.jsonl", "--model", "demo"]) == 1
    assert "/proc/answers.jsonl" in capsys.readouterr().err


def test_numbers_are_read_as_the_server_reads_them() -> None:
    read = checked(CompletionRequest, {"prompt": "x", "max_tokens": 3.0})
    assert read.max_tokens == 3


def test_metrics_are_served_while_a_batch_runs() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    engine: Any = SimpleNamespace(metrics=EngineMetrics("m", 128, {}))
    stop = serve_metrics(engine, "127.0.0.1", port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"vllm:num_requests_running" in answer.read()
        with pytest.raises(ValueError, match=f"Cannot serve metrics on 127.0.0.1:{port}"):
            serve_metrics(engine, "127.0.0.1", port)
    finally:
        stop()


def test_embeddings_and_scores_of_a_batch(tmp_path: Path):
    save_bert(tmp_path / "model")
    texts = ["The capital of France", "Hello"]
    lines = [
        {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": texts}},
        {"custom_id": "s", "method": "POST", "url": "/v1/score", "body": {"text_1": texts[0], "text_2": texts}},
        {"custom_id": "g", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    model = str(tmp_path / "model")
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--model", model, "--dtype", "float32"]) == 0
    embedded, scored, refused = (json.loads(text) for text in target.read_text().splitlines())
    with LLM(model, dtype="float32") as llm:
        wanted = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
        scores = [output.outputs.score for output in llm.score(texts[0], texts, use_tqdm=False)]
    found = embedded["response"]["body"]["data"]
    assert [item["embedding"] for item in found] == [pytest.approx(vector, abs=1e-6) for vector in wanted]
    assert [item["score"] for item in scored["response"]["body"]["data"]] == pytest.approx(scores, abs=1e-5)
    assert refused["error"] == "The model does not support Completions API; it is for: encode, embed, score."
