"""Numbers that several processes count, each for itself, and all of them read: memory that they have in common."""

from __future__ import annotations

import mmap
import os
from typing import BinaryIO

_BYTES = 8  # of a number


class Tally:
    """A table with a row for each process. Each writes its own row, so that nobody waits for anybody."""

    def __init__(self, file: BinaryIO, row: int, columns: int) -> None:
        """file: as `shared_file` made it, or a copy of its descriptor; it is not needed afterwards.   row: ours."""
        self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._row, self._columns = row * columns, columns

    def put(self, column: int, value: int) -> None:
        """Say what this process has counted."""
        self._numbers[self._row + column] = value

    def others(self, column: int) -> int:
        """The sum of what the others have counted."""
        return sum(self._numbers[column :: self._columns]) - self._numbers[self._row + column]


def shared_file(rows: int, columns: int) -> BinaryIO:
    """Memory for a `Tally`, all zeros, that other processes may inherit; it has no name."""
    file = os.fdopen(os.memfd_create("vllm-tally"), "r+b", buffering=0)
    file.truncate(rows * columns * _BYTES)
    return file
