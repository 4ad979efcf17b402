"""`LLM` with models that pool: sentence-transformers' files, pairs, cut texts, refusals, and the guide's examples."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tests.entrypoints.test_examples import run
from tests.lora.adapters import save_adapter
from tests.server.engines import running
from tests.server.http_server import Server
from tests.tiny_encoders import save_bert, save_sentence_files, save_wordpiece
from tests.tiny_llama import assert_idle
from tests.tiny_models import save_llama
from vllm import LLM, PoolingParams, SamplingParams
from vllm.engine.texts import Texts
from vllm.engine.tokenizer import Tokenizer, TransformersTokenizer
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.lora.request import LoRARequest

TEXTS = ["The capital of France is Paris.", "Hello", "numbers 0 1 2 3 4 5 6 7 8 9 10 " * 6, "世界 🙂"]
TYPES = {"return_token_type_ids": True}  # which BERT's own tokenizer class does by itself
TANH = "torch.nn.modules.activation.Tanh"


def start(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", **options)


def pooled_by_transformers(model: Any, tokenizer: Any, mode: str, length: int) -> Tensor:
    """As sentence-transformers does it, one text after the other: [texts, hidden]."""
    found = []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0]
        found.append({"cls": states[0], "mean": states.mean(0), "lasttoken": states[-1]}[mode])
    return torch.stack(found)


@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
def test_sentence_transformers_files_are_followed(mode: str, tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    weight, bias = torch.randn(20, 48), torch.randn(20)
    dense = {"in_features": 48, "out_features": 20, "bias": True, "activation_function": TANH}
    with_dense = mode == "mean"
    save_sentence_files(tmp_path, mode, normalize=mode != "cls", **(dense if with_dense else {}))
    if with_dense:
        save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    with start(tmp_path) as llm:
        assert llm.model_config.max_model_len == 32 and llm.supported_tasks == ("encode", "embed", "score")
        outputs = llm.embed(TEXTS, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
        assert llm.model_config.embedding_width == len(outputs[0].outputs.embedding)
        hf_tokenizer = llm.get_tokenizer()
    want = pooled_by_transformers(model, hf_tokenizer, mode, 32)
    if with_dense:
        want = torch.tanh(want @ weight.T + bias)
    if mode != "cls":
        want = torch.nn.functional.normalize(want, dim=-1)
    torch.testing.assert_close(torch.tensor([o.outputs.embedding for o in outputs]), want, atol=2e-5, rtol=1e-5)
    assert len(outputs[2].prompt_token_ids) == 32 and outputs[2].prompt_token_ids[-1] == 3  # [SEP] is kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: rewrite(d / "1_Pooling/config.json", pooling_mode_max_tokens=True),
            "not supported, expected one of",
        ),
        (lambda d: rewrite(d / "1_Pooling/config.json", include_prompt=False), "include_prompt=false"),
        (
            lambda d: (d / "modules.json").write_text('[{"type": "x.Pooling", "path": "../secret"}]'),
            "not the name of a",
        ),
        (lambda d: (d / "modules.json").write_text('[{"type": "x.WordWeights", "path": ""}]'), "'WordWeights'"),
        (lambda d: (d / "modules.json").write_text("{"), "not valid JSON"),
        (lambda d: in_order(d, "Pooling", "Normalize", "Dense"), "a module Dense behind a module Normalize"),
        (lambda d: in_order(d, "Dense", "Pooling"), "a module Pooling behind a module Dense"),
        (lambda d: in_order(d, "Pooling", "Pooling"), "a module Pooling behind a module Pooling"),
    ],
)
def test_what_sentence_transformers_can_and_we_cannot_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    save_bert(tmp_path)
    save_sentence_files(tmp_path, "mean")
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        start(tmp_path)


def in_order(folder: Path, *kinds: str) -> None:
    """Let the folder have these modules behind its Transformer."""
    paths = {"Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": paths[kind]} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps([{"type": "x.Transformer", "path": ""}, *modules]))
    (folder / "2_Dense").mkdir(exist_ok=True)
    (folder / "2_Dense" / "config.json").write_text(json.dumps({"out_features": 48}))


def rewrite(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("wordpiece")
    save_wordpiece(folder)
    return load_tokenizer(folder)


VOCABULARY = ["capital", "of", "France", "numbers", "0", "1", "7", "hello", "name"]
words = st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=30).map(" ".join)


@settings(deadline=None, max_examples=80)
@given(first=words, second=st.none() | words, most=st.none() | st.integers(4, 40), special=st.booleans())
def test_pairs_are_cut_as_transformers_cuts_them(tokenizer, first, second, most, special) -> None:
    ids, begins = Texts(tokenizer, 10_000).pair(first, second, special, most)
    options = {"add_special_tokens": special, "truncation": "longest_first" if most else False, "max_length": most}
    want = tokenizer.hf_tokenizer(first, second, return_token_type_ids=True, **options)
    if second is not None and most is not None and len(ids) == most:  # which of two equal ones is cut first is open
        assert len(ids) == len(want["input_ids"])
        assert abs(sum(want["token_type_ids"]) - (len(ids) - (len(ids) if begins is None else begins))) <= 1
    else:
        assert ids == want["input_ids"]
    types = [int(begins is not None and i >= begins) for i in range(len(ids))]
    if len(ids) < (most or 10_000):
        assert types == want["token_type_ids"]


@settings(deadline=None, max_examples=40)
@given(first=words, seconds=st.lists(words, max_size=4), most=st.none() | st.integers(4, 40), special=st.booleans())
def test_one_text_and_several_are_the_pairs_one_by_one(tokenizer, first, seconds, most, special) -> None:
    texts = Texts(tokenizer, 10_000)
    assert list(texts.pairs(first, seconds, special, most)) == [texts.pair(first, s, special, most) for s in seconds]


@pytest.mark.parametrize("keep", [None, 8])
def test_a_text_that_stands_in_many_pairs_is_tokenized_once(tokenizer, monkeypatch, keep) -> None:
    """Spaces are no tokens here, so that no length of the text says that it cannot fit."""
    seen: list[int] = []

    def watch(name: str) -> None:
        whole = getattr(tokenizer, name)

        def counted(given: Any, *more: Any) -> Any:
            seen.append(sum(map(len, given)))
            return whole(given, *more)

        monkeypatch.setattr(tokenizer, name, counted)

    watch("encode")
    watch("_parts")
    found = list(Texts(tokenizer, 8).pairs(" " * 50_000, ["a"] * 100, True, keep))
    assert len(found) == 100 and len({str(pair) for pair in found}) == 1
    assert sum(seen) < 50_000 * 5


def test_pairs_with_too_many_tokens_together_are_refused(tmp_path: Path) -> None:
    save_bert(tmp_path, classes=1)
    with start(tmp_path) as llm:
        processor = llm.llm_engine.input_processor
        one = len(processor.pair("hello", "a")["prompt_token_ids"])
        assert len(processor.pairs("hello", ["a"] * 10, most=10 * one)) == 10
        with pytest.raises(ValueError, match=f"more than {10 * one - 1} tokens together"):
            processor.pairs("hello", ["a"] * 10, most=10 * one - 1)


def test_a_tokenizer_that_reads_a_text_anew_for_each_pair_refuses_long_ones(tokenizer) -> None:
    slow = TransformersTokenizer(tokenizer.hf_tokenizer)
    assert list(slow.encode_pairs("hello", ["a", "b"])) == [slow.encode_pair("hello", s) for s in ("a", "b")]
    with pytest.raises(ValueError, match="cannot be paired with 2000 others"):
        slow.encode_pairs("a" * 5000, ["a"] * 2000)


def test_a_cross_encoder_reads_both_texts(tmp_path: Path) -> None:
    model = save_bert(tmp_path, classes=1)
    with start(tmp_path) as llm:
        hf_tokenizer = llm.get_tokenizer()
        scores = [o.outputs.score for o in llm.score(TEXTS[0], TEXTS, use_tqdm=False, truncate_prompt_tokens=40)]
        paired = [o.outputs.score for o in llm.score(TEXTS[:2], TEXTS[2:], use_tqdm=False, truncate_prompt_tokens=40)]
        classes = llm.classify(TEXTS[:2], use_tqdm=False)
        with pytest.raises(ValueError, match="1:1, 1:N or N:N, got 2:3"):
            llm.score(TEXTS[:2], TEXTS[:3])
        with pytest.raises(ValueError, match="needs two texts"):
            llm.score({"prompt_token_ids": [5]}, "a")
        (short,) = llm.classify(TEXTS[0], use_tqdm=False, truncate_prompt_tokens=3)
        assert len(short.prompt_token_ids) == 3
        (same,) = llm.encode(TEXTS[0], use_tqdm=False, truncate_prompt_tokens=3)
        assert same.prompt_token_ids == short.prompt_token_ids
        with pytest.raises(ValueError, match=r"LLM.chat\(\) is only supported for generative models"):
            llm.chat([{"role": "user", "content": "a"}])
        with pytest.raises(ValueError, match="Embedding API is only enabled"):
            llm.embed("a")

    def wanted(first: str, second: str) -> float:
        inputs = hf_tokenizer(first, second, truncation=True, max_length=40, return_tensors="pt", **TYPES)
        with torch.no_grad():
            return model(**inputs).logits.sigmoid().item()

    assert scores == pytest.approx([wanted(TEXTS[0], text) for text in TEXTS], abs=1e-5)
    assert paired == pytest.approx([wanted(a, b) for a, b in zip(TEXTS[:2], TEXTS[2:], strict=True)], abs=1e-5)
    assert [len(o.outputs.probs) for o in classes] == [1, 1]


def save_newer_files(folder: Path, length: int, **settings: Any) -> None:
    """Further files as sentence-transformers 6 writes them: the longest text is the tokenizer's business there."""
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    if not (folder / "modules.json").exists():
        (folder / "modules.json").write_text(json.dumps([module]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"module_output_name": "scores"}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {}, **settings}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": length}))


