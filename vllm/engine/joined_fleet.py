"""Copies of the engine that share a model's experts: they step together, and all end when one does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm.engine.core_client import AsyncCoreClient
from vllm.engine.fleet import Fleet, _Held, _Replica
from vllm.exceptions import EngineDeadError


class JoinedFleet(Fleet):
    """A fleet in which no copy can compute without the others.

    Each is told whenever one of them gets a request, by a message that may have none for itself. They meet in a file
    of a folder that only this user can read; those that are started again use another one.
    """

    def __init__(self, make: Callable[[int, str], AsyncCoreClient], size: int, caches_prefixes: bool = True) -> None:
        """make: a client of a core that is not started yet, by the copy's number and the file where all meet."""
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-copies-")
        self._meetings = 0
        super().__init__(lambda index: make(index, self._meeting), size, caches_prefixes)

    def launch(self) -> None:
        try:
            super().launch()
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def _meeting(self) -> str:
        return str(Path(self._folder.name) / str(self._meetings))

    def _new_clients(self, indices: Iterable[int]) -> list[AsyncCoreClient]:
        self._meetings += 1
        return super()._new_clients(indices)

    def _lost_with(self, replica: _Replica) -> list[_Replica]:
        others = [other for other in self._replicas if other is not replica and other.alive]
        for other in others:
            other.client.kill()
        return [replica, *others]

    def _relieve(self, replica: _Replica) -> None:
        pass  # the others wait for it

    def _deliver(self, parcels: dict[int, list[_Held]]) -> None:
        if not parcels:
            return
        failure: Exception | None = None
        for replica in self._replicas:
            if not replica.alive:
                continue
            requests = parcels.get(replica.index, [])
            try:
                replica.client.add([self._named(held) for held in requests])
            except EngineDeadError:
                continue  # it has just ended: `_lose` will look after the requests
            except Exception as error:
                failure = error
                self.abort([held.message.request_id for held in requests])
                replica.client.add([])
        if failure is not None:
            raise failure

    async def stop(self) -> None:
        await super().stop()
        self._folder.cleanup()

    def kill(self) -> None:
        super().kill()
        self._folder.cleanup()
