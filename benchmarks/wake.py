"""What it costs to wake another process: `python -m benchmarks.wake`.

A process computes for a while and then sends 300 bytes to another one over a socket pair, again and again, as the
engine's core does after each step. Shown is what the call takes (median, 90th percentile, microseconds) where the
reader sleeps until something comes, and where it looks all the time: the difference is the price of waking a processor,
which a virtual machine pays to its host. It is part of each token of a single stream.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import statistics
import time

import numpy as np

PAYLOAD = bytes(300)


def read_forever(end: socket.socket, asleep: bool) -> None:
    """Take what comes; asleep: wait for it in `poll`, else look again and again."""
    end.setblocking(False)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while True:
        if asleep:
            poll.poll()
        try:
            if not end.recv(4096):
                return
        except BlockingIOError:
            pass


def microseconds(asleep: bool, count: int) -> list[float]:
    """What each of so many calls took."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        read_forever(theirs, asleep)
        os._exit(0)
    numbers = np.random.default_rng(0).random(1 << 20)
    found = []
    try:
        for _ in range(count):
            numbers.sum(), numbers.sum()  # about as long as a short step, through as much memory
            begin = time.perf_counter()
            ours.sendall(PAYLOAD)
            found.append(1e6 * (time.perf_counter() - begin))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    args = parser.parse_args()
    for name, asleep in (("reader asleep", True), ("reader awake", False)):
        found = sorted(microseconds(asleep, args.count))
        print(f"{name:14} {statistics.median(found):6.1f} us, p90 {found[len(found) * 9 // 10]:6.1f}")


if __name__ == "__main__":
    main()
