"""What a setting becomes when the user leaves it open: from the model, from the hardware, with a reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.config.families import document
from vllm import EngineArgs
from vllm.config import HFConfig, VllmConfig, resolve
from vllm.config.compilation import CompilationConfig, graph_sizes
from vllm.config.dtype import resolve_dtype
from vllm.config.max_model_len import resolve_max_model_len
from vllm.config.quantization import Quantization, resolve_quantization
from vllm.config.settings import without_secrets
from vllm.platforms.interface import DeviceCapability, Platform
from vllm.usage.usage_lib import UsageContext

GIB = 2**30


class FakePlatform(Platform):
    """A device by its facts."""

    def __init__(self, device: str, bfloat16: bool, memory: int = 16 * GIB, count: int = 8) -> None:
        self.device_type, self.bfloat16, self.memory, self.count = device, bfloat16, memory, count

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        if self.device_type == "cpu":
            return None
        return DeviceCapability(9, 0) if self.bfloat16 else DeviceCapability(7, 5)

    def get_device_name(self, device_id: int = 0) -> str:
        return "Fake T4"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return self.memory

    def device_count(self) -> int:
        return self.count

    def supports_bfloat16(self) -> bool:
        return self.bfloat16

    def bfloat16_reason(self) -> str:
        return "it has bfloat16" if self.bfloat16 else "it has no bfloat16"


CPU, OLD_CPU = FakePlatform("cpu", True), FakePlatform("cpu", False)
GPU, OLD_GPU, BIG_GPU = FakePlatform("cuda", True), FakePlatform("cuda", False), FakePlatform("cuda", True, 141 * GIB)


def hf(model_type: str = "llama", **changes: Any) -> HFConfig:
    return HFConfig.from_dict(document(model_type, **changes))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config for a model and a platform."""

    def build(
        platform: Platform = CPU, usage: UsageContext | None = None, model: dict[str, Any] | None = None, **kwargs: Any
    ) -> VllmConfig:
        (tmp_path / "config.json").write_text(json.dumps(model or document("llama")))
        monkeypatch.setattr(resolve, "platform_for", lambda device: platform)
        args = EngineArgs(str(tmp_path), device=platform.device_type, **kwargs)
        return args.create_engine_config(usage)

    return build


# ---- dtype ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "cpu", "old_cpu", "gpu", "old_gpu"),
    [
        ("bfloat16", "bfloat16", "float32", "bfloat16", "float16"),
        ("float16", "bfloat16", "float32", "float16", "float16"),
        ("float32", "float32", "float32", "float16", "float16"),
        (None, "float32", "float32", "float16", "float16"),
        ("torch.float16", "bfloat16", "float32", "float16", "float16"),
    ],
)
def test_auto_dtype_follows_the_model_and_the_device(
    stored: str | None, cpu: str, old_cpu: str, gpu: str, old_gpu: str
) -> None:
    config = hf(torch_dtype=stored)
    for platform, expected in ((CPU, cpu), (OLD_CPU, old_cpu), (GPU, gpu), (OLD_GPU, old_gpu)):
        dtype, reason = resolve_dtype("auto", config, platform)
        assert dtype == expected
        assert ("float32" if stored is None else stored.removeprefix("torch.")) in reason


