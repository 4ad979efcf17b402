"""The one decoder (or encoder): a spec turned into modules, with its forward pass, its head and its cache's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.linear_method import QuantizationConfig
from vllm.model_executor.layers.logits_processor import NEVER_SAMPLED, LogitsProcessor
from vllm.model_executor.layers.rope import LinearScaling
from vllm.model_executor.layers.rope_table import rope_table
from vllm.model_executor.layers.sharding import REPLICATED, ShardedParameter
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.blocks import (
    MODULES,
    BlockModule,
    BuildContext,
    Experts,
    SelfAttention,
    add_norm,
    build_norm,
)
from vllm.model_executor.models.kv_groups import group_layers, kv_places
from vllm.model_executor.models.pool_head import PoolLayers
from vllm.model_executor.models.spec import Attn, BlockSpec, Decoder, LearnedPositions, PoolHead, Rope
from vllm.model_executor.models.traits import Traits
from vllm.step.inputs import RowView, StepInputs
from vllm.step.kv_policy import KVKind

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.live_weights import LiveWeights


class FusedBlocks(Protocol):
    """A device's own way to run all of the rank's blocks at once, with the same result.

    handles: step features, by name, that it honours; a step with another goes through the blocks one by one.
    """

    handles: frozenset[str]

    def __call__(
        self, x: Tensor, step: StepInputs, kv_caches: Sequence[Tensor], rows: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


_NO_TAPS: Mapping[int, Tensor] = {}


def without_idle_windows(spec: Decoder, max_positions: int) -> Decoder:
    """The same decoder with windows dropped that no sequence of `max_positions` tokens can outgrow."""
    return replace(spec, blocks=tuple(block.within(max_positions) for block in spec.blocks))


class Elsewhere(nn.Module):
    """Stands in the list of blocks for one that another stage of the pipeline has."""


class DecoderModel(nn.Module):
    """A language model on one rank, or with a `pool` head in place of the logits one that pools.

    Built with uninitialised weights on torch's default device (the loader builds on "meta" and fills them); rotary
    tables are computed at once, on `device`.

    modules: what blocks become, by their specs' class, beside `blocks.MODULES`.
    layers: those of this pipeline stage, None for all. What stands before the blocks is on the stage of the first one,
        what stands behind them on the stage of the last one, a table that both use on both.
    deals_experts: see `BuildContext`.
    pool: of a model that pools: its head, in place of the one that makes logits, of which there is none then.
    """

    head: ParallelLMHead

    def __init__(
        self,
        spec: Decoder,
        *,
        dtype: torch.dtype,
        max_positions: int,
        device: torch.device | None = None,
        tp: TensorParallel | None = None,
        quant_config: QuantizationConfig | None = None,
        modules: Mapping[type[BlockSpec], BlockModule] | None = None,
        layers: range | None = None,
        pool: PoolHead | None = None,
        deals_experts: bool = False,
    ) -> None:
        super().__init__()
        self.cache_scales: dict[int, tuple[float, float]] = {}  # of keys and values by layer, as the checkpoint says
        tp = TensorParallel() if tp is None else tp
        device = torch.device("cpu") if device is None else device
        self.spec = spec = without_idle_windows(spec, max_positions)
        self.dtype, self.tp, self.max_positions = dtype, tp, max_positions
        self.layer_numbers = layers = range(len(spec.blocks)) if layers is None else layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(spec.blocks)
        ctx = BuildContext(dtype, device, tp, max_positions, quant_config, deals_experts and tp.experts[1] > 1)
        width = spec.hidden_size if spec.embed_dim is None else spec.embed_dim
        self.embed: VocabParallelEmbedding
        if self.is_first or (self.is_last and spec.tied and pool is None):
            self.embed = VocabParallelEmbedding(
                spec.vocab_size, width, dtype, quant_config=quant_config, prefix="embed", tp=tp
            )
        # rounded to the model's dtype, as the multiplication by a tensor of that dtype would
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=dtype, device="cpu").item()
        self.project_in = self.project_out = self.embed_norm = self.norm = None
        if self.is_first:
            if spec.token_types:
                self.token_types = ShardedParameter.empty((spec.token_types, spec.hidden_size), REPLICATED, 0, 1, dtype)
            if spec.positions is not None:
                self.positions = _position_table(spec.positions, spec.hidden_size, max_positions, dtype)
            if width != spec.hidden_size:
                self.project_in = ReplicatedLinear(width, spec.hidden_size, bias=False, params_dtype=dtype, tp=tp)
            if spec.embed_norm is not None:
                self.embed_norm = build_norm(spec.embed_norm, spec.hidden_size, dtype)
        kv = tuple(block.need(tp.world) for block in spec.blocks)
        self.kv_groups = group_layers(kv)
        places = kv_places(self.kv_groups, kv, layers)
        table = {**MODULES, **(modules or {})}
        for kind in sorted({type(block) for block in spec.blocks} - table.keys(), key=lambda kind: kind.__name__):
            raise ValueError(
                f"No module is known for blocks of the class {kind.__name__}. The file that the family's `modules` "
                f"names must have it in its table: MODULES = {{{kind.__name__}: ...}}."
            )
        self.blocks = nn.ModuleList(
            table[type(block)](block, spec.hidden_size, places.get(i), ctx, f"blocks.{i}")
            if i in layers
            else Elsewhere()
            for i, block in enumerate(spec.blocks)
        )
        whole = any(block.needs_whole_prompt() for block in spec.blocks)
        known = {block.known_prompt() for block in spec.blocks} - {None}
        if len(known) > 1:
            raise ValueError(
                "Layers whose rotation depends on the prompt's length in different ways are not supported."
            )
        self.traits = Traits(
            spec.hidden_size,
            dtype,
            spec.vocab_size,
            kv,
            layers,
            heads=("logits",) if pool is None else ("pooled",),
            takes=frozenset({"token_types"} if spec.token_types > 1 else ()),
            query_heads=tuple(block.heads()[0] // tp.world for block in spec.blocks),
            # graphs of mixed steps do not know what padding means to a state
            replayable=all(need is None or need.kind is not KVKind.RECURRENT for need in kv),
            decoder=spec,
            taps=tuple(layers[: -1 if self.is_last else None]),
            handles=frozenset({"adapters", "rotary", "taps"} | ({"virtual"} if width == spec.hidden_size else set())),
            chunkable=not whole,
            prefix=0 if whole else 1,
            splits=True,
            known_prompt=known.pop() if known else None,
            rotary_rows=max_positions,
        )
        self.fused_blocks: FusedBlocks | None = None
        self.fuse_again: Callable[[], None] | None = None  # after weights have moved
        self.open_weights: Callable[[], LiveWeights] | None = None  # set by the loader
        self._live: LiveWeights | None = None
        if self.is_last and spec.norm is not None:
            self.norm = build_norm(spec.norm, spec.hidden_size, dtype)
        self.pool = PoolLayers(pool, spec.hidden_size) if pool is not None and self.is_last else None
        self.pools = pool is not None
        if self.is_last and not self.pools:
            if width != spec.hidden_size:
                self.project_out = ReplicatedLinear(spec.hidden_size, width, bias=False, params_dtype=dtype, tp=tp)
            self.head = ParallelLMHead(
                spec.vocab_size, width, spec.head_bias, dtype, quant_config=quant_config, prefix="head", tp=tp
            )
            if spec.tied:
                self.head.tie_weights(self.embed)
                if not (self.is_first or self.head.tied):
                    del self.embed  # the head has a table of its own
        self.silent: Tensor
        if spec.silent:
            self.register_buffer("silent", torch.tensor(spec.silent, device=device), persistent=False)
        self.logits_processor = LogitsProcessor(spec.vocab_size, scale=spec.logit_scale, soft_cap=spec.logit_softcap)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Give weights of the loaded model new values, under the names that its checkpoints have: any of them, whole
        (each rank takes its share), in the published layout. Returns the names that belong to this rank.

        Cached keys and values are those of the old weights: `reset_prefix_cache()` drops them. Raises ValueError for a
        tensor that the model lacks, that does not fit, or whose place is quantized.
        """
        if self._live is None:
            if self.open_weights is None:
                raise RuntimeError("This model was not made by the loader, which knows the names of its weights.")
            self._live = self.open_weights()
        try:
            return self._live.load(weights)
        finally:
            if self.fuse_again is not None:
                self.fuse_again()

    @property
    def own_blocks(self) -> list[tuple[BlockSpec, nn.Module]]:
        """The blocks of this stage, each with its spec."""
        return [(self.spec.blocks[i], self.blocks[i]) for i in self.layer_numbers]

    def is_elsewhere(self, name: str) -> bool:
        """Whether a weight, by its canonical name, or a module belongs to other stages of the pipeline only."""
        part, _, rest = name.partition(".")
        if part == "blocks":
            index = rest.partition(".")[0]
            return index.isdigit() and int(index) < len(self.spec.blocks) and int(index) not in self.layer_numbers
        if part in ("positions", "token_types", "project_in", "embed_norm"):
            return not self.is_first
        if part == "embed":
            return "embed" not in self._modules
        return part in ("norm", "project_out", "head", "pool") and not self.is_last

    def paged_attention(self) -> dict[int, SelfAttention]:
        """This rank's attention layers with keys and values in the cache, by the layer's number."""
        return {
            number: module
            for number in self.layer_numbers
            for module in self.blocks[number].modules()
            if isinstance(module, SelfAttention) and module.place is not None
        }

    def adaptable(self) -> dict[str, nn.Module]:
        """As of `AdaptableModel`."""
        return {
            path: module
            for path, module in self.named_modules()
            if isinstance(module, LinearBase | VocabParallelEmbedding)
            or (isinstance(module, Experts) and module.method.takes_adapters and module.shape.gated)
        }

    def stretch(self, factors: Sequence[float]) -> list[int]:
        """As of `AdaptableModel`."""
        blocks: list[Any] = [block for _, block in self.own_blocks]
        specs = [getattr(block.spec, "attn", None) for block in blocks]
        ropes = [spec.rope for spec in specs if type(spec) is Attn and spec.rope is not None]
        plain = all(type(spec) is Attn and spec.temperature is None for spec in specs)
        if not ropes or not plain or not all(isinstance(rope.scaling, LinearScaling | None) for rope in ropes):
            raise ValueError(
                "long_lora_scaling_factors: the positions of this model cannot be divided. It must have rotary "
                "embeddings, without scaling or with a linear one, in layers of attention only."
            )
        tables: dict[Rope, Tensor] = {}
        for block in blocks:
            rope = block.spec.attn.rope
            if rope is None:
                continue
            if rope not in tables:
                stretched = [rope_table(replace(rope, scaling=LinearScaling(f)), self.max_positions) for f in factors]
                old = block.attn.cos_sin
                tables[rope] = torch.cat([old[: self.max_positions], *(table.to(old.device) for table in stretched)])
            block.attn.cos_sin = tables[rope]
        return [self.max_positions * (1 + i) for i in range(len(factors))]

    def heads_of(self, layer: int) -> tuple[int, int]:
        """As of `AdaptableModel`."""
        return self.spec.blocks[layer].heads()

    def forward(self, step: StepInputs, kv_caches: Sequence[Tensor], stream: Tensor | None = None) -> Tensor:
        """Hidden states of the tokens in `step.logits_rows`, [rows, hidden]; all tokens' keys and values are written to
        `kv_caches`.

        Of the last layer, the other tokens need no more than that: most of it is computed for the wanted rows only.

        stream: [tokens, hidden], what the stage before this one has returned, which may be overwritten; None for the
        first. A stage that is not the last returns the stream behind its layers, for all tokens.
        """
        x = self._embedded(step) if stream is None else stream
        residual: Tensor | None = None
        rows = step.logits_rows if self.is_last else None
        if rows is not None and len(rows) == len(x):
            rows = None  # nothing to save
        fused = self.fused_blocks
        if fused is not None and (step.features is None or step.features.names() <= fused.handles):
            x, residual = fused(x, step, kv_caches, rows)
        else:
            last, taps = len(self.blocks) - 1, self._taps(step)
            tokens = x.shape[0]
            for i in self.layer_numbers:
                wanted = rows if i == last else None
                out = self.blocks[i](x, residual, step, kv_caches, wanted)
                try:
                    x, residual = out
                except (TypeError, ValueError) as error:
                    raise ValueError(self._no_pair(i, out)) from error
                if x.shape[0] != (tokens if wanted is None else wanted.shape[0]):
                    raise ValueError(self._wrong_rows(i, x, tokens, wanted))
                if i in taps:
                    taps[i].copy_(x if residual is None else x + residual)
        if not self.is_last:
            return x if residual is None else x + residual
        if not len(x):
            return x
        if self.norm is not None:
            x = add_norm(self.norm, x, residual)[0]
        elif residual is not None:
            x = x + residual
        return x if rows is not None else step.wanted(x)

    def _no_pair(self, layer: int, out: object) -> str:
        """What is said of a block that returns anything but the two terms of the stream."""
        got = f"{len(out)} values" if isinstance(out, tuple | list) else f"one {type(out).__name__}"
        return (
            f"Layer {layer} ({type(self.blocks[layer]).__name__}) returned {got}, expected two: the output, and the "
            "residual that is still to be added to it, or None."
        )

    def _wrong_rows(self, layer: int, x: Tensor, tokens: int, rows: Tensor | None) -> str:
        """What is said of a block that returns another number of tokens than it was asked for."""
        asked = f"all {tokens} tokens" if rows is None else f"the {len(rows)} of {tokens} tokens that `rows` names"
        return f"Layer {layer} ({type(self.blocks[layer]).__name__}) returned {len(x)} rows, expected {asked}."

    def _taps(self, step: StepInputs) -> Mapping[int, Tensor]:
        """Where the output of some layers is to go. Raises ValueError for one that cannot be handed out."""
        taps = None if step.features is None else step.features.taps
        if taps is None:
            return _NO_TAPS
        unknown = sorted(set(taps) - set(self.traits.taps))
        if unknown:
            raise ValueError(f"The output of layers {unknown} is not to be had, only that of {list(self.traits.taps)}.")
        return taps

    def _embedded(self, step: StepInputs) -> Tensor:
        """What the first block takes in: [tokens, hidden]."""
        x: Tensor = self.embed(step.token_ids, step.view(picked=False))
        if step.features is not None and step.features.virtual is not None:
            x = x.index_copy(0, *step.features.virtual)
        late = self.spec.scale_positions
        if self.embed_scale != 1.0 and not late:
            x = x * self.embed_scale
        if self.project_in is not None:
            x = self.project_in.project(x, step.view(picked=False))
        if self.spec.positions is not None:
            x = x + nn.functional.embedding(step.positions + self.spec.positions.offset, self.positions)
        if self.spec.token_types:
            kinds = None if step.features is None else step.features.token_types
            x = x + (self.token_types[0] if kinds is None else nn.functional.embedding(kinds, self.token_types))
        if self.embed_scale != 1.0 and late:
            x = x * self.embed_scale
        if self.embed_norm is not None:
            x = self.embed_norm.norm(x)
        return x

    def logits(self, hidden: Tensor, view: RowView | None = None) -> Tensor:
        """hidden: [rows, hidden], as `forward` gives them -> [rows, vocabulary] fp32, on every rank.

        view: of these rows, None if none of them uses an adapter.
        """
        if self.pools:
            raise ValueError("This model pools: it has no logits.")
        if self.project_out is not None:
            hidden = self.project_out.project(hidden, view)
        out: Tensor = self.logits_processor(self.head, hidden, view=view)
        return out.index_fill_(-1, self.silent, NEVER_SAMPLED) if self.spec.silent else out

    def pooled(self, states: Tensor) -> Tensor:
        """What the head makes of pooled states: [rows, hidden] fp32 -> [rows, outputs] fp32."""
        if self.pool is None:
            raise ValueError("This model generates: it has no head for pooled states.")
        out: Tensor = self.pool(states)
        return out


def _position_table(
    positions: LearnedPositions, width: int, max_positions: int, dtype: torch.dtype
) -> ShardedParameter:
    if positions.rows < max_positions:
        raise ValueError(
            f"The model knows positions up to {positions.rows}, but max_model_len is {max_positions}. "
            f"Choose a max_model_len of at most {positions.rows}."
        )
    return ShardedParameter.empty((positions.rows + positions.offset, width), REPLICATED, 0, 1, dtype)
