"""The table of other values is complete: a field that a spec gains must get its entry before programs are trusted."""

import dataclasses
import enum

from tests.models.spec_flips import VALUES, Flip, flips, spec_classes
from vllm.model_executor.models.spec import Block


def test_every_field_of_every_spec_has_another_value() -> None:
    fields = {
        (kind, f.name) for kind in spec_classes() if dataclasses.is_dataclass(kind) for f in dataclasses.fields(kind)
    }
    assert fields - set(VALUES) == set(), "give these fields values in VALUES that change what a model computes"
    assert set(VALUES) - fields == set(), "these fields are gone"
    compared = {
        (kind, f.name)
        for kind in spec_classes()
        if dataclasses.is_dataclass(kind)
        for f in dataclasses.fields(kind)
        if f.compare
    }
    assert compared == fields, "what equality does not see, programs cannot cover by equality"


def test_every_member_of_an_enumeration_is_tried() -> None:
    for kind in spec_classes():
        if issubclass(kind, enum.Enum):
            tried = {value for values in VALUES.values() for value in values if isinstance(value, kind)}
            specs = [spec for spec in spec_classes() if dataclasses.is_dataclass(spec)]
            used = {f.default for spec in specs for f in dataclasses.fields(spec) if isinstance(f.default, kind)}
            assert tried | used == set(kind)


def test_every_entry_makes_a_decoder_that_differs_from_its_base() -> None:
    found: list[Flip] = list(flips())
    assert all(flip.spec != flip.base for flip in found)
    seen = {name for flip in found for name in [flip.name.split(": ")[1].split("=")[0]]}
    assert seen == {f"{kind.__name__}.{field}" for kind, field in VALUES}
    assert Block in spec_classes()
