"""The table of shapes says who is ahead, and the page shows what the file has."""

import json
from pathlib import Path

import pytest

from benchmarks.h200.table import better, markdown, reached

ROOT = Path(__file__).parents[2]


def row(unit: str, after: float | None, vllm: float | None) -> dict[str, object]:
    return {"shape": "s", "case": "c", "unit": unit, "before": 3.0, "after": after, "vllm": vllm, "goal": 1.5}


def test_less_time_and_more_tokens_are_ahead() -> None:
    assert better(row("ms", 2.0, 3.0), "vllm") == pytest.approx(1.5)
    assert better(row("tok/s", 2000.0, 3000.0), "vllm") == pytest.approx(2 / 3)
    assert better(row("ms", None, 3.0), "vllm") is None and better(row("ms", 2.0, None), "vllm") is None


def test_rows_without_a_figure_have_a_dash() -> None:
    table = markdown([row("ms", 2.0, None), row("tok/s", 12345.6, 6172.8)]).splitlines()
    assert table[2] == "| s | c, ms | 3 | 2 | - | - | 1.5 |"
    assert table[3] == "| s | c, tok/s | 3 | 12,346 | 6,173 | 2.00 | **1.5** |"
    assert table[5] == "1 of 1 rows are ahead of vLLM (the least 2.00), 1 of 2 at their goal (bold)."


def test_a_goal_is_reached_from_its_own_side() -> None:
    assert reached(row("ms", 1.5, None)) and not reached(row("ms", 1.6, None))
    assert reached(row("tok/s", 1.5, None)) and not reached(row("tok/s", 1.4, None))


def test_the_page_shows_what_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/h200_table.json").read_text())
    assert markdown(rows) in (ROOT / "docs/performance.md").read_text()
