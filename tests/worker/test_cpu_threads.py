"""VLLM_CPU_OMP_THREADS_BIND."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from vllm.worker.cpu_threads import parse_bind


@pytest.mark.parametrize(
    ("text", "rank", "ranks", "cores"),
    [
        ("all", 0, 1, None),
        ("ALL", 1, 4, None),
        ("0-3", 0, 1, [0, 1, 2, 3]),
        ("3,1, 5-6,5", 0, 1, [1, 3, 5, 6]),
        ("0-1|2-3", 0, 2, [0, 1]),
        ("0-1|2-3", 1, 2, [2, 3]),
        ("7|8|9", 2, 3, [9]),
    ],
)
def test_cores_of_a_rank(text: str, rank: int, ranks: int, cores: list[int] | None) -> None:
    assert parse_bind(text, rank, ranks) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2", "0-99999999", "1;2", "0x1", "²"])
def test_what_does_not_parse(text: str) -> None:
    with pytest.raises(ValueError, match="is not a core or a range of cores. Expected 'all' or for example"):
        parse_bind(text, 0, 1)


def test_one_part_per_rank() -> None:
    with pytest.raises(ValueError, match=r"names cores for 1 rank\(s\), but there are 2"):
        parse_bind("0-3", 0, 2)


BIND = """
import json, os, sys, torch
from vllm.worker.cpu_threads import bind_threads
for text, rank, ranks, omp in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    if omp:
        os.environ["OMP_NUM_THREADS"] = omp
    try:
        found = bind_threads(text, rank, ranks), torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    except ValueError as error:
        found = str(error)
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


def test_binding_a_process() -> None:
    cores = sorted(os.sched_getaffinity(0))
    absent = max(cores) + 1
    cases = [
        (f"{cores[0]}", 0, 1, ""),
        ("all", 0, 1, "3"),
        ("all", 1, 2, "3,2"),
        ("all", 0, 1000, ""),
        (f"{cores[0]},{absent}", 0, 1, ""),
    ]
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", BIND, json.dumps(cases)], env=env, capture_output=True, text=True, check=True
    )
    *bound, refused = [json.loads(line) for line in done.stdout.splitlines()]
    assert bound == [[1, 1, cores[:1]], [3, 3, cores], [3, 3, cores], [1, 1, cores]]
    assert f"names cores [{absent}] that this process may not use" in refused
