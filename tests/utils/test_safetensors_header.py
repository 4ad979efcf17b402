"""The header of a safetensors file, compared with what the json module makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm.utils.safetensors_header import DamagedFile, iterate_header

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(file: Path, header: str) -> Path:
    raw = header.encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(24))
    return file


@pytest.mark.parametrize("indent", [None, 0, 8])
@pytest.mark.parametrize(
    "header",
    [
        {},
        {"__metadata__": {}},
        {"a": ENTRY},
        {"a": ENTRY, "__metadata__": {"format": "pt", "notes": '}, "b": {"x"} \\ \n', "é": "\U0001f600" * 9}},
        {'"quoted" {name}': ENTRY, "\\": {**ENTRY, "shape": []}, "": {**ENTRY, "more": 1}},
        {str(i): {**ENTRY, "shape": [1] * 16} for i in range(100)},
    ],
)
def test_entries_are_those_of_the_json(
    header: dict[str, dict[str, object]], indent: int | None, tmp_path: Path
) -> None:
    for ascii_only in (True, False):
        text = " " * bool(indent) + json.dumps(header, indent=indent, ensure_ascii=ascii_only) + "  "
        found = list(iterate_header(write(tmp_path / "f", text)))
        start = 8 + len(text.encode())
        assert [(entry.name, list(entry.shape)) for entry in found] == [
            (name, fields["shape"]) for name, fields in header.items() if name != "__metadata__"
        ]
        assert all((entry.dtype, entry.start, entry.end) == ("F32", start, start + 24) for entry in found)


@pytest.mark.parametrize(
    "header",
    [
        "", "{", "[]", '{"a"}', '{"a":}', '{"a":1}', '{"a":{}}', '{"a":{"dtype":[]}}', "{}{}", '{"a":{},}', "{,}",
        '{"__metadata__":1}', '{"__metadata__":{"a":1}}', '{"__metadata__":{"a":"b"', '{"__metadata__":{"a":"b",}}',
        '{"__metadata__":{"a":"' + "b" * (5 << 20) + '"}}', '{"' + "a" * 5000 + '":{}}',
        '{"a":{"x":"' + "b" * 3000 + '"}}',
    ],
    ids=range(18),
)  # fmt: skip
def test_anything_else_is_damaged(header: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match="is not a complete safetensors file") as refused:
        list(iterate_header(write(tmp_path / "f", header)))
    assert len(str(refused.value)) < 600


def test_a_header_beyond_the_bound_is_not_parsed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has a header of 8 bytes, expected at most 7"):
        list(iterate_header(write(tmp_path / "f", "nonsense"), 7))


def test_a_reader_that_has_seen_enough_stops(tmp_path: Path) -> None:
    entries = iterate_header(write(tmp_path / "f", '{"a":' + json.dumps(ENTRY) + ',"b":nonsense'))
    assert next(entries).name == "a"
    with pytest.raises(DamagedFile):
        next(entries)
