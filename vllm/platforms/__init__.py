"""What the machine offers: one `Platform` per kind of device; `current_platform` is found when first asked for."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from vllm.ipc.functions import named
from vllm.logger import init_logger
from vllm.platforms.interface import DeviceCapability, Platform
from vllm.plugins import PLATFORM_GROUP, plugins_of

if TYPE_CHECKING:
    current_platform: Platform

logger = init_logger(__name__)

__all__ = ["DeviceCapability", "Platform", "current_platform", "detect_device", "platform_for"]

# Devices that exist in the API but have no code here -> what a user can do.
_MISSING_DEVICES = {
    "rocm": "AMD GPUs are not supported yet; a ROCm build of PyTorch alone is not enough. Use device='cpu'",
    "xpu": "Intel GPUs need a platform plug-in and intel-extension-for-pytorch. Use device='cpu'",
    "hpu": "Intel Gaudi needs a platform plug-in (vllm-gaudi). Use device='cpu'",
    "tpu": "TPUs need a platform plug-in and torch_xla. Use device='cpu'",
    "neuron": "Neuron devices need a platform plug-in and transformers-neuronx. Use device='cpu'",
    "openvino": "OpenVINO needs a platform plug-in and the package openvino. Use device='cpu'",
}


def detect_device() -> tuple[str, str]:
    """The best device of this machine, and why: ("cuda" | "cpu", reason), or one that a plug-in brings. Imports torch
    unless its name says enough.
    """
    for device, platform in _plugged().items():
        if device not in ("cpu", "cuda"):
            return device, f"the platform plug-in {type(platform).__name__} brings it"
    with suppress(metadata.PackageNotFoundError):
        if "torch" not in sys.modules and metadata.version("torch").endswith("+cpu"):
            return "cpu", "PyTorch is built without CUDA"
    import torch

    if torch.version.hip is not None:
        return "cpu", "PyTorch is a ROCm build, and AMD GPUs are not supported yet"
    if torch.cuda.is_available():
        return "cuda", "PyTorch sees a CUDA device"
    if torch.version.cuda is None:
        return "cpu", "PyTorch is built without CUDA"
    return "cpu", "PyTorch sees no CUDA device"


@lru_cache(maxsize=1)
def _plugged() -> dict[str, Platform]:
    """The platforms of installed plug-ins, by device. One that fails, or has nothing for this machine, is left out."""
    found: dict[str, Platform] = {}
    for name, offer in plugins_of(PLATFORM_GROUP).items():
        try:
            path = offer()
            platform = None if path is None else named(path)()
        except Exception:
            logger.exception("The platform plug-in %s failed and is left out.", name)
            continue
        if platform is None:
            continue
        if isinstance(platform, Platform):
            found.setdefault(platform.device_type, platform)
            logger.info("The platform plug-in %s brings the device %r.", name, platform.device_type)
        else:
            logger.error("The platform plug-in %s is left out: %s is no vllm.platforms.Platform.", name, path)
    return found


def plugged_devices() -> tuple[str, ...]:
    """Devices that plug-ins bring."""
    return tuple(_plugged())


@lru_cache(maxsize=8)
def platform_for(device: str) -> Platform:
    """The platform of a device name, a plug-in's before ours. Raises ValueError that says what to install if there is
    none.
    """
    if device in _plugged():
        return _plugged()[device]
    if device == "cpu":
        from vllm.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if device == "cuda":
        from vllm.platforms.cuda import CudaPlatform

        return CudaPlatform()
    if device in _MISSING_DEVICES:
        raise ValueError(
            f"device={device!r} is not available: {_MISSING_DEVICES[device]}, or device='cuda' on NVIDIA GPUs."
        )
    raise ValueError(f"Unknown device {device!r}, expected one of: auto, cpu, cuda, {', '.join(_MISSING_DEVICES)}.")


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return platform_for(detect_device()[0])
    raise AttributeError(f"module 'vllm.platforms' has no attribute {name!r}")
