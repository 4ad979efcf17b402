"""Settings of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Choice, Json
from vllm.platforms import plugged_devices

DEVICES = ("auto", "cuda", "neuron", "cpu", "openvino", "tpu", "xpu", "hpu", "rocm")


@dataclass(frozen=True)
class _Device(Choice):
    """One of ours, or one that a platform plug-in brings."""

    def _check(self, name: str, value: Any) -> Any:
        known = value in self.values or not isinstance(value, str) or value not in plugged_devices()
        return super()._check(name, value) if known else value

    def cli(self) -> dict[str, Any]:
        return {**super().cli(), "choices": [*self.values, *plugged_devices()]}


@dataclass(frozen=True)
class DeviceConfig:
    """What the model runs on: "cpu" or "cuda"."""

    device: str = setting(
        "auto", _Device(values=DEVICES), 'What the model runs on; "auto": a CUDA device if there is one, else the CPU.',
        resolved="cpu",
    )  # fmt: skip

    additional_config: dict[str, Any] = setting(
        {},
        Json(optional=True),
        "Settings for platform plug-ins, passed through.",
        idle=lambda config: "no platform plug-in reads it",
    )

    @property
    def device_type(self) -> str:
        return self.device
