"""Settings of the model, its tokenizer and its files, and what is known about the model once they are resolved."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config.fields import UnsupportedSettingError, on_cpu, setting
from vllm.config.generation import diff_sampling_params
from vllm.config.hf import HFConfig
from vllm.config.kinds import Choice, Flag, Integer, Json, JsonOr, Kind, Number, Text, TextList
from vllm.config.model_source import downloads_nothing, is_local
from vllm.config.pooler import PoolingSettings
from vllm.config.quantization import Quantization
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig

QUANTIZATIONS = (
    "aqlm", "awq", "deepspeedfp", "tpu_int8", "fp8", "ptpc_fp8", "fbgemm_fp8", "modelopt", "modelopt_fp4", "marlin",
    "bitblas", "gguf", "gptq_marlin_24", "gptq_marlin", "gptq_bitblas", "awq_marlin", "gptq", "squeezellm",
    "compressed-tensors", "bitsandbytes", "qqq", "hqq", "experts_int8", "neuron_quant", "ipex", "quark", "moe_wna16",
    "torchao", "auto-round", "rtn", "mxfp4",
)  # fmt: skip
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
TOKENIZER_MODES = ("auto", "slow", "mistral", "custom")
# Types of settings, for programs with arguments like those of `LLM`.
ConfigFormat = ModelDType = QuantizationMethods = TaskOption = TokenizerMode = str
HfOverrides = dict[str, Any] | Callable[[Any], Any]
logger = init_logger(__name__)

ATTENTION_BACKENDS = ("TORCH_SDPA", "TRITON_ATTN", "TRITON", "FLASH_ATTN", "FLASHINFER", "XFORMERS", "ROCM_FLASH")
# On the CPU the native kernels have no name: leaving the backend unset chooses them.
DEVICE_BACKENDS = {"cpu": ("TORCH_SDPA",), "cuda": ("TRITON_ATTN", "TORCH_SDPA", "FLASH_ATTN", "FLASHINFER")}
_POOLING = ("embedding", "embed", "classify", "score", "reward")


class ModelLength(int):
    """A documented default that stands for `max_model_len`; the same number, set by a user, stands for itself."""


CAPTURED = ModelLength(8192)


@dataclass(frozen=True)
class _Dtype(Kind):
    """A dtype by name, or a torch dtype; `resolve.py` knows what it means."""

    @property
    def words(self) -> str:
        return ", ".join(DTYPES)

    def _check(self, name: str, value: Any) -> str:
        text = str(value).removeprefix("torch.").lower()
        if text not in DTYPES:
            raise ValueError(f"Unknown dtype: {value}. It must be one of {', '.join(DTYPES)}.")
        return text

    def cli(self) -> dict[str, Any]:
        return {"type": str, "choices": list(DTYPES)}


_NO_GRAPHS = on_cpu("there are no CUDA graphs on the CPU")


def _is_local(config: Any) -> str:
    return "the model is a folder of this machine" if is_local(config.model_config.model) else ""


def _is_tokenizer_local(config: Any) -> str:
    return "the tokenizer is a folder of this machine" if is_local(config.model_config.tokenizer) else ""


def _has_no_window(config: Any) -> str:
    return "" if config.model_config.hf.sliding_window else "the model has no sliding window"


def _brings_no_code(config: Any) -> str:
    return "" if any(config.model_config.path.glob("*.py")) else "the model brings no Python code"


def _unknown_quantization(value: Any) -> str:
    return f"Unknown quantization method: {value}. Must be one of {list(QUANTIZATIONS)}."


def _unknown_tokenizer_mode(value: Any) -> str:
    return f"Unknown tokenizer mode: {value}. Must be either 'auto', 'slow', 'mistral' or 'custom'."


class _Resolving(type):
    """Lets `ModelConfig(model, ...)` by itself be what an engine would make of these settings."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not (args or kwargs) or "path" in kwargs:  # neutral, or resolved already
            return super().__call__(*args, **kwargs)
        from vllm.config.resolve import resolve_model

        if len(args) > len(_BY_PLACE):
            raise TypeError(f"ModelConfig takes at most {len(_BY_PLACE)} arguments by place: {', '.join(_BY_PLACE)}.")
        given = dict(zip(_BY_PLACE, args, strict=False))
        twice = sorted(given.keys() & kwargs.keys())
        if twice:
            raise TypeError(f"ModelConfig got two values for the argument {twice[0]!r}.")
        return resolve_model({**given, **kwargs})


_BY_PLACE = ("model", "task", "tokenizer", "tokenizer_mode", "trust_remote_code", "dtype", "seed")


