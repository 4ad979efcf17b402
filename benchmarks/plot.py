"""Draws the curves of `benchmarks.h200.curves` as SVG files, for `docs/performance.md`.

    python -m benchmarks.plot benchmarks/results/h200_curves.json docs/images/h200

Writes PREFIX-decode.svg, PREFIX-batch.svg and, where prompts were timed, PREFIX-prefill.svg. Both axes are
logarithmic; nothing is smoothed.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


class Line(NamedTuple):
    """One curve: its name and its points, (x, y), both above 0."""

    name: str
    points: list[tuple[float, float]]


def number(x: float) -> str:
    """As short as can be: 1k for 1024 and for 1000."""
    if x >= 1024 and x % 1024 == 0:
        return f"{int(x) // 1024}k"
    return f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"


def _ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    found = [m * 10.0**e for e in range(low, high + 1) for m in (1, 2, 5)]
    return [t for t in found if least <= t <= most]


def _doublings(least: float, most: float) -> list[float]:
    first = 2 ** math.ceil(math.log2(least))
    return [first * 2.0**i for i in range(int(math.log2(most / first)) + 1)]


def chart(title: str, across: str, up: str, lines: list[Line]) -> str:
    """An SVG image of the lines, the x axis in doublings. Raises ValueError if there is nothing to draw."""
    points = [p for line in lines for p in line.points]
    if not points or min(min(p) for p in points) <= 0:
        raise ValueError("There must be points, and all of them above 0, because the axes are logarithmic.")
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points) / 1.15, max(p[1] for p in points) * 1.15

    def x_at(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(x / x0) / math.log(x1 / x0) if x1 > x0 else 0.5)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(y / y0) / math.log(y1 / y0)

    def text(x: float, y: float, what: str, more: str = 'text-anchor="middle"') -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(what)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(WIDTH / 2, 22, title, 'text-anchor="middle" font-size="15"'),
        text(WIDTH / 2, HEIGHT - 10, across),
        text(18, HEIGHT / 2, up, f'text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2:.0f})"'),
    ]
    for x in _doublings(x0, x1):
        parts.append(f'<path d="M{x_at(x):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(text(x_at(x), HEIGHT - BOTTOM + 16, number(x)))
    for y in _ticks(y0, y1):
        parts.append(f'<path d="M{LEFT} {y_at(y):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, y_at(y) + 4, f"{y:g}", 'text-anchor="end"'))
    for i, line in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        way = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in line.points:
            shown = f"{line.name}: {number(x)}, {y:.4g}"
            parts.append(
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{colour}"><title>{escape(shown)}</title>'
                "</circle>"
            )
        parts.append(text(LEFT + 10, TOP + 16 + 16 * i, line.name, f'fill="{colour}" text-anchor="start"'))
    return "\n".join([*parts, "</svg>\n"])


def _lines(table: dict[str, dict[str, float]]) -> list[Line]:
    return [
        Line(f"batch {rows}", sorted((float(x), y) for x, y in points.items()))
        for rows, points in sorted(table.items(), key=lambda item: int(item[0]))
    ]


def draw(result: dict) -> dict[str, str]:
    """SVG images by name, of what `benchmarks.h200.curves` has written."""
    of = f"{result['model']}, {result['device']}"
    by_batch = Line("short contexts", sorted((float(x), y) for x, y in result["by_batch"].items()))
    tokens = "tokens of context"
    images = {
        "decode": chart(f"Decode step: {of}", tokens, "milliseconds", _lines(result["decode"])),
        "batch": chart(f"Decode step: {of}", "requests", "milliseconds", [by_batch]),
    }
    if result.get("prefill"):
        images["prefill"] = chart(f"All first tokens: {of}", tokens, "seconds", _lines(result["prefill"]))
    return images


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, prefix = sys.argv[1:]
    for name, image in draw(json.loads(Path(source).read_text())).items():
        path = Path(f"{prefix}-{name}.svg")
        path.write_text(image)
        print(path)


if __name__ == "__main__":
    main()
