"""The core plans and answers as it did at an earlier commit, whatever is thrown at it: plans and outputs are compared
field by field.

The earlier core comes out of git. Where the history is not there (a shallow clone, an archive of the sources) the
digests recorded from it stand in. Random work that finds a difference is shown step by step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("drive.py")
RECORDED = Path(__file__).with_name("recorded_plans.json")
COMMIT = "95cfdd1707c8e26db78b25a21b22e98a69df2ec5"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder with the package as it was; None where git does not have it."""
    try:
        command = ["git", "archive", COMMIT, "vllm"]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder)
    return folder


def drive(root: Path, first: int, count: int, *options: str) -> Iterator[str]:
    """What the core under `root` says to `count` workloads, line by line."""
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(DRIVER), str(first), str(count), *options]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield from map(str.strip, child.stdout)
    assert child.returncode == 0


def first_difference(earlier: Path, seed: int) -> str:
    """The first record in which the two cores differ, and the fields that do."""
    pairs = zip_longest(drive(earlier, seed, 1, "--full"), drive(ROOT, seed, 1, "--full"), fillvalue="{}")
    for number, (was, now) in enumerate(pairs):
        if was != now:
            old, new = json.loads(was), json.loads(now)
            fields = [f"{k}: {old.get(k)} -> {new.get(k)}" for k in {**old, **new} if old.get(k) != new.get(k)]
            return f"workload {seed}, record {number}: " + "; ".join(fields)
    return f"workload {seed}: the records are equal, so the driver is not deterministic"


def compare(earlier: Path, first: int, count: int) -> int:
    """Number of plans compared; fails at the first that differs."""
    plans = 0
    for was, now in zip_longest(drive(earlier, first, count), drive(ROOT, first, count)):
        assert was == now, first_difference(earlier, int((was or now).split()[0]))
        plans += int(was.split()[2])
    return plans


def test_plans_and_outputs_are_those_of_the_earlier_core(earlier: Path | None) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert recorded["commit"] == COMMIT
    lines = list(drive(ROOT, 0, len(recorded["digests"])))
    assert [line.split()[1] for line in lines] == recorded["digests"]
    assert sum(int(line.split()[2]) for line in lines) > 5_000
    if earlier is not None:
        assert [line.split()[1] for line in drive(earlier, 0, 4)] == recorded["digests"][:4]
        assert compare(earlier, 1_000, 9) > 1_500


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_random_steps_are_planned_as_by_the_earlier_core(earlier: Path | None) -> None:
    assert earlier is not None, "this needs the whole history: git fetch --unshallow"
    plans, seed = 0, 10_000
    while plans < 100_000:
        plans += compare(earlier, seed, 50)
        seed += 50
