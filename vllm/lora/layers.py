"""The adapters on one rank: stacks of matrices beside every linear layer, one slot for each adapter on the device."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vllm.lora.adapter import Adapter, LoRAWeights
from vllm.lora.added_tokens import AddedTokens
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.sharding import Part, shard_part
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.blocks import Experts
from vllm.ops.lora import (
    LowRank,
    add_embedding_lora,
    add_lora,
    expand_lora,
    lay_out_b,
    shrink_lora,
)
from vllm.step.inputs import RowView

_ALIGNED = 64  # bytes
_PIECE = 4 << 20  # bytes of host memory that are asked for at once: pinning them takes a millisecond


def keep_going() -> None:
    """What is called between pieces of work in another thread, where nobody has to be let in."""


@dataclass(frozen=True)
class HostAdapter:
    """This rank's share of an adapter in host memory, ready to be copied to a slot.

    matrices: layer -> (a, b) as its stack holds them, b scaled, but with the adapter's own rank.
    rotary_row: where its rows of the rotary tables begin.   added: "embed" and "head" -> the rows of the tokens that it
    adds to the vocabulary, [tokens, width].
    """

    matrices: Mapping[str, tuple[Tensor, Tensor]]
    digest: bytes
    rotary_row: int = 0
    added: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        rows = sum(tensor.nbytes for tensor in self.added.values())
        return sum(a.nbytes + b.nbytes for a, b in self.matrices.values()) + rows

    def moved(self, room: Callable[[int], Tensor], rest: Callable[[], None] = keep_going) -> HostAdapter:
        """The same in memory which `room` gives in pieces: uint8 [bytes], from where a device copies by itself.

        rest: called between the pieces.
        """
        tensors = [*(tensor for pair in self.matrices.values() for tensor in pair), *self.added.values()]
        there: list[Tensor] = []
        while len(there) < len(tensors):
            sizes: list[int] = []
            for tensor in tensors[len(there) :]:
                size = -(-tensor.nbytes // _ALIGNED) * _ALIGNED
                if sizes and sum(sizes) + size > _PIECE:
                    break
                sizes.append(size)
            for place in room(sum(sizes)).split(sizes):
                tensor = tensors[len(there)]
                same = place[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
                there.append(same.copy_(tensor))
            rest()
        found = iter(there)
        matrices = {name: (next(found), next(found)) for name in self.matrices}
        return replace(self, matrices=matrices, added={name: next(found) for name in self.added})


def as_laid_out(b: Tensor) -> Tensor:
    """`b` [outputs, rank] with its numbers in the order of a slot on the device, into which they go as they lie."""
    laid_out: Tensor = lay_out_b(b[None])[0]
    return laid_out


# Pairs (to, of). They are made all at once: each on its own would give up the interpreter's lock and wait for it again.
Copies = list[tuple[Tensor, Tensor]]


def fill_slot(
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slot: int,
    new: tuple[Tensor, Tensor] | None,
    filled: dict[int, tuple[int, int]],
) -> Copies:
    """What puts an adapter's matrices over those of the one before it; None where it has none for the layer.

    a, b: of the slot, [parts, rank, inputs] and [outputs, rank]; of an embedding a is [vocabulary, rank].   ranks: see
    `LowRank`.   filled: how much of the rank of a and b is not zeros, by slot; of a slot that is not there nothing.
    """
    own = (0, 0) if new is None else (new[0].shape[1], new[1].shape[1])
    before = filled.pop(slot, (0, 0))
    if own[0] != before[0]:
        ranks[slot] = own[0]
    for to, used, zeros in ((a, own[0], before[0]), (b, own[1], before[1])):
        if used < zeros:
            to[:, used:zeros].zero_()
    if new is None:
        return []
    filled[slot] = own
    return [(a[:, : own[0]], new[0]), (b[:, : own[1]], new[1])]


def concerns(view: RowView, filled: Container[int]) -> bool:
    """Whether an adapter of these rows is in one of these slots, as far as the host knows."""
    return not view.segments or any(segment.slot in filled for segment in view.segments)


class LinearStack:
    """The adapters' matrices of one linear layer on this rank.

    a: [slots, parts * rank, inputs], for each fused projection a piece of `rank` rows.   b: [slots, outputs, rank].
    Shapes and cuts follow the layer: inputs are cut for row-parallel layers, outputs for column-parallel ones.
    """

    def __init__(
        self, layer: LinearBase | ParallelLMHead, slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ):
        if isinstance(layer, LinearBase):
            shape = layer.shape
            self.inputs, self.outputs, split = shape.inputs, shape.outputs, shape.split
        else:
            self.inputs = Part(layer.embedding_dim, layer.embedding_dim)
            self.outputs, split = (layer.part,), "out"
        self.tp_rank, self.world = layer.tp.rank, layer.tp.world
        self.cuts_inputs, self.cuts_outputs = split == "in", split == "out"
        width = self.inputs.cut(self.tp_rank, self.world)[1] if self.cuts_inputs else self.inputs.size
        counts = [part.cut(self.tp_rank, self.world)[1] if self.cuts_outputs else part.size for part in self.outputs]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        self.parts = tuple(zip(starts, counts, strict=True))
        self.rank = rank
        self.a = torch.zeros(slots, len(counts) * rank, width, dtype=dtype, device=device)
        self.b = lay_out_b(torch.zeros(slots, sum(counts), rank, dtype=dtype, device=device))
        self.ranks = torch.zeros(slots, dtype=torch.int32, device=device)
        self._filled: dict[int, tuple[int, int]] = {}
        self.matrices = LowRank(self.a, self.b, self.ranks, self.parts)
        self.whole = True  # whether `matrices` are all that this rank needs for its part of the output
        self.added: AddedTokens | None = None  # of a head, where adapters may add tokens

    def prepare(self, pieces: Mapping[int | None, LoRAWeights]) -> tuple[Tensor, Tensor]:
        """(a, b) of this rank from full matrices: by fused projection, or None for one pair over all of them."""
        whole = pieces.get(None)
        by_part: list[LoRAWeights | None] = [pieces.get(index) for index in range(len(self.outputs))]
        if whole is not None:
            split = whole.b.split([part.size for part in self.outputs])
            by_part = [LoRAWeights(whole.a, b, whole.scale) for b in split]
        rank = max(piece.a.shape[0] for piece in by_part if piece is not None)
        a = torch.zeros(len(by_part), rank, self.a.shape[2], dtype=self.a.dtype)
        b = torch.zeros(sum(count for _, count in self.parts), rank, dtype=self.b.dtype)
        for index, (piece, (first, count)) in enumerate(zip(by_part, self.parts, strict=True)):
            if piece is None:
                continue
            own = piece.a.shape[0]
            rows = shard_part(piece.a, self.inputs, 1, self.tp_rank, self.world) if self.cuts_inputs else piece.a
            a[index, :own] = rows
            scaled = piece.b.float() * piece.scale
            if self.cuts_outputs:
                scaled = shard_part(scaled, self.outputs[index], 0, self.tp_rank, self.world)
            b[first : first + count, :own] = scaled
        return a, as_laid_out(b)

    def load(self, slot: int, matrices: tuple[Tensor, Tensor] | None) -> Copies:
        """What puts an adapter's matrices into `slot`; None where it does not change this layer."""
        by_part = self.a[slot].view(len(self.parts), -1, self.a.shape[2])
        return fill_slot(by_part, self.b[slot], self.ranks, slot, matrices, self._filled)

    def add(self, out: Tensor, x: Tensor, rows: RowView) -> None:
        """Add the adapters' part of the layer's output in place. out: [rows, outputs], x: [rows, inputs]."""
        if concerns(rows, self._filled):
            add_lora(out, x, self.matrices, rows)