@pytest.mark.parametrize("stored", ["float16", "float32", "bfloat16"])
def test_a_family_that_leaves_the_range_of_float16_never_computes_in_it(stored: str) -> None:
    config = hf("gemma2", torch_dtype=stored)
    assert resolve_dtype("auto", config, GPU)[0] == "bfloat16"
    assert resolve_dtype("auto", config, OLD_GPU)[0] == "float32"
    with pytest.raises(ValueError, match="'gemma2' do not work in float16"):
        resolve_dtype("half", config, GPU)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("half", "float16"),
        ("float16", "float16"),
        ("float", "float32"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_a_given_dtype_is_used(make: Any, given: str, expected: str) -> None:
    assert make(dtype=given).model_config.dtype == expected


def test_a_torch_dtype_is_a_dtype(make: Any) -> None:
    import torch

    assert make(dtype=torch.bfloat16).model_config.dtype == "bfloat16"
    assert make(dtype=torch.float16).model_config.dtype == "float16"
    with pytest.raises(ValueError, match="Unknown dtype: torch.int8"):
        make(dtype=torch.int8)


def test_bfloat16_on_an_old_gpu_is_refused_with_the_documented_text() -> None:
    with pytest.raises(ValueError) as error:
        resolve_dtype("bfloat16", hf(), OLD_GPU)
    assert str(error.value) == (
        "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Fake T4 GPU has compute "
        "capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag in CLI, for example: "
        "--dtype=half."
    )


def test_an_unknown_stored_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="Unknown dtype: float8_e4m3fn .in .*config.json"):
        resolve_dtype("auto", hf(torch_dtype="float8_e4m3fn"), CPU)


# ---- max_model_len --------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf("llama"), 4096),  # llama3 scaling is in the length already
        (hf("llama", rope_scaling=None), 4096),
        (hf("llama", rope_scaling={"type": "linear", "factor": 2.0}), 8192),
        (hf("llama", rope_scaling={"type": "dynamic", "factor": 2.5}), 10240),
        (hf("llama", rope_scaling=YARN), 4000),
        (hf("llama", rope_scaling={"type": "yarn", "factor": 2.0}), 8192),
        (hf("llama", rope_scaling=None, max_position_embeddings=100, max_seq_len=90, seq_length=80), 80),
        (hf("llama", rope_scaling=None, model_max_length=50), 50),
        (hf("phi3"), 8192),  # longrope
        (hf("gpt2"), 512),
        (hf("mistral"), 32768),
        (hf("opt"), 2048),
        (hf("qwen2", rope_scaling={"type": "mrope", "mrope_section": [1, 2, 3]}), 32768),
        (HFConfig.from_dict({"model_type": "unheard_of"}), 2048),
    ],
)  # fmt: skip
def test_the_longest_sequence_is_derived_from_the_config(config: HFConfig, expected: int) -> None:
    length, reason = resolve_max_model_len(None, config, disable_sliding_window=False)
    assert length == expected
    assert reason
    assert resolve_max_model_len(expected, config, disable_sliding_window=False)[0] == expected
    assert resolve_max_model_len(1, config, disable_sliding_window=False)[0] == 1


