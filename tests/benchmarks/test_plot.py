"""Curves become SVG images whose points lie where the numbers say."""

import re
from xml.etree import ElementTree

import pytest

from benchmarks.growth import plots
from benchmarks.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, chart, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_points_lie_by_the_logarithms_of_both_numbers() -> None:
    image = chart("a < b", "x", "y", [Line("one", [(1024, 1.0), (2048, 10.0), (4096, 100.0)])])
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in ElementTree.fromstring(image).iter(f"{SVG}circle")]
    assert circles[0][0] == LEFT and circles[2][0] == WIDTH - RIGHT
    for axis in (0, 1):
        assert circles[1][axis] == pytest.approx((circles[0][axis] + circles[2][axis]) / 2, abs=0.1)
    assert TOP < circles[2][1] < circles[0][1] < HEIGHT - BOTTOM  # larger is higher
    assert {"1k", "2k", "4k", "10", "a < b"} <= {t.text for t in ElementTree.fromstring(image).iter(f"{SVG}text")}


@pytest.mark.parametrize("points", [[], [(1.0, 0.0)]])
def test_what_has_no_logarithm_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        chart("", "", "", [Line("one", points)])


def test_every_batch_is_a_line() -> None:
    table = {"8": {"2048": 3.0, "1024": 2.0}, "1": {"1024": 1.0}, "32": {"1024": 4.0}}
    images = draw({"model": "m", "device": "d", "by_batch": {"1": 1.0, "2": 1.5}, "decode": table, "prefill": table})
    assert set(images) == {"decode", "prefill", "batch"}
    assert re.findall(r"batch (\d+)</text>", images["decode"]) == ["1", "8", "32"]
    way = ElementTree.fromstring(images["decode"]).findall(f"{SVG}polyline")[1].get("points").split()
    assert float(way[0].split(",")[0]) < float(way[1].split(",")[0])  # in the order of x


def test_growth_has_four_images() -> None:
    points = {"1": 2.0, "10": 3.0}
    step = {"by_batch": points, "by_context": points}
    lookups = {"nothing_cached": points, "all_cached": points}
    images = plots({"model": "m", "step": step, "scheduler_us": points, "lookup_ms": lookups})
    assert set(images) == {"batch", "context", "scheduler", "lookup"}
    assert all(ElementTree.fromstring(image).findall(f"{SVG}polyline") for image in images.values())
    assert "all cached" in images["lookup"]
