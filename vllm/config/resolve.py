"""The one place where a setting that the user left open is derived, from the model or from the hardware, and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import model_source
from vllm.config.cache import CacheConfig
from vllm.config.compilation import (
    DEFAULT_GRAPH_SIZES,
    CompilationConfig,
    compiler_keys,
    graph_sizes,
    read_compilation_config,
)
from vllm.config.decoding import DecodingConfig
from vllm.config.device import DeviceConfig
from vllm.config.dtype import resolve_dtype
from vllm.config.fields import build, settings_of
from vllm.config.generation import check_sampling_defaults, read_generation_config, without_effect
from vllm.config.hf import HFConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig, PromptAdapterConfig
from vllm.config.max_model_len import resolve_max_model_len, without_sliding_window
from vllm.config.model import CAPTURED, ModelConfig, ModelLength, chosen_attention_backend
from vllm.config.model_impl import resolve_model_impl
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig, read_partition
from vllm.config.pooler import PoolingChoice, resolve_pooling
from vllm.config.quantization import resolve_quantization
from vllm.config.scheduler import SchedulerConfig
from vllm.config.settings import (
    all_settings,
    check_settings,
    log_idle_settings,
    log_useless_settings,
    near_names,
    refuse_missing_features,
)
from vllm.config.speculative import SpeculativeConfig
from vllm.config.tensorizer import TensorizerConfig
from vllm.config.vllm_config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import Platform, detect_device, platform_for
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext

logger = init_logger(__name__)

_GIB = 2**30
_LARGE_DEVICE = 70 * _GIB
_WHOLE = "in this model every token sees the whole prompt, which is therefore computed in one step."
_OFFLINE = (UsageContext.LLM_CLASS, UsageContext.OPENAI_BATCH_RUNNER)


@dataclass(frozen=True)
class StepSize:
    """Default bounds of a step. Offline, throughput counts; a server keeps steps short for the latency of others."""

    tokens_offline: int
    tokens_server: int
    seqs: int
    why: str


_SERVER_GAP = 60.0  # milliseconds
_LEAST_STAGE_TOKENS = 2048  # of half a default step (`core/pace`): with fewer, a GPU is not busy
_CPU_STEP = StepSize(4096, 2048, 256, "on the CPU")
_CUDA_STEP = StepSize(8192, 2048, 256, "on a GPU with less than 70 GiB")
_WHOLE_PROMPTS = (
    4  # times as many tokens where nothing is kept of a prompt: a step costs the host much, and little memory
)
_LARGE_CUDA_STEP = StepSize(16384, 8192, 1024, "on a GPU with 70 GiB or more")


def resolve(settings: Mapping[str, Any], usage: UsageContext = UsageContext.ENGINE_CONTEXT) -> VllmConfig:
    """The configuration that `settings` (every setting by name) stand for.

    Raises ValueError for a bad value, and for a value that needs a feature which does not exist yet.
    """
    settings = _with_older_names(settings)
    args = check_settings(settings)
    if isinstance(settings["max_seq_len_to_capture"], ModelLength):
        args["max_seq_len_to_capture"] = CAPTURED  # which checking made a plain number of
    _check_features(args)
    log_useless_settings(args)
    why: dict[str, str] = {}
    device = _device(args, why)
    platform = platform_for(device)
    parallel = _parallel(args, platform, why)
    model = _model(args, platform, why)
    model.verify_with_parallel_config(parallel)
    cache = _cache(args, model, device, why)
    if cache.kv_offloading_size and parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "kv_offloading_size works without a pipeline: its stages have blocks of unlike sizes. Leave it unset, or "
            "use tensor_parallel_size in place of pipeline_parallel_size."
        )
    if model.pooling is not None and parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "A model that pools cannot be divided into pipeline stages in this version. Use tensor_parallel_size in "
            "place of pipeline_parallel_size."
        )
    scheduler = _scheduler(args, model.max_model_len, model.hf.sees_whole_prompt, platform, usage, why)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=parallel,
        scheduler_config=scheduler,
        device_config=build(DeviceConfig, args, device=device),
        load_config=build(LoadConfig, args),
        decoding_config=build(DecodingConfig, args),
        observability_config=build(ObservabilityConfig, args),
        lora_config=build(LoRAConfig, args) if args["enable_lora"] else None,
        prompt_adapter_config=build(PromptAdapterConfig, args) if args["enable_prompt_adapter"] else None,
        compilation_config=_compilation(args, parallel, model, scheduler, device, why),
        additional_config=args["additional_config"],
        explanation=why,
    )
    log_idle_settings(args, config)
    return config


def resolve_model(given: Mapping[str, Any]) -> ModelConfig:
    """The model's part of the configuration that these settings of `ModelConfig`, by name, stand for.

    Raises TypeError for a setting that it does not have, else as `resolve`.
    """
    known = {s.name for s in settings_of(ModelConfig)}
    for name in given:
        if name not in known:
            raise TypeError(f"ModelConfig has no argument {name!r}.{near_names(name, known)}")
    load_general_plugins()  # they may register the model that is meant
    args = check_settings({s.name: s.new_default() for s in all_settings()} | dict(given))
    if "max_seq_len_to_capture" not in given:
        args["max_seq_len_to_capture"] = CAPTURED
    _check_features(args)
    why: dict[str, str] = {}
    return _model(args, platform_for(_device(args, why)), why)


def _with_older_names(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings in today's words: where an older version had another name, or meant something else by None."""
    changes: dict[str, Any] = {}
    if settings["max_context_len_to_capture"] is not None:
        logger.warning("max_context_len_to_capture is deprecated, use max_seq_len_to_capture.")
        changes["max_seq_len_to_capture"] = settings["max_context_len_to_capture"]
        changes["max_context_len_to_capture"] = None
    if settings["generation_config"] is None:  # was: no defaults from the model
        changes["generation_config"] = "vllm"
    return {**settings, **changes}


