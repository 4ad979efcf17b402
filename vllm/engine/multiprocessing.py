"""Public path of `MQEngineDeadError`, an older name of `EngineDeadError`."""

from vllm.exceptions import EngineDeadError as MQEngineDeadError

__all__ = ["MQEngineDeadError"]