def test_the_tokenizer_of_sentence_transformers_says_how_long_texts_are(tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    save_sentence_files(tmp_path, "mean")
    save_newer_files(tmp_path, 12)
    with start(tmp_path) as llm:
        assert llm.model_config.max_model_len == 12
        outputs = llm.embed(TEXTS, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
        want = torch.nn.functional.normalize(pooled_by_transformers(model, llm.get_tokenizer(), "mean", 12), dim=-1)
    torch.testing.assert_close(torch.tensor([o.outputs.embedding for o in outputs]), want, atol=2e-5, rtol=1e-5)
    save_newer_files(tmp_path, 10**30)  # of a tokenizer that does not know
    with start(tmp_path) as llm:
        assert llm.model_config.max_model_len == 96


def test_the_activation_that_a_cross_encoder_was_saved_with_counts(tmp_path: Path) -> None:
    model = save_bert(tmp_path, classes=1)
    with start(tmp_path) as llm:
        inputs = llm.get_tokenizer()(*TEXTS[:2], return_tensors="pt", **TYPES)
    with torch.no_grad():
        logit = model(**inputs).logits
    for name, wanted in (("linear.Identity", logit), ("activation.Sigmoid", logit.sigmoid())):
        save_newer_files(tmp_path, 96, activation_fn=f"torch.nn.modules.{name}")
        with start(tmp_path) as llm:
            (output,) = llm.score(*TEXTS[:2], use_tqdm=False)
        assert output.outputs.score == pytest.approx(wanted.item(), abs=1e-5)
    save_newer_files(tmp_path, 96, activation_fn=TANH)
    with pytest.raises(ValueError, match=r"config_sentence_transformers.json: the activation '.*Tanh' is not one of"):
        start(tmp_path)


def test_embeddings_score_by_their_cosine(tmp_path: Path) -> None:
    save_bert(tmp_path, matryoshka_dimensions=[8, 24, 64])
    with start(tmp_path) as llm:
        vectors = np.array([o.outputs.embedding for o in llm.embed(TEXTS, use_tqdm=False)])
        found = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        assert [o.outputs.score for o in found] == pytest.approx((vectors @ vectors[0]).tolist(), abs=1e-5)
        first, second = (o.prompt_token_ids for o in llm.embed(TEXTS[:2], use_tqdm=False))
        assert found[1].prompt_token_ids == [*first, 0, *second] and found[1].finished
        short = llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        cut = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose([o.outputs.embedding for o in short], cut, atol=1e-5)
        several = [PoolingParams(dimensions=8), *[PoolingParams()] * 3]
        assert [len(o.outputs.embedding) for o in llm.embed(TEXTS, pooling_params=several, use_tqdm=False)][:2] == [
            8,
            48,
        ]
        (old,) = llm.encode(TEXTS[0], use_tqdm=False)
        assert old.outputs.embedding == pytest.approx(vectors[0].tolist(), abs=1e-6)
        assert isinstance(old.outputs.data, Tensor)
        for call, message in (
            (lambda: llm.embed(TEXTS, pooling_params=several[:2]), "lengths of prompts and params"),
            (lambda: llm.embed("a", pooling_params=PoolingParams(dimensions=9)), "only supports"),
            (lambda: llm.embed("a", pooling_params=PoolingParams(64)), "has embeddings of 48 dimensions, got dimens"),
            (lambda: llm.encode("a", pooling_task="classify"), "not for 'classify'"),
            (lambda: llm.generate("a"), "this model pools"),
            (lambda: llm.classify("a"), "only enabled for `--task classify`"),
            (lambda: llm.embed("a " * 200), "longer than the maximum model length of 96"),
            (lambda: llm.embed([]) or pytest.fail("nothing"), "nothing"),
        ):
            with pytest.raises((ValueError, pytest.fail.Exception), match=message):
                call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "generate"}, "cannot generate text"),
        ({"task": "classify"}, "does not support the 'classify' task"),
        ({"task": "reward"}, "does not support the 'reward' task"),
        ({"enable_chunked_prefill": True}, "sees the whole prompt"),
        ({"enable_prefix_caching": True}, "sees the whole prompt"),
        ({"override_pooler_config": {"pooling_type": "MAX"}}, "one of LAST, ALL, CLS, STEP, MEAN"),
        ({"override_pooler_config": {"pooling_type": "STEP"}}, "needs step_tag_id"),
        ({"override_pooler_config": {"pooling_type": "STEP", "step_tag_id": 10**7}}, "of the vocabulary, below"),
        ({"override_pooler_config": {"poolng_type": "CLS"}}, "no field 'poolng_type'"),
        ({"override_pooler_config": {"normalize": 1}}, "normalize must be True, False or None"),
        ({"override_pooler_config": {"returned_token_ids": [1]}}, "task='reward'"),
        (
            {"hf_overrides": {"matryoshka_dimensions": [8]}, "override_pooler_config": {"normalize": False}},
            "Matryoshka",
        ),
        ({"max_model_len": 97}, "no position embeddings beyond 96"),
        ({"convert": "embed", "runner": "generate"}, "contradicts"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_bert(tmp_path)
    with pytest.raises(ValueError, match=message):
        start(tmp_path, **options)


@pytest.mark.parametrize("options", [{"task": "embedding"}, {"runner": "pooling"}, {"convert": "embed"}])
def test_spellings_of_one_wish(options: dict[str, Any]) -> None:
    with LLM("demo", **options) as llm:
        assert llm.model_config.task == "embed" and llm.model_config.runner_type == "pooling"
        (output,) = llm.embed("Hello", use_tqdm=False)
        assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1.0, abs=1e-5)


