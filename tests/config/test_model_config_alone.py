"""`ModelConfig(model, ...)` by itself, and an engine made of the parts of a configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiny_llama import MAX_MODEL_LEN, model_folder  # noqa: F401 - fixture
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import ModelConfig, VllmConfig


def test_is_what_an_engine_would_make_of_it(model_folder):  # noqa: F811
    alone = ModelConfig(model=str(model_folder), max_model_len=64, dtype="bfloat16")
    assert alone == EngineArgs(model=str(model_folder), max_model_len=64, dtype="bfloat16").create_model_config()
    assert (alone.max_model_len, alone.dtype, alone.tokenizer) == (64, "bfloat16", str(model_folder))
    assert alone.hf_config.model_type == "llama" and alone.get_vocab_size() == alone.hf_config.vocab_size
    assert replace(alone, seed=3).seed == 3


def test_takes_the_first_arguments_by_place(model_folder):  # noqa: F811
    folder = str(model_folder)
    alone = ModelConfig(folder, "generate", folder, "auto", False, "float32", 7)
    assert (alone.task, alone.seed, alone.max_model_len) == ("generate", 7, MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("args", "given", "error", "text"),
    [
        ((), {"max_modl_len": 3}, TypeError, "no argument 'max_modl_len'. Did you mean 'max_model_len'"),
        (("auto",), {"task": "auto"}, TypeError, "two values for the argument 'task'"),
        ((), {"dtype": "int3"}, ValueError, "Unknown dtype: int3"),
        ((), {"max_model_len": 10**7}, ValueError, "max_model_len"),
    ],
)
def test_says_what_is_wrong(model_folder, args, given, error, text):  # noqa: F811
    with pytest.raises(error, match=text):
        ModelConfig(str(model_folder), *args, **given)


def test_a_neutral_configuration_reads_no_model():
    assert VllmConfig().model_config == ModelConfig()


def test_an_engine_is_made_of_parts(model_folder):  # noqa: F811
    engine = LLMEngine(model_config=ModelConfig(str(model_folder), max_model_len=64))
    try:
        engine.add_request("a", "Hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    finally:
        engine.shutdown()
    assert len(outputs[-1].outputs[0].token_ids) == 3
