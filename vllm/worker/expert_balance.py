"""Moves whole experts between the ranks that they are dealt out to, so that each has as much to do (`enable_eplb`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.parallel_state import TensorParallel
from vllm.logger import init_logger
from vllm.model_executor.layers.expert_method import DealtExpertMethod
from vllm.model_executor.layers.sharding import share
from vllm.model_executor.models.blocks import Experts, experts_of

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)

_WORTH = 0.01  # of a rank's average load: what a swap must take from the busier of two ranks


def owners(experts: int, world: int) -> np.ndarray:
    """[experts] the rank of each slot: slots are numbered rank by rank, and a rank has as many as experts at first."""
    return np.repeat(np.arange(world), [len(share(experts, rank, world)) for rank in range(world)])


def swaps_for(load: np.ndarray, places: np.ndarray, world: int) -> list[tuple[int, int]]:
    """Pairs of experts that should change places, one pair after the other: always of the busiest rank and the idlest.

    load: [experts] how often each was chosen.   places: [experts] the slot of each.
    """
    rank = owners(len(load), world)[places]
    totals = np.bincount(rank, load, world)
    found: list[tuple[int, int]] = []
    for _ in load:
        high, low = int(totals.argmax()), int(totals.argmin())
        theirs, others = np.flatnonzero(rank == high), np.flatnonzero(rank == low)
        moved = load[theirs][:, None] - load[others]
        gain = np.minimum(moved, totals[high] - totals[low] - moved)  # by so much the busier of the two has less
        best = int(gain.argmax())
        if gain.flat[best] <= _WORTH * totals.mean():
            break
        a, b = int(theirs[best // len(others)]), int(others[best % len(others)])
        difference = load[a] - load[b]
        rank[a], rank[b] = low, high
        totals[high], totals[low] = totals[high] - difference, totals[low] + difference
        found.append((a, b))
    return found


def balance(load: np.ndarray, places: np.ndarray, world: int) -> float:
    """The average load of a rank as a share of the busiest one's; 1 if nothing was chosen."""
    totals = np.bincount(owners(len(load), world)[places], load, world)
    return float(totals.mean() / totals.max()) if totals.max() else 1.0


class ExpertBalancer:
    """Counts how often each expert is chosen, and every so many steps deals the experts of each layer out better.

    All ranks that share a layer's experts call it alike. Weights stay where they are in memory, and which rank has an
    expert is read from the device, so that captured graphs go on.
    """

    def __init__(self, layers: list[tuple[Experts, DealtExpertMethod]], tp: TensorParallel, config: ParallelConfig):
        """layers: of this rank's model, all with dealt out experts."""
        self._layers, self._group = layers, tp.group if tp.exchange is None else None
        self.rank, self.world = tp.experts
        self._interval, self._logs = config.eplb_step_interval, config.eplb_log_balancedness and self.rank == 0
        self._counts_from = -config.eplb_window_size % self._interval if config.eplb_window_size < self._interval else 0
        self._steps = 0
        self.places = [np.arange(layer.shape.experts) for layer, _ in layers]
        for layer, method in layers:
            method.count(layer)

    @classmethod
    def of(cls, model: torch.nn.Module, tp: TensorParallel, config: ParallelConfig) -> ExpertBalancer | None:
        """None if it is not asked for, or if the model has no experts that are dealt out."""
        if not config.enable_eplb:
            return None
        layers = [(e, e.method) for e in experts_of(model) if isinstance(e.method, DealtExpertMethod)]
        return cls(layers, tp, config) if layers else None

    def step(self) -> None:
        """Before each step that computes something."""
        self._steps += 1
        if self._steps % self._interval == 0:
            self.rebalance()
        if self._steps == 1 or self._steps % self._interval == self._counts_from:
            for _, method in self._layers:
                method.counted().zero_()

    def rebalance(self) -> None:
        """Deal out the experts by what was counted. Waits for the device."""
        counts = torch.stack([method.counted() for _, method in self._layers])
        dist.all_reduce(counts, group=self._group)  # so that all decide alike
        loads: np.ndarray = counts.cpu().numpy().astype(np.float64)
        before = [balance(load, places, self.world) for load, places in zip(loads, self.places, strict=True)]
        moved = 0
        for index, load in enumerate(loads):
            swaps = swaps_for(load, self.places[index], self.world)
            self._swap_all(index, swaps)
            moved += 2 * len(swaps)
        if self._logs:
            after = [balance(load, places, self.world) for load, places in zip(loads, self.places, strict=True)]
            logger.info(
                "Load of experts: the average rank has %.1f %% of the busiest one's (%.1f %% in the worst layer); %.1f "
                "%% (%.1f %%) with %d experts moved.",
                *(100 * x for x in (np.mean(before), min(before), np.mean(after), min(after))),
                moved,
            )

    def restore(self) -> None:
        """Bring all experts back to where they were at first."""
        for index, places in enumerate(self.places):
            current, swaps = places.copy(), []
            for expert in range(len(current)):
                if current[expert] != expert:
                    other = int(np.flatnonzero(current == expert)[0])
                    swaps.append((expert, other))
                    current[[expert, other]] = current[[other, expert]]
            self._swap_all(index, swaps)

    def _swap_all(self, index: int, swaps: list[tuple[int, int]]) -> None:
        if not swaps:
            return
        layer, method = self._layers[index]
        places, rank = self.places[index], owners(len(self.places[index]), self.world)
        first = share(len(places), self.rank, self.world).start
        with torch.no_grad():
            for a, b in swaps:
                here, there = (int(places[x]) for x in (a, b))
                if rank[there] == self.rank:
                    here, there = there, here
                if rank[here] == self.rank:
                    for weight in method.weights(layer):
                        if rank[there] == self.rank:
                            weight[[here - first, there - first]] = weight[[there - first, here - first]]
                        else:
                            self._exchange(weight[here - first], int(rank[there]))
                places[[a, b]] = places[[b, a]]
            method.move(torch.from_numpy(places))

    def _exchange(self, weight: Tensor, peer: int) -> None:
        """Send one expert's weight to another rank, and put there what comes from it."""
        sent = weight.reshape(-1).view(torch.uint8)
        received = torch.empty_like(sent)
        both = [
            dist.P2POp(dist.isend, sent, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        sent.copy_(received)