def test_two_ranks_give_the_vectors_of_one(tmp_path: Path) -> None:
    save_bert(tmp_path)
    found = []
    for ranks in (1, 2):
        with start(tmp_path, tensor_parallel_size=ranks) as llm:
            found.append([o.outputs.embedding for o in llm.embed(TEXTS[:2], use_tqdm=False)])
    np.testing.assert_allclose(found[1], found[0], atol=2e-6)


def test_engines_take_pooling_requests(tmp_path: Path) -> None:
    """By the step loop, and asynchronously beside requests that are not in order."""
    save_bert(tmp_path)
    with start(tmp_path) as llm:
        want = [o.outputs.array for o in llm.encode(TEXTS[:2], use_tqdm=False)]
        engine = llm.llm_engine
        for i, text in enumerate(TEXTS[:2]):
            engine.add_request(f"r{i}", text, PoolingParams())
        with pytest.raises(ValueError, match="this model pools"):
            engine.add_request("s", TEXTS[0], SamplingParams())
        found: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
        np.testing.assert_allclose([found[f"r{i}"].outputs.array for i in range(2)], want, atol=1e-6)
        assert_idle(llm)

    async def ask() -> list[Any]:
        async with running(tmp_path, num_gpu_blocks_override=None, max_model_len=None) as engine:

            async def one(i: int) -> Any:
                (output,) = [o async for o in engine.encode(TEXTS[i], PoolingParams(), f"a{i}")]
                return output

            with pytest.raises(ValueError, match="not for 'classify'"):
                await anext(engine.encode(TEXTS[0], PoolingParams(task="classify"), "bad"))
            abandoned = engine.encode(TEXTS[2], PoolingParams(), "left")
            task = asyncio.ensure_future(anext(abandoned))
            await asyncio.sleep(0)
            task.cancel()
            return await asyncio.gather(one(0), one(1))

    outputs = asyncio.run(ask())
    np.testing.assert_allclose([output.outputs.array for output in outputs], want, atol=1e-6)
    assert all(output.finished for output in outputs)


