"""Types of multimodal data, and `MultiModalPlugin`, which turns the data of one modality into a model's arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Union, final

from vllm.inputs.registry import InputContext, class_of

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vllm.config import ModelConfig

ModelClass = TypeVar("ModelClass", bound=type)

# A tensor, or tensors of different shapes in (nested) lists.
NestedTensors = Union[list["NestedTensors"], list["torch.Tensor"], "torch.Tensor"]
# Keyword argument of forward() -> its value for a whole batch.
BatchedTensorInputs = dict[str, NestedTensors]


@final
class MultiModalDataBuiltins(TypedDict, total=False):
    """The modalities that are known without a plugin of the user's."""

    image: Any  # PIL.Image.Image, or a list of them
    audio: tuple[np.ndarray, int | float] | list[tuple[np.ndarray, int | float]]


# Modality -> one item or several.
MultiModalDataDict = Union[MultiModalDataBuiltins, Mapping[str, Any]]  # noqa: UP007 (a value, on Python 3.10 too)


class MultiModalInputs(UserDict[str, NestedTensors]):
    """Keyword arguments of a model's forward() that one prompt's data turns into."""

    @staticmethod
    def batch(inputs_list: list[MultiModalInputs]) -> BatchedTensorInputs:
        """The inputs of several prompts under each key: one tensor where all shapes agree, else a list.

        Raises ValueError if the prompts have different keys.
        """
        import torch

        if not inputs_list:
            return {}
        keys = set(inputs_list[0])
        for inputs in inputs_list:
            if set(inputs) != keys:
                raise ValueError(
                    f"Inputs of one batch must have the same keys, got {sorted(keys)} and {sorted(inputs)}."
                )
        batched: BatchedTensorInputs = {}
        for key in inputs_list[0]:
            values: list[Any] = [inputs[key] for inputs in inputs_list]
            tensors = all(isinstance(value, torch.Tensor) for value in values)
            same = tensors and all(value.shape == values[0].shape for value in values)
            batched[key] = torch.stack(values) if same else values
        return batched


InputMapper = Callable[[InputContext, Any], MultiModalInputs]
MaxTokens = Union[int, Callable[[InputContext], int]]  # noqa: UP007 (a value, on Python 3.10 too)


class MultiModalPlugin(ABC):
    """One modality: how each model class maps its data, and into how many tokens at most."""

    def __init__(self) -> None:
        self._mappers: dict[type, InputMapper] = {}
        self._max_tokens: dict[type, MaxTokens] = {}

    @abstractmethod
    def get_data_key(self) -> str:
        """The modality's key in `multi_modal_data`."""

    def default_input_mapper(self, ctx: InputContext, data: Any) -> MultiModalInputs:
        """What `register_input_mapper()` without a mapper registers. Plugins override it."""
        raise NotImplementedError(
            f"The modality {self.get_data_key()!r} has no default input mapper yet; pass one to register_input_mapper."
        )

    def default_max_multimodal_tokens(self, ctx: InputContext) -> int:
        """What `register_max_multimodal_tokens()` without a number registers. Plugins override it."""
        raise NotImplementedError(
            f"The modality {self.get_data_key()!r} has no default number of tokens yet; "
            "pass one to register_max_multimodal_tokens."
        )

    def register_input_mapper(self, mapper: InputMapper | None = None) -> Callable[[ModelClass], ModelClass]:
        """Class decorator: `mapper(context, data)` makes the model's keyword arguments of this modality's data."""

        def register(model_class: ModelClass) -> ModelClass:
            self._mappers[model_class] = mapper or self.default_input_mapper
            return model_class

        return register

    def register_max_multimodal_tokens(
        self, max_mm_tokens: MaxTokens | None = None
    ) -> Callable[[ModelClass], ModelClass]:
        """Class decorator: the most tokens that one item becomes, as a number or a function of the context."""
        if isinstance(max_mm_tokens, int):
            self._check_max_tokens(max_mm_tokens)

        def register(model_class: ModelClass) -> ModelClass:
            chosen = self.default_max_multimodal_tokens if max_mm_tokens is None else max_mm_tokens
            self._max_tokens[model_class] = chosen
            return model_class

        return register

    def serves(self, model_class: type) -> bool:
        """Whether a mapper is registered for the class or one of its bases."""
        return any(base in self._mappers for base in model_class.__mro__)

    def map_input(self, model_config: ModelConfig, data: Any) -> MultiModalInputs:
        """The model's keyword arguments for `data`. Raises NotImplementedError if it does not take this modality."""
        model_class = class_of(model_config)
        mapper = next((self._mappers[base] for base in model_class.__mro__ if base in self._mappers), None)
        if mapper is None:
            raise NotImplementedError(
                f"No input mapper for {self.get_data_key()!r} is registered for model class {model_class.__name__}."
            )
        return mapper(InputContext(model_config), data)

    def get_max_multimodal_tokens(self, model_config: ModelConfig) -> int:
        """The most tokens that one item becomes; 0 if the model does not take this modality."""
        model_class = class_of(model_config)
        found = next((self._max_tokens[base] for base in model_class.__mro__ if base in self._max_tokens), None)
        if found is None:
            return 0
        return self._check_max_tokens(found if isinstance(found, int) else found(InputContext(model_config)))

    def _check_max_tokens(self, count: int) -> int:
        if count < 1:
            raise ValueError(f"The most tokens of one {self.get_data_key()!r} item must be at least 1, got {count}.")
        return count
