"""A group of processes that torch.distributed's default group knows nothing of: a trainer and the ranks of an engine.

Programs that send weights make one (`vllm.distributed.device_communicators.pynccl` sends tensors over it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from vllm.ipc import codec, functions

_decode: Callable[[bytes], Any] = codec.decoder(Any).decode


@dataclass
class StatelessProcessGroup:
    """Rank `rank` of `world_size` processes that find each other at `store`; small objects go through it.

    Objects are plain data, as `collective_rpc` takes it: tensors, arrays, tuples and functions that have a name, too.
    All ranks make the same calls.
    data_expiration_seconds, socket: taken for programs that give them. An object is removed once all have read it.
    """

    rank: int
    world_size: int
    store: Any = field(repr=False)  # torch.distributed.Store
    socket: Any = field(default=None, repr=False)
    data_expiration_seconds: int = 3600
    _calls: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"Rank {self.rank} of {self.world_size}: expected 0 <= rank < world_size.")

    @classmethod
    def create(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: int = 300,
    ) -> StatelessProcessGroup:
        """Join the group at `host:port`, where rank 0 listens; waits up to `store_timeout` seconds for all ranks."""
        store = TCPStore(host, port, world_size, rank == 0, timedelta(seconds=store_timeout))
        return cls(rank, world_size, store, data_expiration_seconds=data_expiration_seconds)

    def _key(self, what: str) -> str:
        """The name of the next object of that kind, which all ranks count alike."""
        self._calls[what] = self._calls.get(what, 0) + 1
        return f"{what}/{self._calls[what]}"

    def send_obj(self, obj: Any, dst: int) -> None:
        """Leave an object for one rank, which takes them in the order in which they were sent."""
        self.store.set(self._key(f"send/{self.rank}/{dst}"), _encode(obj))

    def recv_obj(self, src: int) -> Any:
        """Wait for the next object that rank `src` sends to this one."""
        key = self._key(f"send/{src}/{self.rank}")
        obj = functions.received(_decode(self.store.get(key)))
        self.store.delete_key(key)
        return obj

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """The object of rank `src`, on all ranks."""
        key = self._key(f"broadcast/{src}")
        if self.rank == src:
            self.store.set(key, _encode(obj))
        else:
            obj = functions.received(_decode(self.store.get(key)))
        if self.store.add(f"{key}/read", 1) == self.world_size:
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/read")
        return obj

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every rank's object, in the order of the ranks, on all of them."""
        return [self.broadcast_obj(obj if src == self.rank else None, src) for src in range(self.world_size)]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather_obj(None)


def _encode(obj: Any) -> bytes:
    """Raises TypeError for what is no plain data."""
    return codec.encode(functions.portable(obj))
