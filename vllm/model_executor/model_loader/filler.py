"""Filling a model built on the meta device from a stream of named tensors, strictly and one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.sharding import ShardedParameter, load_weight, part_shape

_BLOCK = re.compile(r"blocks\.\d+")


@runtime_checkable
class ProcessesWeights(Protocol):
    """A module that repacks its weights once they are filled."""

    def process_after_load(self) -> None:
        """Called once, when every parameter of the module is filled."""


@dataclass
class _Slot:
    """A parameter, the places that refer to it, and what is still missing in it: (expert, part) pairs."""

    path: str
    blank: ShardedParameter  # as built, on the meta device
    parameter: ShardedParameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    missing: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Target:
    """What one canonical name fills: a whole parameter, or one part and / or one expert of it."""

    slot: _Slot
    part: int | None = None
    expert: int | None = None

    @property
    def atoms(self) -> set[tuple[int, int]]:
        """The (expert, part) pairs it covers."""
        parameter = self.slot.parameter
        spec = parameter.shard_spec
        parts = range(max(1, len(spec.parts))) if self.part is None else (self.part,)
        experts = range(parameter.full_shape[0] if spec.stack else 1) if self.expert is None else (self.expert,)
        return {(expert, part) for expert in experts for part in parts}


class WeightFiller:
    """Takes tensors by canonical name, puts each in its place on `device`, and repacks a module as soon as it is full.

    Memory grows with what has been filled: a parameter is allocated when its first tensor arrives. A tensor that is a
    whole parameter of a module that repacks its weights is not copied first: it is repacked from where it lies.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._unfilled: dict[nn.Module, int] = {}
        self._targets: dict[str, _Target] = {}
        self._spare: dict[int, list[Tensor]] = {}  # memory of parameters that were repacked, by size in bytes
        self.filled_bytes = 0
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not isinstance(parameter, ShardedParameter):
                    raise TypeError(f"{prefix}.{name} is not a ShardedParameter, so the loader cannot fill it.")
                path = f"{prefix}.{name}" if prefix else name
                slot = self._slots.get(id(parameter))
                if slot is None:
                    slot = self._slots[id(parameter)] = _Slot(path, parameter, parameter)
                    self._add_targets(slot)
                slot.owners.append((module, name))
                self._unfilled[module] = self._unfilled.get(module, 0) + 1

    def _add(self, name: str, target: _Target) -> None:
        """Raises ValueError for a name that fills something else already."""
        other = self._targets.setdefault(name, target)
        if other is not target:
            raise ValueError(
                f"Tensors called {name!r} would belong to {other.slot.path!r} and to {target.slot.path!r}. Parameters "
                "and their parts need names that are unique in a block: call them otherwise, or give the parts of one "
                "no names."
            )

    def _add_targets(self, slot: _Slot) -> None:
        whole = _Target(slot)
        slot.missing = whole.atoms
        self._add(slot.path, whole)
        parent, _, leaf = slot.path.rpartition(".")
        spec = slot.parameter.shard_spec
        if spec.stack and not spec.parts:
            for row in range(slot.parameter.full_shape[0]):
                self._add(f"{parent}.{row}.{leaf}", _Target(slot, None, row))
        for part in range(len(spec.parts)):
            name = spec.parts[part].name
            if spec.stack:
                if name:
                    self._add(f"{parent}.{name}", _Target(slot, part))
                if not name and len(spec.parts) > 1:
                    continue
                for expert in range(slot.parameter.full_shape[0]):
                    self._add(f"{parent}.{expert}.{name or leaf}.weight", _Target(slot, part, expert))
            elif name and len(spec.parts) > 1:
                # in place of the module's name, or behind that of a parameter which a block or the model itself has
                container = parent.rpartition(".")[0]
                own = not parent or _BLOCK.fullmatch(parent)
                fused = f"{slot.path}.{name}" if own else ".".join(filter(None, (container, name, leaf)))
                self._add(fused, _Target(slot, part))

    def names(self) -> Iterable[str]:
        """All canonical names: of whole parameters, of their parts and of experts."""
        return self._targets

    def expected_shape(self, canonical: str) -> tuple[int, ...] | None:
        """The full shape that a tensor called `canonical` must have, None if the model has no such weight."""
        target = self._targets.get(canonical)
        return None if target is None else part_shape(target.slot.parameter, target.part, target.expert)

    def place_of(self, canonical: str) -> tuple[list[tuple[nn.Module, str]], int | None, int | None]:
        """Where a name's weight is: the modules that own the parameter, by what name, and which part and expert."""
        target = self._targets[canonical]
        return target.slot.owners, target.part, target.expert

    def dtype_of(self, canonical: str) -> torch.dtype:
        """The dtype of the weight that `canonical` fills."""
        return self._targets[canonical].slot.parameter.dtype

    def fill(self, canonical: str, tensor: Tensor) -> None:
        """Write a full tensor in canonical layout. Raises ValueError if it is there already, or does not fit."""
        target = self._targets[canonical]
        slot = target.slot
        if not target.atoms <= slot.missing:
            raise ValueError(f"the weight {canonical} occurs twice")
        if slot.parameter.is_floating_point() and not tensor.is_floating_point():
            raise ValueError(f"it holds {tensor.dtype}, expected floating-point numbers; are the weights quantized?")
        borrowed = slot.blank.world == 1 and self._can_borrow(slot, target, tensor)
        self._write(
            slot, target, tensor, borrowed, lambda: load_weight(slot.parameter, tensor, target.part, target.expert)
        )

    def fill_share(self, path: str, tensor: Tensor) -> None:
        """Write what this rank holds of a whole parameter. Raises ValueError if it is there already, or differs."""
        target = self._targets[path]
        slot = target.slot
        if target.atoms != slot.missing or target.part is not None or target.expert is not None:
            raise ValueError(f"the weight {path} occurs twice")
        if tensor.shape != slot.blank.shape or tensor.dtype != slot.blank.dtype:
            got, expected = (f"{list(t.shape)} of {t.dtype}" for t in (tensor, slot.blank))
            raise ValueError(f"got {got}, expected {expected}")
        borrowed = self._can_borrow(slot, target, tensor)
        self._write(slot, target, tensor, borrowed, lambda: slot.parameter.data.copy_(tensor))

    def _write(self, slot: _Slot, target: _Target, tensor: Tensor, borrowed: bool, copy: Callable[[], object]) -> None:
        if slot.parameter.is_meta:
            self.filled_bytes += slot.parameter.numel() * slot.parameter.element_size()
            self._use(slot, slot.blank.over(tensor) if borrowed else self._materialized(slot))
        if not borrowed:
            copy()
        slot.missing -= target.atoms
        if not slot.missing:
            self._finish(slot)
            if borrowed:
                self._keep_copy(slot, tensor)
            else:
                self._reclaim(slot)
            slot.parameter = slot.blank  # the modules own the weight now, and may have freed it

    def _use(self, slot: _Slot, parameter: ShardedParameter) -> None:
        slot.parameter = parameter
        for module, name in slot.owners:
            setattr(module, name, parameter)

    def _materialized(self, slot: _Slot) -> ShardedParameter:
        """The slot's parameter in real memory, that of one which was repacked before if there is one of its size."""
        blank = slot.blank
        spare = self._spare.get(blank.numel() * blank.element_size())
        if not spare:
            return blank.materialized(self._device)
        return blank.over(spare.pop().view(blank.dtype).view(blank.shape))

    def _reclaim(self, slot: _Slot) -> None:
        """Keep the memory of a parameter that its modules have repacked and dropped, for the next of its size."""
        parameter = slot.parameter
        if all(_repacks_whole(module) and getattr(module, name) is not parameter for module, name in slot.owners):
            data = parameter.data.view(-1).view(torch.uint8)
            self._spare.setdefault(data.numel(), []).append(data)

    def _can_borrow(self, slot: _Slot, target: _Target, tensor: Tensor) -> bool:
        """Whether `tensor` is the parameter as it stands, and a module will repack it as soon as it is there."""
        return (
            slot.parameter.is_meta
            and self._device.type == tensor.device.type == "cpu"
            and target.atoms == slot.missing
            and tensor.shape == slot.blank.shape
            and tensor.dtype == slot.blank.dtype
            and any(_repacks_whole(module) for module, _ in slot.owners)
            and all(
                self._unfilled[module] == 1 and (_repacks_whole(module) or not isinstance(module, ProcessesWeights))
                for module, _ in slot.owners
            )
        )

    def _keep_copy(self, slot: _Slot, tensor: Tensor) -> None:
        """Copy what the modules did not repack: the tensor may be a view of a file."""
        if any(getattr(module, name) is slot.parameter for module, name in slot.owners):
            kept = slot.blank.materialized(self._device)
            kept.data.copy_(tensor)
            for module, name in slot.owners:
                if getattr(module, name) is slot.parameter:
                    setattr(module, name, kept)

    def _finish(self, slot: _Slot) -> None:
        for module, _ in slot.owners:
            self._unfilled[module] -= 1
            if self._unfilled[module] == 0 and isinstance(module, ProcessesWeights):
                module.process_after_load()

    def missing(self) -> Iterator[str]:
        """Canonical names that no tensor has filled; of a fused weight either all parts' names or the missing ones."""
        for slot in self._slots.values():
            if slot.missing:
                parts = [name for name, t in self._targets.items() if t.slot is slot and t.part is not None]
                unfilled = [name for name in parts if self._targets[name].atoms & slot.missing]
                yield from unfilled or [slot.path]

    def parameters(self) -> Iterator[tuple[str, ShardedParameter, nn.Module]]:
        """(canonical name, parameter, the first module that owns it)."""
        for slot in self._slots.values():
            yield slot.path, slot.parameter, slot.owners[0][0]


def _repacks_whole(module: nn.Module) -> bool:
    """Whether the module, when it repacks, copies a weight or leaves it in its place, and keeps no view of it."""
    return isinstance(module, ProcessesWeights) and bool(getattr(module, "repacks_whole", False))