def _check_features(args: dict[str, Any]) -> None:
    """Refuse what does not exist yet, but say first what would be wrong with it anyway."""
    for config_class in (LoRAConfig, PromptAdapterConfig, SpeculativeConfig, DecodingConfig, ObservabilityConfig):
        build(config_class, args)
    speculative = args["speculative_config"] or args["speculative_model"] or args["spec_model"]
    if args["num_scheduler_steps"] > 1:
        if speculative:
            raise ValueError("Speculative decoding is not supported with multi-step (--num-scheduler-steps > 1)")
        if args["enable_chunked_prefill"] and args["pipeline_parallel_size"] > 1:
            raise ValueError("Multi-Step Chunked-Prefill is not supported for pipeline-parallel-size > 1")
        logger.info("num_scheduler_steps changes nothing: planning a step overlaps with the device's work on the last.")
    _check_loader(args)
    if args["num_lookahead_slots"] < 0:
        build(SchedulerConfig, {"num_lookahead_slots": args["num_lookahead_slots"]})
    if args["qlora_adapter_name_or_path"] is not None and args["quantization"] != "bitsandbytes":
        raise ValueError(f"QLoRA adapter only support 'bitsandbytes' quantization, but got {args['quantization']}")
    if args["cpu_offload_gb"] < 0:
        build(CacheConfig, {"cpu_offload_gb": args["cpu_offload_gb"]})
    refuse_missing_features(args)


def _qlora_targets(adapter: str | None) -> tuple[str, ...]:
    """The modules that a QLoRA adapter adapts, () for all. Raises ValueError, or LoRAAdapterNotFoundError."""
    if adapter is None:
        return ()
    from vllm.lora.config import find_adapter, read_targets
    from vllm.lora.request import LoRARequest
    from vllm.lora.source import adapter_folder

    return read_targets(find_adapter(adapter_folder(LoRARequest("qlora", 1, adapter)))[0])


def _check_loader(args: dict[str, Any]) -> None:
    """Settings of the loader as plain JSON. Raises ValueError for those that the load format does not have."""
    extra = args["model_loader_extra_config"] or {}
    args["model_loader_extra_config"] = extra = extra if isinstance(extra, dict) else extra.to_serializable()
    name = args["load_format"]
    if name == "tensorizer":
        TensorizerConfig.of(extra).uri(0, args["tensor_parallel_size"] * args["pipeline_parallel_size"])
        return
    unknown = sorted(set(extra) - ({"pattern"} if name == "sharded_state" else set()))
    if unknown:
        raise ValueError(
            f"model_loader_extra_config has no setting {', '.join(unknown)} for load_format={name!r}. It is for "
            "load_format='sharded_state' (pattern) and 'tensorizer'."
        )


