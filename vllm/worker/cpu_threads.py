"""Which CPU cores this rank's threads run on, from VLLM_CPU_OMP_THREADS_BIND, and how many there are."""

from __future__ import annotations

import os

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

_MAX_CORE = 1 << 16


def parse_bind(text: str, rank: int, ranks: int) -> list[int] | None:
    """The cores of `rank` in e.g. "all", "0-31", "0,2,4-7" or "0-15|16-31" (one part per rank); None for "all".

    Raises ValueError if the text does not parse or names another number of ranks.
    """
    if text.strip().lower() == "all":
        return None
    parts = text.split("|")
    if len(parts) != ranks:
        raise ValueError(
            f"VLLM_CPU_OMP_THREADS_BIND={text!r} names cores for {len(parts)} rank(s), but there are {ranks}. Separate "
            "the cores of each rank by '|', for example '0-15|16-31'."
        )
    cores: set[int] = set()
    for item in parts[rank].split(","):
        low, dash, high = item.strip().partition("-")
        bounds = (low, high if dash else low)
        if not all(b.strip().isdecimal() for b in bounds) or not int(bounds[0]) <= int(bounds[1]) < _MAX_CORE:
            raise ValueError(
                f"VLLM_CPU_OMP_THREADS_BIND={text!r}: {item.strip()!r} is not a core or a range of cores. Expected "
                "'all' or for example '0-31', '0,2,4-7', '0-15|16-31'."
            )
        cores.update(range(int(bounds[0]), int(bounds[1]) + 1))
    return sorted(cores)


def default_threads(ranks: int) -> int:
    """Threads of a rank when no cores are named: OMP_NUM_THREADS if it is a number, else its share of torch's own."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, int(given) if given.isdecimal() else torch.get_num_threads() // ranks)


def bind_threads(bind: str, rank: int, ranks: int) -> int:
    """Set torch's number of threads and, if `bind` names cores, keep this process's compute threads there.

    Returns the number of threads. Call it before the first computation: threads inherit the mask of the one that starts
    them.
    """
    allowed = os.sched_getaffinity(0)
    cores = parse_bind(bind, rank, ranks)
    if cores is None:
        threads = default_threads(ranks)
    else:
        missing = sorted(set(cores) - allowed)
        if missing:
            raise ValueError(
                f"VLLM_CPU_OMP_THREADS_BIND={bind!r} names cores {missing} that this process may not use; it may use "
                f"{sorted(allowed)}."
            )
        threads = len(cores)
        # Only this thread and those it starts from now on, among them the OpenMP team; the caller's others are left
        # alone.
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    logger.info(
        "Rank %d computes with %d threads on %s.", rank, threads, "any core" if cores is None else f"cores {cores}"
    )
    return threads
