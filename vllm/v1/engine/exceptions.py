"""Public path of the engine's exceptions; they live in `vllm.exceptions`."""

from vllm.exceptions import EngineDeadError, EngineGenerateError

__all__ = ["EngineDeadError", "EngineGenerateError"]
