"""The C library's memory allocator."""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> None:
    """Return memory that was freed, but is kept for later, to the operating system; nothing where glibc is not used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
