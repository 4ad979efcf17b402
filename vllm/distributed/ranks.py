"""Where one worker stands among all of them: its share of each layer, its stage, its device."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.exchange import Peers
from vllm.distributed.parallel_state import SINGLE, GroupRank, TensorParallel, WorldRank
from vllm.distributed.pipeline import ONE_STAGE, Pipeline


@dataclass(frozen=True, slots=True)
class Seat:
    """Number `index` of `tp * pp` workers, and what that means.

    Worker 0 is the core's own: it has the first share of the last stage, where results come about. The ranks that share
    layers have consecutive numbers, so that they are on one host where that is possible.
    copy, copies: of the engine, where they share experts; all others stand alone. A copy has one stage then.
    """

    index: int
    tp: int
    pp: int
    copy: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.world:
            raise ValueError(f"Worker {self.index} of {self.world}: expected 0 <= index < world.")
        if not 0 <= self.copy < self.copies or (self.copies > 1 and self.pp > 1):
            raise ValueError(f"Copy {self.copy} of {self.copies} with {self.pp} stages cannot share experts.")

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        return self.index % self.tp

    @property
    def stage(self) -> int:
        return self.pp - 1 - self.index // self.tp

    @property
    def is_sampling(self) -> bool:
        """Whether it is on the last stage."""
        return self.stage == self.pp - 1

    @property
    def everybody(self) -> tuple[int, int]:
        """(number, count) among the workers of all copies."""
        return self.copy * self.world + self.index, self.copies * self.world

    def counterparts(self, index: int) -> list[int]:
        """The numbers among all workers of those that are worker `index` of their copy."""
        return [copy * self.world + index for copy in range(self.copies)]

    def at(self, stage: int) -> int:
        """The number of the worker with the same share of each layer in another stage."""
        return (self.pp - 1 - stage) * self.tp + self.tp_rank

    def sharers(self, stage: int) -> list[int]:
        """The numbers of the workers that share the layers of a stage, by their ranks."""
        first = (self.pp - 1 - stage) * self.tp
        return list(range(first, first + self.tp))


@dataclass(frozen=True, slots=True)
class Ranks:
    """One worker among all. index: its number, `world` their count.   device: of the host's devices, its own.

    local: (number, count) among the workers of its host, which share its cores and its memory.
    peers: on the first worker of a copy that shares experts.   process: its place among all processes of the launcher
    that has started it, which may make several engines.
    """

    tp: TensorParallel = SINGLE
    pp: Pipeline = ONE_STAGE
    index: int = 0
    world: int = 1
    device: int = 0
    local: tuple[int, int] = (0, 1)
    peers: Peers | None = None
    process: WorldRank | None = None

    def place(self, copy: int, copies: int) -> WorldRank:
        """What `get_world_group` says to those who call this worker of a copy of the engine."""
        if self.process is not None:
            return self.process
        return WorldRank(
            copy * self.world + self.index,
            copies * self.world,
            self.local[0],
            stage=GroupRank(self.pp.rank, self.pp.world),
            copy=GroupRank(copy, copies),
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the core's own worker."""
        return self.index == 0


ALONE = Ranks()
