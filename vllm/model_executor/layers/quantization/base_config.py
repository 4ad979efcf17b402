"""What a quantization format is: which tensors it stores for a projection, and how they are read.

The interface of layers, `LinearMethod`, is importable here under the path that out-of-tree models know.
"""

from __future__ import annotations

import fnmatch
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import regex  # its matches, unlike those of `re`, can be given a limit of time
import torch
from torch import Tensor

from vllm.model_executor.layers.linear_method import LinearMethod, QuantizationConfig
from vllm.ops.quantized_weights import GroupedWeight, StoredRows, round_to_groups

__all__ = ["Format", "LinearMethod", "Pattern", "QuantizationConfig", "Reader", "Tensors", "setting", "take"]

Tensors = Mapping[str, Tensor]

_MATCH_SECONDS, _ALL_SECONDS = 0.5, 300.0  # of a match, and of all patterns of a config
_MOST_PATTERN, _MOST_COPIES = 1 << 12, 1 << 16  # letters, and repetitions that are written out when it is compiled
_MOST_NAMES = 1 << 17
_PLAIN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Reader(ABC):
    """How one projection is stored. reads_plain: it takes plain weights, to quantize them; others leave them alone."""

    reads_plain: bool = False

    @abstractmethod
    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight | Tensor:
        """The projection [n, k]. tensors: by the last part of their names.

        Raises ValueError that names the tensor which is missing or wrong.
        """

    def stored(self, tensors: Tensors, n: int, k: int) -> StoredRows | None:
        """The projection as its file stores it, for devices that pack that; None if none can. Raises as `read`."""
        return None

    def example(self, weight: Tensor) -> GroupedWeight | Tensor:
        """A plain weight [n, k] as this format would about hold it, for random weights."""
        return round_to_groups(weight, 8, -1)


