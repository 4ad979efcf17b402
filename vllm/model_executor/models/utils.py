"""Small helpers that models from outside the tree import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.sequence import IntermediateTensors


class PPMissingLayer(nn.Identity):
    """Stands in for a layer that another pipeline stage has."""


@dataclass(frozen=True)
class WeightsMapper:
    """Renames a checkpoint's tensors: every text of `orig_to_new_substr` in a name, then the first prefix and the first
    suffix that fit. A text that becomes None drops the tensor.
    """

    orig_to_new_substr: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_prefix: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_suffix: Mapping[str, str | None] = field(default_factory=dict)

    def name_of(self, name: str) -> str | None:
        """The new name, None for a tensor that is dropped."""
        for old, new in self.orig_to_new_substr.items():
            if old in name:
                if new is None:
                    return None
                name = name.replace(old, new, 1)
        for old, new in self.orig_to_new_prefix.items():
            if name.startswith(old):
                if new is None:
                    return None
                name = new + name[len(old) :]
                break
        for old, new in self.orig_to_new_suffix.items():
            if name.endswith(old):
                return None if new is None else name[: len(name) - len(old)] + new
        return name

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors under their new names, without those that are dropped."""
        for name, tensor in weights:
            new = self.name_of(name)
            if new is not None:
                yield new, tensor


class AutoWeightsLoader:
    """Loads a checkpoint into a module tree by names alone.

    A submodule with its own `load_weights` gets the tensors below its name; anything else is copied to the parameter of
    the same name. Raises ValueError for a tensor without a place. A module with `load_checkpoint` gets all tensors: one
    that derives from a built-in class, whose parameters have other names than checkpoints.

    skip_prefixes: names that begin so are left out.   ignore_unexpected_prefixes: these may have no place.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        skip_prefixes: list[str] | None = None,
        ignore_unexpected_prefixes: list[str] | None = None,
    ) -> None:
        self.module = module
        self.skip_prefixes = tuple(skip_prefixes or ())
        self.ignore_unexpected_prefixes = tuple(ignore_unexpected_prefixes or ())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, mapper: WeightsMapper | None = None) -> set[str]:
        """Load everything, renamed by `mapper`; the names of the parameters that were filled."""
        weights = weights if mapper is None else mapper.apply(weights)
        load_checkpoint: Any = getattr(self.module, "load_checkpoint", None)
        if load_checkpoint is not None:
            unplaced = self.skip_prefixes + self.ignore_unexpected_prefixes
            return set(load_checkpoint((name, tensor) for name, tensor in weights if not name.startswith(unplaced)))
        owners = {
            name: module for name, module in self.module.named_modules() if name and hasattr(module, "load_weights")
        }
        outer = {
            name: m for name, m in owners.items() if not any(name.startswith(f"{o}.") for o in owners if o != name)
        }
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        delegated: dict[str, list[tuple[str, Tensor]]] = {}
        loaded: set[str] = set()
        for name, tensor in weights:
            if name.startswith(self.skip_prefixes):
                continue
            owner = next((o for o in outer if name.startswith(f"{o}.")), None)
            if owner is not None:
                delegated.setdefault(owner, []).append((name[len(owner) + 1 :], tensor))
            elif name in parameters:
                parameter = parameters[name]
                load = parameter.weight_loader if hasattr(parameter, "weight_loader") else default_weight_loader
                load(parameter, tensor)
                loaded.add(name)
            elif not name.startswith(self.ignore_unexpected_prefixes):
                raise ValueError(f"There is no module or parameter named {name!r} in {type(self.module).__name__}.")
        for owner, tensors in delegated.items():
            inner = outer[owner].load_weights(iter(tensors))
            loaded |= {f"{owner}.{name}" for name in inner or ()}
        return loaded


def maybe_prefix(prefix: str, name: str) -> str:
    """`prefix.name`, or `name` if there is no prefix."""
    return f"{prefix}.{name}" if prefix else name


def make_layers(
    num_hidden_layers: int, layer_fn: Callable[..., nn.Module], prefix: str
) -> tuple[int, int, nn.ModuleList]:
    """(first layer, end, layers) of this pipeline stage, each made by `layer_fn(prefix=...)`."""
    return 0, num_hidden_layers, nn.ModuleList(layer_fn(prefix=f"{prefix}.{i}") for i in range(num_hidden_layers))


def extract_layer_index(layer_name: str) -> int:
    """The one number in a layer's name. Raises ValueError unless there is exactly one."""
    numbers = [int(part) for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ValueError(f"layer name {layer_name!r} should contain exactly one number.")
    return numbers[0]


def is_pp_missing_parameter(name: str, model: nn.Module) -> bool:
    """Whether the parameter belongs to a layer that another pipeline stage has."""
    missing = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, PPMissingLayer))
    return name.startswith(missing) if missing else False


def make_empty_intermediate_tensors_factory(keys: list[str], hidden_size: int) -> Callable[..., IntermediateTensors]:
    """A function that makes zeros of [batch_size, hidden_size] for each key."""

    def make(batch_size: int, dtype: torch.dtype, device: Any) -> IntermediateTensors:
        return IntermediateTensors(
            {key: torch.zeros((batch_size, hidden_size), dtype=dtype, device=device) for key in keys}
        )

    return make
