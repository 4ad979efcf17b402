"""Prints the table of `docs/performance.md`: shapes on an H200, before and after, beside vLLM's figures and the goals.

    python -m benchmarks.h200.table benchmarks/results/h200_table.json

The file has a list of rows: shape, case, unit, and the figures `before`, `after`, `vllm` and `goal`, null where there
is none; `from` says where `after` stands. Of tokens per second more is better, of everything else less. A goal that was
reached, within the half percent by which runs differ, is marked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def shown(value: float | None) -> str:
    """Three digits, or all of those before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def better(row: dict[str, Any], name: str) -> float | None:
    """How many times as good as another figure of the row."""
    if row[name] is None or row["after"] is None:
        return None
    ratio = row[name] / row["after"]
    return float(1 / ratio if row["unit"] == "tok/s" else ratio)


def reached(row: dict[str, Any]) -> bool:
    """Whether the row is at its goal."""
    ratio = better(row, "goal")
    return ratio is not None and ratio >= 0.995


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table, its rows in the order of the file, and how many of them are where."""
    lines = ["| shape | case | before | after | vLLM 0.26 | ahead | goal |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        ratio = better(row, "vllm")
        figures = [shown(row[name]) for name in ("before", "after", "vllm")]
        goal = f"**{shown(row['goal'])}**" if reached(row) else shown(row["goal"])
        cells = [
            row["shape"],
            f"{row['case']}, {row['unit']}",
            *figures,
            "-" if ratio is None else f"{ratio:.2f}",
            goal,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    ratios = [ratio for row in rows if (ratio := better(row, "vllm")) is not None]
    goals = [row for row in rows if better(row, "goal") is not None]
    least = min(ratios, default=1.0)
    summary = (
        f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} rows are ahead of vLLM (the least {least:.2f}), "
        f"{sum(map(reached, goals))} of {len(goals)} at their goal (bold)."
    )
    return "\n".join([*lines, "", summary]) + "\n"


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
