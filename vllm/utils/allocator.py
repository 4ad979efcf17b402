"""The C library's memory allocator."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_LARGE_BYTES = 256 * 1024
_SPARE_BYTES = 8 << 20


def give_back_freed_memory() -> None:
    """Return memory that was freed, but is kept for later, to the operating system; nothing where glibc is not used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def keep_little_freed_memory() -> None:
    """From now on, return large blocks as soon as they are freed; nothing where glibc is not used.

    By itself glibc learns from the first large block that is freed to keep blocks of its size, up to 32 MB, for later.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)
