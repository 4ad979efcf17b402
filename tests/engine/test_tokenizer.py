"""The light tokenizer gives what transformers gives, on texts chosen to be unpleasant."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from tests.engine import tokenizer_makers as make
from tests.tiny_encoders import save_wordpiece
from vllm.engine.tokenizer import FastTokenizer, TransformersTokenizer
from vllm.engine.tokenizer_files import from_transformers, load_tokenizer


def bpe_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(make.byte_level().to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def llama_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(make.byte_fallback().to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def save_gpt2(folder: Path):
    vocab, merges = bpe_parts()
    tokenizer = GPT2Tokenizer(vocab, merges, bos_token="<|bos|>", eos_token="<|eos|>", add_prefix_space=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_qwen2(folder: Path):
    vocab, merges = bpe_parts()
    extra = ["<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(vocab, merges, eos_token="<|im_end|>", pad_token="<|eos|>", extra_special_tokens=extra)
    tokenizer.add_tokens(["<tool_call>", "no space "])
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_llama(folder: Path):
    vocab, merges = llama_parts()
    tokenizer = LlamaTokenizer(vocab, merges, add_bos_token=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_llama_with_eos(folder: Path):
    # transformers loses `legacy` when it saves, so the object itself is the oracle, not what it would load again.
    vocab, merges = llama_parts()
    tokenizer = LlamaTokenizer(vocab, merges, add_bos_token=True, add_eos_token=True, legacy=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_plain(folder: Path):
    make.save(
        folder,
        make.byte_level(),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|bos|>",
        eos_token={"__type": "AddedToken", "content": "<|im_end|>", "normalized": False, "special": True},
        additional_special_tokens=["<|extra|>"],
        added_tokens_decoder={"600": {"content": "<|late|>", "special": False, "lstrip": True}},
    )
    return AutoTokenizer.from_pretrained(folder)


def save_llama_of_old_files(folder: Path):
    """A normalizer that prepends the mark, special tokens in a file of their own, a stale setting."""
    make.save(folder, make.byte_fallback(), tokenizer_class="PreTrainedTokenizerFast", add_bos_token=False)
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    return AutoTokenizer.from_pretrained(folder)


def save_unigram(folder: Path):
    make.save(folder, make.metaspace(), tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>", unk_token="<unk>")
    return AutoTokenizer.from_pretrained(folder)


SAVERS = [
    save_gpt2,
    save_qwen2,
    save_llama,
    save_llama_with_eos,
    save_llama_of_old_files,
    save_plain,
    save_unigram,
]


@pytest.mark.parametrize("saver", SAVERS, ids=lambda f: f.__name__)
def test_equals_transformers(saver, tmp_path):
    oracle = saver(tmp_path)
    light = load_tokenizer(tmp_path)
    assert isinstance(light, FastTokenizer)
    assert light.eos_token_id == oracle.eos_token_id
    assert light.bos_token_id == oracle.bos_token_id
    assert set(light.all_special_ids) >= set(oracle.all_special_ids)
    assert light.vocab_size == len(oracle)
    assert light.max_token_id == max(oracle.get_vocab().values())
    for text in [*make.NASTY, " ".join(make.NASTY)]:
        for special in (True, False):
            ids = light.encode(text, add_special_tokens=special)
            assert ids == oracle.encode(text, add_special_tokens=special), text
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert light.decode(ids, skip_special_tokens=skip) == expected
    assert light.encode_batch(make.NASTY) == [oracle.encode(text) for text in make.NASTY]


@pytest.mark.parametrize("name", ["BertTokenizer", "DistilBertTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("lowercase", [True, False])  # of tokenizer.json, which BERT's classes do not ask
@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": False}])
def test_bert_cuts_texts_by_its_settings(name, lowercase, settings, tmp_path):
    save_wordpiece(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["normalizer"]["lowercase"] = lowercase
    for word in ("paris", "Paris", "cafe", "caf\u00e9"):
        document["model"]["vocab"].setdefault(word, len(document["model"]["vocab"]))
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **settings}))
    for text in ("paris caf\u00e9", "Paris cafe"):
        assert load_tokenizer(tmp_path).encode(text) == AutoTokenizer.from_pretrained(tmp_path).encode(text)


def test_models_hear_of_pairs_if_the_settings_say_so(tmp_path):
    save_wordpiece(tmp_path)
    for inputs, second in [(["input_ids", "token_type_ids"], 4), (["input_ids", "attention_mask"], None)]:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        oracle = AutoTokenizer.from_pretrained(tmp_path)
        assert ("token_type_ids" in oracle("capital", "france")) == (second is not None)
        for tokenizer in (load_tokenizer(tmp_path), from_transformers(oracle)):
            ids, begins = tokenizer.encode_pair("capital of", "france")
            assert ids == oracle("capital of", "france")["input_ids"] and begins == second


def test_loads_without_transformers(tmp_path):
    save_plain(tmp_path)
    code = (
        "import sys; from pathlib import Path; from vllm.engine.tokenizer_files import load_tokenizer;"
        f"t = load_tokenizer(Path({str(tmp_path)!r})); t.decode(t.encode('hello'));"
        "assert not {'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_users_fast_transformers_object_keeps_its_behaviour(tmp_path):
    save_qwen2(tmp_path)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    wrapped = from_transformers(oracle)
    assert wrapped.hf_tokenizer is oracle
    assert [wrapped.encode(text) for text in make.NASTY] == [oracle.encode(text) for text in make.NASTY]


def test_slow_tokenizer_runs_through_transformers(tmp_path):
    from transformers import CTRLTokenizer

    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "l": 1, "o": 2, "w": 3, "lo": 4, "low</w>": 5}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\nlo w</w>\n")
    oracle = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    oracle.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ctrl"}))
    tokenizer = load_tokenizer(tmp_path, mode="slow")
    assert isinstance(tokenizer, TransformersTokenizer)
    ids = tokenizer.encode("low lo low")
    assert ids == oracle.encode("low lo low")
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join([*map(stream.feed, ids), stream.finish()]) == oracle.decode(ids)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "quick"}, ValueError, "Unknown tokenizer_mode 'quick': expected one of auto, slow, mistral"),
        ({"mode": "mistral"}, ValueError, "no tokenizer of Mistral's own format in .*expected tekken.json"),
        ({}, ValueError, "No tokenizer found in .*expected tokenizer.json"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        load_tokenizer(tmp_path, **arguments)


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "Nonsense"}])
@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_settings_without_a_vocabulary_are_no_tokenizer(tmp_path, settings, mode):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"No tokenizer found in {tmp_path}: .*tokenizer=.*skip_tokenizer_init"):
        load_tokenizer(tmp_path, mode)


def test_a_tokenizer_that_needs_no_vocabulary_loads(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Grüße", add_special_tokens=False)) == "Grüße"


@pytest.mark.parametrize("settings", [{"tokenizer_class": 5}, {"tokenizer_class": {"a": 1}}, {"eos_token": 1.5}])
def test_settings_of_a_wrong_kind_name_the_folder(tmp_path, settings):
    make.save(tmp_path, make.byte_level(300))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(tmp_path, mode="slow")


def test_damaged_files_say_which(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_code_in_the_model_folder_does_not_run_unless_trusted(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "tokenization_evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil"}))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_tokenizer(tmp_path)
    assert not canary.exists()


def test_lone_surrogate_is_named():
    tokenizer = from_transformers(_fast_object())
    with pytest.raises(ValueError, match=r"character 3 is a lone surrogate \(U\+D800\)"):
        tokenizer.encode("abc\ud800")


@pytest.mark.parametrize("template", [[[]], [5], [{"name": "default"}], 5, {"a": "b"}])
def test_a_chat_template_of_a_wrong_kind_is_named(tmp_path, template):
    make.save(tmp_path, make.byte_level(), chat_template=template)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template must be a text"):
        load_tokenizer(tmp_path)


def test_chat_templates_are_read(tmp_path):
    make.save(tmp_path, make.byte_level(), chat_template="from settings")
    assert load_tokenizer(tmp_path).chat_template == "from settings"
    make.save(tmp_path, make.byte_level(), chat_template=[{"name": "default", "template": "a"}])
    assert load_tokenizer(tmp_path).chat_template == {"default": "a"}
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(tmp_path).chat_template == "from the file"


def _fast_object():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=make.byte_level())


def test_bound_of_characters_per_token_holds(tmp_path):
    save_qwen2(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    bound = tokenizer.max_characters_per_token
    for text in [*make.NASTY, "the " * 500, "e\u0301" * 300, "<|im_start|>" * 50]:
        assert len(text) <= bound * len(tokenizer.encode(text))
    assert load_tokenizer(make.save(tmp_path / "words", make.words())).max_characters_per_token is None


def test_public_helpers_find_the_packaged_model():
    from vllm.transformers_utils.tokenizer import decode_tokens, encode_tokens, get_tokenizer

    tokenizer = get_tokenizer("demo")
    ids = encode_tokens(tokenizer, "Paris", add_special_tokens=False)
    assert decode_tokens(tokenizer, ids, skip_special_tokens=True) == "Paris"
    assert len(encode_tokens(tokenizer, "Paris")) >= len(ids)
    assert get_tokenizer("demo", padding_side="left").padding_side == "left"


MISTRAL = {  # the file's name in a model's folder -> in the package's data
    "tekken.json": "tekken_240911.json",
    "tokenizer.model.v3": "mistral_instruct_tokenizer_240323.model.v3",
    "tokenizer.model": "tokenizer.model.v1",
}


@pytest.mark.parametrize("name", MISTRAL)
def test_mistral_mode_writes_and_reads_what_mistral_common_does(tmp_path, name):
    import mistral_common
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    from vllm.entrypoints.chat_utils import tokenize_chat

    shutil.copy(Path(mistral_common.__file__).parent / "data" / MISTRAL[name], tmp_path / name)
    oracle = MistralTokenizer.from_file(str(tmp_path / name))
    tokenizer = load_tokenizer(tmp_path, mode="mistral")
    messages = [
        {"role": "user", "content": "Hello wörld 世界 🙂"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "more"},
    ]
    expected = oracle.encode_chat_completion(ChatCompletionRequest(messages=messages))
    assert tokenize_chat(tokenizer, messages) == (expected.text, expected.tokens)
    text = "Zwölf große 世界 🙂\n  x"
    ids = oracle.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False)
    assert tokenizer.encode(text) == ids
    stream = tokenizer.stream()
    assert "".join([*map(stream.feed, ids), stream.finish()]) == text


def test_mistral_mode_says_what_is_missing_or_damaged(tmp_path, monkeypatch):
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read; its files may be damaged"):
        load_tokenizer(tmp_path, mode="mistral")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install vllm\[mistral\]"):
        load_tokenizer(tmp_path, mode="mistral")


def test_tokenizer_that_writes_chats_itself(tmp_path):
    """mistral_common formats conversations by its own rules; a stand-in for it shows what we ask of it."""
    from vllm.entrypoints.chat_utils import tokenize_chat

    save_qwen2(tmp_path)
    real = AutoTokenizer.from_pretrained(tmp_path)

    class MistralCommonBackend:
        is_fast, chat_template, eos_token_id = False, None, 2
        special_tokens_map, all_special_ids = {}, [0, 1, 2, 3]

        def __len__(self) -> int:
            return len(real)

        def get_vocab(self) -> dict[str, int]:
            return real.get_vocab()

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return real.encode(text, add_special_tokens=add_special_tokens)

        def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            return real.decode(ids, skip_special_tokens=skip_special_tokens)

        def apply_chat_template(self, messages, return_dict, tools, continue_final_message) -> list[int]:
            assert (return_dict, tools, continue_final_message) == (False, None, False)
            return real.encode("[INST]" + messages[-1]["content"])

    tokenizer = from_transformers(MistralCommonBackend())
    text, ids = tokenize_chat(tokenizer, [{"role": "user", "content": "hello"}])
    assert (text, ids) == ("[INST]hello", real.encode("[INST]hello"))
    stream = tokenizer.stream()
    assert "".join([*map(stream.feed, ids), stream.finish()]) == text
    assert tokenizer.eos_token_id == 2
    with pytest.raises(ValueError, match="Remove chat_template"):
        tokenize_chat(tokenizer, [{"role": "user", "content": "hello"}], chat_template="{{ x }}")
    with pytest.raises(TypeError, match="messages must be a list"):
        tokenize_chat(tokenizer, "hello")
