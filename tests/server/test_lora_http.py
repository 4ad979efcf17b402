"""Adapters over HTTP: served as models beside their base, loaded, unloaded and reloaded while the server runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file

from tests.lora.adapters import save_adapter
from tests.lora.test_added_tokens import save_with_tokens
from tests.server.http_server import MODEL, Server
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai import routes
from vllm.entrypoints.openai.adapters import ServedAdapters, parse_lora_modules, parse_prompt_adapters
from vllm.entrypoints.openai.errors import APIError
from vllm.lora.request import LoRARequest
from vllm.prompt_adapter.request import PromptAdapterRequest

PROMPT = "The capital of France is"
SOFT = ("soft", "softer")  # prompt adapters


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("lora")
    base = save_llama(root / "base", sharpness=2.0)
    adapters = [root / "allowed" / name for name in ("first", "second", "third", "changing")]
    for seed, folder in enumerate(adapters):
        save_adapter(base, folder, rank=8, seed=seed)
    save_adapter(base, root / "found" / "by-name", rank=8, seed=2)  # as "third"
    save_with_tokens(base, root / "found" / "with-tokens", ["<new0>", "<new1>"])
    (root / "found" / "broken").mkdir()
    (root / "found" / "broken" / "adapter_config.json").write_text("{")
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    for count, name in enumerate(SOFT, 3):
        folder = root / name
        folder.mkdir()
        config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": count}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, width, generator=generator)
        save_file({"prompt_embeddings": rows}, folder / "adapter_model.safetensors")
    return base, adapters


@pytest.fixture(scope="module")
def answers(folders: tuple[Path, list[Path]]) -> dict[str, str]:
    """Adapter -> greedy text of the offline engine."""
    base, adapters = folders
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = {}
    soft: dict[str, Any] = {"enable_prompt_adapter": True, "max_prompt_adapter_token": 4}
    with LLM(str(base), dtype="float32", enable_lora=True, max_loras=4, num_gpu_blocks_override=100, **soft) as llm:
        for i, folder in enumerate(adapters, start=1):
            (output,) = llm.generate(
                PROMPT, params, lora_request=LoRARequest(folder.name, i, str(folder)), use_tqdm=False
            )
            found[folder.name] = output.outputs[0].text
        for i, name in enumerate(SOFT, 1):
            request = PromptAdapterRequest(name, i, str(base.parent / name), i + 2)
            (output,) = llm.generate(PROMPT, params, prompt_adapter_request=request, use_tqdm=False)
            found[name] = output.outputs[0].text
        found["base"] = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    return found


@pytest.fixture(scope="module")
def lora_server(folders: tuple[Path, list[Path]]) -> Iterator[Server]:
    base, adapters = folders
    second = json.dumps({"name": "second", "path": str(adapters[1]), "base_model_name": "parent"})
    flags = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--dtype", "float32"]
    modules = ["--lora-modules", f"first={adapters[0]}", second, "--lora-root", str(adapters[0].parent)]
    found = str(adapters[0].parent.parent / "found")
    soft = ["--enable-prompt-adapter", "--max-prompt-adapters", "1", "--max-prompt-adapter-token", "4"]
    paths = [str(base.parent / name) for name in SOFT]
    soft += ["--prompt-adapters", f"{SOFT[0]}={paths[0]}", json.dumps({"name": SOFT[1], "path": paths[1]})]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LORA_RESOLVER_CACHE_DIR": found}
    with Server(base, *flags, *modules, *soft, env=env) as running:
        yield running


def complete(server: Server, model: str) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body)


def test_adapters_and_their_base_answer_side_by_side(
    lora_server: Server, answers: dict[str, str], folders: tuple[Path, list[Path]]
) -> None:
    with openai.OpenAI(base_url=lora_server.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        cards = {card.id: card.model_dump() for card in client.models.list().data}
        assert (cards["first"]["parent"], cards["second"]["parent"], cards[MODEL]["parent"]) == (MODEL, "parent", None)
        assert client.models.retrieve("second").model_dump()["root"].endswith("second")
        for name in (MODEL, "first", "second", "first"):
            options = {"temperature": 0.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
            answer = client.completions.create(model=name, prompt=PROMPT, **options)
            assert answer.model == name
            assert answer.choices[0].text == answers["base" if name == MODEL else name]
            chunks = list(client.completions.create(model=name, prompt=PROMPT, stream=True, **options))
            assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
        messages = [{"role": "user", "content": "Hello"}]
        chats = [
            client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=12)
            for name in (MODEL, "first")
        ]
        assert chats[0].choices[0].message.content != chats[1].choices[0].message.content
        assert [cards[name]["root"] for name in ("first", MODEL)] == [str(folders[1][0]), str(folders[0])]


def test_two_adapters_and_their_base_answer_at_once(lora_server: Server, answers: dict[str, str]) -> None:
    """Interleaved streams of one client, prompt adapters among them."""

    async def ask(client: openai.AsyncOpenAI, name: str) -> tuple[str, str]:
        stream = await client.completions.create(
            model=name, prompt=PROMPT, temperature=0.0, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
        )
        return name, "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(names: list[str]) -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=lora_server.url + "/v1", api_key="EMPTY", max_retries=0) as client:
            return list(await asyncio.gather(*(ask(client, name) for name in names)))

    for name, text in asyncio.run(ask_all([MODEL, "first", "second", *SOFT] * 4)):
        assert text == answers["base" if name == MODEL else name]


def test_prompt_adapters_are_models(lora_server: Server, answers: dict[str, str]) -> None:
    cards = {card["id"]: card for card in lora_server.get("/v1/models").json["data"]}
    for name in SOFT:
        assert (cards[name]["parent"], Path(cards[name]["root"]).name) == (MODEL, name)
        assert lora_server.get(f"/v1/models/{name}").json == cards[name]
        answer = complete(lora_server, name).json
        assert (answer["model"], answer["choices"][0]["text"]) == (name, answers[name])
        assert answer["usage"]["prompt_tokens"] == complete(lora_server, MODEL).json["usage"]["prompt_tokens"]
    assert len({answers[name] for name in (*SOFT, "base")}) == 3
    taken = lora_server.post("/v1/load_lora_adapter", {"lora_name": SOFT[0], "lora_path": "x"})
    assert taken.status == 400 and "has already been loaded" in taken.json["message"]
    assert lora_server.post("/v1/unload_lora_adapter", {"lora_name": SOFT[0]}).status == 404
    # what is left for the answer is what the virtual tokens leave
    body = {"model": SOFT[1], "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    whole = lora_server.post("/v1/chat/completions", {**body, "ignore_eos": True}).json["usage"]["total_tokens"]
    base = lora_server.post("/v1/chat/completions", {**body, "model": MODEL, "ignore_eos": True}).json
    assert base["usage"]["total_tokens"] - whole == 4


def test_adapters_that_run_are_told_to_prometheus(lora_server: Server, answers: dict[str, str]) -> None:
    with openai.OpenAI(base_url=lora_server.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        options: Any = {"max_tokens": 400, "extra_body": {"ignore_eos": True, "stream_interval": 1}}
        stream = client.completions.create(model="first", prompt=PROMPT, stream=True, **options)
        for index, _ in enumerate(stream):
            if index == 1:
                text = lora_server.get("/metrics").text
        assert 'running_lora_adapters="first"' in text, text
    assert 'max_lora="2"' in text and 'waiting_lora_adapters=""' in text


def test_adapters_come_and_go(lora_server: Server, folders: tuple[Path, list[Path]], answers: dict[str, str]) -> None:
    base, adapters = folders
    load = {"lora_name": "third", "lora_path": str(adapters[2])}
    assert complete(lora_server, "third").status == 404
    answer = lora_server.post("/v1/load_lora_adapter", load)
    assert (answer.status, answer.text) == (200, "Success: LoRA adapter 'third' added successfully.")
    assert complete(lora_server, "third").json["choices"][0]["text"] == answers["third"]
    again = lora_server.post("/v1/load_lora_adapter", load)
    assert again.status == 400 and "has already been loaded" in again.json["message"]
    assert again.json["type"] == "InvalidUserInput"
    gone = lora_server.post("/v1/unload_lora_adapter", {"lora_name": "third"})
    assert (gone.status, gone.text) == (200, "Success: LoRA adapter 'third' removed successfully.")
    assert complete(lora_server, "third").status == 404
    assert lora_server.post("/v1/unload_lora_adapter", {"lora_name": "third"}).status == 404
    # changed weights under the same name give the new answer
    changing = {"lora_name": "changing", "lora_path": str(adapters[3])}
    lora_server.post("/v1/load_lora_adapter", changing)
    assert complete(lora_server, "changing").json["choices"][0]["text"] == answers["changing"]
    save_adapter(base, adapters[3], rank=8, seed=2)  # as "third"
    lora_server.post("/v1/unload_lora_adapter", changing)
    lora_server.post("/v1/load_lora_adapter", changing)
    assert complete(lora_server, "changing").json["choices"][0]["text"] == answers["third"]
    lora_server.post("/v1/unload_lora_adapter", changing)


def test_adapters_in_the_folder_of_the_operator_are_found_by_name(lora_server: Server, answers: dict[str, str]) -> None:
    for _ in range(2):
        assert complete(lora_server, "by-name").json["choices"][0]["text"] == answers["third"]
    assert "by-name" in [card["id"] for card in lora_server.get("/v1/models").json["data"]]
    for name in ("absent", "../allowed/third", "..", ".", "by-name/", "x" * 300):
        assert complete(lora_server, name).status == 404, name
    broken = complete(lora_server, "broken")
    assert broken.status == 400 and "neither adapter_model.safetensors" in broken.json["message"]
    unload = {"lora_name": "by-name"}
    assert lora_server.post("/v1/unload_lora_adapter", unload).status == 200
    messages = [{"role": "user", "content": "Hi"}]
    for path, fields in (
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": messages}),
    ):
        for model, status in (("by-name", 200), ("absent", 404)):
            assert lora_server.post(path, {"model": model, **fields}).status == status, path
        assert lora_server.post("/v1/unload_lora_adapter", unload).status == 200


def test_adapters_are_found_by_name_for_what_is_pooled(folders: tuple[Path, list[Path]]) -> None:
    base, adapters = folders
    found = base.parent / "found"
    with LLM(str(base), task="embed", enable_lora=True, dtype="float32") as llm:
        request = LoRARequest("third", 1, str(adapters[2]))
        expected, plain = (llm.encode(PROMPT, lora_request=r, use_tqdm=False)[0].outputs.data for r in (request, None))
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LORA_RESOLVER_CACHE_DIR": str(found)}
    with Server(base, "--task", "embed", "--enable-lora", "--dtype", "float32", env=env) as server:
        answer = server.post("/v1/embeddings", {"model": "by-name", "input": PROMPT}).json
        assert answer["model"] == "by-name"
        assert answer["data"][0]["embedding"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert answer["data"][0]["embedding"] != pytest.approx(plain.tolist(), abs=1e-2)
        assert server.post("/v1/embeddings", {"model": "absent", "input": PROMPT}).status == 404


def test_an_adapter_brings_tokens_of_its_own(lora_server: Server, folders: tuple[Path, list[Path]]) -> None:
    """Texts in and out by its tokenizer; the base knows none of them."""
    base = folders[0]
    prompt, folder = "Hello <new1> and", base.parent / "found" / "with-tokens"
    with LLM(str(base), dtype="float32", enable_lora=True, num_gpu_blocks_override=100) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate(prompt, params, lora_request=LoRARequest("n", 1, str(folder)), use_tqdm=False)
        width = llm.llm_engine.model_config.get_vocab_size()
    assert max(output.outputs[0].token_ids) >= width and "<new" in output.outputs[0].text
    with openai.OpenAI(base_url=f"{lora_server.url}/v1", api_key="none") as client:
        options: Any = {"max_tokens": 12, "temperature": 0, "logprobs": 1, "extra_body": {"ignore_eos": True}}
        done = client.completions.create(model="with-tokens", prompt=prompt, **options)
        assert done.choices[0].text == output.outputs[0].text
        assert done.usage is not None and done.usage.prompt_tokens == len(output.prompt_token_ids)
        assert any(token.startswith("<new") for token in done.choices[0].logprobs.tokens)
        streamed = client.completions.create(
            model="with-tokens", prompt=output.prompt_token_ids, stream=True, **options
        )
        assert "".join(event.choices[0].text for event in streamed) == output.outputs[0].text
        echoed = client.completions.create(model="with-tokens", prompt=output.prompt_token_ids, echo=True, max_tokens=1)
        assert "Hello <new1> and" in echoed.choices[0].text
        with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
            client.completions.create(model=MODEL, prompt=output.prompt_token_ids, max_tokens=2)
    asked = {"model": "with-tokens", "prompt": prompt, "return_token_strs": True}
    found = lora_server.post("/tokenize", asked).json
    assert found["tokens"] == output.prompt_token_ids and "<new1>" in found["token_strs"]
    back = {"model": "with-tokens", "tokens": found["tokens"]}
    assert prompt in lora_server.post("/detokenize", back).json["prompt"]
    assert "<new1>" not in lora_server.post("/tokenize", {**asked, "model": MODEL}).json["token_strs"]
    assert lora_server.post("/detokenize", {**back, "model": MODEL}).status == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x" * 300, "lora_path": "y"}, "at most 256 characters"),
        ({"lora_name": MODEL, "lora_path": "y"}, "has already been loaded"),
        ({"lora_name": "x", "lora_path": "/etc"}, "--lora-root"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "NUL"),
        ({"lora_name": "x", "lora_path": "{root}/../../.."}, "--lora-root"),
        ({"lora_name": "x", "lora_path": "{root}/nothing"}, "No adapter found"),
        ({"lora_name": "x", "lora_path": "~nobody-of-that-name/y"}, "lora_path is no folder"),
        ({"lora_name": 5, "lora_path": "y"}, "lora_name"),
    ],
)
def test_what_cannot_be_loaded_is_a_400_with_the_reason(
    body: dict[str, Any], message: str, lora_server: Server, folders: tuple[Path, list[Path]]
) -> None:
    root = str(folders[1][0].parent)
    sent = {key: value.replace("{root}", root) if isinstance(value, str) else value for key, value in body.items()}
    answer = lora_server.post("/v1/load_lora_adapter", sent)
    assert answer.status == 400
    assert message in answer.json["message"]
    assert lora_server.alive


def test_adapters_cannot_be_changed_unless_the_operator_allows_it(server: Server) -> None:
    for route in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert server.post(route, {"lora_name": "a", "lora_path": "b"}).status == 400


@pytest.mark.parametrize("words", [["a"], ["=x"], ["a="], ['{"name": "a"}'], ["{"], ["a=x", "a=y"]])
def test_modules_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="--lora-modules"):
        parse_lora_modules(words)
    with pytest.raises(ValueError, match="--prompt-adapters"):
        parse_prompt_adapters(words)


class Blocked:
    """An engine that reads an adapter when it is let."""

    def __init__(self) -> None:
        self.let, self.began = asyncio.Event(), asyncio.Event()
        self.removed: list[int] = []

    async def add_lora(self, request: LoRARequest) -> bool:
        self.began.set()
        await self.let.wait()
        return True

    async def remove_lora(self, number: int) -> bool:
        self.removed.append(number)
        return True


def test_a_name_that_nobody_knows_waits_for_no_other_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "adapter_config.json").write_text("{}")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(tmp_path))

    async def run() -> None:
        engine = Blocked()
        adapters = ServedAdapters(engine)  # type: ignore[arg-type]
        loading = asyncio.ensure_future(adapters.load("slow", "x", ["base"]))
        await engine.began.wait()
        await adapters.discover("nobody", ["base"])
        assert adapters.find("nobody") is None and not loading.done()
        again = asyncio.ensure_future(adapters.load("slow", "y", ["base"]))
        found = [asyncio.ensure_future(adapters.discover("known", ["base"])) for _ in range(2)]
        await asyncio.sleep(0)
        engine.let.set()
        await asyncio.gather(loading, *found)
        with pytest.raises(APIError, match="has already been loaded"):
            await again
        assert [request.lora_name for request in adapters.all()] == ["slow", "known"]
        assert not engine.removed and not adapters._changing, "no name is held any more"

    asyncio.run(run())


def test_a_load_that_nobody_waits_for_is_given_up() -> None:
    async def run() -> None:
        engine = Blocked()
        adapters = ServedAdapters(engine)  # type: ignore[arg-type]
        loading = asyncio.ensure_future(adapters.load("slow", "x", ["base"]))
        await engine.began.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert engine.removed == [1] and adapters.find("slow") is None
        engine.let.set()
        await adapters.load("slow", "x", ["base"])
        assert adapters.find("slow") is not None

    asyncio.run(run())


def test_a_client_that_leaves_takes_its_load_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine, gone = Blocked(), asyncio.Event()
        adapters = ServedAdapters(engine)  # type: ignore[arg-type]
        body = SimpleNamespace(lora_name="slow", lora_path="x")

        async def read(*_: Any) -> Any:
            return body

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        monkeypatch.setattr(routes, "_changeable_adapters", lambda _: adapters)
        monkeypatch.setattr(routes, "context_of", lambda _: SimpleNamespace(fixed_names=["base"]))
        monkeypatch.setattr(routes, "read", read)
        request: Any = SimpleNamespace(receive=receive)
        loading = asyncio.ensure_future(routes.load_lora_adapter(request))
        await engine.began.wait()
        gone.set()
        assert (await loading).status_code == 499
        assert engine.removed == [1] and not adapters.all()
        gone.clear()
        engine.let.set()
        assert (await routes.load_lora_adapter(request)).status_code == 200
        assert [known.lora_name for known in adapters.all()] == ["slow"]

    asyncio.run(run())


def test_a_name_of_the_hub_is_no_way_around_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server runs in a folder that may be loaded from."""
    monkeypatch.chdir(tmp_path)
    assert ServedAdapters(None, roots=[str(tmp_path)])._inside_root("owner/name") == str(tmp_path / "owner" / "name")  # type: ignore[arg-type]
    assert ServedAdapters(None)._inside_root("owner/name") == "owner/name"  # type: ignore[arg-type]
