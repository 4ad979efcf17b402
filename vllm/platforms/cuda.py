"""NVIDIA GPUs, as PyTorch sees them."""

from __future__ import annotations

from vllm.platforms.interface import DeviceCapability, Platform


class CudaPlatform(Platform):
    device_type = "cuda"

    def __init__(self) -> None:
        import torch

        if torch.version.hip is not None or not torch.cuda.is_available():
            built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
            raise ValueError(
                f"device='cuda' is not available: PyTorch {torch.__version__} (built {built}) sees no CUDA device. "
                "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, install a CUDA build of PyTorch, or use device='cpu'."
            )

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability:
        import torch

        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    def get_device_name(self, device_id: int = 0) -> str:
        import torch

        return str(torch.cuda.get_device_name(device_id))

    def get_device_total_memory(self, device_id: int = 0) -> int:
        import torch

        return int(torch.cuda.get_device_properties(device_id).total_memory)

    def device_count(self) -> int:
        import torch

        return int(torch.cuda.device_count())

    def supports_bfloat16(self) -> bool:
        return self.get_device_capability().major >= 8

    def bfloat16_reason(self) -> str:
        capability = self.get_device_capability().as_version_str()
        return f"the GPU has compute capability {capability}" + ("" if self.supports_bfloat16() else ", below 8.0")
