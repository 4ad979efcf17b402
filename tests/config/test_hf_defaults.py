"""The table of class defaults is what transformers' classes say, and families' facts are found without torch."""

from __future__ import annotations

import pytest

from tools.hf_class_defaults import document
from vllm.config.facts import USUAL, Facts, Windows, facts_of
from vllm.config.hf import HFConfig
from vllm.config.hf_defaults import architecture_of, class_defaults, model_types
from vllm.model_executor.models.registry import ModelRegistry


def test_the_table_is_what_the_tool_writes() -> None:
    """If not: python -m tools.hf_class_defaults. Types that are newer than the table may be missing from it, and those
    that nothing here runs may have changed: what is installed is the newest release, of any day.
    """
    ours, known = set(ModelRegistry.get_supported_archs()), set(model_types())
    compared = 0
    for model_type, entry in document().items():
        if model_type in known and entry["architecture"] in ours:
            assert class_defaults(model_type) == entry["defaults"], model_type
            assert architecture_of(model_type) == entry["architecture"]
            compared += 1
    assert compared > 50


def test_unknown_types_have_no_defaults() -> None:
    assert class_defaults("no-such-type") == {}
    assert architecture_of("no-such-type") is None


def test_facts_are_found_by_architecture_then_by_type() -> None:
    assert facts_of(["MistralForCausalLM"], "llama").windows is Windows.CONFIG
    assert facts_of(["SomethingElse"], "llama").windows is Windows.NONE
    assert facts_of([], "qwen2").windows is Windows.ON_REQUEST
    assert facts_of(["SomethingElse"], "no-such-type") is USUAL


def test_a_familys_own_defaults_stand_for_types_that_transformers_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.families.llama import LLAMA

    facts = Facts(defaults={"vocab_size": 77, "hidden_size": 12}, kv_heads=lambda hf: hf.get_int("groups"))
    monkeypatch.setattr(registry, "_built_in", lambda _: type(LLAMA)(LLAMA.decoder, LLAMA.names, facts=facts))
    hf = HFConfig.from_dict(
        {"model_type": "own", "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "groups": 3, "n_head": 6}
    )
    assert (hf.vocab_size, hf.hidden_size, hf.num_kv_heads) == (77, 24, 3)
