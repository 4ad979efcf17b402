"""Workers of the tests' own."""

from __future__ import annotations

from vllm.worker.pool import Pooler, PoolingKind
from vllm.worker.worker import Worker


class MeanWorker(Worker):
    """A generating model that can pool, too."""

    def _pooler(self) -> Pooler:
        return Pooler(PoolingKind.MEAN)