@dataclass(frozen=True)
class ModelConfig(metaclass=_Resolving):
    """The model: which one, from where, in which precision and up to which length.

    `ModelConfig(model, ...)` takes the settings of the engine that are about the model, checks them and reads the
    model's config, as `EngineArgs(model, ...).create_model_config()` does; it loads no weights.
    """

    model: str = setting(
        "facebook/opt-125m",
        Text(),
        'Name of a Hugging Face repository, a local folder, or "demo" (comes with the package).',
    )
    tokenizer: str = setting(
        None, Text(optional=True), "Name or folder of the tokenizer. Default: the model's.", resolved=""
    )
    task: str = setting(
        "auto",
        Choice(values=("auto", "generate", *_POOLING, "transcription", "draft")),
        "What the model is used for. Default: what its architecture and its files say.",
        resolved="generate",
        later={name: f"The task '{name}'" for name in ("transcription", "draft")},
    )
    runner: str = setting(
        "auto",
        Choice(values=("auto", "generate", "pooling", "draft")),
        "The newer name of task: generate, or pooling of the kind that the model is made for.",
        later={"draft": "Draft models"},
    )
    convert: str = setting(
        "auto",
        Choice(values=("auto", "none", "embed", "classify", "reward")),
        "Turn a generating model into a pooling model.",
    )
    skip_tokenizer_init: bool = setting(
        False, Flag(), "Load no tokenizer: prompts must be token ids, and outputs are token ids only."
    )
    tokenizer_mode: str = setting(
        "auto",
        Choice(values=TOKENIZER_MODES, error=_unknown_tokenizer_mode),
        '"auto" (the fast tokenizer if there is one), "slow", "mistral" (mistral_common) or "custom".',
        later={"custom": "tokenizer_mode='custom'"},
    )
    trust_remote_code: bool = setting(
        False, Flag(), "Allow Python code of the model's repository to run.", idle=_brings_no_code
    )
    dtype: str = setting(
        "auto",
        _Dtype(),
        "Type of weights and activations: auto, half = float16, bfloat16, float = float32. Auto follows the model: "
        "bfloat16 stays, float16 and float32 become float16 on CUDA; see --explain for the CPU.",
        resolved="float32",
    )
    seed: int = setting(
        None,
        Integer(low=-(2**63), high=2**64 - 1, optional=True),
        "Seed of requests without a seed of their own. Default: 0.",
        resolved=0,
    )
    max_model_len: int = setting(
        None,
        Integer(low=1, high=2**31 - 1, human=True, optional=True),
        "The longest sequence, prompt and output together. Default: what the model was made for.",
        resolved=2048,
    )
    hf_config_path: str | None = setting(
        None, Text(optional=True), "Name or folder of the model's config.json. Default: the model's."
    )
    revision: str | None = setting(
        None, Text(optional=True), "Branch, tag or commit of the model. Default: the default branch.", idle=_is_local
    )
    code_revision: str | None = setting(
        None, Text(optional=True), "Branch, tag or commit of the model's Python code.", needs="trust_remote_code"
    )
    tokenizer_revision: str | None = setting(
        None,
        Text(optional=True),
        "Branch, tag or commit of the tokenizer. Default: the default branch.",
        idle=_is_tokenizer_local,
    )
    hf_token: bool | str | None = setting(
        None,
        JsonOr(
            optional=True,
            accept=lambda value: isinstance(value, bool | str),
            expected="a token or true",
            text=True,
            bare=True,
        ),
        "Token for the Hugging Face Hub. Default: the one that was stored by logging in.",
        idle=downloads_nothing,
        secret=True,
    )
    hf_overrides: dict[str, Any] | Callable[[Any], Any] = setting(
        {}, JsonOr(optional=True), "Fields that replace those of config.json (nested); in Python also a function."
    )
    rope_scaling: dict[str, Any] = setting(
        {}, Json(optional=True), 'Scaling of rotary embeddings, e.g. {"rope_type": "dynamic", "factor": 2.0}.'
    )
    rope_theta: float | None = setting(None, Number(optional=True), "Base of rotary embeddings. Default: the model's.")
    config_format: str = setting(
        "auto",
        Choice(values=("auto", "hf", "mistral")),
        "Format of the model's config.",
        later={"mistral": "The config format 'mistral' (params.json)"},
    )
    quantization: str | None = setting(
        None,
        Choice(optional=True, values=QUANTIZATIONS, error=_unknown_quantization, any_case=True),
        "How the weights are quantized. Default: what config.json says.",
        flags=("-q",),
        later={name: f"Quantization with '{name}'" for name in ("modelopt_fp4", "quark", "rtn")},
    )
    enforce_eager: bool = setting(False, Flag(optional=True), "Never use CUDA graphs.", idle=_NO_GRAPHS)
    max_seq_len_to_capture: int = setting(
        CAPTURED,
        Integer(low=1),
        "CUDA graphs are used for sequences up to this length. If it is not set: up to max_model_len.",
        idle=_NO_GRAPHS,
    )
    max_logprobs: int = setting(20, Integer(low=-1), "The most logprobs per token that a request may ask for; -1: all.")
    disable_sliding_window: bool = setting(
        False, Flag(), "Do without a sliding window: max_model_len is at most the window.", idle=_has_no_window
    )
    disable_async_output_proc: bool = setting(
        False,
        Flag(),
        "Finish a step's outputs before the next step is planned.",
        idle=on_cpu("steps never overlap on the CPU"),
    )
    served_model_name: str = setting(
        None,
        TextList(optional=True),
        "The model's name (or names) in the API; answers and metrics carry the first. Default: the model argument.",
        resolved="",
    )
    generation_config_source: str = setting(
        "auto",
        Text(optional=True),
        'Default sampling parameters: "auto" (generation_config.json of the model), "vllm" (neutral ones) or a folder.',
        name="generation_config",
    )
    override_generation_config: dict[str, Any] = setting(
        {}, Json(optional=True), 'Values that replace those of generation_config.json, e.g. {"temperature": 0.5}.'
    )
    model_impl: str = setting(
        "auto",
        Choice(values=("auto", "vllm", "transformers")),
        '"vllm" (this package\'s model), "transformers" (that of transformers: any attention-only language model, '
        'slower), or "auto": the first that exists.',
    )
    enable_sleep_mode: bool = setting(False, Flag(), "Allow the engine to sleep.", later="Sleep mode")
    override_neuron_config: dict[str, Any] = setting(
        {}, Json(optional=True), "Settings of Neuron devices.", later="Neuron devices (override_neuron_config)"
    )
    override_pooler_config: Any = setting(
        None,
        JsonOr(optional=True, accept=lambda value: hasattr(value, "pooling_type"), expected="a PoolerConfig"),
        'How to pool, in place of what the model\'s files say, e.g. {"pooling_type": "MEAN", "normalize": true}.',
    )
    pooler_config: Any = setting(
        None,
        JsonOr(optional=True, accept=lambda value: hasattr(value, "pooling_type"), expected="a PoolerConfig"),
        "The newer name of override_pooler_config.",
    )
    override_attention_dtype: str | None = setting(
        None, Text(optional=True), "Type of attention.", later="Another dtype for attention (override_attention_dtype)"
    )
    attention_backend: str | None = setting(
        None,
        Text(optional=True),
        "Implementation of attention. Default: VLLM_ATTENTION_BACKEND, or the best one for the device.",
    )
    # What resolving adds.
    path: Path = field(default_factory=Path)
    tokenizer_path: Path = field(default_factory=Path)
    hf: HFConfig = field(default_factory=lambda: HFConfig({}))
    quantized: Quantization | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    served_model_names: tuple[str, ...] = ()
    pooling: PoolingSettings | None = None
    convert_type: str = "none"

    # ---- the model's shape ---------------------------------------------------------------------------------------

    @property
    def logits_width(self) -> int:
        """Rows of the language model head: token ids are below it."""
        return self.hf.vocab_size

    @property
    def known_prompt(self) -> int | None:
        """As of `Facts`; None if no prompt can be longer."""
        facts = self.hf.facts
        known = None if facts.known_prompt is None else facts.known_prompt(self.hf)
        return known if known is not None and known < self.max_model_len else None

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.hf.architectures

    @cached_property
    def hf_config(self) -> Any:
        """transformers' config object (imports transformers)."""
        return self.hf.to_transformers(trust_remote_code=self.trust_remote_code, code_revision=self.code_revision)

    @property
    def hf_text_config(self) -> Any:
        return self.hf_config.get_text_config()

    @property
    def runner_type(self) -> str:
        return "generate" if self.pooling is None else "pooling"

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What requests may ask the model for."""
        return ("generate",) if self.pooling is None else self.pooling.tasks

    @property
    def is_matryoshka(self) -> bool:
        return self.hf.is_matryoshka

    @property
    def matryoshka_dimensions(self) -> list[int] | None:
        return self.hf.matryoshka_dimensions

    @property
    def embedding_width(self) -> int | None:
        """Numbers of an embedding; None if the model does not embed, or is the user's own."""
        return None if self.pooling is None else self.pooling.width

    @property
    def use_async_output_proc(self) -> bool:
        return not self.disable_async_output_proc

    @property
    def is_encoder_decoder(self) -> bool:
        return self.hf.is_encoder_decoder

    @property
    def is_multimodal_model(self) -> bool:
        return self.hf.is_multimodal

    @property
    def uses_mrope(self) -> bool:
        return self.hf.rope.kind == "mrope"

    @property
    def is_attention_free(self) -> bool:
        return not self.hf.facts.attention

    def get_vocab_size(self) -> int:
        return self.hf.vocab_size

    def get_hidden_size(self) -> int:
        return self.hf.hidden_size

    def get_head_size(self) -> int:
        return self.hf.head_dim

    def get_sliding_window(self) -> int | None:
        return self.hf.sliding_window

    def get_total_num_kv_heads(self) -> int:
        return self.hf.num_kv_heads

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """Key/value heads on one rank; with more ranks than heads, heads are repeated."""
        return max(1, self.hf.num_kv_heads // parallel_config.tensor_parallel_size)

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        return self.hf.num_heads // parallel_config.tensor_parallel_size

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        """Layers of one pipeline stage (the largest)."""
        stages = parallel_config.pipeline_parallel_size
        return max(len(parallel_config.layers_of(stage, self.hf.num_layers)) for stage in range(stages))

    def get_multimodal_config(self) -> Any:
        raise ValueError("The model is not multimodal.")

    def verify_with_parallel_config(self, parallel_config: ParallelConfig) -> None:
        """Raise ValueError if the model cannot be divided as `parallel_config` says."""
        parallel_config.layers_of(0, self.hf.num_layers)
        size = parallel_config.tensor_parallel_size
        if not self.hf.facts.attention:
            return  # what else is divided says so when it is built
        heads, kv_heads = self.hf.num_heads, self.hf.num_kv_heads
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        if size in fits:
            return
        if heads % size:
            why = f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({size})."
        else:
            why = f"The {kv_heads} key/value heads can be neither divided by nor repeated over {size} ranks."
        sizes = ", ".join(map(str, fits))
        raise ValueError(
            f"{why} Sizes that do for this model: {sizes}; or use pipeline_parallel_size, which divides layers."
        )

    # ---- sampling defaults ---------------------------------------------------------------------------------------

    def try_get_generation_config(self) -> dict[str, Any]:
        """The fields of generation_config.json, empty if there is none."""
        return dict(self.generation_config)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Default sampling parameters that the model or the user asks for, by their names in SamplingParams."""
        base = {} if self.generation_config_source == "vllm" else self.generation_config
        return diff_sampling_params({**base, **self.override_generation_config})


def chosen_attention_backend(argument: str | None, variable: str | None, device: str) -> str | None:
    """`attention_backend` of the argument, or else of VLLM_ATTENTION_BACKEND.

    The variable is often exported once for machines of several kinds: what does not run on this device is then a
    warning, and the device's own kernels are used.
    """
    if argument is not None or variable is None:
        return attention_backend(argument, device)
    try:
        return attention_backend(variable, device)
    except UnsupportedSettingError as error:
        logger.warning("VLLM_ATTENTION_BACKEND=%s is not used: %s", variable, error)
        return None


def attention_backend(name: str | None, device: str) -> str | None:
    """The canonical name of attention backend `name`, None for the device's own kernels.

    Raises ValueError if it is unknown, its package is not installed, or it does not run on `device`.
    """
    if name is None:
        return None
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend must be one of {', '.join(ATTENTION_BACKENDS)}, got {name!r}.")
    name = "TRITON_ATTN" if name == "TRITON" else name
    choices = DEVICE_BACKENDS[device]
    if name not in choices:
        raise UnsupportedSettingError(
            f"The attention backend {name} is not supported by this version on {device!r}, only {', '.join(choices)}. "
            "Leave attention_backend and VLLM_ATTENTION_BACKEND unset for the best one.",
            parameter="attention_backend",
            value=name,
        )
    if name == "FLASHINFER" and importlib.util.find_spec("flashinfer") is None:
        raise ValueError(
            "VLLM_ATTENTION_BACKEND is set to FLASHINFER, but flashinfer module was not found. Install it (pip install "
            "flashinfer-python), or leave attention_backend and VLLM_ATTENTION_BACKEND unset."
        )
    if name == "FLASH_ATTN" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "The attention backend FLASH_ATTN needs the package flash-attn, which is not installed. Install it "
            "(pip install flash-attn), or leave attention_backend and VLLM_ATTENTION_BACKEND unset."
        )
    return name
