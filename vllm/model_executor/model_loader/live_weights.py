"""New values for the weights of a model that is in use, tensor by tensor under their checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.sharding import ShardedParameter, load_weight
from vllm.model_executor.model_loader.filler import WeightFiller
from vllm.model_executor.model_loader.fitting import fitted
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.spec import Decoder


@runtime_checkable
class Restorable(Protocol):
    """A module whose weights may be repacked for the device."""

    def restore(self) -> bool: ...

    def process_after_load(self) -> None: ...


@contextmanager
def unpacked(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the weights of these modules are parameters, as they came from the checkpoint; changes to them stay."""
    repacked = [module for module in modules if isinstance(module, Restorable) and module.restore()]
    try:
        yield
    finally:
        for module in repacked:
            module.process_after_load()


class LiveWeights:
    """Writes tensors into a decoder that runs. Memory stays where it is, but for weights repacked for the CPU.

    shell: the same decoder on "meta", where nothing is repacked: it says which module and which part a name means.
    """

    def __init__(self, model: DecoderModel, shell: DecoderModel, family: Family, spec: Decoder) -> None:
        self._model, self._family, self._spec = model, family, spec
        self._filler = WeightFiller(shell, torch.device("meta"))
        self._paths = {module: path for path, module in shell.named_modules()}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write each tensor to its place; the names that have one on this rank. What is not named keeps its values.

        Raises ValueError for a tensor that the model does not have or that does not fit, and for a part of the model
        that is quantized. Those before it are written then.
        """
        loaded = set()
        for name, tensor in tensors:
            if self._write(name, tensor):
                loaded.add(name)
        return loaded

    def _write(self, name: str, tensor: Tensor) -> bool:
        model, family = self._model, self._family
        found = family.resolve(name)
        if family.is_beyond(name, len(self._spec.blocks)) or (found is None and family.is_harmless(name)):
            return False
        if found is not None:
            target, layout = found
            if model.is_elsewhere(target) or (target == "head.weight" and not model.pools and model.head.tied):
                return False  # another stage's, or a copy of the embedding
            shape = self._filler.expected_shape(target)
            if shape is not None:
                try:
                    value = fitted(tensor, layout, shape, target, self._spec)
                except ValueError as error:
                    raise ValueError(f"The tensor {name!r} {error}.") from None
                self._put(target, value)
                return True
        raise ValueError(
            f"The tensor {name!r} cannot be loaded: the model has no such weight, or has it quantized, and then it "
            "keeps its values for as long as the engine lives."
        )

    def _put(self, target: str, value: Tensor) -> None:
        owners, part, expert = self._filler.place_of(target)
        modules = [(self._model.get_submodule(self._paths[module]), name) for module, name in owners]
        with torch.no_grad(), unpacked(module for module, _ in modules):
            module, name = modules[0]
            parameter = getattr(module, name)
            assert isinstance(parameter, ShardedParameter)
            load_weight(parameter, value.to(parameter.device), part, expert)
