"""Prints the table of `docs/performance.md`: shapes on an H200, before and after, beside vLLM's figures and the goals.

    python -m benchmarks.h200.table benchmarks/results/h200_table.json

The file has a list of rows: shape, case, unit, and the figures `before`, `after`, `vllm` and `goal`, null where there
is none; `from` says where `after` stands. Of tokens per second more is better, of everything else less.
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


def ahead(row: dict[str, Any]) -> float | None:
    """How many times as fast as vLLM."""
    if row["vllm"] is None or row["after"] is None:
        return None
    ratio = row["vllm"] / row["after"]
    return float(1 / ratio if row["unit"] == "tok/s" else ratio)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table, its rows in the order of the file."""
    lines = ["| shape | case | before | after | vLLM 0.26 | ahead | goal |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        ratio = ahead(row)
        figures = [shown(row[name]) for name in ("before", "after", "vllm")]
        cells = [row["shape"], f"{row['case']}, {row['unit']}", *figures]
        lines.append("| " + " | ".join([*cells, "-" if ratio is None else f"{ratio:.2f}", shown(row["goal"])]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