class ShardedStack(LinearStack):
    """As `LinearStack`, with nothing held by two ranks: of a column-parallel layer `a` is cut by its ranks, of a
    row-parallel one `b` by its outputs, and what lies between the products is exchanged.
    """

    def __init__(
        self, layer: LinearBase | ParallelLMHead, slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ):
        super().__init__(layer, slots, rank, dtype, device)
        self._tp = layer.tp
        self._between, self._outputs = slice(0, rank), self.parts
        if self.cuts_outputs:
            if rank % self.world:
                raise ValueError(
                    f"fully_sharded_loras divides the rank: {self.world} ranks cannot share max_lora_rank {rank}."
                )
            share = rank // self.world
            self._between = slice(self.tp_rank * share, (self.tp_rank + 1) * share)
            self.a = self.a.new_zeros(slots, len(self.parts) * share, self.a.shape[2])
        elif self.cuts_inputs:
            ((_, count),) = self.parts
            first, end = (count * r // self.world for r in (self.tp_rank, self.tp_rank + 1))
            self._outputs = ((first, end - first),)
            self.b = lay_out_b(self.b.new_zeros(slots, end - first, rank))
        self.matrices = LowRank(self.a, self.b, self.ranks, self.parts)
        self.whole = not (self.cuts_outputs or self.cuts_inputs)

    def prepare(self, pieces: Mapping[int | None, LoRAWeights]) -> tuple[Tensor, Tensor]:
        """As of `LinearStack`, then this rank's share of it."""
        a, b = super().prepare(pieces)
        if self.cuts_outputs:
            a = a[:, self._between].clone()
        elif self.cuts_inputs:
            ((first, count),) = self._outputs
            b = as_laid_out(b[first : first + count].contiguous())
        return a, b

    def add(self, out: Tensor, x: Tensor, rows: RowView) -> None:
        """As of `LinearStack`."""
        if self.whole:
            super().add(out, x, rows)
            return
        small = shrink_lora(x, self.a, rows)
        if self.cuts_outputs:
            gathered = self._tp.all_gather(small).view(len(x), self.world, len(self.parts), -1)
            expand_lora(out, gathered.transpose(1, 2).flatten(1), self.b, self.parts, rows)
            return
        ((first, count),) = self._outputs
        expand_lora(out.narrow(1, first, count), self._tp.all_reduce(small), self.b, ((0, count),), rows)


class EmbeddingStack:
    """The adapters' matrices of the token embedding: a [slots, vocabulary, rank], b [slots, width, rank]."""

    def __init__(self, layer: VocabParallelEmbedding, slots: int, rank: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.rank = layer.org_vocab_size, rank
        self.a = torch.zeros(slots, layer.org_vocab_size, rank, dtype=dtype, device=device)
        self.b = torch.zeros(slots, layer.embedding_dim, rank, dtype=dtype, device=device)
        self.ranks = torch.zeros(slots, dtype=torch.int32, device=device)
        self._filled: dict[int, tuple[int, int]] = {}
        self.matrices = LowRank(self.a, self.b, self.ranks, ((0, layer.embedding_dim),))
        self.whole = True  # as of `LinearStack`
        self.added: AddedTokens | None = None

    def prepare(self, pieces: Mapping[int | None, LoRAWeights]) -> tuple[Tensor, Tensor]:
        """(a, b) from the full matrices; ranks do not share them."""
        (piece,) = pieces.values()
        return piece.a.t().to(self.a.dtype).contiguous(), (piece.b.float() * piece.scale).to(self.b.dtype)

    def load(self, slot: int, matrices: tuple[Tensor, Tensor] | None) -> Copies:
        """What puts an adapter's matrices into `slot`; None where it does not change the embedding."""
        return fill_slot(self.a[slot], self.b[slot], self.ranks, slot, matrices, self._filled)

    def add(self, out: Tensor, ids: Tensor, rows: RowView) -> None:
        """Add the adapters' part of the embedding in place. out: [rows, width], ids: [rows]."""
        if concerns(rows, self._filled):
            add_embedding_lora(out, ids, self.matrices, rows)


class ExpertStack:
    """The adapters' matrices of a layer's experts: of each expert as of a `LinearStack`, gate and up as two parts.

    Memory is taken when the first adapter comes that has any. used: the slots whose adapters have.
    """

    def __init__(self, layer: Experts, slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        shape, tp = layer.shape, layer.tp
        self.shape, self.rank, self.used = shape, rank, set[int]()
        self._slots, self._dtype, self._device, self._tp_rank, self._world = slots, dtype, device, tp.rank, tp.world
        self._inner = Part(shape.inner, shape.inner)
        self._count = self._inner.cut(tp.rank, tp.world)[1]
        self.changes: list[tuple[LowRank, LowRank]] = []

    def concerns(self, view: RowView) -> bool:
        """Whether an adapter of these rows changes experts, as far as the host knows."""
        return any(segment.slot in self.used for segment in view.segments)

    def prepare(self, pieces: Mapping[int, LoRAWeights]) -> tuple[Tensor, Tensor]:
        """This rank's matrices from full ones, by 3 * expert + (gate, up, down): all `a`, all `b`, one behind the
        other, of each expert [gate and up, down], with the adapter's own rank.
        """
        own = max(piece.a.shape[0] for piece in pieces.values())
        all_a, all_b = [], []
        for expert in range(self.shape.experts):
            for kind in range(3):
                piece = pieces.get(3 * expert + kind)
                inputs, outputs = self._sizes(kind)
                a = torch.zeros(own, inputs, dtype=self._dtype)
                b = torch.zeros(outputs, own, dtype=self._dtype)
                if piece is not None:
                    scaled = piece.b.float() * piece.scale
                    rows = piece.a
                    if kind == 2:
                        rows = shard_part(piece.a, self._inner, 1, self._tp_rank, self._world)
                    else:
                        scaled = shard_part(scaled, self._inner, 0, self._tp_rank, self._world)
                    a[: len(rows)], b[:, : len(rows)] = rows, scaled
                all_a.append(a.flatten())
                all_b.append(b.flatten())
        return torch.cat(all_a).view(own, -1), torch.cat(all_b).view(-1, own)

    def _sizes(self, kind: int) -> tuple[int, int]:
        """Inputs and outputs of gate, up or down on this rank."""
        hidden = self.shape.hidden
        return (self._count, hidden) if kind == 2 else (hidden, self._count)

    def _allocate(self) -> None:
        def zeros(inputs: int, counts: tuple[int, ...]) -> LowRank:
            like = torch.empty(0, dtype=self._dtype, device=self._device)
            a = like.new_zeros(self._slots, len(counts) * self.rank, inputs)
            b = lay_out_b(like.new_zeros(self._slots, sum(counts), self.rank))
            ranks = torch.zeros(self._slots, dtype=torch.int32, device=self._device)
            return LowRank(a, b, ranks, tuple((i * counts[0], n) for i, n in enumerate(counts)))

        count, hidden = self._count, self.shape.hidden
        self.changes = [(zeros(hidden, (count, count)), zeros(count, (hidden,))) for _ in range(self.shape.experts)]

    def load(self, slot: int, matrices: tuple[Tensor, Tensor] | None) -> Copies:
        """What puts an adapter's matrices into `slot`; None where it does not change these experts."""
        if matrices is None:
            self.used.discard(slot)
            for change in self.changes:
                for part in change:
                    part.ranks[slot] = 0
                    part.a[slot].zero_()
                    part.b[slot].zero_()
            return []
        if not self.changes:
            self._allocate()
        self.used.add(slot)
        all_a, all_b = (matrix.flatten() for matrix in matrices)
        own = matrices[0].shape[0]
        copies: Copies = []
        for change in self.changes:
            for low_rank in change:
                low_rank.a[slot].zero_()
                low_rank.b[slot].zero_()
                low_rank.ranks[slot] = own
            for kind in range(3):
                inputs, outputs = self._sizes(kind)
                low_rank, row = change[kind == 2], self.rank * (kind == 1)
                first = low_rank.parts[kind == 1][0]
                a, all_a = all_a[: own * inputs].view(own, inputs), all_a[own * inputs :]
                b, all_b = all_b[: own * outputs].view(outputs, own), all_b[own * outputs :]
                copies.append((low_rank.a[slot, row : row + own], a))
                copies.append((low_rank.b[slot, first : first + outputs, :own], b))
        return copies

    @property
    def most(self) -> int:
        """Numbers of the largest adapter's matrices on this rank."""
        return 3 * self.shape.experts * self.rank * (self._count + self.shape.hidden)


class LoRALayers:
    """All stacks of a model. `slots` adapters of up to `rank` fit in; the layers find their stack as `layer.lora`."""

    def __init__(
        self, modules: Mapping[str, nn.Module], slots: int, rank: int, dtype: torch.dtype, device: torch.device, *,
        sharded: bool = False, extra: int = 0,
    ) -> None:  # fmt: skip
        """modules: what the model says can be adapted (`AdaptableModel.adaptable`).   sharded: see `ShardedStack`.

        extra: tokens that an adapter may add to the vocabulary.
        """
        self.slots = slots
        self.with_added: frozenset[int] = frozenset()  # the slots whose adapters add tokens
        self._added: dict[str, AddedTokens] = {}
        self._vocabulary: dict[str, tuple[int, int]] = {}  # "embed" and "head": tokens and width
        self._extra, self._tied = extra, False
        self.with_experts: frozenset[int] = frozenset()  # the slots whose adapters change experts
        self._stacks: dict[str, LinearStack | EmbeddingStack | ExpertStack] = {}
        self._targets: dict[str, tuple[str, int | None, tuple[int, int]]] = {}  # name -> layer, part, (out, in)
        for path, module in modules.items():
            if isinstance(module, LinearBase | ParallelLMHead):
                of_this = ShardedStack if sharded and module.tp.world > 1 else LinearStack
                linear = of_this(module, slots, rank, dtype, device)
                self._add_targets(path, linear)
                stack: LinearStack | EmbeddingStack | ExpertStack = linear
            elif isinstance(module, VocabParallelEmbedding):
                stack = EmbeddingStack(module, slots, rank, dtype, device)
                self._targets[path] = (path, None, (module.embedding_dim, module.org_vocab_size))
            elif isinstance(module, Experts):
                stack = ExpertStack(module, slots, rank, dtype, device)
                hidden, inner = module.shape.hidden, module.shape.inner
                for expert in range(module.shape.experts):
                    for kind, name in enumerate(("gate", "up", "down")):
                        shape = (hidden, inner) if name == "down" else (inner, hidden)
                        self._targets[f"{path}.{expert}.{name}"] = (path, 3 * expert + kind, shape)
            else:
                continue
            self._stacks[path] = module.lora = stack  # type: ignore[assignment]
            if path in ("embed", "head") and isinstance(stack, LinearStack | EmbeddingStack):
                assert isinstance(module, VocabParallelEmbedding)
                tokens, width = self._vocabulary[path] = (module.org_vocab_size, module.embedding_dim)
                self._tied |= isinstance(module, ParallelLMHead) and module.tied
                if extra:
                    self._added[path] = stack.added = AddedTokens(tokens, extra, slots, width, dtype, device)

    def _add_targets(self, path: str, stack: LinearStack) -> None:
        width = stack.inputs.size
        self._targets[path] = (path, None, (sum(part.size for part in stack.outputs), width))
        container = path.rpartition(".")[0]
        for index, part in enumerate(stack.outputs):
            if part.name and len(stack.outputs) > 1:
                self._targets[f"{container}.{part.name}" if container else part.name] = (
                    path,
                    index,
                    (part.size, width),
                )

    def prepare(
        self,
        adapter: Adapter,
        is_elsewhere: Callable[[str], bool] = lambda name: False,
        rest: Callable[[], None] = keep_going,
    ) -> HostAdapter:
        """This rank's share of an adapter. Raises ValueError if it does not fit the model; may run in any thread.

        is_elsewhere: whether another stage of the pipeline has a layer, which then looks after it.   rest: called
        between two layers.
        """
        for name, copied in adapter.copies.items():
            layer = name.partition(".")[0]
            if is_elsewhere(layer):
                continue
            rows, new = self._vocabulary[layer][0], adapter.new_tokens.get(name)
            if copied[0] != rows + (0 if new is None else len(new)):
                raise ValueError(
                    f"The adapter was trained with a vocabulary of {copied[0]} tokens ({name}), but the model has "
                    f"{rows}."
                )
        added = self._prepare_added(adapter, is_elsewhere)
        pieces: dict[str, dict[int | None, LoRAWeights]] = {}
        for name, weights in adapter.layers.items():
            if is_elsewhere(name):
                continue
            target = self._targets.get(name)
            if target is None:
                raise ValueError(f"The adapter changes {name}, where this model has no layer that can be adapted.")
            path, part, shape = target
            if name in added:
                weights = self._without_added(name, weights, len(added[name]))
            found = (weights.b.shape[0], weights.a.shape[1])
            if found != shape:
                raise ValueError(
                    f"The adapter's matrices for {name} map {found[1]} inputs to {found[0]} outputs, but the layer has "
                    f"{shape[1]} and {shape[0]}. Was the adapter trained for another model?"
                )
            pieces.setdefault(path, {})[part] = weights
        for name, stacked in adapter.experts.items():
            if is_elsewhere(name):
                continue
            stack = self._stacks.get(name)
            if not isinstance(stack, ExpertStack):
                raise ValueError(f"The adapter changes {name}, where this model has no experts that can be adapted.")
            changes = stacked.by_expert(stack.shape.experts, stack.shape.hidden, stack.shape.inner)
            if name in pieces:
                raise ValueError(f"The adapter changes {name} both one by one and stacked.")
            pieces[name] = {
                3 * expert + ("gate", "up", "down").index(kind): weights for (expert, kind), weights in changes.items()
            }
        for path, by_part in pieces.items():
            if None in by_part and len(by_part) > 1:
                raise ValueError(f"The adapter changes {path} both as a whole and in parts.")
        matrices = {}
        for path, by_part in pieces.items():
            matrices[path] = self._stacks[path].prepare(by_part)  # type: ignore[arg-type]
            rest()
        return HostAdapter(matrices, adapter.digest, added=added)

    def _prepare_added(self, adapter: Adapter, is_elsewhere: Callable[[str], bool]) -> dict[str, Tensor]:
        """ "embed" and "head" -> the rows of the tokens that an adapter adds, its changes of them included."""
        given, found = dict(adapter.new_tokens), dict[str, Tensor]()
        if self._tied and "embed" in given:
            given.setdefault("head", given["embed"])
        counts = {len(rows) for rows in given.values()}
        if counts and (len(counts) > 1 or not 1 <= max(counts) <= self._extra or "embed" not in given):
            sizes = {name: list(rows.shape) for name, rows in given.items()}
            raise ValueError(
                f"The adapter adds tokens to the vocabulary with matrices of the shapes {sizes}. Expected are as many "
                f"input_embeddings as output_embeddings, and at most lora_extra_vocab_size ({self._extra}) of them."
            )
        for name, rows in given.items():
            if is_elsewhere(name) or name not in self._vocabulary:
                continue
            tokens, width = self._vocabulary[name]
            if rows.shape[1] != width or not bool(rows.isfinite().all()):
                raise ValueError(
                    f"The adapter's rows for new tokens ({name}) are {list(rows.shape)}; expected are finite numbers, "
                    f"{width} for each token. Was the adapter trained for another model?"
                )
            dense, weights = rows.float(), adapter.layers.get(name)
            change = None if weights is None else weights.a.t() if name == "embed" else weights.b
            if weights is not None and change is not None and len(change) == tokens + len(rows):
                other = weights.b.t() if name == "embed" else weights.a
                dense = dense + weights.scale * change[tokens:].float() @ other.float()
            found[name] = dense.to(self._stacks[name].b.dtype)  # type: ignore[union-attr]
        return found

    def _without_added(self, name: str, weights: LoRAWeights, count: int) -> LoRAWeights:
        """An adapter's matrices of the embedding or the head for the model's own tokens."""
        tokens = self._vocabulary[name][0]
        if name == "embed" and weights.a.shape[1] == tokens + count:
            return replace(weights, a=weights.a[:, :tokens])
        if name == "head" and weights.b.shape[0] == tokens + count:
            return replace(weights, b=weights.b[:tokens])
        return weights

    def load(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter to the device, into a slot that no step in flight reads."""
        copies: Copies = []
        for path, stack in self._stacks.items():
            copies += stack.load(slot, adapter.matrices.get(path))
        for path, tokens in self._added.items():
            copies += tokens.load(slot, adapter.added.get(path))
        if copies:
            to, of = zip(*copies, strict=True)
            torch._foreach_copy_(to, of, non_blocking=True)
        self.with_added = frozenset(s for tokens in self._added.values() for s, n in enumerate(tokens.counts) if n)
        experts = [stack for stack in self._stacks.values() if isinstance(stack, ExpertStack)]
        self.with_experts = frozenset(slot for stack in experts for slot in stack.used)

    @property
    def bytes_per_adapter(self) -> int:
        """Device memory of one slot."""
        products = [stack for stack in self._stacks.values() if not isinstance(stack, ExpertStack)]
        return sum(stack.a[0].nbytes + stack.b[0].nbytes for stack in products)

    def max_tensors(self) -> int:
        """More than any file of an adapter for this stage of the model has."""
        return 8 * len(self._targets) + 1024  # two for each, copies, and what only training reads

    def max_file_bytes(self) -> int:
        """More than any file of an adapter of the largest rank for this model needs, in fp32 and with long names."""
        world = max((stack.world for stack in self._stacks.values() if isinstance(stack, LinearStack)), default=1)
        largest = 0
        for stack in self._stacks.values():
            if isinstance(stack, ExpertStack):
                largest += 4 * stack.most
            else:
                largest += 4 * (stack.a[0].numel() + stack.b[0].numel())
        # beside an adapter of the embedding or the head peft stores these, too
        copied = sum(4 * (tokens + self._extra) * width for tokens, width in self._vocabulary.values())
        return world * largest + copied + (64 << 20)
