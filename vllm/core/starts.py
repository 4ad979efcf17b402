"""What a request that starts finds computed: the cache of the one it was forked from, or a cached prefix."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.core.kv_manager import KVManager
from vllm.core.request import Request, Status
from vllm.step.messages import CoreStats


class Starts:
    """Gives requests their first blocks. `requests` are all there are, by id."""

    def __init__(self, requests: Mapping[str, Request], kv: KVManager, chunk: int, stats: CoreStats) -> None:
        """chunk: tokens of a prompt in one step."""
        self._requests, self._kv, self._chunk, self._stats = requests, kv, chunk, stats

    def start(self, request: Request, step_id: int, reserve: int) -> bool:
        """Attach what is cached or forked; False, changing nothing, if the whole prompt does not fit in.

        step_id: of the plan being made.   reserve: blocks that stay free.
        """
        kv = self._kv
        parent = self._parent(request)
        if parent is not None and request.reads_cache:
            shared = _shared(parent, request)
            if (
                shared <= _computed_before(parent, step_id)
                and kv.can_fork(parent, request, shared)
                and parent.tokens[:shared] == request.tokens[:shared]
            ):
                rest = len(request.tokens) - shared + kv.block_size
                if not kv.can_admit(request, rest, self._chunk, reserve):
                    return False
                kv.fork(parent, request, shared)
                return True
        cached = kv.attach_prefix(request)
        if not kv.can_admit(request, len(request.tokens), self._chunk, reserve):
            self.undo(request)
            return False
        if kv.looks_up(request):
            self._stats.prefix_cache_queries += len(request.tokens)
            self._stats.prefix_cache_hits += cached
        return True

    def undo(self, request: Request) -> None:
        """It does not start after all."""
        self._kv.free([request])
        request.num_computed = 0

    def parent_unready(self, request: Request, step_id: int) -> bool:
        """Whether what a parent has to share is still to be computed."""
        parent = self._parent(request)
        if parent is None or not request.reads_cache:
            return False
        return _computed_before(parent, step_id) < _shared(parent, request) and parent.num_preemptions == 0

    def parent_waits(self, request: Request, step_id: int) -> bool:
        """Whether the request would wait for a parent that has no slot itself."""
        parent = self._parent(request)
        return parent is not None and parent.status is not Status.RUNNING and self.parent_unready(request, step_id)

    def _parent(self, request: Request) -> Request | None:
        return self._requests.get(request.fork_of) if request.fork_of is not None else None


def _shared(parent: Request, child: Request) -> int:
    """Tokens of the parent's cache that the child can use: one is left to compute."""
    return min(child.num_prompt_tokens, len(parent.tokens), len(child.tokens) - 1)


def _computed_before(request: Request, step_id: int) -> int:
    """Tokens computed by plans before the one being made."""
    return request.num_computed - (request.plan_tokens if request.plan_step == step_id else 0)