def _note(why: dict[str, str], name: str, value: Any, given: bool, reason: str) -> None:
    why[name] = f"{value!r}: {'set by you' if given else reason}"


def _device(args: dict[str, Any], why: dict[str, str]) -> str:
    device: str = args["device"]
    reason = ""
    if device == "auto":
        device, reason = detect_device()
        logger.info("Running on %r: %s.", device, reason)
    _note(why, "device", device, args["device"] != "auto", reason)
    return device


def _parallel(args: dict[str, Any], platform: Platform, why: dict[str, str]) -> ParallelConfig:
    first_copy = 0
    if args["data_parallel_size"] == 1 and envs.VLLM_DP_SIZE > 1:
        args |= {"data_parallel_size": envs.VLLM_DP_SIZE, "data_parallel_rank": envs.VLLM_DP_RANK}
        first_copy = envs.VLLM_DP_RANK_LOCAL
        _note(why, "data_parallel_rank", envs.VLLM_DP_RANK, False, f"VLLM_DP_RANK, of {envs.VLLM_DP_SIZE} copies")
    size: int = args["tensor_parallel_size"] * args["pipeline_parallel_size"]
    copies = (
        1 if args["data_parallel_rank"] is not None else args["data_parallel_size_local"] or args["data_parallel_size"]
    )
    devices = size * (first_copy + copies)
    given = args["distributed_executor_backend"] or ("ray" if args["worker_use_ray"] else None)
    backend, reason = given or ("uni" if size == 1 else "mp"), f"{size} workers need a process each"
    if size == 1:
        reason = "one worker runs in the engine's own process"
    elif given is None and (why_ray := _wants_ray(platform, devices)):
        backend, reason = "ray", why_ray
    local = backend in ("uni", "mp")
    if local and platform.is_cuda() and devices > platform.device_count():
        sizes = f"tensor_parallel_size={args['tensor_parallel_size']}"
        if args["pipeline_parallel_size"] > 1:
            sizes += f" with pipeline_parallel_size={args['pipeline_parallel_size']}"
        if copies > 1:
            sizes += f" and {copies} engine copies (data_parallel_size)"
        elif first_copy:
            sizes += f" of this host's copy {first_copy} (VLLM_DP_RANK_LOCAL)"
        raise ValueError(
            f"{sizes} needs {devices} CUDA devices, but {platform.device_count()} can be seen. "
            "Check CUDA_VISIBLE_DEVICES, use a smaller tensor_parallel_size, or, for several hosts, pip install "
            "'vllm[ray]' and distributed_executor_backend='ray'."
        )
    _note(why, "distributed_executor_backend", backend, given is not None, reason)
    stages = args["pipeline_parallel_size"]
    partition = read_partition(envs.VLLM_PP_LAYER_PARTITION)
    if partition and stages == 1:
        logger.info("VLLM_PP_LAYER_PARTITION changes nothing: there is one pipeline stage.")
        partition = ()
    resolved = {"distributed_executor_backend": backend, "layer_partition": partition, "first_copy": first_copy}
    return build(ParallelConfig, args, **resolved)


