"""Which rank this is among those that share a model's layers, and their collectives.

The project's own layers get a `TensorParallel` as an argument. Models from outside the tree were written for functions
without arguments (`get_tensor_model_parallel_world_size()`); for them `use_tensor_parallel` names the current object
while such a model is built or runs. `use_world` does so for what `collective_rpc` calls, and `take_place` for a program
that is a rank itself, in all of its threads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from vllm.distributed.exchange import Exchange
    from vllm.distributed.one_shot import OneShot

# torch 2.13 renamed it
gather_into = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of the `world` ranks that hold one shard of every layer each.

    `group` is their process group, None for torch.distributed's default group. With `world == 1` nothing is
    communicated; nor for "meta" tensors, of which only shapes matter. `one_shot`, if there is one, sums a few rows.
    `exchange`, if there is one, connects the rank to those of other copies of the engine that have other experts.
    `cpu_group`, if there is one, is for tensors on the host.
    """

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None
    one_shot: OneShot | None = field(default=None, repr=False, compare=False)
    exchange: Exchange | None = field(default=None, repr=False, compare=False)
    cpu_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ValueError(f"Tensor parallel rank {self.rank} of {self.world}: expected 0 <= rank < world.")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def rank_in_group(self) -> int:
        return self.rank

    @property
    def world_size(self) -> int:
        return self.world

    @property
    def device_group(self) -> dist.ProcessGroup | None:
        """The group for tensors on devices; None where torch.distributed has none."""
        if self.group is None and self.world > 1 and dist.is_initialized():
            return dist.group.WORLD
        return self.group

    @property
    def experts(self) -> tuple[int, int]:
        """(rank, world) among all ranks that whole experts are dealt out to, those of other copies included."""
        if self.exchange is None:
            return self.rank, self.world
        return self.exchange.rank * self.world + self.rank, self.exchange.world * self.world

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank. May overwrite `x`."""
        if self.world == 1:
            return x
        x = x.contiguous()
        if self.one_shot is not None and self.one_shot.accepts(x):
            return self.one_shot.sum(x)
        if x.is_meta:
            return x
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `x`, joined along `dim` in rank order."""
        if self.world == 1:
            return x
        x = x.contiguous()
        out = torch.empty((self.world, *x.shape), dtype=x.dtype, device=x.device)
        if not x.is_meta:
            gather_into(out.view(-1), x.view(-1), group=self.group)
        return torch.cat(out.unbind(0), dim)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's `x`, on every rank; the others' `x` is overwritten."""
        if self.world > 1 and not x.is_meta:
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier(group=self.group)


GroupCoordinator = TensorParallel  # the name that vLLM gives to the class of `get_tp_group()`


@dataclass(frozen=True, slots=True)
class GroupRank:
    """This rank's number in a group that has no collectives here."""

    rank: int = 0
    world: int = 1

    @property
    def rank_in_group(self) -> int:
        return self.rank

    @property
    def world_size(self) -> int:
        return self.world

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.world - 1


@dataclass(frozen=True, slots=True)
class WorldRank:
    """This worker's number among all `world_size` workers of all copies of the engine, or, where it is a process that
    somebody else has started, among all of these; and among those of its host. The groups are torch.distributed's, if
    there are any.

    stage: among the stages of the pipeline.   copy: of the engine, among all copies.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    cpu_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    device_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    stage: GroupRank = GroupRank()
    copy: GroupRank = GroupRank()

    @property
    def rank_in_group(self) -> int:
        return self.rank


SINGLE = TensorParallel()
ONLY_ONE = WorldRank()
_CURRENT: ContextVar[TensorParallel] = ContextVar("tensor_parallel")
_WORLD: ContextVar[WorldRank] = ContextVar("world")
_PLACES = [(SINGLE, ONLY_ONE)]  # of this process; the last one counts


def current_tensor_parallel() -> TensorParallel:
    """What `use_tensor_parallel` named last in this context; outside of it this process, mostly a single rank."""
    return _CURRENT.get(_PLACES[-1][0])


def take_place(tp: TensorParallel, world: WorldRank) -> Callable[[], None]:
    """Make this process a rank outside of `use_tensor_parallel` and `use_world` too, until the result is called."""
    place = (tp, world)
    _PLACES.append(place)

    def leave() -> None:
        _PLACES[:] = [other for other in _PLACES if other is not place]

    return leave


@contextmanager
def use_tensor_parallel(tp: TensorParallel) -> Iterator[TensorParallel]:
    """Inside, layers built without an explicit `tp`, and the functions below, use `tp`."""
    token = _CURRENT.set(tp)
    try:
        yield tp
    finally:
        _CURRENT.reset(token)


@contextmanager
def use_world(world: WorldRank) -> Iterator[WorldRank]:
    """Inside, `get_world_group` says `world`."""
    token = _WORLD.set(world)
    try:
        yield world
    finally:
        _WORLD.reset(token)


def get_world_group() -> WorldRank:
    """This worker among those of all copies, in what `collective_rpc` calls; elsewhere this process, mostly alone."""
    return _WORLD.get(_PLACES[-1][1])


def get_tp_group() -> TensorParallel:
    """The ranks that share this model's layers."""
    return current_tensor_parallel()


def get_pp_group() -> GroupRank:
    """This rank's pipeline stage."""
    return get_world_group().stage


def get_dp_group() -> GroupRank:
    """This rank's copy of the engine."""
    return get_world_group().copy


def get_ep_group() -> GroupRank:
    """This rank among those that whole experts are dealt out to, if they are."""
    return GroupRank(*current_tensor_parallel().experts)


def model_parallel_is_initialized() -> bool:
    """Whether this process, or what runs here, is a rank of an engine."""
    return len(_PLACES) > 1 or _CURRENT.get(None) is not None


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share the layers of the model being built or run."""
    return current_tensor_parallel().world


def get_tensor_model_parallel_rank() -> int:
    """This rank among them."""
    return current_tensor_parallel().rank


def tensor_model_parallel_all_reduce(x: Tensor) -> Tensor:
    """The sum of every rank's `x`. May overwrite `x`."""
    return current_tensor_parallel().all_reduce(x)


def tensor_model_parallel_all_gather(x: Tensor, dim: int = -1) -> Tensor:
    """Every rank's `x`, joined along `dim`."""
    return current_tensor_parallel().all_gather(x, dim)


def divide(numerator: int, denominator: int) -> int:
    """`numerator // denominator`; ValueError unless it divides evenly."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}.")
    return numerator // denominator


def destroy_model_parallel() -> None:
    """For programs that call it before they make another `LLM`. Here, an engine that is deleted ends its own ranks."""


def destroy_distributed_environment() -> None:
    """As `destroy_model_parallel`: there is no group of this process that outlives its engine."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect what a deleted engine has left, and give unused device memory back. Ray is not used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