def test_a_longer_sequence_is_refused_with_the_documented_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as error:
        resolve_max_model_len(4097, hf(), disable_sliding_window=False)
    assert str(error.value) == (
        "User-specified max_model_len (4097) is greater than the derived max_model_len (max_position_embeddings=4096 "
        "or model_max_length=None in model's config.json). This may lead to incorrect model outputs or CUDA errors. To "
        "allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    )
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert resolve_max_model_len(4097, hf(), disable_sliding_window=False)[0] == 4097


@pytest.mark.parametrize(("model_type", "length"), [("gpt2", 512), ("opt", 2048)])
def test_learned_positions_cannot_be_exceeded_at_all(
    model_type: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(ValueError, match=f"no position embeddings beyond {length}"):
        resolve_max_model_len(length + 1, hf(model_type), disable_sliding_window=False)


def test_model_max_length_of_the_config_allows_more() -> None:
    config = hf(rope_scaling=None, model_max_length=9000)
    assert resolve_max_model_len(9000, config, disable_sliding_window=False)[0] == 9000
    with pytest.raises(ValueError, match="model_max_length=9000"):
        resolve_max_model_len(9001, config, disable_sliding_window=False)


def test_without_its_window_a_model_is_as_long_as_the_window(make: Any) -> None:
    config = make(model=document("mistral"), disable_sliding_window=True)
    assert config.model_config.max_model_len == 256
    assert config.model_config.hf.sliding_window is None
    assert config.model_config.get_sliding_window() is None
    assert config.cache_config.sliding_window is None
    assert set(config.model_config.hf.layer_types) == {"full_attention"}
    assert make(model=document("mistral")).cache_config.sliding_window == 256


def test_turning_the_window_off_has_documented_limits() -> None:
    scaled = hf("mistral", rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(NotImplementedError, match="not supported for models with rope_scaling. Please raise an issue"):
        resolve_max_model_len(None, scaled, disable_sliding_window=True)
    with pytest.raises(NotImplementedError, match="not supported for models model_max_length in the config."):
        resolve_max_model_len(300, hf("mistral", model_max_length=400), disable_sliding_window=True)


# ---- the size of a step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "usage", "tokens", "seqs"),
    [
        (GPU, UsageContext.LLM_CLASS, 8192, 256),
        (GPU, UsageContext.OPENAI_API_SERVER, 2048, 256),
        (GPU, None, 2048, 256),
        (BIG_GPU, UsageContext.LLM_CLASS, 16384, 1024),
        (BIG_GPU, UsageContext.OPENAI_API_SERVER, 8192, 1024),
        (CPU, UsageContext.LLM_CLASS, 4096, 256),
        (CPU, UsageContext.OPENAI_API_SERVER, 2048, 256),
        (CPU, UsageContext.OPENAI_BATCH_RUNNER, 4096, 256),
    ],
)
def test_a_step_is_as_large_as_device_and_use_suggest(
    make: Any, platform: Platform, usage: UsageContext | None, tokens: int, seqs: int
) -> None:
    scheduler = make(platform, usage).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seqs)
    assert scheduler.enable_chunked_prefill and scheduler.chunked_prefill_enabled
    assert scheduler.max_model_len == 4096


@pytest.mark.parametrize(
    ("kwargs", "tokens", "seqs"),
    [
        ({"enable_chunked_prefill": False}, 4096, 256),  # a whole prompt must fit
        ({"max_num_seqs": 3, "max_model_len": 10}, 30, 3),  # more can never be waiting
        ({"max_num_seqs": 5000}, 5000, 5000),  # a token each
        ({"max_num_batched_tokens": 16}, 16, 16),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 16}, 16, 16),
        ({"max_num_batched_tokens": 100_000}, 100_000, 256),
        ({"max_num_batched_tokens": "2k", "max_num_seqs": 1}, 2000, 1),
        ({"max_model_len": 1, "max_num_seqs": 1}, 1, 1),
    ],
)
def test_a_step_fits_what_was_given(make: Any, kwargs: dict[str, Any], tokens: int, seqs: int) -> None:
    scheduler = make(**kwargs).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seqs)


def test_stages_share_a_prompt_in_pieces(make: Any) -> None:
    """By default a step is smaller with a pipeline, so that several are under way; what a user says is kept."""
    for stages, tokens in ((1, 16384), (2, 8192)):
        config = make(
            BIG_GPU, UsageContext.LLM_CLASS, pipeline_parallel_size=stages, distributed_executor_backend="ray"
        )
        assert config.scheduler_config.max_num_batched_tokens == tokens
    own = make(BIG_GPU, pipeline_parallel_size=2, distributed_executor_backend="ray", max_num_batched_tokens=16384)
    assert own.scheduler_config.max_num_batched_tokens == 16384
    small = make(GPU, pipeline_parallel_size=2, distributed_executor_backend="ray", max_num_seqs=4)
    assert small.scheduler_config.max_num_batched_tokens == 2048


def test_several_partial_prefills_have_a_threshold(make: Any) -> None:
    assert make(max_num_partial_prefills=2).scheduler_config.long_prefill_token_threshold == 163
    assert make().scheduler_config.long_prefill_token_threshold == 0
    given = make(max_num_partial_prefills=2, long_prefill_token_threshold=7).scheduler_config
    assert given.long_prefill_token_threshold == 7


# ---- workers, cache, graphs -----------------------------------------------------------------------------------------


