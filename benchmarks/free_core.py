"""A core that costs nothing: each step gives every request one token. The child process of `benchmarks.frontend`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any, cast

from vllm.engine.core import EngineCore
from vllm.engine.core_process import main
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats


class FreeCore:
    """Answers as `EngineCore` does, without a model: token 5 + i mod 200 as the i-th of a request from the end.

    A step begins `step_seconds` after the one before, as if a model had computed that long; 0 is as fast as can be.
    """

    step_allowance = 0.0

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._next = 0.0
        self._left: dict[str, int] = {}
        self._made = 0

    def describe(self) -> dict[str, Any]:
        return {"num_blocks": 1000, "block_size": 16, "bytes_per_block": 1, "max_in_flight": 1}

    def add_requests(self, requests: Iterable[CoreRequest]) -> list[CoreOutput]:
        for request in requests:
            self._left[request.request_id] = request.params.max_tokens or 1
        return []

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        for request_id in request_ids:
            self._left.pop(request_id, None)
        return []

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def has_work(self) -> bool:
        return self.has_unfinished()

    def has_waiting(self) -> bool:
        return False

    def prepare(self) -> bool:
        return False

    def step(self) -> list[CoreOutput]:
        wait = self._next - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        self._next = time.perf_counter() + self._step_seconds
        outputs = []
        for request_id, left in list(self._left.items()):
            outputs.append(CoreOutput(request_id, [5 + left % 200], "length" if left == 1 else None))
            if left == 1:
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
        self._made += len(outputs)
        return outputs

    def stats(self) -> CoreStats:
        made, self._made = self._made, 0
        return CoreStats(num_running=len(self._left), kv_blocks_total=999, generation_tokens=made)

    def check_idle(self) -> None: ...

    def check_alive(self) -> None: ...

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


if __name__ == "__main__":
    status = main(sys.argv[1:], lambda document: cast(EngineCore, FreeCore(document["step_seconds"])))
    os._exit(status)
