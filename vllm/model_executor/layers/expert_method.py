"""How the experts of a layer are stored and computed: cut, every rank with a share of each, or dealt out whole; other
formats of expert weights fill in the same interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.sharding import ShardedParameter, ShardSpec, share, whole
from vllm.ops.moe import NO_EXTRAS, ExpertExtras, expert_mlp, expert_mlp_lora

if TYPE_CHECKING:
    from vllm.model_executor.models.blocks import Experts


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """`experts` MLPs from `hidden` features over `inner` back to `hidden`; act: as in `ops.activation`.

    bias: of every product.   limit: as of `activate_gated`.   gated: if not, there is no gate, only `up`.
    choices: experts of each row.   rows: of the experts' input for each token.
    """

    experts: int
    hidden: int
    inner: int
    act: str
    bias: bool = False
    limit: float | None = None
    choices: int = 1
    rows: int = 1
    gated: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether experts are gated and have nothing beside their weights."""
        return self.gated and not self.bias and self.limit is None

    @property
    def first(self) -> tuple[str, ...]:
        """The parts of the first product."""
        return ("gate", "up") if self.gated else ("up",)


class ExpertMethod(ABC):
    """One format of expert weights. A layer owns the parameters, the method creates and reads them.

    A step passes dispatch, compute, combine. By default every rank has a share of every expert: tokens stay where they
    are, and the ranks' partial sums are added up.

    repacks_whole: as of `LinearMethod`.   takes_adapters: whether `compute` knows what adapters add to experts.
    """

    repacks_whole = False
    takes_adapters = False

    def dealt(self) -> ExpertMethod:
        """The same for whole experts that are dealt out to the ranks (`Dealt`). Raises ValueError if there is none."""
        raise ValueError(
            "enable_expert_parallel: experts of this format cannot be dealt out. Leave it out: each rank then has a "
            "share of every expert."
        )

    @abstractmethod
    def create_weights(self, layer: Experts, shape: ExpertShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        """Register the layer's parameters, each a `ShardedParameter`, uninitialised, on torch's default device."""

    def place(self, layer: Experts) -> tuple[torch.dtype, torch.device]:
        """Of the tokens that `compute` takes, once the weights are there."""
        return layer.down.dtype, layer.down.device

    def process_after_load(self, layer: Experts) -> None:
        """Called once when every parameter of the layer is filled: repack, dequantize. By default nothing."""
        return

    def dispatch(self, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x, weights, experts) of the tokens that this rank computes.

        x: [tokens, hidden]; weights [tokens, top_k] fp32, experts [tokens, top_k] int64: which experts a token has.
        """
        return x, weights, experts

    @abstractmethod
    def compute(
        self, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor, adapters: Tensor | None = None
    ) -> Tensor:
        """This rank's part of each token's weighted sum of its experts' outputs, down(act(gate x) * up x).

        Arguments as `dispatch` returned them -> [tokens, hidden].
        adapters: [tokens] int32, the slot of each token's adapter where one of them changes experts.
        """

    def combine(self, layer: Experts, out: Tensor, rows: int) -> Tensor:
        """What `compute` returned -> the sum of all ranks' parts, for the `rows` tokens that `dispatch` was given."""
        return layer.tp.all_reduce(out) if layer.reduce else out


class UnquantizedExpertMethod(ExpertMethod):
    """gate_up: [experts, 2 * inner / world, hidden], gate rows first; without a gate up alone.

    down: [experts, hidden, inner / world].

    gate_up_bias: [experts, 2 * inner / world].   down_bias: [experts, hidden], which the first rank adds.
    """

    takes_adapters = True

    def dealt(self) -> ExpertMethod:
        return DealtExpertMethod()

    def create_weights(self, layer: Experts, shape: ExpertShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        n, inner, hidden = shape.experts, shape.inner, shape.hidden
        width = len(shape.first) * inner
        gate_up = ShardSpec(1, tuple(whole(inner, name) for name in shape.first), stack=1)
        layer.gate_up = ShardedParameter.empty((n, width, hidden), gate_up, tp.rank, tp.world, dtype)
        down = ShardSpec(2, (whole(inner),), stack=1)
        layer.down = ShardedParameter.empty((n, hidden, inner), down, tp.rank, tp.world, dtype)
        if shape.bias:
            biases = ShardSpec(1, tuple(whole(inner, f"{name}_bias") for name in shape.first), stack=1)
            layer.gate_up_bias = ShardedParameter.empty((n, width), biases, tp.rank, tp.world, dtype)
            layer.down_bias = ShardedParameter.empty((n, hidden), ShardSpec(stack=1), 0, 1, dtype)

    def compute(
        self, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor, adapters: Tensor | None = None
    ) -> Tensor:
        shape, extras = layer.shape, NO_EXTRAS
        if not shape.is_plain:
            extras = ExpertExtras(limit=shape.limit, gated=shape.gated)
            if shape.bias:
                down_bias = layer.down_bias if self._adds_bias(layer) else None
                extras = ExpertExtras(layer.gate_up_bias, down_bias, shape.limit, shape.gated)
        if adapters is not None and layer.lora is not None:
            changes = layer.lora.changes
            return expert_mlp_lora(x, weights, experts, layer.gate_up, layer.down, shape.act, extras, changes, adapters)
        out: Tensor = expert_mlp(x, weights, experts, layer.gate_up, layer.down, shape.act, extras)
        return out

    def _adds_bias(self, layer: Experts) -> bool:
        """Whether this rank adds the bias behind `down`: of experts that are cut it must not be added twice."""
        return layer.tp.is_first


class Dealt(ExpertMethod):
    """Whole experts, dealt out to the ranks (expert parallelism), whatever their format.

    The ranks that share a layer's attention have all of its tokens, so none must be sent: each computes the part of its
    own experts for every token, and the parts are added up. Where copies of the engine share experts, a rank is sent
    the tokens of the other copies, and sends back its part of them.
    """

    mine: range  # the experts that this rank has at first
    tally: Tensor | None = None  # [experts + 1] int64: how often each was chosen since somebody began to count
    places: Tensor | None = None  # [experts + 1] int64: the slot of each among those of all ranks, if experts may move

    _copies: Tensor | None = None  # [slots] the copy of the engine to which this rank sends tokens for each, or -1

    def dispatch(self, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts by their numbers on this rank; of other ranks' nothing is computed."""
        exchange = layer.tp.exchange
        if exchange is None:
            return self._own(x, weights, self._slots(experts))
        top_k, times = weights.shape[1], layer.shape.rows
        deals = exchange.deals(top_k, x.shape[1] * x.element_size(), times)
        if deals:
            experts = self._slots(experts, exchange.world)
        choices = torch.cat([weights.view(torch.int32), experts.to(torch.int32)], 1)
        if deals:
            x, choices = exchange.deal(self._copies_of(layer, experts), (x, choices))
        else:
            x, choices = (exchange.gather(part, times, value) for part, value in ((x, 0.0), (choices, -1)))
        weights, experts = choices[:, :top_k].view(torch.float32), choices[:, top_k:].to(torch.int64)
        return self._own(x, weights, experts if deals else self._slots(experts))

    def _slots(self, experts: Tensor, times: int = 1) -> Tensor:
        """Where the experts are, each choice counted so many times: as often as by gathered tokens of all copies."""
        if self.tally is None or self.places is None:
            return experts
        experts = experts.remainder(len(self.tally))  # that of padding is the last
        chosen = experts.flatten()
        self.tally.scatter_add_(0, chosen, torch.full_like(chosen, times))
        return self.places[experts]

    def _own(self, x: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        local = slots - self.mine.start
        foreign = (local < 0) | (local >= len(self.mine))
        return x, weights.masked_fill(foreign, 0.0), local.masked_fill(foreign, len(self.mine))

    def _copies_of(self, layer: Experts, slots: Tensor) -> Tensor:
        """Where this rank sends tokens for these slots: its own counterparts have some, and the others of its copy send
        to theirs.
        """
        if self._copies is None:
            tp, world = layer.tp, layer.tp.experts[1]
            sizes = [len(share(layer.shape.experts, rank, world)) for rank in range(world)]
            copies = [rank // tp.world if rank % tp.world == tp.rank else -1 for rank in range(world)]
            self._copies = torch.tensor(copies).repeat_interleave(torch.tensor(sizes)).to(slots.device)
        return self._copies[slots]

    def combine(self, layer: Experts, out: Tensor, rows: int) -> Tensor:
        exchange = layer.tp.exchange
        if exchange is not None and exchange.is_dealt:
            out = exchange.collect(out, rows)
        elif exchange is not None:
            out = exchange.scatter(out, layer.shape.rows)[:rows]
        return super().combine(layer, out, rows)


def dealt_to(tp: TensorParallel, experts: int) -> range:
    """Which of a layer's experts this rank has. Raises ValueError if there are fewer than ranks."""
    rank, world = tp.experts
    if experts < world:
        smaller = "tensor_parallel_size" if tp.exchange is None else "tensor_parallel_size or data_parallel_size"
        raise ValueError(f"{experts} experts cannot be dealt out to {world} ranks. Use a smaller {smaller}.")
    return share(experts, rank, world)


class DealtExpertMethod(Dealt, UnquantizedExpertMethod):
    """Plain experts that are dealt out, and may change places.

    gate_up: [experts of this rank, 2 * inner, hidden], gate rows first.   down: [experts of this rank, hidden, inner].
    Biases alike.
    """

    takes_adapters = False

    def create_weights(self, layer: Experts, shape: ExpertShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        n, inner, hidden = shape.experts, shape.inner, shape.hidden
        self.mine = dealt_to(tp, n)
        rank, world = tp.experts
        width = len(shape.first) * inner
        pair = ShardSpec(1, tuple(whole(inner, name) for name in shape.first), stack=1, dealt=True)
        layer.gate_up = ShardedParameter.empty((n, width, hidden), pair, rank, world, dtype)
        one = ShardSpec(2, (whole(inner),), stack=1, dealt=True)
        layer.down = ShardedParameter.empty((n, hidden, inner), one, rank, world, dtype)
        if shape.bias:
            biases = ShardSpec(1, tuple(whole(inner, f"{name}_bias") for name in shape.first), stack=1, dealt=True)
            layer.gate_up_bias = ShardedParameter.empty((n, width), biases, rank, world, dtype)
            last = ShardSpec(stack=1, dealt=True)
            layer.down_bias = ShardedParameter.empty((n, hidden), last, rank, world, dtype)

    def count(self, layer: Experts) -> None:
        """From now on count how often each expert is chosen, and let experts change places."""
        device = layer.down.device
        self.tally = torch.zeros(layer.shape.experts + 1, dtype=torch.int64, device=device)
        self.places = torch.arange(layer.shape.experts + 1, device=device)

    def counted(self) -> Tensor:
        """[experts] how often each was chosen since counting began."""
        if self.tally is None:
            raise RuntimeError("The experts of this layer are not counted.")
        return self.tally[:-1]

    def move(self, places: Tensor) -> None:
        """The experts are in these slots now. places: [experts] int64."""
        if self.places is None:
            raise RuntimeError("The experts of this layer do not move.")
        self.places[:-1].copy_(places)

    def weights(self, layer: Experts) -> list[Tensor]:
        """All that belongs to an expert, each [experts of this rank, ...]."""
        biases = [layer.gate_up_bias, layer.down_bias] if layer.shape.bias else []
        return [layer.gate_up, layer.down, *biases]

    @property
    def has_moved(self) -> bool:
        """Whether an expert is elsewhere than `create_weights` says."""
        return self.places is not None and not torch.equal(self.places, torch.arange(len(self.places)).to(self.places))

    def _adds_bias(self, layer: Experts) -> bool:
        return True