def test_the_executor_follows_the_number_of_workers(make: Any) -> None:
    assert make().parallel_config.distributed_executor_backend == "uni"
    assert make(tensor_parallel_size=2).parallel_config.distributed_executor_backend == "mp"
    assert make(distributed_executor_backend="mp").parallel_config.distributed_executor_backend == "mp"
    assert make(tensor_parallel_size=2).parallel_config.world_size == 2


def test_more_workers_than_devices_are_refused_or_left_to_ray(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.config.resolve.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs 2 CUDA devices, but 1 can be seen"):
        make(FakePlatform("cuda", True, count=1), tensor_parallel_size=2)
    monkeypatch.setattr("vllm.config.resolve.find_spec", lambda name: object())  # Ray is installed
    config = make(FakePlatform("cuda", True, count=1), tensor_parallel_size=2)
    assert config.parallel_config.distributed_executor_backend == "ray"


def test_programs_may_say_by_variables_which_copy_a_process_is(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "4")
    monkeypatch.setenv("VLLM_DP_RANK", "3")
    monkeypatch.setenv("VLLM_DP_MASTER_IP", "127.0.0.1")
    parallel = make(tensor_parallel_size=2).parallel_config
    assert (parallel.data_parallel_size, parallel.data_parallel_rank, parallel.local_replicas) == (4, 3, 1)
    assert parallel.first_device == 6
    monkeypatch.setenv("VLLM_DP_RANK_LOCAL", "1")  # two copies on each of two hosts
    assert make(tensor_parallel_size=2).parallel_config.first_device == 2
    with pytest.raises(ValueError, match=r"of this host's copy 1 \(VLLM_DP_RANK_LOCAL\) needs 4 CUDA devices"):
        make(FakePlatform("cuda", True, count=3), tensor_parallel_size=2, distributed_executor_backend="mp")
    with caplog.at_level(logging.INFO, "vllm"):
        given = make(data_parallel_size=2).parallel_config
    assert (given.data_parallel_rank, given.local_replicas, given.first_device) == (None, 2, 0)
    assert "VLLM_DP_SIZE changes nothing here: data_parallel_size says how many copies" in caplog.text
    monkeypatch.setenv("VLLM_DP_RANK", "4")
    with pytest.raises(ValueError, match="data_parallel_rank=4 must be below data_parallel_size=4"):
        make()


def test_key_value_heads_must_divide_or_repeat(make: Any) -> None:
    config = make(tensor_parallel_size=6)  # 6 heads, 2 key/value heads: each is on three ranks
    assert config.model_config.get_num_kv_heads(config.parallel_config) == 1
    assert config.model_config.get_num_attention_heads(config.parallel_config) == 1
    with pytest.raises(
        ValueError, match="2 key/value heads can be neither divided by nor repeated over 3 ranks.*: 1, 2, 6;"
    ):
        make(tensor_parallel_size=3)
    with pytest.raises(ValueError, match=r"heads \(6\) must be divisible.*: 1, 2, 6; or use pipeline_parallel_size"):
        make(tensor_parallel_size=4)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_a_block_holds_a_power_of_two_tokens(make: Any, block_size: int) -> None:
    assert make(block_size=block_size).cache_config.block_size == block_size


def test_cache_defaults(make: Any) -> None:
    cache = make().cache_config
    assert (cache.block_size, cache.enable_prefix_caching, cache.cache_dtype) == (16, True, "auto")
    assert cache.swap_space_bytes == 4 * GIB
    assert not make(enable_prefix_caching=False).cache_config.enable_prefix_caching


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "fp8_e4m3"])
def test_an_fp8_cache_and_its_scales(make: Any, dtype: str) -> None:
    for device in (GPU, CPU):
        cache = make(device, kv_cache_dtype=dtype, calculate_kv_scales=True).cache_config
        assert cache.cache_dtype == dtype
    assert make(kv_cache_dtype=dtype, quantization_param_path="x.json").cache_config.quantization_param_path == "x.json"
    with pytest.raises(ValueError, match="set one"):
        make(kv_cache_dtype=dtype, quantization_param_path="x.json", calculate_kv_scales=True)