def _wants_ray(platform: Platform, devices: int) -> str:
    """Why Ray is to place the workers when nobody has said who should; "" if it is not."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and ray.util.get_current_placement_group() is not None:
        return "this process is in a placement group of Ray"
    if platform.is_cuda() and devices > platform.device_count() and find_spec("ray") is not None:
        return f"{devices} devices are asked for, and this host has {platform.device_count()}"
    return ""


# ---- model -------------------------------------------------------------------------------------------------------


def _model(args: dict[str, Any], platform: Platform, why: dict[str, str]) -> ModelConfig:
    path, tokenizer_path = _folders(args, why)
    hf = HFConfig.load(
        _config_folder(args, path),
        hf_overrides=args["hf_overrides"],
        rope_scaling=args["rope_scaling"],
        rope_theta=args["rope_theta"],
        trust_remote_code=args["trust_remote_code"],
    )
    model_impl, hf, reason = resolve_model_impl(args["model_impl"], hf, trust_remote_code=args["trust_remote_code"])
    why["model_impl"] = f"{model_impl!r}: {reason}"
    _check_model_features(args, hf)
    choice = resolve_pooling(args, hf, path, tokenizer_path)
    hf = choice.hf
    wanted = args["quantization"]
    if args["load_format"] == "bitsandbytes" and wanted != "bitsandbytes":
        if wanted is not None:
            raise ValueError(
                f"BitsAndBytes load format and QLoRA adapter only support 'bitsandbytes' quantization, but got {wanted}"
            )
        wanted = "bitsandbytes"
    quantized = resolve_quantization(wanted, hf, path, _qlora_targets(args["qlora_adapter_name_or_path"]))
    if quantized is not None:
        origin = "made of plain weights while they are loaded" if quantized.in_flight else f"{hf.path} says so"
        why["quantization"] = f"{quantized.name!r}: {'set by you' if wanted else origin}"
    longest = max([1.0, *(args["long_lora_scaling_factors"] or ())]) if args["enable_lora"] else 1.0
    max_model_len, reason = resolve_max_model_len(args["max_model_len"], hf, args["disable_sliding_window"], longest)
    if args["max_model_len"] is None and choice.max_length is not None and choice.max_length < max_model_len:
        max_model_len, reason = choice.max_length, "the longest text by sentence-transformers' files"
    _note(why, "max_model_len", max_model_len, args["max_model_len"] is not None, reason)
    _note_pooling(why, choice, args)
    captured = args["max_seq_len_to_capture"]
    if isinstance(captured, ModelLength):
        captured = max_model_len
    if args["disable_sliding_window"]:
        hf = without_sliding_window(hf)
    dtype, reason = resolve_dtype(args["dtype"], hf, platform)
    why["dtype"] = f"{dtype!r}: {reason}"
    if args["dtype"] == "auto" and hf.torch_dtype not in (None, dtype):
        logger.info("The model's weights are %s; computing in %s: %s.", hf.torch_dtype, dtype, reason)
    seed = 0 if args["seed"] is None else args["seed"]
    _note(why, "seed", seed, args["seed"] is not None, "the default, so that two runs give the same tokens")
    names = args["served_model_name"] or args["model"]
    names = (names,) if isinstance(names, str) else tuple(names)
    source = args["generation_config"]
    generation_config = read_generation_config(source, path, hf.eos_token_ids)
    check_sampling_defaults(args["override_generation_config"], "override_generation_config")
    useless = without_effect(args["override_generation_config"])
    if useless:
        logger.warning("override_generation_config: %s changes nothing; it is no sampling parameter.", useless)
    config = build(
        ModelConfig,
        args,
        tokenizer=args["tokenizer"] or args["model"],
        model_impl=model_impl,
        quantization=None if quantized is None else quantized.name,
        quantized=quantized,
        dtype=dtype,
        seed=seed,
        max_model_len=max_model_len,
        max_seq_len_to_capture=captured,
        served_model_name=names[0],
        served_model_names=names,
        generation_config=generation_config,
        attention_backend=chosen_attention_backend(
            args["attention_backend"], envs.VLLM_ATTENTION_BACKEND, platform.device_type
        ),
        path=path,
        tokenizer_path=tokenizer_path,
        hf=hf,
        task="generate" if choice.settings is None else choice.settings.task,
        pooling=choice.settings,
        convert_type=choice.convert,
    )
    defaults = config.get_diff_sampling_param()
    why["sampling defaults"] = f"{defaults!r}: generation_config={source!r}"
    if defaults:
        logger.info("Default sampling parameters of this model: %s. To do without: generation_config='vllm'.", defaults)
    return config


def _note_pooling(why: dict[str, str], choice: PoolingChoice, args: dict[str, Any]) -> None:
    """How the model pools, if it does, in the explanation and in the log."""
    settings = choice.settings
    if settings is None:
        return
    asked = args["task"] != "auto" or args["convert"] not in ("auto", "none")
    _note(why, "task", settings.task, asked, "from the architecture or sentence-transformers' files")
    why["pooling"] = f"{settings.type!r}: normalize={settings.normalize}, activation={settings.activation!r}"
    logger.info("Pooling for %r: %s", settings.task, why["pooling"])


def _folders(args: dict[str, Any], why: dict[str, str]) -> tuple[Path, Path]:
    """The folders of the model and of its tokenizer, downloaded if need be."""
    where = {"download_dir": args["download_dir"], "hf_token": args["hf_token"]}
    path = model_source.resolve(
        args["model"],
        revision=args["revision"],
        load_format=args["load_format"],
        ignore_patterns=args["ignore_patterns"],
        trust_remote_code=args["trust_remote_code"],
        **where,
    )
    why["model"] = f"{args['model']!r}: found in {path}"
    name, revision = args["tokenizer"], args["tokenizer_revision"]
    same_files = name is None and revision in (None, args["revision"])
    if same_files or args["skip_tokenizer_init"]:
        return path, path
    tokenizer_path = model_source.resolve(
        name or args["model"],
        revision=revision,
        load_format="dummy",
        trust_remote_code=args["trust_remote_code"],
        what="tokenizer",
        **where,
    )
    why["tokenizer"] = f"{name or args['model']!r}: found in {tokenizer_path}"
    return path, tokenizer_path


def _config_folder(args: dict[str, Any], path: Path) -> Path:
    if args["hf_config_path"] is None:
        return path
    return model_source.resolve(
        args["hf_config_path"],
        download_dir=args["download_dir"],
        hf_token=args["hf_token"],
        load_format="dummy",
        trust_remote_code=args["trust_remote_code"],
        what="config",
    )


def _check_model_features(args: dict[str, Any], hf: HFConfig) -> None:
    """Refuse settings that the model has no use for."""
    if args["limit_mm_per_prompt"] and not hf.is_multimodal:
        raise ValueError("`limit_mm_per_prompt` is only supported for multimodal models.")


# ---- cache, scheduler, graphs ------------------------------------------------------------------------------------


def _cache(args: dict[str, Any], model: ModelConfig, device: str, why: dict[str, str]) -> CacheConfig:
    given = args["block_size"]
    block_size = 16 if given is None else given
    _note(why, "block_size", block_size, given is not None, "the default")
    kept = args["enable_prefix_caching"]
    if model.hf.sees_whole_prompt:
        if kept:
            raise ValueError(f"enable_prefix_caching=True: {_WHOLE} Leave it unset.")
        kept = False
    _note(why, "enable_prefix_caching", kept is not False, kept is not None, "on by default, it costs next to nothing")
    dtype = args["kv_cache_dtype"]
    _note(why, "kv_cache_dtype", dtype, dtype != "auto", f"the model's dtype, {model.dtype}")
    return build(
        CacheConfig,
        args,
        block_size=block_size,
        enable_prefix_caching=kept is not False,
        sliding_window=model.hf.sliding_window,
    )


def step_size(platform: Platform) -> StepSize:
    """Default bounds of a step on this hardware."""
    if not platform.is_cuda():
        return _CPU_STEP
    return _LARGE_CUDA_STEP if platform.get_device_total_memory() >= _LARGE_DEVICE else _CUDA_STEP


def _scheduler(
    args: dict[str, Any],
    max_model_len: int,
    whole_prompts: bool,
    platform: Platform,
    usage: UsageContext,
    why: dict[str, str],
) -> SchedulerConfig:
    chunked = args["enable_chunked_prefill"]
    if whole_prompts:
        if chunked:
            raise ValueError(f"enable_chunked_prefill=True: {_WHOLE} Leave it unset.")
        chunked = False
    _note(why, "enable_chunked_prefill", chunked is not False, chunked is not None, "on by default")
    size = step_size(platform)
    offline = usage in _OFFLINE
    default_tokens = size.tokens_offline if offline else size.tokens_server
    given_seqs, given_tokens = args["max_num_seqs"], args["max_num_batched_tokens"]
    seqs = given_seqs if given_seqs is not None else min(size.seqs, given_tokens or size.seqs)
    reason = f"the default {size.why}" if seqs == size.seqs else "no more than max_num_batched_tokens"
    _note(why, "max_num_seqs", seqs, given_seqs is not None, reason)
    use = "offline" if offline else "in a server"
    tokens, reason = default_tokens, f"the default {size.why}, {use}"
    if whole_prompts and offline and not platform.is_cpu():
        tokens, reason = _WHOLE_PROMPTS * tokens, f"{reason}, for a model that sees whole prompts"
    if args["pipeline_parallel_size"] > 1:  # else a prompt is one step, and stages wait for each other
        tokens = min(tokens, max(2 * _LEAST_STAGE_TOKENS, tokens // args["pipeline_parallel_size"]))
        reason += ", cut so that all stages work on a prompt"
    if chunked is False and tokens < max_model_len:
        tokens, reason = max_model_len, "max_model_len, because prompts are not divided over steps"
    if tokens > seqs * max_model_len:
        tokens, reason = seqs * max_model_len, "max_num_seqs * max_model_len, more can never be waiting"
    if tokens < seqs:
        tokens, reason = seqs, "max_num_seqs, so that every sequence can take a token in each step"
    tokens = tokens if given_tokens is None else given_tokens
    _note(why, "max_num_batched_tokens", tokens, given_tokens is not None, reason)
    gap = args["max_token_gap"]
    if gap is None:
        gap = 0.0 if offline else _SERVER_GAP
    _note(why, "max_token_gap", gap, args["max_token_gap"] is not None, f"the default {use}")
    threshold = args["long_prefill_token_threshold"]
    if threshold == 0 and args["max_num_partial_prefills"] > 1:
        threshold = int(max_model_len * 0.04)
        why["long_prefill_token_threshold"] = f"{threshold}: 4 % of max_model_len, with several partial prefills"
    return build(
        SchedulerConfig,
        args,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        enable_chunked_prefill=chunked is not False,
        long_prefill_token_threshold=threshold,
        max_token_gap=gap,
        max_model_len=max_model_len,
    )


def _compilation(
    args: dict[str, Any],
    parallel: ParallelConfig,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    device: str,
    why: dict[str, str],
) -> CompilationConfig:
    given = read_compilation_config(args["compilation_config"])
    unused = [*(["level"] if given.get("level") else []), *compiler_keys(given)]
    if unused:
        logger.info("compilation_config: nothing is compiled, so %s change nothing.", ", ".join(unused))
    own_attention = model.attention_backend in (None, "TRITON_ATTN")
    use_graphs = device == "cuda" and not model.enforce_eager and given.get("use_cudagraph", True) and own_attention
    use_graphs = use_graphs and model.pooling is None
    if parallel.shares_experts:
        use_graphs = False  # a step's size is that of the largest of all copies, which differs from its own
    sizes: tuple[int, ...] = ()
    if use_graphs:
        exact = args["cudagraph_capture_sizes"] or given.get("cudagraph_capture_sizes")
        series = args["cuda_graph_sizes"] or []
        series = [] if series == DEFAULT_GRAPH_SIZES else series
        exact = exact or (series if len(series) > 1 else None)
        largest = args["max_cudagraph_capture_size"] or (series[0] if series else None)
        sizes = graph_sizes(largest, exact, scheduler.max_num_seqs)
        why["cudagraph_capture_sizes"] = f"{len(sizes)} sizes up to {max(sizes, default=0)}: at most max_num_seqs"
    else:
        reason = "off"
        if device != "cuda":
            reason = f"there are none on {device!r}"
        elif model.enforce_eager:
            reason = "enforce_eager"
        elif model.pooling is not None:
            reason = "they are for single tokens, and the model computes prompts only"
        elif not own_attention:
            reason = f"{model.attention_backend} reads lengths on the host"
        why["cudagraph_capture_sizes"] = f"none: {reason}"
    return build(
        CompilationConfig,
        args,
        given=given,
        level=given.get("level", 0),
        use_cudagraph=use_graphs,
        cudagraph_capture_sizes=sizes,
    )
