"""Numbers of tokens that large steps are cut to, or padded to: few of them.

cuBLAS has products for every eighth number of rows, and CUDA loads each of them at its first use, which takes 10 ms and
waits for all that is queued on the device. A step whose size nobody has had before takes 50 ms longer so.
"""

from __future__ import annotations

LARGE = 256  # steps of more tokens are of few sizes
_PARTS = 4  # sizes between a power of two and the next


def _unit(tokens: int) -> int:
    return max(32, (1 << (tokens - 1).bit_length()) // (2 * _PARTS))


def rounded_up(tokens: int) -> int:
    """The smallest size that is not below `tokens` (1 or more), by a quarter at most above it beyond 128."""
    unit = _unit(tokens)
    return -(-tokens // unit) * unit


def rounded_down(tokens: int) -> int:
    """The largest size that is not above `tokens`; `tokens` itself below the least."""
    unit = _unit(tokens)
    return tokens // unit * unit or tokens


def large_sizes(most: int) -> list[int]:
    """The sizes beyond `LARGE` up to `most`, which is among them."""
    sizes, size = [], LARGE
    while size < most:
        size = min(most, rounded_up(size + 1))
        sizes.append(size)
    return sizes
