"""EngineArgs has every field and flag of the guide, checks every value, and travels as keywords and as JSON."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.config.families import document
from vllm import AsyncEngineArgs, EngineArgs
from vllm.config import CompilationConfig, UnsupportedSettingError, VllmConfig
from vllm.config.document import markdown
from vllm.config.settings import all_settings
from vllm.usage.usage_lib import UsageContext
from vllm.utils import FlexibleArgumentParser

# Every flag of the guide's "Engine Arguments": words, field, value.
GUIDE_FLAGS: list[tuple[str, str, Any]] = [
    ("--model m", "model", "m"),
    ("--tokenizer t", "tokenizer", "t"),
    ("--skip-tokenizer-init", "skip_tokenizer_init", True),
    ("--revision r", "revision", "r"),
    ("--code-revision r", "code_revision", "r"),
    ("--tokenizer-revision r", "tokenizer_revision", "r"),
    ("--tokenizer-mode slow", "tokenizer_mode", "slow"),
    ("--trust-remote-code", "trust_remote_code", True),
    ("--download-dir d", "download_dir", "d"),
    *[(f"--load-format {f}", "load_format", f) for f in (
        "auto", "pt", "safetensors", "npcache", "dummy", "tensorizer", "sharded_state", "gguf", "bitsandbytes")],
    *[(f"--dtype {d}", "dtype", d) for d in ("auto", "half", "float16", "bfloat16", "float", "float32")],
    *[(f"--kv-cache-dtype {d}", "kv_cache_dtype", d) for d in ("auto", "fp8", "fp8_e5m2", "fp8_e4m3")],
    ("--quantization-param-path p", "quantization_param_path", "p"),
    ("--max-model-len 100", "max_model_len", 100),
    ("--guided-decoding-backend outlines", "guided_decoding_backend", "outlines"),
    ("--guided-decoding-backend lm-format-enforcer", "guided_decoding_backend", "lm-format-enforcer"),
    ("--distributed-executor-backend ray", "distributed_executor_backend", "ray"),
    ("--distributed-executor-backend mp", "distributed_executor_backend", "mp"),
    ("--worker-use-ray", "worker_use_ray", True),
    ("--pipeline-parallel-size 2", "pipeline_parallel_size", 2),
    ("-pp 2", "pipeline_parallel_size", 2),
    ("--tensor-parallel-size 2", "tensor_parallel_size", 2),
    ("-tp 2", "tensor_parallel_size", 2),
    ("-tp=2", "tensor_parallel_size", 2),
    ("--max-parallel-loading-workers 2", "max_parallel_loading_workers", 2),
    ("--ray-workers-use-nsight", "ray_workers_use_nsight", True),
    *[(f"--block-size {b}", "block_size", b) for b in (8, 16, 32)],
    ("--enable-prefix-caching", "enable_prefix_caching", True),
    ("--no-enable-prefix-caching", "enable_prefix_caching", False),
    ("--disable-sliding-window", "disable_sliding_window", True),
    ("--use-v2-block-manager", "use_v2_block_manager", True),
    ("--num-lookahead-slots 2", "num_lookahead_slots", 2),
    ("--seed 7", "seed", 7),
    ("--swap-space 2.5", "swap_space", 2.5),
    ("--cpu-offload-gb 10", "cpu_offload_gb", 10.0),
    ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
    ("--num-gpu-blocks-override 9", "num_gpu_blocks_override", 9),
    ("--max-num-batched-tokens 512", "max_num_batched_tokens", 512),
    ("--max-num-seqs 8", "max_num_seqs", 8),
    ("--max-logprobs 5", "max_logprobs", 5),
    ("--disable-log-stats", "disable_log_stats", True),
    *[(f"{flag} {q}", "quantization", q) for flag in ("--quantization", "-q") for q in (
        "aqlm", "awq", "deepspeedfp", "tpu_int8", "fp8", "fbgemm_fp8", "marlin", "gguf", "gptq_marlin_24",
        "gptq_marlin", "awq_marlin", "gptq", "squeezellm", "compressed-tensors", "bitsandbytes", "qqq", "experts_int8",
        "neuron_quant")],
    ("--quantization None", "quantization", None),
    ('--rope-scaling {"type":"dynamic","factor":2.0}', "rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ("--rope-theta 1000", "rope_theta", 1000.0),
    ("--enforce-eager", "enforce_eager", True),
    ("--max-context-len-to-capture 100", "max_context_len_to_capture", 100),
    ("--max-seq-len-to-capture 100", "max_seq_len_to_capture", 100),
    ("--disable-custom-all-reduce", "disable_custom_all_reduce", True),
    ("--tokenizer-pool-size 2", "tokenizer_pool_size", 2),
    ("--tokenizer-pool-type ray", "tokenizer_pool_type", "ray"),
    ('--tokenizer-pool-extra-config {"a":1}', "tokenizer_pool_extra_config", {"a": 1}),
    ("--limit-mm-per-prompt image=16,video=2", "limit_mm_per_prompt", {"image": 16, "video": 2}),
    ('--limit-mm-per-prompt {"image":3}', "limit_mm_per_prompt", {"image": 3}),
    ("--enable-lora", "enable_lora", True),
    ("--max-loras 2", "max_loras", 2),
    ("--max-lora-rank 8", "max_lora_rank", 8),
    ("--lora-extra-vocab-size 512", "lora_extra_vocab_size", 512),
    ("--lora-dtype bfloat16", "lora_dtype", "bfloat16"),
    ("--long-lora-scaling-factors 1.0 2.5", "long_lora_scaling_factors", [1.0, 2.5]),
    ("--max-cpu-loras 4", "max_cpu_loras", 4),
    ("--fully-sharded-loras", "fully_sharded_loras", True),
    ("--enable-prompt-adapter", "enable_prompt_adapter", True),
    ("--enable-prompt-adapters", "enable_prompt_adapter", True),
    ("--max-prompt-adapters 2", "max_prompt_adapters", 2),
    ("--max-prompt-adapter-token 3", "max_prompt_adapter_token", 3),
    *[(f"--device {d}", "device", d) for d in ("auto", "cuda", "neuron", "cpu", "openvino", "tpu", "xpu")],
    ("--num-scheduler-steps 8", "num_scheduler_steps", 8),
    ("--scheduler-delay-factor 0.5", "scheduler_delay_factor", 0.5),
    ("--enable-chunked-prefill", "enable_chunked_prefill", True),
    ("--enable-chunked-prefill true", "enable_chunked_prefill", True),
    ("--enable-chunked-prefill False", "enable_chunked_prefill", False),
    ("--enable-chunked-prefill=False", "enable_chunked_prefill", False),
    ("--no-enable-chunked-prefill", "enable_chunked_prefill", False),
    ("--speculative-model s", "speculative_model", "s"),
    ("--speculative-model-quantization gptq", "speculative_model_quantization", "gptq"),
    ("--num-speculative-tokens 3", "num_speculative_tokens", 3),
    ("--speculative-draft-tensor-parallel-size 1", "speculative_draft_tensor_parallel_size", 1),
    ("-spec-draft-tp 1", "speculative_draft_tensor_parallel_size", 1),
    ("--speculative-max-model-len 10", "speculative_max_model_len", 10),
    ("--speculative-disable-by-batch-size 4", "speculative_disable_by_batch_size", 4),
    ("--ngram-prompt-lookup-max 4", "ngram_prompt_lookup_max", 4),
    ("--ngram-prompt-lookup-min 2", "ngram_prompt_lookup_min", 2),
    ("--spec-decoding-acceptance-method typical_acceptance_sampler", "spec_decoding_acceptance_method",
     "typical_acceptance_sampler"),
    ("--typical-acceptance-sampler-posterior-threshold 0.1", "typical_acceptance_sampler_posterior_threshold", 0.1),
    ("--typical-acceptance-sampler-posterior-alpha 0.3", "typical_acceptance_sampler_posterior_alpha", 0.3),
    ("--disable-logprobs-during-spec-decoding", "disable_logprobs_during_spec_decoding", True),
    ("--disable-logprobs-during-spec-decoding false", "disable_logprobs_during_spec_decoding", False),
    ('--model-loader-extra-config {"a":1}', "model_loader_extra_config", {"a": 1}),
    ("--ignore-patterns a* b*", "ignore_patterns", ["a*", "b*"]),
    ("--preemption-mode recompute", "preemption_mode", "recompute"),
    ("--served-model-name a b", "served_model_name", ["a", "b"]),
    ("--qlora-adapter-name-or-path q", "qlora_adapter_name_or_path", "q"),
    ("--otlp-traces-endpoint u", "otlp_traces_endpoint", "u"),
    ("--collect-detailed-traces model", "collect_detailed_traces", "model"),
    ("--disable-async-output-proc", "disable_async_output_proc", True),
    ('--override-neuron-config {"a":1}', "override_neuron_config", {"a": 1}),
    ("--engine-use-ray", "engine_use_ray", True),
    ("--disable-log-requests", "disable_log_requests", True),
    # and of the versions after it
    ("-O3", "compilation_config", CompilationConfig.of(3)),
    ("-O 3", "compilation_config", CompilationConfig.of(3)),
    ("--compilation-config 3", "compilation_config", CompilationConfig.of(3)),
    ("-O.backend x -O1", "compilation_config", CompilationConfig.of({"backend": "x", "level": 1})),
    ('-O {"level":3}', "compilation_config", CompilationConfig.of(3)),
    ("-O.level 2", "compilation_config", CompilationConfig.of(2)),
    ('--compilation-config {"level":1,"cache_dir":"x"}', "compilation_config",
     CompilationConfig.of({"level": 1, "cache_dir": "x"})),
    ("--speculative-config.model x --speculative-config.num_speculative_tokens 3", "speculative_config",
     {"model": "x", "num_speculative_tokens": 3}),
    ("--hf-overrides.rope_scaling.factor 2", "hf_overrides", {"rope_scaling": {"factor": 2}}),
    ("--cuda-graph-sizes 1 2 4", "cuda_graph_sizes", [1, 2, 4]),
    ("--hf-token", "hf_token", True),
    ("--hf-token abc", "hf_token", "abc"),
    ("-dp 2", "data_parallel_size", 2),
    ("--max-model-len 16k", "max_model_len", 16_000),
    ("--max-model-len 16K", "max_model_len", 16_384),
    ("--max_model_len=25.6k", "max_model_len", 25_600),
    ("--kv-cache-memory-bytes 1G", "kv_cache_memory_bytes", 2**30),
    ("--task generate", "task", "generate"),
    ("--scheduling-policy priority", "scheduling_policy", "priority"),
    ("--enforce_eager=true", "enforce_eager", True),
    ("--enforce-eager=false", "enforce_eager", False),
    ("--generation-config vllm", "generation_config", "vllm"),
    ("--seed None", "seed", None),
]  # fmt: skip

# Defaults of 0.9.2 (fields that only exist in other versions have the default of the version nearest to it).
DEFAULTS = {
    "model": "facebook/opt-125m", "served_model_name": None, "tokenizer": None, "hf_config_path": None, "task": "auto",
    "skip_tokenizer_init": False, "tokenizer_mode": "auto", "trust_remote_code": False, "allowed_local_media_path": "",
    "download_dir": None, "load_format": "auto", "config_format": "auto", "dtype": "auto", "kv_cache_dtype": "auto",
    "seed": None, "max_model_len": None, "distributed_executor_backend": None, "pipeline_parallel_size": 1,
    "tensor_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False,
    "max_parallel_loading_workers": None, "block_size": None, "enable_prefix_caching": None,
    "prefix_caching_hash_algo": "builtin", "disable_sliding_window": False, "disable_cascade_attn": False,
    "use_v2_block_manager": True, "swap_space": 4, "cpu_offload_gb": 0, "gpu_memory_utilization": 0.9,
    "max_num_batched_tokens": None, "max_num_partial_prefills": 1, "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0, "max_num_seqs": None, "max_logprobs": 20, "disable_log_stats": False,
    "revision": None, "code_revision": None, "rope_scaling": {}, "rope_theta": None, "hf_token": None,
    "hf_overrides": {}, "tokenizer_revision": None, "quantization": None, "enforce_eager": False,
    "max_seq_len_to_capture": 8192, "disable_custom_all_reduce": False, "tokenizer_pool_size": 0,
    "tokenizer_pool_type": "ray",
    "tokenizer_pool_extra_config": {}, "limit_mm_per_prompt": {}, "mm_processor_kwargs": None,
    "disable_mm_preprocessor_cache": False, "enable_lora": False, "enable_lora_bias": False, "max_loras": 1,
    "max_lora_rank": 16, "fully_sharded_loras": False, "max_cpu_loras": None, "lora_dtype": "auto",
    "lora_extra_vocab_size": 256, "long_lora_scaling_factors": None, "enable_prompt_adapter": False,
    "max_prompt_adapters": 1, "max_prompt_adapter_token": 0, "device": "auto", "num_scheduler_steps": 1,
    "multi_step_stream_outputs": True, "ray_workers_use_nsight": False, "num_gpu_blocks_override": None,
    "num_lookahead_slots": 0, "model_loader_extra_config": {}, "ignore_patterns": None, "preemption_mode": None,
    "scheduler_delay_factor": 0.0, "enable_chunked_prefill": None, "disable_chunked_mm_input": False,
    "guided_decoding_backend": "auto", "logits_processor_pattern": None, "speculative_config": None,
    "qlora_adapter_name_or_path": None, "show_hidden_metrics_for_version": None, "otlp_traces_endpoint": None,
    "collect_detailed_traces": None, "disable_async_output_proc": False, "scheduling_policy": "fcfs",
    "scheduler_cls": "vllm.core.scheduler.Scheduler", "override_neuron_config": {}, "override_pooler_config": None,
    "compilation_config": CompilationConfig(), "worker_cls": "auto", "worker_extension_cls": "",
    "kv_transfer_config": None,
    "generation_config": "auto", "override_generation_config": {}, "enable_sleep_mode": False, "model_impl": "auto",
    "calculate_kv_scales": False, "additional_config": {}, "enable_reasoning": None, "reasoning_parser": "",
    "use_tqdm_on_load": True, "quantization_param_path": None, "worker_use_ray": False,
    "max_context_len_to_capture": None, "speculative_model": None, "speculative_model_quantization": None,
    "speculative_draft_tensor_parallel_size": None, "num_speculative_tokens": None, "speculative_max_model_len": None,
    "speculative_disable_by_batch_size": None, "ngram_prompt_lookup_max": None, "ngram_prompt_lookup_min": None,
    "spec_decoding_acceptance_method": "rejection_sampler", "typical_acceptance_sampler_posterior_threshold": None,
    "typical_acceptance_sampler_posterior_alpha": None, "disable_logprobs_during_spec_decoding": None,
    "speculative_disable_mqa_scorer": False, "enable_prompt_embeds": False, "cuda_graph_sizes": [512],
    "data_parallel_rank": None, "data_parallel_size_local": None, "data_parallel_address": None,
    "data_parallel_rpc_port": None, "data_parallel_backend": "mp", "enable_eplb": False, "num_redundant_experts": 0,
    "eplb_window_size": 1000, "eplb_step_interval": 3000, "eplb_log_balancedness": False, "media_io_kwargs": {},
    "disable_hybrid_kv_cache_manager": False, "guided_decoding_disable_fallback": False,
    "guided_decoding_disable_any_whitespace": False, "guided_decoding_disable_additional_properties": False,
    "kv_events_config": None, "override_attention_dtype": None, "pt_load_map_location": "cpu",
    "enable_multimodal_encoder_data_parallel": False,
}  # fmt: skip
NEWER = (
    "runner", "convert", "allowed_media_domains", "kv_cache_memory_bytes", "kv_offloading_size",
    "kv_offloading_backend", "max_num_queued_reqs",
    "max_num_queued_tokens", "max_token_gap", "attention_backend", "async_scheduling", "logits_processors",
    "structured_outputs_config", "pooler_config",
    "profiler_config", "attention_config", "quantization_config", "offload_group_size", "offload_num_in_group",
    "offload_prefetch_step", "offload_params", "enable_return_routed_experts", "return_sampling_mask", "spec_method",
    "spec_model", "spec_tokens", "logprobs_mode", "stream_interval", "cudagraph_capture_sizes",
    "max_cudagraph_capture_size", "distributed_timeout_seconds", "default_mm_loras",
)  # fmt: skip


def parser() -> FlexibleArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(document("llama")))
    return str(tmp_path)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the package logs."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    collector = Collector()
    logging.getLogger("vllm").addHandler(collector)
    yield lines
    logging.getLogger("vllm").removeHandler(collector)


# ---- fields and flags -----------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_api_level() -> None:
    args = vars(EngineArgs())
    assert {name: args.get(name, "absent") for name in DEFAULTS} == DEFAULTS
    assert set(args) == set(DEFAULTS) | set(NEWER)
    assert {f.name for f in dataclasses.fields(AsyncEngineArgs)} - set(args) == {
        "disable_log_requests", "enable_log_requests", "engine_use_ray"}  # fmt: skip


@pytest.mark.parametrize(("words", "name", "value"), GUIDE_FLAGS, ids=[words for words, _, _ in GUIDE_FLAGS])
def test_every_flag_of_the_guide_sets_its_field(words: str, name: str, value: Any) -> None:
    args = AsyncEngineArgs.from_cli_args(parser().parse_args(words.split()))
    assert getattr(args, name) == value
    others = dataclasses.replace(args, **{name: getattr(AsyncEngineArgs(), name)})
    assert others == AsyncEngineArgs()


def test_no_flag_changes_nothing() -> None:
    assert AsyncEngineArgs.from_cli_args(parser().parse_args([])) == AsyncEngineArgs()
    assert EngineArgs.from_cli_args(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([])) == EngineArgs()


def test_a_compilation_config_is_an_object_however_it_is_given() -> None:
    """As programs that read parsed flags expect; keys that steer a compiler are there as they were given."""
    words = ["-O.level", "2", "-O.custom_ops+", "-quant_fp8", "-O.cudagraph_capture_sizes", "[1,2,8]"]
    keys = {"level": 2, "custom_ops": ["-quant_fp8"], "cudagraph_capture_sizes": [1, 2, 8]}
    parsed = parser().parse_args(words).compilation_config
    assert parsed == EngineArgs(compilation_config=keys).compilation_config == CompilationConfig.of(keys)
    assert (parsed.level, parsed.custom_ops, parsed.backend) == (2, ["-quant_fp8"], None)
    assert parsed.cudagraph_capture_sizes == [1, 2, 8]
    assert parser().parse_args([]).compilation_config == CompilationConfig()
    assert EngineArgs(compilation_config=3).compilation_config.level == 3
    with pytest.raises(AttributeError, match="levle"):
        _ = parsed.levle


def test_async_flags_can_stand_alone() -> None:
    alone = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(), async_args_only=True)
    assert vars(alone.parse_args(["--disable-log-requests"])) == {
        "disable_log_requests": True, "enable_log_requests": None, "engine_use_ray": False}  # fmt: skip


def test_help_explains_every_setting() -> None:
    text = parser().format_help()
    for setting in all_settings():
        assert "--" + setting.name.replace("_", "-") in text
        assert setting.help.endswith((".", ")")), setting.name


def test_the_page_of_engine_arguments_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "engine_arguments.md"
    assert page.read_text() == markdown(), "run: python -m vllm.config.document > docs/engine_arguments.md"


def test_settings_are_declared_once() -> None:
    names = [setting.name for setting in all_settings()]
    assert len(names) == len(set(names))
    assert names[0] == "model"


# ---- Python ---------------------------------------------------------------------------------------------------------


def test_arguments_travel_as_keywords_and_as_json(model: str) -> None:
    args = EngineArgs(model, max_num_seqs=3, hf_overrides={"vocab_size": 99}, served_model_name=["a", "b"])
    assert EngineArgs(**vars(args)) == args
    assert EngineArgs.from_json(args.to_json()) == args
    assert EngineArgs.from_json(json.loads(args.to_json())) == args
    assert dataclasses.replace(args, max_num_seqs=4).max_num_seqs == 4
    assert args != EngineArgs(model)
    assert "max_num_seqs=3" in repr(args)
    compiled = EngineArgs(model, compilation_config={"level": 1, "backend": "x"})
    assert EngineArgs.from_json(compiled.to_json()) == compiled == EngineArgs(**vars(compiled))


def test_defaults_are_not_shared() -> None:
    EngineArgs().hf_overrides["vocab_size"] = 1
    assert EngineArgs().hf_overrides == {}


def test_values_of_this_process_are_refused_as_json() -> None:
    with pytest.raises(ValueError, match="hf_overrides is a function, which cannot be sent to another process"):
        EngineArgs(hf_overrides=lambda config: config).to_json()


@pytest.mark.parametrize(
    ("kwargs", "near"),
    [({"max_modl_len": 1}, "'max_model_len'"), ({"tensor_parallel": 2}, "'tensor_parallel_size'"), ({"zzz": 1}, "")],
)
def test_an_unknown_argument_is_an_error_that_names_the_near_ones(kwargs: dict[str, Any], near: str) -> None:
    with pytest.raises(TypeError, match=f"EngineArgs has no argument .*{near}"):
        EngineArgs(**kwargs)


def test_none_stands_for_the_default_of_an_optional_setting(model: str) -> None:
    optional = {s.name: None for s in all_settings() if s.kind.optional}
    config = EngineArgs(model, device="cpu", **optional).create_engine_config()
    plain = EngineArgs(model, device="cpu").create_engine_config()
    neutral = dataclasses.replace(plain.model_config, generation_config_source="vllm")  # None meant that
    explanation = {**plain.explanation, "sampling defaults": "{}: generation_config='vllm'"}
    assert config == dataclasses.replace(plain, model_config=neutral, explanation=explanation)


def test_an_argument_cannot_be_given_twice() -> None:
    with pytest.raises(TypeError, match="two values for the argument 'model'"):
        EngineArgs("a", model="b")


def test_the_config_is_equal_after_a_journey_as_json(model: str) -> None:
    args = EngineArgs(model, hf_overrides=lambda config: config, served_model_name=["a", "b"], max_num_seqs=5)
    config = args.create_engine_config(UsageContext.LLM_CLASS)
    arrived = VllmConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    plain = dataclasses.replace(config, model_config=dataclasses.replace(config.model_config, hf_overrides={}))
    assert arrived == plain
    assert arrived.model_config.hf.rope == config.model_config.hf.rope
    assert arrived.model_config.path == Path(model)


def test_a_config_cannot_be_changed(model: str) -> None:
    config = EngineArgs(model).create_engine_config()
    for part in (config, config.model_config, config.cache_config, config.scheduler_config, config.model_config.hf):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, 1)


def test_logging_of_requests_has_two_names() -> None:
    assert AsyncEngineArgs().log_requests
    assert not AsyncEngineArgs(disable_log_requests=True).log_requests
    assert not AsyncEngineArgs(enable_log_requests=False).log_requests
    assert AsyncEngineArgs(enable_log_requests=True, disable_log_requests=True).log_requests


# ---- features of later versions -------------------------------------------------------------------------------------

LATER: list[dict[str, Any]] = [
    {"logits_processor_pattern": ".*"},
    {"quantization": "tpu_int8"}, {"quantization": "rtn"}, {"quantization": "Quark"}, {"quantization": "modelopt_fp4"},
    {"speculative_config": {"model": "x", "num_speculative_tokens": 2}}, {"speculative_model": "[ngram]"},
    {"spec_method": "ngram"},
    {"kv_transfer_config": {"kv_role": "kv_both"}}, {"kv_events_config": {"a": 1}},
    {"mm_processor_kwargs": {"a": 1}}, {"media_io_kwargs": {"a": {}}}, {"allowed_local_media_path": "/x"},
    {"load_format": "runai_streamer"}, {"load_format": "fastsafetensors"},
    {"cpu_offload_gb": 1}, {"enable_prompt_embeds": True},
    {"task": "transcription"}, {"runner": "draft"}, {"tokenizer_mode": "custom"},
    {"preemption_mode": "swap"}, {"enable_sleep_mode": True}, {"otlp_traces_endpoint": "http://x"},
    {"collect_detailed_traces": "all"},
    {"num_lookahead_slots": 2}, {"override_neuron_config": {"a": 1}},
    {"logits_processors": ["a:B"]},
    {"disable_hybrid_kv_cache_manager": True}, {"config_format": "mistral"},
    {"override_attention_dtype": "float16"},
    {"logprobs_mode": "raw_logits"}, {"offload_params": ["a"]}, {"quantization_config": {"a": 1}},
    {"num_redundant_experts": 2}, {"disable_chunked_mm_input": True},
]  # fmt: skip


@pytest.mark.parametrize("kwargs", LATER, ids=[", ".join(map(str, kwargs)) for kwargs in LATER])
def test_a_feature_of_a_later_version_is_refused_by_name(model: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSettingError, match="(?i)not supported|needs a CUDA device") as error:
        EngineArgs(model, device="cpu", **kwargs).create_engine_config()
    assert isinstance(error.value, ValueError) and isinstance(error.value, NotImplementedError)
    assert error.value.parameter in kwargs


def test_every_setting_with_a_missing_feature_is_refused(model: str) -> None:
    for setting in all_settings():
        if isinstance(setting.later, str):
            assert setting.feature_missing_for(object()) == setting.later
        else:
            assert setting.later and setting.feature_missing_for(setting.default) == ""


def test_the_engine_cannot_run_in_ray(model: str) -> None:
    with pytest.raises(UnsupportedSettingError, match="engine_use_ray"):
        AsyncEngineArgs(model, engine_use_ray=True).create_engine_config()


OBSOLETE: list[dict[str, Any]] = [
    {"use_v2_block_manager": False}, {"swap_space": 2},
    {"multi_step_stream_outputs": False}, {"tokenizer_pool_size": 2}, {"tokenizer_pool_type": "x"},
    {"tokenizer_pool_extra_config": {"a": 1}},
    {"max_parallel_loading_workers": 2}, {"disable_cascade_attn": True}, {"show_hidden_metrics_for_version": "0.7"},
    {"max_loras": 4}, {"max_prompt_adapters": 2},
    {"num_scheduler_steps": 8},
    {"override_generation_config": {"eos_token_id": 5}},
    {"code_revision": "x"}, {"eplb_window_size": 5}, {"enable_eplb": True}, {"ngram_prompt_lookup_max": 3},
    {"gpu_memory_utilization": 0.5}, {"enforce_eager": True}, {"max_seq_len_to_capture": 99}, {"cuda_graph_sizes": [4]},
    {"cudagraph_capture_sizes": [4]}, {"max_cudagraph_capture_size": 4}, {"disable_async_output_proc": True},
    {"async_scheduling": True}, {"trust_remote_code": True}, {"revision": "main"}, {"additional_config": {"a": 1}},
    {"distributed_timeout_seconds": 5}, {"disable_custom_all_reduce": True}, {"tokenizer_revision": "main"},
    {"download_dir": "x"}, {"ignore_patterns": ["x"]}, {"hf_token": "x"}, {"disable_sliding_window": True},
    {"compilation_config": 2},
]  # fmt: skip


@pytest.mark.parametrize("kwargs", OBSOLETE, ids=[", ".join(kwargs) for kwargs in OBSOLETE])
def test_a_setting_without_effect_is_said_to_be_in_one_log_line(
    model: str, kwargs: dict[str, Any], logged: list[str]
) -> None:
    EngineArgs(model, device="cpu", **kwargs).create_engine_config()
    (name,) = kwargs
    assert len([line for line in logged if name in line]) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LOCAL_RANK", "changes nothing here: distributed_executor_backend is not external_launcher"),
        ("S3_ENDPOINT_URL", "changes nothing here: load_format is not tensorizer"),
        ("VLLM_USE_RAY_COMPILED_DAG", "changes nothing: steps do not pass through Ray"),
        ("VLLM_CPU_KVCACHE_SPCE", "is not known and changes nothing. Did you mean 'VLLM_CPU_KVCACHE_SPACE'"),
    ],
)
def test_a_variable_without_effect_is_said_to_be_in_one_log_line(
    model: str, name: str, words: str, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    EngineArgs(model, device="cpu").create_engine_config()
    (line,) = [line for line in logged if name in line]
    assert words in line


def test_the_default_arguments_log_no_useless_setting(model: str, logged: list[str]) -> None:
    EngineArgs(model, device="cpu", dtype="float32").create_engine_config()
    assert logged == []


def test_folders_may_be_paths(model: str) -> None:
    config = EngineArgs(Path(model), tokenizer=Path(model), device="cpu").create_engine_config()
    assert (config.model_config.model, config.model_config.tokenizer) == (model, model)
    assert config.model_config.served_model_name == model


def test_quantization_is_written_in_any_case(model: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["-q", "AWQ"]).quantization == "awq"
    with pytest.raises(ValueError, match="quantization='awq' needs a checkpoint"):
        EngineArgs(model, quantization="AWQ").create_engine_config()


def test_graphs_are_for_all_sequences_unless_somebody_sets_how_long(model: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

    def longest(args: EngineArgs) -> int:
        return args.create_engine_config().model_config.max_seq_len_to_capture

    unset = EngineArgs(model, max_model_len=50)
    assert unset.max_seq_len_to_capture == 8192
    assert longest(unset) == 50
    assert longest(EngineArgs(model, max_model_len=50, max_seq_len_to_capture=8192)) == 8192
    assert longest(EngineArgs.from_cli_args(parser.parse_args(["--model", model, "--max-model-len", "50"]))) == 50
    given = ["--model", model, "--max-model-len", "50", "--max-seq-len-to-capture", "8192"]
    assert longest(EngineArgs.from_cli_args(parser.parse_args(given))) == 8192


def test_the_older_name_of_the_longest_graph_is_accepted(model: str) -> None:
    config = EngineArgs(model, max_context_len_to_capture=77).create_engine_config()
    assert config.model_config.max_seq_len_to_capture == 77


# ---- wrong values ---------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model must be a string"),
    ({"model": None}, "model must be a string"),
    ({"max_model_len": "long"}, "max_model_len"),
    ({"max_model_len": 0}, "max_model_len must be at least 1, got 0."),
    ({"max_model_len": -1}, "max_model_len must be at least 1"),
    ({"max_model_len": 1.5}, "max_model_len must be an int"),
    ({"max_model_len": True}, "max_model_len must be an int"),
    ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0."),
    ({"max_num_seqs": 2**40}, "max_num_seqs must be at most 1048576"),
    ({"max_model_len": 2**31}, "max_model_len must be at most 2147483647"),
    ({"seed": 2**64}, "seed must be at most"),
    ({"max_num_seqs": float("nan")}, "max_num_seqs must be an int"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ({"block_size": 24}, "block_size must be a power of two from 1 to 256, got 24."),
    ({"block_size": 512}, "block_size must be a power of two from 1 to 256, got 512."),
    ({"gpu_memory_utilization": 1.1}, "GPU memory utilization must be less than 1.0. Got 1.1."),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be greater than 0"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be a finite number"),
    ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number"),
    ({"cpu_offload_gb": -1}, "CPU offload space must be non-negative, but got -1.0"),
    ({"swap_space": -1}, "swap_space must be non-negative"),
    ({"kv_cache_dtype": "int3"}, "Unknown kv cache dtype: int3. Must be one of ['auto', "),
    ({"prefix_caching_hash_algo": "md5"},
     "Unknown prefix caching hash algorithm: md5. Must be one of ('builtin', 'sha256')."),
    ({"tokenizer_mode": "quick"},
     "Unknown tokenizer mode: quick. Must be either 'auto', 'slow', 'mistral' or 'custom'."),
    ({"quantization": "none"}, "Unknown quantization method: none. Must be one of ["),
    ({"dtype": "int8"}, "Unknown dtype: int8. It must be one of auto, half, float16"),
    ({"dtype": 5}, "Unknown dtype: 5"),
    ({"distributed_executor_backend": "mpi"},
     "Unrecognized distributed executor backend mpi. Supported values are 'ray', 'mp' 'uni', 'external_launcher' or "
     "custom ExecutorBase subclass."),
    ({"ray_workers_use_nsight": True}, "Unable to use nsight profiling unless workers run with Ray."),
    ({"tensor_parallel_size": 4}, "Total number of attention heads (6) must be divisible by tensor parallel size (4)."),
    ({"max_num_batched_tokens": 100, "enable_chunked_prefill": False},
     "max_num_batched_tokens (100) is smaller than max_model_len (4096). This effectively limits the maximum sequence "
     "length to max_num_batched_tokens and makes vLLM reject longer sequences. Please increase max_num_batched_tokens "
     "or decrease max_model_len."),
    ({"max_num_batched_tokens": 10, "max_num_seqs": 20},
     "max_num_batched_tokens (10) must be greater than or equal to max_num_seqs (20)."),
    ({"num_lookahead_slots": -1}, "num_lookahead_slots (-1) must be greater than or equal to 0."),
    ({"num_scheduler_steps": 0}, "num_scheduler_steps (0) must be greater than or equal to 1."),
    ({"max_num_partial_prefills": 0}, "max_num_partial_prefills (0) must be greater than or equal to 1."),
    ({"max_num_partial_prefills": 2, "enable_chunked_prefill": False},
     "Chunked prefill must be enabled to set max_num_partial_prefills > 1."),
    ({"long_prefill_token_threshold": 5000},
     "long_prefill_token_threshold (5000) cannot be greater than the max_model_len (4096)."),
    ({"max_long_partial_prefills": 3, "max_num_partial_prefills": 2},
     "max_long_partial_prefills (3) must be greater than or equal to 1 and less than or equal to "
     "max_num_partial_prefills (2)."),
    ({"enable_lora": True, "max_lora_rank": 9},
     "max_lora_rank (9) must be one of (8, 16, 32, 64, 128, 256, 320, 512)."),
    ({"enable_lora": True, "lora_extra_vocab_size": 9}, "lora_extra_vocab_size (9) must be one of (0, 256, 512)."),
    ({"enable_lora": True, "max_loras": 0}, "max_loras (0) must be >= 1."),
    ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras (2) must be >= max_loras (4)"),
    ({"enable_prompt_adapter": True, "max_prompt_adapters": 0}, "max_prompt_adapters (0) must be >= 1."),
    ({"enable_prompt_adapter": True}, "max_prompt_adapter_token must be set."),
    ({"num_speculative_tokens": 3}, "num_speculative_tokens was provided without speculative model."),
    ({"speculative_model": "m", "num_speculative_tokens": 0},
     "Expected num_speculative_tokens to be greater than zero (0)."),
    ({"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 0}, "prompt_lookup_min=0 must be > 0"),
    ({"speculative_model": "[ngram]", "ngram_prompt_lookup_max": 0}, "prompt_lookup_max=0 must be > 0"),
    ({"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 4, "ngram_prompt_lookup_max": 2},
     "prompt_lookup_min=4 must be <= prompt_lookup_max=2"),
    ({"speculative_model": "m", "speculative_disable_by_batch_size": 1},
     "Expect the batch size threshold of disabling speculative decoding is > 1, but got self.disable_by_batch_size=1"),
    ({"spec_decoding_acceptance_method": "x"},
     "Expected acceptance_method to be either rejection_sampler or typical_acceptance_sampler. Instead it is x"),
    ({"speculative_config": {"method": "ngram", "acceptance_method": None}},
     "acceptance_method is not set. Expected values are rejection_sampler or typical_acceptance_sampler."),
    ({"typical_acceptance_sampler_posterior_alpha": 0.0},
     "Expected the posterior_threshold and posterior_alpha of typical_acceptance_sampler to be > 0. Instead found "
     "posterior_threshold = None and posterior_alpha = 0.0"),
    ({"speculative_model": "m", "num_scheduler_steps": 2},
     "Speculative decoding is not supported with multi-step (--num-scheduler-steps > 1)"),
    ({"kv_offloading_size": 1, "pipeline_parallel_size": 2}, "kv_offloading_size works without a pipeline"),
    ({"num_scheduler_steps": 2, "enable_chunked_prefill": True, "pipeline_parallel_size": 2},
     "Multi-Step Chunked-Prefill is not supported for pipeline-parallel-size > 1"),
    ({"guided_decoding_backend": "magic"}, "Invalid guided_decoding_backend 'magic', must be one of ["),
    ({"collect_detailed_traces": "model,gpu"}, "Invalid module gpu in collect_detailed_traces. Valid modules are ("),
    ({"qlora_adapter_name_or_path": "x"}, "QLoRA adapter only support 'bitsandbytes' quantization, but got None"),
    ({"limit_mm_per_prompt": {"image": 2}}, "`limit_mm_per_prompt` is only supported for multimodal models."),
    ({"hf_overrides": 5}, "hf_overrides must be a dict or a callable, got 5."),
    ({"rope_scaling": "linear"}, "rope_scaling must be a dict"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"device": "abacus"}, "device must be one of auto, cuda,"),
    ({"device": "tpu"}, "device='tpu' is not available: TPUs need a platform plug-in and torch_xla."),
    ({"device": "neuron"}, "transformers-neuronx"),
    ({"device": "xpu"}, "intel-extension-for-pytorch"),
    ({"device": "openvino"}, "the package openvino"),
    ({"device": "rocm"}, "AMD GPUs are not supported yet"),
    ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "The 'uni' executor runs one device"),
    (
        {"distributed_executor_backend": "uni", "pipeline_parallel_size": 2},
        "one device, but pipeline_parallel_size=2 asks for 2",
    ),
    (
        {"distributed_executor_backend": "external_launcher", "pipeline_parallel_size": 2},
        "'external_launcher' works without a pipeline, pipeline_parallel_size=2 asks for one",
    ),
    ({"generation_config": "/nowhere"}, "there is no /nowhere/generation_config.json"),
    ({"override_generation_config": {"top_p": "hot"}}, "override_generation_config: top_p must be a number"),
    ({"compilation_config": 7}, "level must be an integer from 0 to 3, got 7"),
    ({"compilation_config": {"levle": 1}}, "unknown keys levle"),
    ({"compilation_config": "fast"}, "compilation_config must be a dict or a level from 0 to 3"),
    ({"logits_processor_pattern": "("}, "must be a regular expression"),
    ({"attention_backend": "FLASHINFER"}, "is not supported by this version on 'cpu', only TORCH_SDPA"),
    ({"attention_backend": "FLASH_ATTN"}, "is not supported by this version on 'cpu', only TORCH_SDPA"),
    ({"attention_backend": "MAGIC"}, "attention_backend must be one of TORCH_SDPA"),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching must be True or False"),
    ({"served_model_name": 5}, "served_model_name must be a list of strings"),
    ({"max_logprobs": -2}, "max_logprobs must be at least -1"),
    ({"seed": "x"}, "seed must be an int"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority"),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "message"), WRONG, ids=[str(kwargs)[:60] for kwargs, _ in WRONG])
def test_a_wrong_value_is_refused_with_the_documented_text(model: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineArgs(**{"model": model, "device": "cpu", **kwargs}).create_engine_config()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--max-model-len 1.5K",
            "Decimals are not allowed with binary suffixes like K. Did you mean to use 1.5k instead?",
        ),
        ("--max-model-len many", "Value many cannot be converted to"),
        ("--max-num-seqs x", "Value x cannot be converted to"),
        ("--gpu-memory-utilization x", "Value x cannot be converted to"),
        ("--limit-mm-per-prompt image", "Each item should be in the form KEY=VALUE"),
        ("--limit-mm-per-prompt image=1,image=2", "Conflicting values specified for key: image"),
        ("--rope-scaling {", "Value { cannot be converted to JSON."),
        ("--rope-scaling [1]", "Value [1] cannot be converted to"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--enforce-eager=maybe", "expected true or false, got 'maybe'"),
        ("--max-modl-len 5", "unrecognized arguments: --max-modl-len 5. Did you mean --max-model-len"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_refused(words: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words.split())
    assert message in capsys.readouterr().err


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.binary(max_size=3),
    st.sampled_from([0, -1, 2**31, 2**64, 10**400, float("nan"), "\0", "auto", "1K", "None", "/", ("a",), object()]),
    st.lists(st.integers() | st.text(max_size=3) | st.none(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=3) | st.none(), max_size=3),
)  # fmt: skip


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(document("llama")))
    return str(folder)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([s.name for s in all_settings()]), HOSTILE, min_size=1, max_size=2))
def test_no_value_raises_anything_but_a_value_error(
    shared_model: str, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    try:
        config = EngineArgs(**{"model": shared_model, "device": "cpu", **kwargs}).create_engine_config()
    except (ValueError, NotImplementedError) as error:
        assert str(error)
    else:
        assert VllmConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