class Format(ABC):
    """A quantization format with the settings of one checkpoint.

    leaves: the last parts of the names of its tensors, besides "weight".   ignored: those that nobody needs.
    stacks: the ends of names of tensors that hold the matrices of all experts, where it stores such.
    rows_apart: each row of a projection is a row of its tensor, so that a table can be looked up as it is stored.
    by_tensor: each tensor says how it is stored, so that a checkpoint of plain ones alone is of this format too.
    """

    name: str
    rows_apart: bool = False
    by_tensor: bool = False
    leaves: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: the checkpoint's quantization config; {} for plain weights that are to be quantized."""

    @abstractmethod
    def reader(self, names: Sequence[str]) -> Reader | None:
        """How the projection with these names in checkpoints is stored; None: plainly."""

    def experts_reader(self, names: Sequence[str]) -> Reader | None:
        """The same for a projection of an expert."""
        return self.reader(names)

    def table_reader(self, names: Sequence[str]) -> Reader | None:
        """The same for the token embedding."""
        return self.reader(names)

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        """The same for the output head, whatever it is called there: plain, unless the settings say otherwise."""
        return None

    def read_stack(self, tensors: Tensors, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The matrices of all experts, of `shape` [experts, out, in], on `device`. tensors: by the end of their names.

        Raises ValueError that says what is wrong with them.
        """
        raise ValueError(f"{self.name} does not store the matrices of all experts together")


@dataclass(frozen=True)
class InFlight(Reader):
    """Plain weights that are quantized while they are loaded."""

    quantize: Callable[[Tensor], GroupedWeight]
    reads_plain: bool = True

    def read(self, tensors: Tensors, n: int, k: int) -> GroupedWeight | Tensor:
        return self.quantize(plain_weight(tensors, n, k).float())

    def example(self, weight: Tensor) -> GroupedWeight | Tensor:
        return self.quantize(weight.float())


def is_plain(tensors: Tensors) -> bool:
    """Whether these tensors are a weight that is not quantized."""
    return set(tensors) == {"weight"} and tensors["weight"].dtype in _PLAIN


def plain_weight(tensors: Tensors, n: int, k: int) -> Tensor:
    """The weight [n, k] of a projection that is stored plainly."""
    return take(tensors, "weight", (n, k), *_PLAIN)


def take(tensors: Tensors, leaf: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """The tensor called `leaf`, which must have `shape` and one of `dtypes` (any if none is named).

    A single number may have any number of dimensions. Raises ValueError otherwise.
    """
    tensor = tensors.get(leaf)
    if tensor is None:
        there = ", ".join(sorted(tensors)) or "nothing"
        raise ValueError(f"the tensor {leaf!r} is missing; there is {there}")
    if dtypes and tensor.dtype not in dtypes:
        expected = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"{leaf!r} holds {str(tensor.dtype).removeprefix('torch.')}, expected {expected}")
    if shape in ((), (1,)) and tensor.numel() == 1:
        return tensor.reshape(shape)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{leaf!r} has the shape {list(tensor.shape)}, expected {list(shape)}")
    return tensor


def by_index(weight: GroupedWeight, tensors: Tensors, leaf: str, *, needed: bool) -> GroupedWeight:
    """A weight as its file has it, with the groups that the tensor `leaf` names for its inputs.

    needed: the settings say that groups are not of neighbours, so that the tensor must be there.
    """
    groups, k = weight.scales.shape[1], weight.shape[1]
    if groups == 1 or not (needed or leaf in tensors):
        return weight
    index = take(tensors, leaf, (k,), torch.int32, torch.int64).long()
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise ValueError(f"{leaf!r} names groups from {int(index.min())} to {int(index.max())} of {groups}")
    neighbours = torch.arange(k) // weight.group
    if torch.equal(index, neighbours):
        return weight
    order = index.argsort(stable=True)
    weight, index = replace(weight, codes=weight.codes[:, order].contiguous(), order=order), index[order]
    if torch.equal(index, neighbours):
        return weight
    # groups of unequal sizes
    offsets = None if weight.offsets is None else weight.offsets[:, index]
    return replace(weight, scales=weight.scales[:, index], offsets=offsets, group=1)


_MISSING = object()


def setting(settings: Mapping[str, Any], names: str, kind: type, default: Any = _MISSING, among: Any = None) -> Any:
    """A field of a quantization config under the first of `names` (separated by spaces) that is there and not null.

    Raises ValueError if it is of another kind, not `among` the values that are possible, or missing.
    """
    value = next((settings[name] for name in names.split() if settings.get(name) is not None), _MISSING)
    label = names.split()[0]
    if value is _MISSING:
        if default is _MISSING:
            raise ValueError(f"The quantization config has no field `{label}`, expected {_words(kind, among)}.")
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (among is not None and value not in among):
        shown = repr(value)[:80]
        raise ValueError(f"The quantization config's `{label}` is {shown}, expected {_words(kind, among)}.")
    return value


def _words(kind: type, among: Any) -> str:
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "a list"}
    return words.get(kind, "an object") if among is None else " or ".join(repr(value) for value in among)


def names_of(settings: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """A field that lists modules."""
    value = setting(settings, field, list, [])
    if len(value) > _MOST_NAMES or not all(isinstance(name, str) for name in value):
        raise ValueError(
            f"The quantization config's `{field.split()[0]}` must be a list of at most {_MOST_NAMES} names."
        )
    return tuple(value)


class Patterns:
    """What makes the patterns of one quantization config, which have a limit of time together."""

    def __init__(self) -> None:
        self._left = _ALL_SECONDS

    def of(self, text: str) -> Pattern:
        return Pattern(text, self)

    def glob(self, text: str) -> Pattern:
        """A pattern with * for any letters, of whole names."""
        return Pattern(fnmatch.translate(text), self)

    @contextmanager
    def time(self) -> Iterator[None]:
        """Count what happens inside."""
        if self._left < 0:
            raise ValueError("The patterns of the quantization config take too long.")
        start = time.monotonic()
        try:
            yield
        finally:
            self._left -= time.monotonic() - start


class Pattern:
    """A regular expression that a quantization config has for names of modules."""

    def __init__(self, text: str, patterns: Patterns) -> None:
        self.text, self._patterns = text, patterns
        with patterns.time():
            self._compiled = self._compile(text)

    def _compile(self, text: str) -> Any:
        try:
            copies = math.prod(max(1, int(count)) for count in re.findall(r"[{,](\d{1,9})", text))
            if len(text) > _MOST_PATTERN or copies > _MOST_COPIES:
                raise ValueError("it is too large")
            re.compile(text)  # of the library that matches, nothing else is wanted
            return regex.compile(text)
        except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
            raise ValueError(f"The quantization config has the pattern {text[:80]!r}: {error}.") from None

    def matches(self, name: str, *, whole: bool = False) -> bool:
        """Whether a name begins with what is described, or is it as a `whole`."""
        match = self._compiled.fullmatch if whole else self._compiled.match
        try:
            with self._patterns.time():
                return match(name, timeout=_MATCH_SECONDS) is not None
        except (TimeoutError, MemoryError):
            raise ValueError(
                f"The quantization config has the pattern {self.text[:80]!r}, which takes too long for {name[:80]!r}."
            ) from None


def group_size(settings: Mapping[str, Any], names: str, default: Any = _MISSING) -> int:
    """The number of inputs that share a scale; -1: all of a row."""
    size: int = setting(settings, names, int, default)
    if size != -1 and not 1 <= size <= 1 << 20:
        raise ValueError(f"The quantization config's `{names.split()[0]}` is {size}, expected -1 or a positive number.")
    return size


def word_bits(bits: int) -> Literal[4, 8]:
    """In how many bits codes of `bits` bits are kept."""
    return 4 if bits <= 4 else 8