@pytest.mark.parametrize("given", [{"quantization_param_path": "x.json"}, {"calculate_kv_scales": True}])
def test_scales_need_an_fp8_cache(make: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set kv_cache_dtype='fp8'"):
        make(**given)


def test_graphs_are_for_cuda_only(make: Any) -> None:
    assert make(CPU).compilation_config.cudagraph_capture_sizes == ()
    sizes = make(GPU).compilation_config.cudagraph_capture_sizes
    assert sizes[:5] == (1, 2, 4, 8, 16) and sizes[-1] == 256
    assert make(GPU, enforce_eager=True).compilation_config.cudagraph_capture_sizes == ()
    assert make(GPU, compilation_config={"use_cudagraph": False}).compilation_config.cudagraph_capture_sizes == ()
    assert make(GPU, compilation_config=3).compilation_config.level == 3
    assert make(GPU, compilation_config=CompilationConfig(level=2)).compilation_config.level == 2
    given = CompilationConfig.from_cli('{"level": 1, "cudagraph_capture_sizes": [3]}')
    assert make(GPU, compilation_config=given).compilation_config.cudagraph_capture_sizes == (3,)
    exact = {"compilation_config": {"cudagraph_capture_sizes": [7, 3]}}, {"cudagraph_capture_sizes": [3, 7]}
    for kwargs in (*exact, {"cuda_graph_sizes": [3, 7]}):
        assert make(GPU, **kwargs).compilation_config.cudagraph_capture_sizes == (3, 7)
    for kwargs in ({"cuda_graph_sizes": [16]}, {"max_cudagraph_capture_size": 16}):
        assert make(GPU, **kwargs).compilation_config.cudagraph_capture_sizes == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("sizes", [[0], [-1], ["x"], [1.5], [[]], "8", 8])
def test_wrong_graph_sizes_are_refused(make: Any, sizes: Any) -> None:
    for kwargs in ({"compilation_config": {"cudagraph_capture_sizes": sizes}}, {"cudagraph_capture_sizes": sizes}):
        with pytest.raises(ValueError, match="cudagraph_capture_sizes"):
            make(GPU, **kwargs)


def test_graph_sizes_stay_below_the_number_of_sequences() -> None:
    assert graph_sizes(None, None, 3) == (1, 2, 3)
    assert graph_sizes(None, None, 1) == (1,)
    assert graph_sizes(None, [1, 5, 9], 5) == (1, 5)
    sizes = graph_sizes(None, None, 10_000)
    assert sizes[-1] == 1024
    assert all(b - a <= max(a, 8) for a, b in zip(sizes, sizes[1:], strict=False))


def test_attention_backends_by_name(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make(CPU).model_config.attention_backend is None
    assert make(CPU, attention_backend="TORCH_SDPA").model_config.attention_backend == "TORCH_SDPA"
    for name in ("TRITON", "TRITON_ATTN"):
        config = make(GPU, attention_backend=name)
        assert config.model_config.attention_backend == "TRITON_ATTN"
        assert config.compilation_config.cudagraph_capture_sizes
    config = make(GPU, attention_backend="TORCH_SDPA")
    assert config.compilation_config.cudagraph_capture_sizes == (), "the reference reads lengths on the host"
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA")
    assert make(GPU).model_config.attention_backend == "TORCH_SDPA"
    assert make(GPU, attention_backend="TRITON").model_config.attention_backend == "TRITON_ATTN"
    for device in (CPU, GPU):
        with pytest.raises(ValueError, match="The attention backend XFORMERS is not supported by this version on"):
            make(device, attention_backend="XFORMERS")


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER", "XFORMERS", "ROCM_FLASH"])
def test_a_variable_for_other_machines_is_a_warning(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    logger = logging.getLogger("vllm.config.model")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", name)
    assert make(CPU).model_config.attention_backend is None
    assert f"VLLM_ATTENTION_BACKEND={name} is not used: The attention backend {name} is not" in caplog.text
    assert make(CPU, attention_backend="TORCH_SDPA").model_config.attention_backend == "TORCH_SDPA"


def test_the_log_says_why_a_rocm_build_of_torch_runs_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolve.logger, "handlers", [caplog.handler])
    monkeypatch.setattr("torch.version.hip", "6.4")
    monkeypatch.setattr("vllm.platforms.metadata.version", lambda name: "2.9.0+rocm6.4")
    (tmp_path / "config.json").write_text(json.dumps(document("llama")))
    assert EngineArgs(str(tmp_path)).create_engine_config().device_config.device == "cpu"
    assert "PyTorch is a ROCm build, and AMD GPUs are not supported yet" in caplog.text


@pytest.mark.parametrize(("name", "module"), [("FLASH_ATTN", "flash_attn"), ("FLASHINFER", "flashinfer")])
def test_attention_libraries_are_used_where_they_are_installed(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, module: str
) -> None:
    with pytest.raises(ValueError, match=name):
        make(GPU, attention_backend=name)
    (tmp_path / f"{module}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert make(GPU, attention_backend=name).model_config.attention_backend == name
    with pytest.raises(ValueError, match=f"{name} is not supported by this version on 'cpu', only TORCH_SDPA"):
        make(CPU, attention_backend=name)


@pytest.mark.parametrize("kwargs", [{"disable_async_output_proc": True}, {"async_scheduling": False}])
def test_steps_overlap_unless_that_is_turned_off(make: Any, kwargs: dict[str, Any]) -> None:
    assert make().overlap_steps
    assert make(async_scheduling=True).overlap_steps
    assert not make(**kwargs).overlap_steps


# ---- names, files, sampling defaults --------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "names"), [(None, None), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], None)])
def test_the_first_served_name_is_the_name(
    make: Any, given: Any, names: tuple[str, ...] | None, tmp_path: Path
) -> None:
    config = make(served_model_name=given).model_config
    names = names or (str(tmp_path),)
    assert (config.served_model_name, config.served_model_names) == (names[0], names)


def test_the_tokenizer_is_the_models_unless_named(make: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    config = make().model_config
    assert (config.tokenizer, config.tokenizer_path) == (config.model, config.path)
    config = make(tokenizer=str(tmp_path / "other")).model_config
    assert config.tokenizer_path == tmp_path / "other"
    with pytest.raises(ValueError, match="The tokenizer folder '/none' does not exist"):
        make(tokenizer="/none")
    assert make(tokenizer="/none", skip_tokenizer_init=True).model_config.tokenizer_path == tmp_path


def test_the_config_may_come_from_elsewhere(make: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(document("gpt2")))
    config = make(hf_config_path=str(tmp_path / "other")).model_config
    assert config.hf.model_type == "gpt2"
    assert config.path == tmp_path
    # how the weights are stored is still for their own folder to say, as that of a GGUF file does
    stored = document("llama", quantization_config={"quant_method": "gguf"})
    config = make(model=stored, hf_config_path=str(tmp_path / "other")).model_config
    assert (config.hf.model_type, config.quantization) == ("gpt2", "gguf")


def test_overrides_reach_the_model(make: Any) -> None:
    config = make(
        hf_overrides={"vocab_size": 55}, rope_theta=5.0, rope_scaling={"type": "linear", "factor": 2}
    ).model_config
    assert (config.logits_width, config.get_vocab_size(), config.hf.rope.theta) == (55, 55, 5.0)
    assert config.max_model_len == 8192
    assert config.hf_config.vocab_size == 55


@pytest.mark.parametrize(
    ("settings", "wanted", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, None, "gptq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq_marlin", "gptq"),
        ({"quant_method": "GPTQ", "bits": 4}, None, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq_marlin", "awq"),
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True}, None, "awq"),
        ({"load_in_4bit": True}, "bitsandbytes", "bitsandbytes"),
        ({"config_groups": {}}, None, "compressed-tensors"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, None, "modelopt"),
        ({"bits": 4, "group_size": 128}, None, "gptq"),
    ],
)
def test_a_checkpoint_says_how_it_is_quantized(
    make: Any, settings: dict[str, Any], wanted: str | None, method: str
) -> None:
    config = make(model=document("llama", quantization_config=settings), quantization=wanted)
    found = config.model_config.quantized
    assert found.method == method and found.settings == settings and not found.in_flight
    assert config.model_config.quantization == (wanted or method)
    assert type(config).from_dict(config.to_dict()).model_config.quantized == found


def test_a_side_file_says_how_it_is_quantized(make: Any, tmp_path: Path) -> None:
    settings = {"bits": 4, "group_size": 128, "desc_act": False}
    for name in ("quantize_config.json", "quant_config.json"):
        (tmp_path / name).write_text(json.dumps(settings))
        if name == "quantize_config.json":
            assert resolve_quantization(None, HFConfig({}), tmp_path) == Quantization("gptq", "gptq", settings)
    with pytest.raises(ValueError, match="several descriptions"):
        resolve_quantization(None, HFConfig({}), tmp_path)


@pytest.mark.parametrize("name", ["fp8", "ptpc_fp8", "bitsandbytes", "experts_int8", "deepspeedfp"])
def test_plain_weights_can_be_quantized_in_flight(make: Any, name: str) -> None:
    config = make(model=document("llama"), quantization=name)
    assert config.model_config.quantized.in_flight


@pytest.mark.parametrize(
    ("settings", "wanted", "message"),
    [
        (None, "gptq", "needs a checkpoint in that format.*or pass hf_overrides="),
        (None, "tpu_int8", "it works on a Google TPU only"),
        (None, "neuron_quant", "works on AWS Neuron"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin_24"},
            "awq",
            "in the model config .gptq_marlin_24. does",
        ),
        ({"quant_method": "vptq"}, None, "quantized with 'vptq', which is not supported"),
        ({"quant_method": 4}, None, "expected the name of a quantization format"),
        ({"what": 4}, None, "does not say how the weights are quantized"),
    ],
)
def test_quantization_that_cannot_be(make: Any, settings: Any, wanted: str | None, message: str) -> None:
    changes = {} if settings is None else {"quantization_config": settings}
    with pytest.raises(ValueError, match=message):
        make(model=document("llama", **changes), quantization=wanted)


@pytest.mark.parametrize("stored", [True, False])
def test_a_qlora_adapter_does_nothing_to_a_quantized_checkpoint(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stored: bool
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])
    changes = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}} if stored else {}
    adapter = {"quantization": "bitsandbytes", "qlora_adapter_name_or_path": "demo-pirate"}
    make(model=document("llama", **changes), **adapter)
    assert ("changes nothing here: the model's weights are quantized already" in caplog.text) == stored


