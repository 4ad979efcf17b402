"""Hooks with which a model class changes its inputs, kept in `INPUT_REGISTRY`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vllm.inputs.data import LLMInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import ModelConfig

ModelClass = TypeVar("ModelClass", bound=type)
Config = TypeVar("Config", bound="PretrainedConfig")


@dataclass(frozen=True)
class InputContext:
    """What an input hook may know about the model."""

    model_config: ModelConfig

    def get_hf_config(self, hf_config_type: type[Config] | None = None) -> Config | PretrainedConfig:
        """The model's Hugging Face configuration. Raises TypeError if it is not of the type given."""
        config: PretrainedConfig = self.model_config.hf_config
        if hf_config_type is not None and not isinstance(config, hf_config_type):
            raise TypeError(
                f"Invalid type of HuggingFace config. Expected type: {hf_config_type}, but found type: {type(config)}"
            )
        return config

    def get_hf_image_processor_config(self) -> dict[str, Any]:
        """The contents of the model's preprocessor_config.json; empty if it has none."""
        path = self.model_config.path / "preprocessor_config.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


InputProcessor = Callable[[InputContext, LLMInputs], LLMInputs]


class DummyDataFactory(Protocol):
    """Makes the largest input that a model can receive, for memory profiling."""

    def __call__(
        self, ctx: InputContext, seq_len: int, mm_counts: Mapping[str, int], **mm_processor_kwargs: Any
    ) -> Any: ...


class MultiModalLimits(Protocol):
    """The part of a multimodal registry that memory profiling needs."""

    def get_mm_limits_per_prompt(self, model_config: ModelConfig) -> Mapping[str, int]: ...


class InputRegistry:
    """Input hooks by model class; a class without a hook of its own uses that of the nearest base class."""

    def __init__(self) -> None:
        self._processors: dict[type, InputProcessor] = {}
        self._dummy_data: dict[type, DummyDataFactory] = {}

    def register_input_processor(self, processor: InputProcessor) -> Callable[[ModelClass], ModelClass]:
        """Class decorator: `processor` sees each processed prompt of the model and returns the one to use."""

        def register(model_class: ModelClass) -> ModelClass:
            self._processors[model_class] = processor
            return model_class

        return register

    def register_dummy_data(self, factory: DummyDataFactory) -> Callable[[ModelClass], ModelClass]:
        """Class decorator: `factory` makes the largest input of a model that takes more than text.

        It is asked through `dummy_data_for_profiling` only. The engine profiles text, which needs no factory: its
        largest step has `max_num_batched_tokens` tokens, whatever they are.
        """

        def register(model_class: ModelClass) -> ModelClass:
            self._dummy_data[model_class] = factory
            return model_class

        return register

    @property
    def has_input_processors(self) -> bool:
        """Whether any model class has a hook; only then is it worth finding the class of a model."""
        return bool(self._processors)

    def input_processor_of(self, model_class: type) -> InputProcessor | None:
        return next((self._processors[c] for c in model_class.__mro__ if c in self._processors), None)

    def dummy_data_factory_of(self, model_class: type) -> DummyDataFactory | None:
        return next((self._dummy_data[c] for c in model_class.__mro__ if c in self._dummy_data), None)

    def dummy_data_for_profiling(
        self, model_config: ModelConfig, seq_len: int, mm_registry: MultiModalLimits | None = None
    ) -> Any:
        """The largest input of a model: what its factory makes, else `seq_len` times token 0 and no other data.

        `mm_registry` knows how many items of each modality a prompt of this model may have.
        """
        factory = self.dummy_data_factory_of(class_of(model_config))
        if factory is None:
            return LLMInputs(prompt_token_ids=[0] * seq_len), None
        counts = {} if mm_registry is None else mm_registry.get_mm_limits_per_prompt(model_config)
        return factory(InputContext(model_config), seq_len, counts)

    def process_input(self, model_config: ModelConfig, inputs: LLMInputs) -> LLMInputs:
        """`inputs` after the hook of the model that `model_config` names."""
        processor = self.input_processor_of(class_of(model_config))
        return inputs if processor is None else processor(InputContext(model_config), inputs)

    def create_input_processor(self, model_config: ModelConfig) -> Callable[[LLMInputs], LLMInputs]:
        """`process_input` for one model, whose hook is looked up once, now."""
        processor = self.input_processor_of(class_of(model_config))
        if processor is None:
            return lambda inputs: inputs
        return functools.partial(processor, InputContext(model_config))


def class_of(model_config: ModelConfig) -> type:
    """The class of the model that `model_config` names."""
    from vllm.model_executor.models import ModelRegistry  # torch comes with it

    model_class, _ = ModelRegistry.resolve_model_cls(model_config.architectures)
    return model_class


INPUT_REGISTRY = InputRegistry()
