"""The environment variables: one table with type, default and help; read when used, e.g. `envs.VLLM_LOGGING_LEVEL`."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    VLLM_TARGET_DEVICE: str
    MAX_JOBS: str | None
    NVCC_THREADS: str | None
    VLLM_USE_PRECOMPILED: bool
    CMAKE_BUILD_TYPE: str | None
    VERBOSE: bool
    VLLM_CONFIG_ROOT: str
    VLLM_CACHE_ROOT: str
    VLLM_HOST_IP: str
    VLLM_PORT: int | None
    VLLM_RPC_BASE_PATH: str
    VLLM_USE_MODELSCOPE: bool
    VLLM_INSTANCE_ID: str | None
    VLLM_DP_SIZE: int
    VLLM_DP_RANK: int
    VLLM_DP_RANK_LOCAL: int
    VLLM_DP_MASTER_IP: str
    VLLM_DP_MASTER_PORT: int
    VLLM_RINGBUFFER_WARNING_INTERVAL: int
    CUDA_HOME: str | None
    VLLM_NCCL_SO_PATH: str | None
    LD_LIBRARY_PATH: str | None
    VLLM_USE_TRITON_FLASH_ATTN: bool
    VLLM_TEST_DYNAMO_GRAPH_CAPTURE: int
    VLLM_DYNAMO_USE_CUSTOM_DISPATCHER: bool
    LOCAL_RANK: int
    CUDA_VISIBLE_DEVICES: str | None
    VLLM_ENGINE_ITERATION_TIMEOUT_S: int
    VLLM_HEALTH_TIMEOUT_S: int
    VLLM_GRAMMAR_COMPILE_TIMEOUT_S: float
    VLLM_API_KEY: str | None
    S3_ACCESS_KEY_ID: str | None
    S3_SECRET_ACCESS_KEY: str | None
    S3_ENDPOINT_URL: str | None
    VLLM_USAGE_STATS: bool
    VLLM_USAGE_STATS_SERVER: str
    VLLM_NO_USAGE_STATS: bool
    VLLM_DO_NOT_TRACK: bool
    VLLM_USAGE_SOURCE: str
    VLLM_CONFIGURE_LOGGING: bool
    VLLM_LOGGING_CONFIG_PATH: str | None
    VLLM_LOGGING_LEVEL: str
    VLLM_TRACE_FUNCTION: int
    VLLM_ATTENTION_BACKEND: str | None
    VLLM_USE_FLASHINFER_SAMPLER: bool
    VLLM_PP_LAYER_PARTITION: str | None
    VLLM_CPU_KVCACHE_SPACE: float
    VLLM_CPU_OMP_THREADS_BIND: str
    VLLM_OPENVINO_KVCACHE_SPACE: int
    VLLM_OPENVINO_CPU_KV_CACHE_PRECISION: str | None
    VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS: bool
    VLLM_USE_RAY_SPMD_WORKER: bool
    VLLM_USE_RAY_COMPILED_DAG: bool
    VLLM_USE_RAY_COMPILED_DAG_NCCL_CHANNEL: bool
    VLLM_RAY_BUNDLE_INDICES: list[int]
    VLLM_RAY_PER_WORKER_GPUS: float
    VLLM_WORKER_MULTIPROC_METHOD: str
    VLLM_ASSETS_CACHE: str
    VLLM_IMAGE_FETCH_TIMEOUT: int
    VLLM_AUDIO_FETCH_TIMEOUT: int
    VLLM_XLA_CACHE_PATH: str
    VLLM_FUSED_MOE_CHUNK_SIZE: int
    VLLM_NO_DEPRECATED_WARNING: bool
    VLLM_KEEP_ALIVE_ON_ENGINE_DEATH: bool
    VLLM_ENABLE_RESPONSES_API_STORE: bool
    VLLM_ALLOW_LONG_MAX_MODEL_LEN: bool
    VLLM_TEST_FORCE_FP8_MARLIN: bool
    VLLM_RPC_GET_DATA_TIMEOUT_MS: int
    VLLM_ALLOW_ENGINE_USE_RAY: bool
    VLLM_PLUGINS: list[str] | None
    VLLM_TORCH_PROFILER_DIR: str | None
    VLLM_USE_TRITON_AWQ: bool
    VLLM_MAX_N_SEQUENCES: int
    VLLM_ALLOW_RUNTIME_LORA_UPDATING: bool
    VLLM_LORA_RESOLVER_CACHE_DIR: str | None
    VLLM_ALLOW_INSECURE_SERIALIZATION: bool
    VLLM_SERVER_DEV_MODE: bool
    VLLM_STRICT: bool
    VLLM_FAULTS: str
    VLLM_USE_V1: bool


@dataclass(frozen=True)
class EnvVar:
    """One variable. Calling it reads the environment now.

    `default` is a value, or a function that computes it (when it depends on other variables).
    `unused` says why setting the variable changes nothing here; empty for variables with an effect.
    `idle`, given the resolved configuration, says why setting it changes nothing in it, or "".
    """

    name: str
    parse: Callable[[str, str], Any]  # (name, text) -> value
    default: Any
    help: str
    unused: str = ""
    idle: Callable[[Any], str] | None = None

    def __call__(self) -> Any:
        text = os.environ.get(self.name)
        if text is None:
            return self.default() if callable(self.default) else self.default
        return self.parse(self.name, text)

    @property
    def is_set(self) -> bool:
        return self.name in os.environ


_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


def _text(_name: str, text: str) -> str:
    return text


def _path(_name: str, text: str) -> str:
    return os.path.expanduser(text)


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {text!r}") from None


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"environment variable {name} must be a number of seconds above 0, got {text!r}")
    return value


def _size(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"environment variable {name} must be a number of GiB, 0 or more, got {text!r}")
    return int(value) if value.is_integer() else value


def _part(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ValueError(f"environment variable {name} must be above 0 and at most 1, got {text!r}")
    return value


def _numbers(name: str, text: str) -> list[int]:
    return [_not_negative(name, item) for item in text.split(",") if item.strip()]


def _not_negative(name: str, text: str) -> int:
    value = _integer(name, text)
    if value < 0:
        raise ValueError(f"environment variable {name} must be 0 or more, got {text!r}")
    return value


def _positive(name: str, text: str) -> int:
    value = _integer(name, text)
    if value < 1:
        raise ValueError(f"environment variable {name} must be 1 or more, got {text!r}")
    return value


def _port(name: str, text: str) -> int:
    value = _integer(name, text)
    if not 0 <= value <= 65535:
        raise ValueError(f"environment variable {name} must be a port number from 0 to 65535, got {text!r}")
    return value


def _flag(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"environment variable {name} must be 1 or 0 (or true or false), got {text!r}")


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in choices:
            raise ValueError(f"environment variable {name} must be one of {', '.join(choices)}, got {text!r}")
        return text

    return parse


def _log_level(name: str, text: str) -> str:
    return _one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")(name, text.strip().upper())


def _comma_separated(_name: str, text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _root(kind: str, fallback: str) -> Callable[[], str]:
    """`$XDG_<kind>_HOME/vllm`, or `~/<fallback>/vllm`."""

    def default() -> str:
        base = os.environ.get(f"XDG_{kind}_HOME") or os.path.join("~", fallback)
        return os.path.expanduser(os.path.join(base, "vllm"))

    return default


_config_root = _root("CONFIG", ".config")
_cache_root = _root("CACHE", ".cache")


def _do_not_track() -> bool:
    return _flag("DO_NOT_TRACK", os.environ.get("DO_NOT_TRACK", "0"))


def _copies_are_given(config: Any) -> str:
    return "" if config.parallel_config.data_parallel_rank is not None else "data_parallel_size says how many copies"


_AT_INSTALL = "only the native CPU library is compiled when this package is installed"
_NO_STATS = "usage statistics are never sent"
_SILENT_COPIES = "copies of the engine do not talk to each other"
_NO_OPENVINO = "there is no OpenVINO backend"
_NO_TPU = "there is no XLA backend"
_NO_DYNAMO = "models are not compiled with TorchDynamo"
_NO_FILES = "no file of this kind is kept"
_NO_RAY = "steps do not pass through Ray, which places and watches the workers"
_NO_MEDIA = "models take text only"
_ONE_HOST = "all processes run on this host"


def _no_launcher(config: Any) -> str:
    backend = config.parallel_config.distributed_executor_backend
    return "" if backend == "external_launcher" else "distributed_executor_backend is not external_launcher"


def _no_places(config: Any) -> str:
    return "" if config.parallel_config.distributed_executor_backend == "ray" else "Ray does not place the ranks"


def _no_tensorizer(config: Any) -> str:
    return "" if config.load_config.load_format == "tensorizer" else "load_format is not tensorizer"


_TABLE = (
    # --- Read by installers and build tools ---
    EnvVar("VLLM_TARGET_DEVICE", _text, "cuda", "Device the package is built for.", _AT_INSTALL),
    EnvVar("MAX_JOBS", _text, None, "Largest number of parallel compilation jobs.", _AT_INSTALL),
    EnvVar("NVCC_THREADS", _text, None, "Threads of each nvcc process.", _AT_INSTALL),
    EnvVar("VLLM_USE_PRECOMPILED", _flag, False, "Use precompiled binaries.", _AT_INSTALL),
    EnvVar("CMAKE_BUILD_TYPE", _text, None, "Debug, Release or RelWithDebInfo.", _AT_INSTALL),
    EnvVar("VERBOSE", _flag, False, "Verbose output of the build.", _AT_INSTALL),
    # --- Folders ---
    EnvVar("VLLM_CONFIG_ROOT", _path, _config_root, "Folder of usage_stats.json and do_not_track."),
    EnvVar("VLLM_CACHE_ROOT", _path, _cache_root, "Folder of cached files: the settings of GGUF files."),
    EnvVar(
        "VLLM_ASSETS_CACHE",
        _path,
        lambda: os.path.join(_cache_root(), "assets"),
        "Folder of downloaded assets.",
        _NO_FILES,
    ),
    EnvVar("VLLM_XLA_CACHE_PATH", _path, lambda: os.path.join(_cache_root(), "xla_cache"), "XLA's cache.", _NO_TPU),
    EnvVar(
        "VLLM_RPC_BASE_PATH",
        _path,
        tempfile.gettempdir,
        "Folder of the sockets between server and engine.",
        "processes talk through sockets without a path",
    ),
    EnvVar("VLLM_TORCH_PROFILER_DIR", _path, None, "Turns the torch profiler on; absolute folder of its traces."),
    # --- Processes and network ---
    EnvVar("VLLM_HOST_IP", _text, lambda: os.environ.get("HOST_IP", ""), "This node's address, for its peers."),
    EnvVar("VLLM_PORT", _port, None, "First port for traffic between processes (not the API server's port)."),
    EnvVar("VLLM_INSTANCE_ID", _text, None, "Name shared by all processes of one instance.", _ONE_HOST),
    EnvVar(
        "VLLM_DP_SIZE",
        _positive,
        1,
        "data_parallel_size of programs that make an engine in each of several processes.",
        idle=_copies_are_given,
    ),
    EnvVar("VLLM_DP_RANK", _not_negative, 0, "The data_parallel_rank that goes with VLLM_DP_SIZE."),
    EnvVar(
        "VLLM_DP_RANK_LOCAL",
        _not_negative,
        lambda: environment_variables["VLLM_DP_RANK"](),
        "With VLLM_DP_SIZE, place of the process on its host: which of its GPUs are this engine's.",
    ),
    EnvVar("VLLM_DP_MASTER_IP", _text, "127.0.0.1", "Address of the first copy.", _SILENT_COPIES),
    EnvVar("VLLM_DP_MASTER_PORT", _port, 0, "Port of the first copy.", _SILENT_COPIES),
    EnvVar(
        "VLLM_WORKER_MULTIPROC_METHOD",
        _one_of("spawn", "fork"),
        "spawn",
        "How worker processes are started.",
        "workers are always fresh processes",
    ),
    EnvVar(
        "VLLM_RINGBUFFER_WARNING_INTERVAL",
        _positive,
        60,
        "Seconds between warnings about a full ring buffer.",
        "there is no ring buffer between processes",
    ),
    EnvVar("VLLM_ENGINE_ITERATION_TIMEOUT_S", _positive, 60, "Seconds without progress after which a step has failed."),
    EnvVar("VLLM_HEALTH_TIMEOUT_S", _positive, 10, "Seconds without progress after which /health answers 503."),
    EnvVar(
        "VLLM_GRAMMAR_COMPILE_TIMEOUT_S",
        _seconds,
        1.5,
        "Seconds that compiling a schema, regular expression or grammar may take; what takes longer is refused.",
    ),
    EnvVar(
        "VLLM_RPC_GET_DATA_TIMEOUT_MS",
        _positive,
        5000,
        "Milliseconds to wait for the engine's simple answers.",
        "the engine's process is watched, its answers have no deadline",
    ),
    EnvVar(
        "LOCAL_RANK",
        _not_negative,
        0,
        "Rank of this process on its node, for distributed_executor_backend='external_launcher'.",
        idle=_no_launcher,
    ),
    EnvVar("VLLM_USE_RAY_SPMD_WORKER", _flag, False, "Ray workers execute as separate processes.", _NO_RAY),
    EnvVar("VLLM_USE_RAY_COMPILED_DAG", _flag, False, "Use Ray's compiled graphs.", _NO_RAY),
    EnvVar("VLLM_USE_RAY_COMPILED_DAG_NCCL_CHANNEL", _flag, True, "NCCL channels in Ray's compiled graphs.", _NO_RAY),
    EnvVar(
        "VLLM_RAY_BUNDLE_INDICES",
        _numbers,
        [],
        "Bundles of the placement group that this engine takes, one for each rank, e.g. 2,3; by default the first.",
        idle=_no_places,
    ),
    EnvVar(
        "VLLM_RAY_PER_WORKER_GPUS",
        _part,
        1.0,
        "Part of a GPU that each rank asks Ray for, so that others may have the rest.",
        idle=_no_places,
    ),
    EnvVar("VLLM_ALLOW_ENGINE_USE_RAY", _flag, False, "Allow the engine to run as a Ray actor.", _NO_RAY),
    EnvVar(
        "VLLM_PP_LAYER_PARTITION",
        _text,
        None,
        'Layers of each pipeline stage, e.g. "8,8,8,8"; by default they are dealt out evenly.',
    ),
    # --- Device ---
    EnvVar("CUDA_HOME", _text, None, "Folder of the CUDA toolkit."),
    EnvVar("CUDA_VISIBLE_DEVICES", _text, None, "CUDA devices that may be used."),
    EnvVar("VLLM_NCCL_SO_PATH", _text, None, "Path of the NCCL library.", "torch's own NCCL is used"),
    EnvVar("LD_LIBRARY_PATH", _text, None, "Where the system looks for shared libraries."),
    EnvVar("VLLM_CPU_KVCACHE_SPACE", _size, 0, "KV cache of the CPU backend in GiB, 0.5 for half a one; 0 means 4."),
    EnvVar("VLLM_CPU_OMP_THREADS_BIND", _text, "all", 'Cores of the CPU backend: "0-31", "0,1"; ranks split by "|".'),
    EnvVar("VLLM_OPENVINO_KVCACHE_SPACE", _not_negative, 0, "OpenVINO KV cache in GiB.", _NO_OPENVINO),
    EnvVar("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", _text, None, "OpenVINO KV cache type.", _NO_OPENVINO),
    EnvVar("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS", _flag, False, "OpenVINO weight compression.", _NO_OPENVINO),
    EnvVar("VLLM_ATTENTION_BACKEND", _text, None, "TRITON_ATTN, TORCH_SDPA, FLASH_ATTN or FLASHINFER."),
    EnvVar("VLLM_USE_TRITON_FLASH_ATTN", _flag, True, "Triton attention kernels on ROCm.", "there is no ROCm backend"),
    EnvVar("VLLM_USE_FLASHINFER_SAMPLER", _flag, False, "FlashInfer's sampler.", "the sampler has its own kernels"),
    EnvVar("VLLM_USE_TRITON_AWQ", _flag, False, "Triton kernels for AWQ.", "there are no such kernels yet"),
    EnvVar(
        "VLLM_FUSED_MOE_CHUNK_SIZE",
        _positive,
        32768,
        "Most tokens that one pass through the experts takes.",
        "max_num_batched_tokens bounds what passes through the experts",
    ),
    EnvVar("VLLM_TEST_FORCE_FP8_MARLIN", _flag, False, "Force FP8 Marlin kernels.", "there are no Marlin kernels"),
    EnvVar("VLLM_TEST_DYNAMO_GRAPH_CAPTURE", _integer, 0, "Capture with TorchDynamo.", _NO_DYNAMO),
    EnvVar("VLLM_DYNAMO_USE_CUSTOM_DISPATCHER", _flag, True, "TorchDynamo's dispatcher.", _NO_DYNAMO),
    EnvVar("VLLM_USE_V1", _flag, True, "Engine generation of other versions.", "there is one engine"),
    # --- Models and limits ---
    EnvVar("VLLM_USE_MODELSCOPE", _flag, False, "Download models from ModelScope instead of the Hugging Face Hub."),
    EnvVar("S3_ACCESS_KEY_ID", _text, None, "S3 access key of load_format='tensorizer'.", idle=_no_tensorizer),
    EnvVar("S3_SECRET_ACCESS_KEY", _text, None, "S3 secret of load_format='tensorizer'.", idle=_no_tensorizer),
    EnvVar("S3_ENDPOINT_URL", _text, None, "S3 endpoint of load_format='tensorizer'.", idle=_no_tensorizer),
    EnvVar("VLLM_ALLOW_LONG_MAX_MODEL_LEN", _flag, False, "Allow max_model_len above the model's own limit."),
    EnvVar("VLLM_MAX_N_SEQUENCES", _positive, 16384, "Largest `n` and `best_of` of one request."),
    EnvVar("VLLM_PLUGINS", _comma_separated, None, "Plugins to load, separated by commas; unset: all, empty: none."),
    EnvVar("VLLM_IMAGE_FETCH_TIMEOUT", _positive, 5, "Seconds to wait for an image of a request.", _NO_MEDIA),
    EnvVar("VLLM_AUDIO_FETCH_TIMEOUT", _positive, 5, "Seconds to wait for an audio file of a request.", _NO_MEDIA),
    # --- Server ---
    EnvVar("VLLM_API_KEY", _text, None, "Key that clients of the API server must send."),
    EnvVar("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", _flag, False, "Keep the API server alive after the engine has failed."),
    EnvVar("VLLM_ENABLE_RESPONSES_API_STORE", _flag, False, "Keep the newest responses of /v1/responses in memory."),
    EnvVar("VLLM_ALLOW_RUNTIME_LORA_UPDATING", _flag, False, "Routes that load and unload LoRA adapters."),
    EnvVar(
        "VLLM_LORA_RESOLVER_CACHE_DIR",
        _text,
        None,
        "Folder whose subfolders are LoRA adapters that requests may name; needs VLLM_ALLOW_RUNTIME_LORA_UPDATING.",
    ),
    EnvVar(
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        _flag,
        False,
        "Send functions given to collective_rpc to other processes by value (pickled).",
    ),
    EnvVar("VLLM_SERVER_DEV_MODE", _flag, False, "Routes for development: server_info, reset_prefix_cache."),
    # --- Tests of survival ---
    EnvVar("VLLM_STRICT", _flag, False, "An idle engine core that holds anything ends with a report."),
    EnvVar("VLLM_FAULTS", _text, "", "Faults on purpose, as `point@where:seconds,...`; see `vllm/faults.py`."),
    # --- Logging and statistics ---
    EnvVar("VLLM_CONFIGURE_LOGGING", _flag, True, "0: leave the configuration of logging to the application."),
    EnvVar("VLLM_LOGGING_CONFIG_PATH", _path, None, "JSON file for logging.config.dictConfig."),
    EnvVar("VLLM_LOGGING_LEVEL", _log_level, "INFO", "DEBUG, INFO, WARNING, ERROR or CRITICAL."),
    EnvVar("VLLM_TRACE_FUNCTION", _integer, 0, "1: write every call of a function to files."),
    EnvVar("VLLM_NO_DEPRECATED_WARNING", _flag, False, "Skip warnings about deprecated names."),
    EnvVar("VLLM_USAGE_STATS", _flag, False, "Add a line about each start to usage_stats.json on this machine."),
    EnvVar("VLLM_USAGE_STATS_SERVER", _text, "https://stats.vllm.ai", "Where statistics go.", _NO_STATS),
    EnvVar("VLLM_NO_USAGE_STATS", _flag, False, "Turn usage statistics off, whatever else says."),
    EnvVar("VLLM_DO_NOT_TRACK", _flag, _do_not_track, "Turn usage statistics off; also as DO_NOT_TRACK."),
    EnvVar("VLLM_USAGE_SOURCE", _text, "production", "Label in usage statistics."),
)

environment_variables: dict[str, EnvVar] = {variable.name: variable for variable in _TABLE}


_OURS = re.compile("VLLM_(?!BUILD_NATIVE$|TEST_)")  # but for those of the installation and of tests
# Variables that launchers and build systems set for other programs.
_SET_FOR_OTHERS = frozenset({"CUDA_HOME", "LD_LIBRARY_PATH", "VERBOSE", "CMAKE_BUILD_TYPE"})


def set_without_effect() -> dict[str, str]:
    """Variables of this package that are set although they change nothing, each with the reason (for one log line)."""
    return {v.name: v.unused for v in _TABLE if v.unused and v.is_set and v.name not in _SET_FOR_OTHERS}


def set_idly(config: Any) -> dict[str, str]:
    """Variables that are set although they change nothing in this (resolved) configuration, each with the reason."""
    found = {v.name: v.idle(config) for v in _TABLE if v.idle is not None and v.is_set}
    return {name: reason for name, reason in found.items() if reason}


def unknown() -> list[str]:
    """Variables that are named like those of this package and are none, such as misspelled ones."""
    return sorted(name for name in os.environ if _OURS.match(name) and name not in environment_variables)


def is_set(name: str) -> bool:
    """Whether the environment sets this variable. Raises AttributeError for a name that is none of ours."""
    if name not in environment_variables:
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    return environment_variables[name].is_set


def get_vllm_port() -> int | None:
    """VLLM_PORT, the first port of communication between processes; None if it is not set."""
    port: int | None = environment_variables["VLLM_PORT"]()
    return port


def __getattr__(name: str) -> Any:
    variable = environment_variables.get(name)
    if variable is None:
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    return variable()


def __dir__() -> list[str]:
    return sorted({*globals(), *environment_variables})
