"""HFConfig reads config.json as transformers' own classes do, and refuses hostile files with a ValueError."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config.families import FAMILIES, document, variation
from vllm.config.hf import HFConfig, RopeSettings, refuse_model_code

SHAPE = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


def theirs(raw: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw)))


def read(raw: dict[str, Any]) -> HFConfig:
    return HFConfig.from_dict(raw)


def write(folder: Path, raw: Any, name: str = "config.json") -> Path:
    (folder / name).write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return folder


def assert_same_as_transformers(raw: dict[str, Any]) -> None:
    ours, hf = read(raw), theirs(raw)
    assert ours.hidden_size == hf.hidden_size
    assert ours.num_layers == hf.num_hidden_layers
    assert ours.num_heads == hf.num_attention_heads
    assert ours.num_kv_heads == getattr(hf, "num_key_value_heads", hf.num_attention_heads)
    assert ours.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    assert ours.vocab_size == hf.vocab_size
    assert ours.max_position_embeddings == hf.max_position_embeddings
    assert ours.tie_word_embeddings == hf.tie_word_embeddings
    if raw["model_type"] not in ("llama", "gemma", "phi", "opt", "gpt2", "gpt_neox"):
        assert ours.sliding_window == hf.sliding_window
    if getattr(hf, "layer_types", None) is not None:
        assert ours.layer_types == tuple(hf.layer_types)
    rope = getattr(hf, "rope_parameters", None)
    if rope is not None:
        assert ours.rope.theta == rope["rope_theta"]
        assert ours.rope.kind == rope["rope_type"]
        assert ours.rope.partial_rotary_factor == rope.get("partial_rotary_factor", 1.0)
        ignored = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
        assert ours.rope.params == {name: value for name, value in rope.items() if name not in ignored}
    eos = hf.eos_token_id
    assert ours.eos_token_ids == (tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_values_agree_with_transformers(model_type: str) -> None:
    assert_same_as_transformers(document(model_type))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_fields_mean_what_transformers_means(model_type: str) -> None:
    compared = 0
    for seed in range(40):
        raw = variation(model_type, seed)
        try:
            theirs(raw)
        except Exception:  # transformers checks too, with errors of many classes
            continue
        try:
            read(raw)
        except ValueError as error:  # ours checks that heads divide; theirs fails when the model is built
            assert "divisor" in str(error)
            continue
        assert_same_as_transformers(raw)
        compared += 1
    assert compared >= 15


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_saved_by_transformers_reads_the_same(model_type: str, tmp_path: Path) -> None:
    theirs(document(model_type)).save_pretrained(tmp_path)
    saved, original = HFConfig.load(tmp_path), read(document(model_type))
    for name in (*SHAPE, "max_position_embeddings", "tie_word_embeddings", "sliding_window", "layer_types", "rope"):
        assert getattr(saved, name) == getattr(original, name), name
    assert saved.torch_dtype == "bfloat16"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_transformers_object_has_the_same_fields(model_type: str) -> None:
    hf = read(document(model_type)).to_transformers()
    assert hf.model_type == model_type
    expected = theirs(document(model_type)).to_dict()
    older = {name: value for name, value in hf.to_dict().items() if name not in expected}
    assert hf.to_dict() == {**expected, **older}
    assert set(older) <= {"rope_theta", "rope_scaling"}
    if "rope_parameters" in expected:
        assert hf.rope_theta == expected["rope_parameters"]["rope_theta"]


def test_get_prefers_the_file_then_the_class_default_then_the_callers() -> None:
    config = read({"model_type": "mistral", "hidden_act": "gelu", "sliding_window": None})
    assert config.get("hidden_act", default="relu") == "gelu"
    assert config.get("rms_norm_eps", default=1.0) == 1e-6
    assert config.get("no_such_field", default=5) == 5
    assert config.get("sliding_window", default=None) is None  # null is "off", not 4096
    with pytest.raises(ValueError, match="has no field `a` or `b`"):
        config.get("a", "b")


def test_a_class_default_counts_only_where_the_field_is_absent() -> None:
    assert read({"model_type": "mistral"}).sliding_window == 4096
    assert read({"model_type": "mistral", "sliding_window": None}).sliding_window is None


def test_a_switch_that_is_null_is_off() -> None:
    config = read({"model_type": "deepseek_v3", "rope_interleave": None})
    assert config.get_bool("rope_interleave", default=True) is False
    assert config.get_bool("no_such_field", default=True) is True
    assert config.get_bool("rope_interleave", default=None) is None
    assert config.sees_whole_prompt is False
    assert read({"model_type": "llama", "is_causal": None}).sees_whole_prompt is False


def test_an_unknown_family_needs_its_own_fields() -> None:
    config = read({"model_type": "unheard_of", "hidden_size": 8, "num_attention_heads": 2})
    assert config.head_dim == 4
    assert config.num_kv_heads == 2
    with pytest.raises(ValueError, match="num_hidden_layers.*unheard_of"):
        _ = config.num_layers


def test_the_text_model_of_a_multimodal_config_is_read() -> None:
    raw = {"model_type": "llava", "text_config": document("llama"), "vision_config": {"hidden_size": 3}}
    config = read(raw)
    assert (config.hidden_size, config.num_layers, config.is_multimodal) == (96, 5, True)


def test_each_layer_type_may_have_its_own_rope() -> None:
    raw = document("gemma2", rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    })  # fmt: skip
    config = read(raw)
    assert config.rope == RopeSettings(1e6, "linear", {"factor": 8.0})
    assert config.rope_for("sliding_attention") == RopeSettings(1e4, "default", {})


def test_early_names_of_longrope_are_read() -> None:
    raw = document("phi3")
    for name in ("su", "yarn"):
        raw["rope_scaling"]["type"] = name
        assert read(raw).rope.kind == "longrope"
        assert read(raw).rope.params["original_max_position_embeddings"] == 4096


# ---- overrides ------------------------------------------------------------------------------------------------------


def test_overrides_are_merged_deeply(tmp_path: Path) -> None:
    write(tmp_path, document("llama"))
    config = HFConfig.load(tmp_path, hf_overrides={"rope_scaling": {"factor": 2.0}, "vocab_size": 50})
    assert config.rope.params["factor"] == 2.0
    assert config.rope.params["low_freq_factor"] == 1.0
    assert config.vocab_size == 50


def test_an_override_function_gets_and_returns_the_transformers_config(tmp_path: Path) -> None:
    write(tmp_path, document("llama"))

    def fewer_layers(config: Any) -> Any:
        config.num_hidden_layers = 2
        return config

    assert HFConfig.load(tmp_path, hf_overrides=fewer_layers).num_layers == 2
    with pytest.raises(ValueError, match="must return the config it was given, but returned a NoneType"):
        HFConfig.load(tmp_path, hf_overrides=lambda config: None)


def _two_layers(config: Any) -> Any:
    config.num_hidden_layers = 2
    return config


@pytest.mark.parametrize("overrides", [{"num_hidden_layers": 2}, _two_layers])
def test_with_fewer_layers_by_an_override_the_kinds_of_the_last_are_left_out(tmp_path: Path, overrides: Any) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    raw = document("qwen3", num_hidden_layers=3, layer_types=kinds, eos_token_id=[1, 2, 3], sliding_window=8)
    write(tmp_path, {**raw, "use_sliding_window": True})
    config = HFConfig.load(tmp_path, hf_overrides=overrides)
    assert config.layer_types == ("full_attention", "sliding_attention")
    assert config.eos_token_ids == (1, 2, 3)
    with pytest.raises(ValueError, match="one entry for each of the 4 layers"):
        HFConfig.load(tmp_path, hf_overrides={"num_hidden_layers": 4})


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_rope_arguments_replace_the_scaling_and_the_base(tmp_path: Path, spelling: str) -> None:
    raw = document("phi", rope_theta=777.0)
    if spelling == "new":
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}
        del raw["rope_theta"], raw["partial_rotary_factor"]
    write(tmp_path, raw)
    with pytest.raises(ValueError, match=r"rope_scaling must have a 'rope_type'.*got \{'factor': 2.0\}"):
        HFConfig.load(tmp_path, rope_scaling={"factor": 2.0})
    scaled = HFConfig.load(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert scaled.rope == RopeSettings(777.0, "dynamic", {"factor": 2.0}, 0.5)
    based = HFConfig.load(tmp_path, rope_theta=123.0)
    assert based.rope == RopeSettings(123.0, "default", {}, 0.5)


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_overrides_of_rope_fields_work_in_both_spellings_of_the_file(tmp_path: Path, spelling: str) -> None:
    raw = document("phi", rope_theta=777.0)
    if spelling == "new":
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}
        del raw["rope_theta"], raw["partial_rotary_factor"]
    write(tmp_path, raw)

    def rope(**changes: Any) -> RopeSettings:
        return HFConfig.load(tmp_path, hf_overrides=changes).rope

    linear = {"rope_type": "linear", "factor": 2.0}
    assert rope(rope_theta=5.0) == RopeSettings(5.0, "default", {}, 0.5)
    assert rope(partial_rotary_factor=0.25) == RopeSettings(777.0, "default", {}, 0.25)
    assert rope(rope_scaling=linear) == RopeSettings(777.0, "linear", {"factor": 2.0}, 0.5)
    assert rope(rope_scaling=None) == RopeSettings(777.0, "default", {}, 0.5)
    whole = {**linear, "rope_theta": 5.0, "partial_rotary_factor": 0.5}
    assert rope(rope_parameters=whole) == RopeSettings(5.0, "linear", {"factor": 2.0}, 0.5)
    both = rope(rope_scaling=linear, rope_theta=5.0)
    assert both == RopeSettings(5.0, "linear", {"factor": 2.0}, 0.5)
    raw["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0}
    write(tmp_path, raw)
    assert rope(rope_parameters=whole) == RopeSettings(5.0, "linear", {"factor": 2.0}, 0.5)


# ---- the model-code gate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [(), ("vision_config",), ("a", "b", "c"), ("list",)])
def test_auto_map_is_refused_at_any_depth_without_trust(tmp_path: Path, where: tuple[str, ...]) -> None:
    inner: Any = {"auto_map": {"AutoConfig": "evil.Config"}}
    for name in reversed(where):
        inner = {name: [inner] if name == "list" else inner}
    theirs = {**document("llama"), "architectures": ["TheirForCausalLM"]}
    write(tmp_path, {**(document("llama") if where else theirs), **inner})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    with pytest.raises(ValueError, match="Python code from the model's repository"):
        HFConfig.load(tmp_path)
    assert not (tmp_path / "canary").exists()
    assert HFConfig.load(tmp_path, trust_remote_code=True).num_layers == 5


def test_auto_map_of_a_model_of_ours_is_left_out_and_its_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    for name in ("llama", "chatglm"):
        architecture = {"llama": "LlamaForCausalLM", "chatglm": "ChatGLMModel"}[name]
        own = {"num_layers": 5, "hidden_size": 48, "num_attention_heads": 6, "padded_vocab_size": 99, "seq_length": 64}
        raw = {**(document("llama") if name == "llama" else own), "model_type": name, "architectures": [architecture]}
        write(tmp_path, {**raw, "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}})
        config = HFConfig.load(tmp_path)
        assert "auto_map" not in config.raw
        assert config.to_transformers().model_type == name
    write(tmp_path, {**raw, "auto_map": {"AutoConfig": "evil.Config"}})
    with pytest.raises(ValueError, match="Python code from the model's repository"):
        HFConfig.load(tmp_path, hf_overrides={"architectures": ["TheirForCausalLM"]})
    with pytest.raises(ValueError, match="Python code from the model's repository"):
        HFConfig.load(tmp_path, hf_overrides=lambda config: config)
    assert not (tmp_path / "canary").exists()


def test_auto_map_cannot_come_through_overrides(tmp_path: Path) -> None:
    write(tmp_path, document("llama"))
    with pytest.raises(ValueError, match="hf_overrides asks for Python code"):
        HFConfig.load(tmp_path, hf_overrides={"auto_map": {"AutoConfig": "evil.Config"}})


def test_the_gate_is_a_function_for_any_document() -> None:
    refuse_model_code({"auto_map": None, "x": [1, {"auto_map": {}}]}, "tokenizer_config.json", trust_remote_code=False)
    with pytest.raises(ValueError, match=r"^tokenizer_config.json asks"):
        refuse_model_code([{"auto_map": ["a", "b"]}], "tokenizer_config.json", trust_remote_code=False)


# ---- bad files ------------------------------------------------------------------------------------------------------


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist. Expected a model folder"):
        HFConfig.load(tmp_path)
    write(tmp_path, "{}", "params.json")
    with pytest.raises(ValueError, match="Mistral's own format"):
        HFConfig.load(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        HFConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must hold a JSON object, but holds a list"),
        ("null", "holds a NoneType"),
        ('{"a": ', "is not valid JSON"),
        ("[" * 200_000, "nested too deeply|is not valid JSON"),
        (' {"a": "' + "x" * (16 * 2**20) + '"}', "expected at most"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HFConfig.load(write(tmp_path, text))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(ValueError, match="is not valid JSON"):
        HFConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": -1}, "field `num_hidden_layers` is -1, expected an integer from 1 to 10000"),
        ({"num_hidden_layers": 10**9}, "field `num_hidden_layers`"),
        ({"hidden_size": 0}, "field `hidden_size` is 0"),
        ({"hidden_size": "64"}, "field `hidden_size` is '64', expected an integer"),
        ({"vocab_size": 1e9}, "field `vocab_size`"),
        ({"vocab_size": True}, "field `vocab_size` is True"),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7},
            "field `num_attention_heads` is 7, expected a divisor of the hidden size 96",
        ),
        ({"num_key_value_heads": 4}, "field `num_key_value_heads` is 4, expected a divisor of the 6 attention heads"),
        ({"max_position_embeddings": -5}, "field `max_position_embeddings`"),
        ({"tie_word_embeddings": "yes"}, "field `tie_word_embeddings` is 'yes', expected true or false"),
        ({"architectures": "LlamaForCausalLM"}, "field `architectures`.*a list of strings"),
        ({"torch_dtype": 16}, "field `torch_dtype`"),
        ({"model_type": ["llama"]}, "field `model_type`"),
        ({"quantization_config": "awq"}, "field `quantization_config`.*an object"),
        ({"layer_types": ["full_attention"]}, "one entry for each of the 5 layers"),
        ({"eos_token_id": "</s>"}, "field `eos_token_id`"),
        ({"rope_scaling": "linear"}, "field `rope_scaling`.*an object"),
        ({"rope_scaling": {"type": "linear"}}, "field `rope_scaling.factor` is None, expected a value"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "field `rope_scaling.factor`.*a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "field `rope_scaling.factor`"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "field `rope_scaling.factor`"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "field `rope_scaling.rope_type` is 'spiral'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": []}}, "long_factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"head_dim": 2**30}, "field `head_dim`"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        HFConfig.load(write(tmp_path, document("llama", **changes)))
    assert str(tmp_path / "config.json") in str(error.value)


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([0, -1, 2**31, 2**63, 10**400, 1e308, "", "\0", "float16", "yarn", "sliding_attention"]),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.sampled_from(
        ["type", "rope_type", "factor", "rope_theta", "short_factor", "long_factor", "auto_map", "mrope_section", "x"]
    ), values, max_size=4),
    max_leaves=8,
)  # fmt: skip
FIELDS = sorted(
    {name for _, fields in FAMILIES.values() for name in fields}
    | {"model_type", "architectures", "torch_dtype", "dtype", "layer_types", "rope_parameters", "text_config",
       "quantization_config", "eos_token_id", "is_encoder_decoder", "head_dim", "rotary_dim", "rope_local_base_freq",
       "sliding_window_pattern", "auto_map", "max_window_layers"}
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(FIELDS), HOSTILE, min_size=1, max_size=3))
def test_no_document_raises_anything_but_a_value_error(model_type: str, changes: dict[str, Any]) -> None:
    raw = document(model_type, **changes)
    try:
        refuse_model_code(raw, "config.json", trust_remote_code=False)
        config = HFConfig.from_dict(raw)
        values = [getattr(config, name) for name in (*SHAPE, "layer_types", "rope", "sliding_window")]
    except ValueError as error:
        assert str(error)
    else:
        assert len(values[6]) == config.num_layers


def _fields_read_by(*folders: str) -> set[str]:
    """Fields of config.json that code asks a config for, whatever the family."""
    files = [file for folder in folders for file in (Path(__file__).parents[2] / folder).rglob("*.py")]
    calls = re.compile(r"\b(?:self|hf)\.get(?:_int|_float|_bool|_str)?\(((?:\"\w+\"(?:, )?)+)")
    texts = [found for file in files for found in calls.findall(file.read_text())]
    return {name for text in texts for name in re.findall(r"\w+", text)}


def test_overrides_that_no_model_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FAMILIES["llama"][1], "model_type": "llama", "own": 1}))
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        HFConfig.load(tmp_path, hf_overrides=dict.fromkeys(_fields_read_by("vllm/config", "vllm/entrypoints")))
        assert not caplog.text
        HFConfig.load(
            tmp_path, hf_overrides={"own": 2, "sliding_window": 8, "torch_dtype": "float16", "rms_norm_eps": 1}
        )
        assert not caplog.text
        HFConfig.load(tmp_path, hf_overrides={"rms_norm_epz": 1e-5, "vocab_size": 400})
    finally:
        logger.removeHandler(caplog.handler)
    assert "no model is known to have the fields rms_norm_epz" in caplog.text
    assert "vocab_size" not in caplog.text


def test_numbers_without_a_name_in_json_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    limits = [{"__float__": "Infinity"}, {"__float__": "-Infinity"}, {"__float__": "NaN"}]
    others = [{"__float__": "7"}, {"__float__": 1}, {"__float__": "NaN", "b": 1}]
    raw = HFConfig.load(write(tmp_path, json.dumps({"model_type": "llama", "limits": limits, "others": others}))).raw
    assert raw["limits"][:2] == [math.inf, -math.inf] and math.isnan(raw["limits"][2])
    assert raw["others"] == others
