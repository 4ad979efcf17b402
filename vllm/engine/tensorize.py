"""Writing a model's weights in tensorizer's format: an engine that loads it, and saves it."""

from __future__ import annotations

from vllm.config.tensorizer import TensorizerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.model_executor.model_loader.tensorizer import new_key


def tensorize_vllm_model(engine_args: EngineArgs, tensorizer_config: TensorizerConfig) -> None:
    """Load a model as `engine_args` say and write its weights where `tensorizer_config` says, a file for each rank.

    With an `encryption_keyfile` a new key is written to it, and the weights are encrypted with it.
    """
    config = engine_args.create_engine_config()
    tensorizer_config.uri(0, config.parallel_config.world_size)
    if tensorizer_config.encryption_keyfile is not None:
        new_key(tensorizer_config.encryption_keyfile)
    engine = LLMEngine.from_engine_args(engine_args)
    try:
        engine.collective_rpc("save_tensorized", args=(tensorizer_config.to_serializable(),))
    finally:
        engine.shutdown()
