"""The table of shapes says who is ahead, and the page shows what the file has."""

import json
from pathlib import Path

import pytest

from benchmarks.h200.table import ahead, markdown

ROOT = Path(__file__).parents[2]


def row(unit: str, after: float | None, vllm: float | None) -> dict[str, object]:
    return {"shape": "s", "case": "c", "unit": unit, "before": 3.0, "after": after, "vllm": vllm, "goal": 1.5}


def test_less_time_and_more_tokens_are_ahead() -> None:
    assert ahead(row("ms", 2.0, 3.0)) == pytest.approx(1.5)
    assert ahead(row("tok/s", 2000.0, 3000.0)) == pytest.approx(2 / 3)
    assert ahead(row("ms", None, 3.0)) is None and ahead(row("ms", 2.0, None)) is None


def test_rows_without_a_figure_have_a_dash() -> None:
    table = markdown([row("ms", 2.0, None), row("tok/s", 12345.6, 6172.8)]).splitlines()
    assert table[2] == "| s | c, ms | 3 | 2 | - | - | 1.5 |"
    assert table[3] == "| s | c, tok/s | 3 | 12,346 | 6,173 | 2.00 | 1.5 |"


def test_the_page_shows_what_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/h200_table.json").read_text())
    assert markdown(rows) in (ROOT / "docs/performance.md").read_text()
