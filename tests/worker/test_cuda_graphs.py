"""What graphs of decode steps decide on the host (the graphs: tests/gpu)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.worker.cuda_graphs import DecodeGraphs


class Compiling:
    """Kernels under way."""

    def __init__(self) -> None:
        self.finished = False

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_go_another_way_while_kernels_are_compiled_unless_ranks_must_agree(ranks: int) -> None:
    graphs: Any = object.__new__(DecodeGraphs)
    compiling = graphs._compiling = Compiling()
    graphs._runner = SimpleNamespace(tp=SimpleNamespace(world=ranks))
    assert graphs._still_compiling() == (ranks == 1)
    assert compiling.finished == (ranks == 2), "only the first rank knows of it: it waits, and the others for it"
    compiling.finished = True
    assert not graphs._still_compiling()
    assert graphs._compiling is None