def test_each_request_has_its_own_adapter(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", sharpness=2.0)
    merged = save_adapter(base, tmp_path / "a", targets=["q_proj", "v_proj", "down_proj"]).merge_and_unload()
    adapter = LoRARequest("a", 1, str(tmp_path / "a"))
    with LLM(str(base), dtype="float32", task="embed", enable_lora=True) as llm:
        mixed = llm.embed([TEXTS[0]] * 2, lora_request=[adapter, None], use_tqdm=False)  # type: ignore[list-item]
    with torch.no_grad():
        last = merged.model(torch.tensor([mixed[0].prompt_token_ids])).last_hidden_state[0, -1]
    want = torch.nn.functional.normalize(last, dim=0)
    np.testing.assert_allclose(mixed[0].outputs.embedding, want, atol=1e-5)
    assert np.abs(np.subtract(mixed[0].outputs.embedding, mixed[1].outputs.embedding)).max() > 0.01


def test_examples(monkeypatch, capsys) -> None:
    assert run("offline_inference_embedding.py", monkeypatch, capsys).count("Embedding: [") == 4
    scored = run("offline_inference_scoring.py", monkeypatch, capsys).splitlines()
    assert len([line for line in scored if line.startswith("Score: ")]) == 3
    with Server(Path("demo"), "--task", "embed") as server:
        out = run("openai_embedding_client.py", monkeypatch, capsys, "--base-url", server.url + "/v1")
    assert len(out.splitlines()) == 2 and out.startswith("[")