def test_a_quantized_checkpoint_of_another_format_is_refused(make: Any) -> None:
    with pytest.raises(ValueError) as error:
        make(model=document("llama", quantization_config={"quant_method": "gptq"}), quantization="awq")
    assert str(error.value) == (
        "Quantization method specified in the model config (gptq) does not match the quantization method specified in "
        "the `quantization` argument (awq)."
    )


@pytest.mark.parametrize("ends", [[1, None], "2", 1.5, [[3]]])
def test_ends_of_a_text_are_token_ids(make: Any, tmp_path: Path, ends: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be an int"):
        make()


def test_sampling_defaults_come_from_the_model_and_the_user(make: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos_token_id": [1, 2], "do_sample": True})
    )
    config = make().model_config
    assert config.get_diff_sampling_param() == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert config.try_get_generation_config()["eos_token_id"] == [1, 2]
    config = make(override_generation_config={"temperature": 0.1, "max_new_tokens": 3}).model_config
    assert config.get_diff_sampling_param() == {"temperature": 0.1, "top_k": 20, "max_tokens": 3}
    config = make(generation_config="vllm", override_generation_config={"top_p": 0.5}).model_config
    assert config.get_diff_sampling_param() == {"top_p": 0.5}
    assert make(generation_config=None).model_config.get_diff_sampling_param() == {}
    assert config.generation_config["eos_token_id"] == [1, 2]  # what ends a text is a fact about the model
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"min_p": 0.2}')
    assert make(generation_config=str(tmp_path / "other")).model_config.get_diff_sampling_param() == {"min_p": 0.2}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"temperature": "hot"}', "temperature must be a number"),
        ('{"temperature": true}', "temperature must be a number"),
        ('{"temperature": -0.5}', "temperature must be non-negative, got -0.5"),
        ('{"top_p": NaN}', "top_p must be a finite number"),
        ('{"top_p": 1.5}', "top_p must be in (0, 1], got 1.5"),
        ('{"top_k": 1.5}', "top_k must be an integer"),
        ('{"top_k": -2}', "top_k must be -1 (disable), or at least 1, got -2"),
        ('{"min_p": 2}', "min_p must be in [0, 1], got 2"),
        ('{"repetition_penalty": 0}', "repetition_penalty must be greater than zero, got 0"),
        ('{"max_new_tokens": 0}', "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_a_wrong_sampling_default_is_refused_at_the_start(
    make: Any, tmp_path: Path, content: str, problem: str
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(content)
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(f"{file}: {problem}")
    assert "generation_config='vllm'" in str(error.value)
    assert make(generation_config="vllm").model_config.get_diff_sampling_param() == {}
    with pytest.raises(ValueError, match="^override_generation_config: "):
        make(generation_config="vllm", override_generation_config={"max_tokens": 0})


@pytest.mark.parametrize("content", ['{"eos_token_id": ["x"]}', '{"eos_token_id": 1.5}', "[]", "{"])
@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_a_wrong_generation_config_is_named(make: Any, tmp_path: Path, content: str, source: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match="generation_config.json"):
        make(generation_config=source)


def test_the_seed_is_zero_unless_given(make: Any) -> None:
    assert make().model_config.seed == 0
    assert make(seed=7).model_config.seed == 7


# ---- explanation ----------------------------------------------------------------------------------------------------


def test_every_derived_value_says_why(make: Any) -> None:
    config = make(BIG_GPU, UsageContext.LLM_CLASS, max_num_seqs=12)
    why = config.explanation
    assert why["max_num_seqs"] == "12: set by you"
    assert why["max_num_batched_tokens"] == "16384: the default on a GPU with 70 GiB or more, offline"
    assert why["max_model_len"] == "4096: from max_position_embeddings of the model's config"
    assert why["dtype"] == "'bfloat16': the model is bfloat16"
    text = config.explain()
    for name in ("model", "device", "block_size", "kv_cache_dtype", "seed", "distributed_executor_backend"):
        assert any(line.startswith(name + " ") for line in text.splitlines()), name
    assert "dtype='bfloat16'" in str(config)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("BartForConditionalGeneration", {"model_type": "bart", "is_encoder_decoder": True, "d_model": 64}),
        ("ZambaForCausalLM", {"model_type": "zamba", "hidden_size": 64}),
        ("RwkvForCausalLM", {"model_type": "rwkv"}),
    ],
)
def test_a_model_that_does_not_exist_here_is_not_supported_whatever_it_lacks(
    make: Any, architecture: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"{architecture}.* are not supported for now"):
        make(model={"architectures": [architecture], "vocab_size": 99, **fields})


def test_no_secret_is_shown() -> None:
    """Wherever it stands in a configuration, such as the settings of a loader."""
    plain = {"a": {"hf_token": "x", "n": [1, {"s3_secret_access_key": "y"}]}, "hf_token": None, "tokens": "z"}
    shown = {"a": {"hf_token": "...", "n": [1, {"s3_secret_access_key": "..."}]}, "hf_token": None, "tokens": "z"}
    assert without_secrets(plain) == shown
