"""What makes a family of models: a function from a Hugging Face config to a `Decoder`, and a table of names.

Nothing here needs torch, nor does any family: the front end asks families too.

Names in tables are templates. A field in braces stands for one component of a name: {i} a layer's number, {e} an
expert's number, {p} the last word ("weight", "bias", or whatever a quantization format stores).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vllm.config.facts import USUAL, Facts
from vllm.model_executor.layers.weight_layout import WeightLayout

if TYPE_CHECKING:
    from vllm.config.hf import HFConfig
    from vllm.model_executor.models.spec import Decoder, PoolHead

_FIELDS = {"i": r"\d+", "e": r"\d+", "p": r"\w+"}


@dataclass(frozen=True)
class Rename:
    """A checkpoint's name -> the canonical name, and the layout in which the checkpoint stores the tensor."""

    source: str
    target: str
    layout: WeightLayout = WeightLayout.PLAIN

    def __post_init__(self) -> None:
        """Raises ValueError for a field that is unknown, or that stands on one side only."""
        fields = set(_fields(self.source))
        if fields != set(_fields(self.target)) or not fields <= _FIELDS.keys():
            raise ValueError(
                f"Rename {self.source!r} -> {self.target!r}: expected the same fields in both, out of "
                f"{', '.join('{' + field + '}' for field in _FIELDS)}."
            )

    @cached_property
    def _source_pattern(self) -> re.Pattern[str]:
        return _pattern(self.source)

    @cached_property
    def _target_pattern(self) -> re.Pattern[str]:
        return _pattern(self.target)

    def apply(self, name: str) -> str | None:
        """The canonical name of a checkpoint's tensor, None if this rename is not about it."""
        found = self._source_pattern.fullmatch(name)
        return None if found is None else self.target.format(**found.groupdict())

    def reverse(self, canonical: str) -> str | None:
        """The checkpoint's name of a canonical one, None if this rename does not produce it."""
        found = self._target_pattern.fullmatch(canonical)
        return None if found is None else self.source.format(**found.groupdict())


def _fields(template: str) -> list[str]:
    return re.findall(r"\{(\w*)\}", template)


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)\}", template)
    literal, fields = pieces[::2], pieces[1::2]
    pattern = re.escape(literal[0])
    for field, text in zip(fields, literal[1:], strict=True):
        pattern += f"(?P<{field}>{_FIELDS[field]})" + re.escape(text)
    return re.compile(pattern)


def renames(table: Mapping[str, str], layout: WeightLayout = WeightLayout.PLAIN) -> tuple[Rename, ...]:
    """A table of equal layout."""
    return tuple(Rename(source, target, layout) for source, target in table.items())


@dataclass(frozen=True)
class Family:
    """base_prefix: what checkpoints of the bare decoder (without its head) leave out of every name.

    harmless: names (templates) that checkpoints contain and the model does not need.
    facts: what settings need to know of the family.
    extra_layers: how names of layers begin, where checkpoints may hold more of them than the config says (those that
        predict several tokens at once), which are left out.
    modules: a module ("package.file"), imported by workers only, whose `MODULES` maps the classes of the family's own
        blocks to the modules they become.
    inside: how names of a larger model's text part begin, where that part is the model; the rest is left out.
    pool: of a family that pools: from the config to its head; None for one that generates.
    """

    decoder: Callable[[HFConfig], Decoder]
    names: tuple[Rename, ...]
    base_prefix: str = "model."
    harmless: tuple[str, ...] = ()
    facts: Facts = USUAL
    modules: str | None = None
    extra_layers: str | None = None
    inside: str = ""
    pool: Callable[[HFConfig], PoolHead] | None = None

    def decoder_of(self, hf: HFConfig) -> Decoder:
        """The model of a config. Raises ValueError if the family's function gives something else."""
        from vllm.model_executor.models.spec import Decoder

        made = self.decoder(hf)
        if not isinstance(made, Decoder):
            name = getattr(self.decoder, "__qualname__", repr(self.decoder))
            raise ValueError(
                f"{self.decoder.__module__}.{name}, the function of the family that makes its Decoder, returned "
                f"{made!r:.80}, expected a Decoder. Is there a `return`?"
            )
        return made

    def is_beyond(self, name: str, layers: int) -> bool:
        """Whether a checkpoint's tensor is of a layer behind the model's last, or of another part of a larger model,
        and may be left out.
        """
        if not name.startswith(self.inside):
            return True
        if self.extra_layers is None:
            return False
        found = _pattern(self.extra_layers).match(name)
        return found is not None and int(found["i"]) >= layers

    @cached_property
    def _harmless_patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(_pattern(template) for template in self.harmless)

    def resolve(self, name: str) -> tuple[str, WeightLayout] | None:
        """(canonical name, layout) of a checkpoint's tensor, None if the table does not know it."""
        name = name.removeprefix(self.inside)
        for candidate in (name, self.base_prefix + name):
            for rename in self.names:
                target = rename.apply(candidate)
                if target is not None:
                    return target, rename.layout
        return None

    def is_harmless(self, name: str) -> bool:
        """Whether a checkpoint may contain `name` without the model using it."""
        candidates = (name, self.base_prefix + name)
        return any(pattern.fullmatch(c) for pattern in self._harmless_patterns for c in candidates)

    def checkpoint_names(self, canonical: str) -> Iterable[str]:
        """The names under which a checkpoint may hold a canonical tensor."""
        found = [source for rename in self.names if (source := rename.reverse(canonical)) is not None]
        return [self.inside + source for source in found]
