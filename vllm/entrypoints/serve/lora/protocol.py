"""Public path of requests about adapters."""

from vllm.entrypoints.openai.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

__all__ = [
    "LoadLoRAAdapterRequest",
    "UnloadLoRAAdapterRequest",
]
