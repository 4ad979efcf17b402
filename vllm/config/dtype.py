"""In which precision a model computes."""

from __future__ import annotations

from vllm.config.hf import HFConfig
from vllm.platforms import Platform

_ALIASES = {"half": "float16", "float": "float32"}
_KNOWN = ("float16", "bfloat16", "float32")


def resolve_dtype(requested: str, hf: HFConfig, platform: Platform) -> tuple[str, str]:
    """The dtype to compute in and why. Raises ValueError if the model or the device cannot do what was asked for."""
    if requested != "auto":
        dtype = _ALIASES.get(requested, requested)
        _check(dtype, hf, platform)
        return dtype, "set by you"
    stored = hf.torch_dtype
    if stored is not None and stored not in _KNOWN:
        raise ValueError(f"Unknown dtype: {stored} (in {hf.file}). Pass dtype='bfloat16', 'float16' or 'float32'.")
    says = "the model does not say its dtype, which means float32" if stored is None else f"the model is {stored}"
    stored = stored or "float32"
    return _on_cuda(stored, says, hf, platform) if platform.is_cuda() else _on_cpu(stored, says, platform)


def _check(dtype: str, hf: HFConfig, platform: Platform) -> None:
    if dtype not in _KNOWN:
        raise ValueError(f"Unknown dtype: {dtype}")
    if dtype == "float16" and hf.facts.wide_range:
        raise ValueError(
            f"Models of type {hf.model_type!r} do not work in float16: their activations leave its range. "
            "Use dtype='bfloat16' or dtype='float32'."
        )
    if dtype == "bfloat16" and platform.is_cuda() and not platform.supports_bfloat16():
        capability = platform.get_device_capability()
        compute = "does not have a compute capability"
        if capability is not None:
            compute = f"has compute capability {capability.as_version_str()}"
        raise ValueError(
            "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. "
            f"Your {platform.get_device_name()} GPU {compute}. You can use float16 instead by explicitly setting the "
            "`dtype` flag in CLI, for example: --dtype=half."
        )


def _on_cuda(stored: str, says: str, hf: HFConfig, platform: Platform) -> tuple[str, str]:
    needs_range = hf.facts.wide_range
    if stored == "bfloat16" or needs_range:
        if platform.supports_bfloat16():
            return "bfloat16", f"{says}, and its family leaves float16's range" if stored != "bfloat16" else says
        reason = f"{says}, and {platform.bfloat16_reason()}"
        return ("float32", f"{reason}; its family leaves float16's range") if needs_range else ("float16", reason)
    return "float16", says if stored == "float16" else f"{says}; GPUs compute such models in float16"


def _on_cpu(stored: str, says: str, platform: Platform) -> tuple[str, str]:
    if stored == "float32":
        return "float32", says
    dtype = "bfloat16" if platform.supports_bfloat16() else "float32"
    return dtype, f"{says}, and {platform.bfloat16_reason()}"
