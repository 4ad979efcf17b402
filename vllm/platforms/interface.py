"""What every platform answers about its devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


class DeviceCapability(NamedTuple):
    """Compute capability of a CUDA device."""

    major: int
    minor: int

    def to_int(self) -> int:
        return self.major * 10 + self.minor

    def as_version_str(self) -> str:
        return f"{self.major}.{self.minor}"


class Platform(ABC):
    """One kind of device. Asking for facts never allocates memory on a device."""

    device_type: str

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_hpu(self) -> bool:
        return False

    def is_neuron(self) -> bool:
        return False

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """Compute capability, None where there is no such thing."""
        return None

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        own = self.get_device_capability(device_id)
        if own is None:
            return False
        wanted = capability if isinstance(capability, int) else capability[0] * 10 + capability[1]
        return own.to_int() >= wanted

    @abstractmethod
    def get_device_name(self, device_id: int = 0) -> str: ...

    @abstractmethod
    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of memory of a device."""

    @abstractmethod
    def device_count(self) -> int: ...

    @abstractmethod
    def supports_bfloat16(self) -> bool:
        """Whether bfloat16 is computed by the hardware itself."""

    @abstractmethod
    def bfloat16_reason(self) -> str:
        """Why `supports_bfloat16` says what it says, for the log."""
