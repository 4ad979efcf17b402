"""The fused decode step: what a decoder computes for one new token per row, as a walk over its layers that is the same
for few rows, for many and for several ranks. What differs is how a product runs and how its result gets back to the
residual stream:

  few rows, one rank    our own products; an RMS norm behind a branch is folded into the products around it
  many rows, one rank   cuBLAS, and our own products where something after them can be folded in; norms are kernels
  several ranks         partial sums are added up over the ranks before they reach the stream

Five kernels a layer in the best case: qkv; attention with head norms, rotation, cache write and reduction; o, adding
to the stream; gate and up with the activation; down, likewise. `decode_weights` says which decoders are covered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm.model_executor.models.spec import Layout
from vllm.ops.activation import activate, activate_gated
from vllm.ops.linear import linear
from vllm.ops.lora import LowRank, add_lora
from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.attention import choose_splits
from vllm.ops.triton.decode_attention import PIECE, Behind, DecodeRows, decode_attention
from vllm.ops.triton.decode_experts import (
    MOST_EXPERTS,
    ChosenExperts,
    Router,
    choose_by_logits,
    fall,
    fall_tiles,
    rise,
)
from vllm.ops.triton.decode_join import Chosen, NormWeights, join_rows
from vllm.ops.triton.decode_latent import LatentDecode, LatentRows, choose_latent_splits, decode_latent
from vllm.ops.triton.decode_linear import (
    ARGMAX,
    GATED,
    RESIDUAL,
    STORE,
    Folded,
    Product,
    Stream,
    Tiling,
    choose_product_tiling,
    run_product,
)
from vllm.ops.triton.decode_lora import Change, counters, look_up, room
from vllm.ops.triton.decode_step import (
    Drawing,
    argmax_tiles,
    choose_tokens,
    draw_tokens,
    elect,
    embed_rows,
    nominate,
    normalize_rows,
)
from vllm.ops.triton.float8 import Float8Weight, Rounded, round_rows, rounded_product
from vllm.ops.triton.moe import routed_mlp, sum_chosen
from vllm.ops.triton.packed_experts import PackedStack
from vllm.ops.triton.packed_linear import PackedWords
from vllm.ops.triton.quantized import gated_rows, many_rows
from vllm.ops.triton.wide_linear import (
    WideTiling,
    argmax_product,
    choose_wide_gate,
    choose_wide_head,
    gated_product,
)
from vllm.step.inputs import RowView
from vllm.worker.decode_weights import LayerWeights, Linear, MlpWeights, MoeWeights, ProgramWeights, read_weights
from vllm.worker.slot_table import SlotTable

__all__ = ["DecodeProgram", "ProgramWeights", "StepTiling", "choose_step_tiling", "read_weights"]

Rows = Tensor | Folded | Rounded  # behind a norm
MAX_ROWS = 64  # with more, cuBLAS reads the weights as fast as our own products and multiplies faster
MAX_PACKED_ROWS = 64  # with more, a packed weight is written as numbers first


@dataclass(frozen=True, slots=True)
class StepTiling:
    """How every kernel of a step is cut: its products, and the attention's splits, keys at a time, warps and stages.

    up: of gate and up, or of up alone.   up, down: not used if all layers have experts.   router: of experts.
    splits, tile, warps, stages: of latent attention only the splits count.
    early, ahead, least, late: as in `DecodeRows`.   behind: bytes of gate and up that attention's programs without keys
    bring nearer.   wide_gate, wide_head: for many rows; None leaves these products to cuBLAS.
    """

    qkv: Tiling
    o: Tiling
    up: Tiling
    down: Tiling
    head: Tiling
    splits: int
    tile: int
    warps: int
    stages: int
    early: bool = False
    ahead: int = 0
    least: int = 0
    late: int = 0
    behind: int = 0
    wide_gate: WideTiling | None = None
    wide_head: WideTiling | None = None
    router: Tiling | None = None


def choose_step_tiling(w: ProgramWeights, rows: int, width: int, adapted: bool = False) -> StepTiling:
    """The tiling for `rows` rows of sequences of up to `width` tokens. adapted: rows may have adapters."""
    layer, attn = w.layers[0], w.layers[0].attention
    mlp = next((x.ffn for x in w.layers if isinstance(x.ffn, MlpWeights)), None)
    experts = next((x.ffn for x in w.layers if isinstance(x.ffn, MoeWeights)), None)
    latent = isinstance(attn, LatentDecode)
    kv_heads, head_dim = (1, attn.cache.shape[2]) if latent else (attn.cache.shape[2], attn.cache.shape[4])

    def product(part: Linear, mode: int) -> Tiling:
        return choose_product_tiling(max(rows, 2) if adapted else rows, part.weight, mode, adapted)

    windows = [layer.attention.window for layer in w.layers]
    if None not in windows:
        width = min(width, max(window or 0 for window in windows))
    # Few rows: several warps a program, and fewer programs than there is room for, because somebody has to merge them.
    # Programs without keys cost less than nothing: they keep the next product's from reading weights at the same time.
    few = rows * kv_heads <= 64
    large = head_dim > 128  # one tile of keys takes the room of two
    # with more warps and a tile in registers attention is faster, but the programs of the next product have less room:
    # that pays where they need little
    eight = attn.cache.element_size() == 1
    wide = few and width <= 16384  # of longer sequences every program has enough keys to read alone
    one = rows == 1 and wide and not eight
    long = rows * kv_heads <= (16 if eight else 64) and not (wide or large)  # few programs, which must ask for much
    weights = layer.o.weight.shape.numel()
    light = weights <= 1 << (22 if rows == 1 else 21)
    alone = w.tp.world == 1
    splits = choose_splits(rows * kv_heads, max(width // 2, 2048) if few else width, None)
    if one:
        splits = max(1, min(splits, (256 if light else 512) // kv_heads))
    # with so many rows half the shares will do, and the next product leaves room for more warps
    shared = wide and rows * kv_heads > 32 and not (one or light or large or eight) and weights <= 1 << 22
    if shared:
        splits = max(1, splits // 2)
    # programs for several rows: where they are as many as will run at once, a share is worth a program of its own
    programs, least, ahead = rows * kv_heads, 0, 0
    filling = 192 <= programs <= 256 and not (few or eight or latent)
    deep = filling and head_dim in (64, 128) and not light
    if deep:
        splits, least = 2 * splits, 512
    elif filling and large:
        least = 128
    elif filling and light:
        ahead = 128
    if isinstance(attn, LatentDecode):
        splits = choose_latent_splits(rows, attn.heads)
    behind = 0  # memory rests while one row's attention computes; of wide plain weights there is too much to read
    if one and mlp is not None:
        behind = 4 << 20
        if isinstance(mlp.up.weight, Tensor):
            behind = 2 << 20 if light else 0
    up = down = o = product(layer.o, RESIDUAL)
    wide_gate = None
    if mlp is not None:
        up, down = product(mlp.up, GATED if mlp.gated else STORE), product(mlp.down, RESIDUAL)
        if alone and mlp.gated and mlp.up.bias is None and isinstance(mlp.up.weight, Tensor) and not adapted:
            wide_gate = choose_wide_gate(rows, *mlp.up.weight.shape)
    plain_head = alone and w.head is not None and w.head_bias is None
    qkv = product(layer.qkv, STORE)
    if large and isinstance(layer.qkv.weight, Tensor) and qkv.late:  # they make less of room that is left
        qkv = replace(qkv, stages=2 * qkv.stages - 1)
    chosen = StepTiling(
        qkv,
        o,
        up,
        down,
        o if w.head is None else product(Linear(w.head), ARGMAX),
        splits,
        tile=128
        if deep or (eight and not (few or large))
        else 64
        if (wide or long or (few and light)) and not (large or shared)
        else 32,
        warps=4
        if one or large or long or shared or deep or (few and light) or (eight and not few)
        else 2
        if wide
        else 1,
        stages=3 if long or (eight and not (few or large)) else 2,
        early=one or (few and light and not large),
        ahead=ahead,
        least=least,
        behind=behind,
        wide_gate=wide_gate,
        wide_head=choose_wide_head(rows) if plain_head and not adapted else None,
        router=None if experts is None else product(experts.router, STORE),
    )
    return replace(chosen, up=replace(up, late=3)) if _may_foresee(w, chosen) else chosen


def _may_foresee(w: ProgramWeights, t: StepTiling) -> bool:
    """Whether `up` may multiply before attention has ended: rows that were there before qkv let attention begin, by
    copies past the L1, and without a place for shares, which qkv's may still need.
    """
    plain = all(
        layer.layout is Layout.PARALLEL_SHARED
        and not layer.norms[0].folds
        and isinstance(layer.ffn, MlpWeights)
        and isinstance(layer.qkv.weight, Tensor)
        and isinstance(layer.ffn.up.weight, Tensor)
        for layer in w.layers
    )
    own = t.up.whole and not (t.up.vector or t.qkv.vector)  # kernels that know of it
    return plain and own and t.qkv.late in (1, 2) and t.up.split == 1


@dataclass(frozen=True, slots=True)
class _Products:
    """A layer's products. up, down: of the MLP, or of the shared expert.   router: of experts."""

    qkv: Product
    o: Product
    up: Product | None
    down: Product | None
    router: Product | None = None


class DecodeProgram:
    """The fused step for exactly `rows` rows, over static buffers. One instance per graph size; weights are shared."""

    def __init__(
        self, weights: ProgramWeights, rows: int, width: int, slots: Tensor, positions: Tensor, *,
        tiling: StepTiling | None = None, pdl: bool = True, shared: SharedPlan | None = None,
        stream: Tensor | None = None, adapters: Tensor | None = None,
    ) -> None:  # fmt: skip
        """slots, positions: [rows] int32 views of the uploaded inputs.   width: the longest sequence that may come.

        shared: where a plan for the rows' common keys stands, if the step is to use one.   stream: [rows, hidden] of a
        pipeline's stage: there stands what the stage before has computed, and then what this one has.
        adapters: [slots] int32, the adapter of each slot, if rows may have adapters, which the weights must take.
        """
        self.weights, self.rows, self._pdl = weights, rows, pdl
        self._slots, self._positions, self._shared = slots, positions, shared
        adapted = adapters is not None
        if adapted and not weights.takes_adapters:
            raise ValueError("The fused step does not know what adapters add to these weights.")
        self._tiling = t = choose_step_tiling(weights, rows, width, adapted) if tiling is None else tiling
        if t.up.late == 3 and not _may_foresee(weights, t):
            raise ValueError("The first product of the MLP cannot begin before attention has ended.")
        self._alone, self._few = weights.tp.world == 1, rows <= MAX_ROWS
        self._adapters = None if adapters is None else _AdapterRows(weights, rows, adapters)
        self._products = [self._layer_products(layer) for layer in weights.layers]
        self._head = None
        if weights.head is not None:
            change = self._change(weights.head_lora)
            self._head = Product(weights.head, weights.head_bias, ARGMAX, t.head, change=change)
        elif stream is None:
            raise ValueError("A stage without a head needs room for its stream.")
        first, attn, hidden = self._products[0], weights.layers[0].attention, weights.hidden_size
        every = [self._head, *(x for p in self._products for x in (p.qkv, p.o, p.up, p.down, p.router))]
        products = [p for p in every if p is not None]
        device = attn.cache.device

        def empty(*shape: int, dtype: torch.dtype = weights.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        fp32, int32 = torch.float32, torch.int32
        tile_rows = max(16, 1 << (rows - 1).bit_length())
        part = max(p.tiling.split * tile_rows * p.weight.shape[0] if p.tiling.split > 1 else 1 for p in products)
        tiles = max(fall_tiles(hidden), *(p.tiles for p in products))
        if t.wide_head is not None and weights.head is not None:
            tiles = max(tiles, -(-weights.head.shape[0] // t.wide_head.outputs))
        self._stream = Stream(
            rows, hidden, empty(rows, hidden) if stream is None else stream, empty(rows, hidden),
            empty(rows, tiles, dtype=fp32),
            empty(part, dtype=fp32), torch.zeros(tiles, dtype=int32, device=device), empty(rows, tiles, dtype=fp32),
            empty(rows, tiles, dtype=int32), empty(rows, tiles, dtype=fp32),
        )  # fmt: skip
        self._x = empty(rows, hidden)  # normalised rows
        self._rounded: Rounded | None = None  # the same for products that take them so
        if not self._few and all(_takes_rounded(p) for p in products if p is not self._head):
            self._rounded = Rounded(empty(rows, hidden, dtype=torch.float8_e4m3fn), empty(rows, 1, dtype=fp32))
        self._branch = empty(rows, hidden)  # what a branch computed, where it does not go to the stream at once
        self._qkv = empty(rows, first.qkv.outputs)
        self._context = empty(rows, first.o.weight.shape[1])
        inner = [x.outputs for p in self._products for x in (p.up, p.router) if x is not None]
        self._inner = empty(rows * max(inner))
        self._latent: LatentRows | None = None
        if isinstance(attn, LatentDecode):
            self._latent = LatentRows.of(attn, slots, positions, (), t.splits)
        else:
            kv_heads, head_dim = attn.cache.shape[2], attn.cache.shape[4]
            self._part = empty(rows * attn.heads * t.splits, head_dim, dtype=fp32)
            self._lse = empty(rows * attn.heads * t.splits, dtype=fp32)
            self._arrived = torch.zeros(rows * kv_heads, dtype=int32, device=device)
        self._chosen: ChosenExperts | None = None
        moe = next((layer.ffn for layer in weights.layers if isinstance(layer.ffn, MoeWeights)), None)
        packed = moe is not None and (isinstance(moe.gate_up, PackedStack) or isinstance(moe.down, PackedStack))
        fused = moe is not None and not (packed and moe.shared is not None)
        if moe is not None and fused and rows == 1 and moe.router.weight.shape[0] <= MOST_EXPERTS:
            width = moe.top_k * moe.down.shape[2] + (0 if moe.shared is None else moe.shared.down.weight.shape[1])
            experts = moe.router.weight.shape[0]
            self._chosen = ChosenExperts.of(experts, moe.top_k, width, weights.dtype, device, moe.down)
        self._final = empty(rows, hidden)
        self._behind: tuple[Rows, Tensor] | None = None  # the last norm as the head takes it, and as it left the step
        self._nominees = empty(rows, 3, dtype=fp32)

    def _layer_products(self, layer: LayerWeights) -> _Products:
        t, ffn = self._tiling, layer.ffn

        def product(part: Linear, mode: int, tiling: Tiling, act: str | None = None, scale: float = 1.0) -> Product:
            return Product(part.weight, part.bias, mode, tiling, act, scale, self._change(part.lora))

        def back(part: Linear, tiling: Tiling) -> Product:
            # straight to the stream where nothing comes between
            mode = RESIDUAL if self._alone and self._few and layer.layout not in _BRANCH_NORMS else STORE
            return product(part, mode, tiling, scale=layer.scale)

        qkv, o = product(layer.qkv, STORE, t.qkv), back(layer.o, t.o)
        if isinstance(ffn, MoeWeights):
            if t.router is None:
                raise ValueError("The tiling has none for a router.")
            router, up, down = product(ffn.router, STORE, t.router), None, None
            if ffn.shared is not None:
                parts, rows = ffn.shared, self.rows
                adapted = self._adapters is not None
                up = product(parts.up, GATED, choose_product_tiling(rows, parts.up.weight, GATED, adapted), parts.act)
                down = back(parts.down, choose_product_tiling(rows, parts.down.weight, RESIDUAL, adapted))
            return _Products(qkv, o, up, down, router)
        up = product(ffn.up, GATED if ffn.gated else STORE, t.up, ffn.act)
        return _Products(qkv, o, up, back(ffn.down, t.down))

    def _change(self, low_rank: LowRank | None) -> Change | None:
        """What adapters add to a product, where rows have them."""
        return None if low_rank is None or self._adapters is None else self._adapters.change(low_rank)

    def run(
        self, table: SlotTable, *, token_ids: Tensor | None = None, hidden: Tensor | None = None,
        turns: Tensor | None = None, drawing: Drawing | None = None,
    ) -> None:  # fmt: skip
        """Queue the step. token_ids: [rows] int32 receives the greedy ids (also written to the table); hidden:
        [rows, hidden] receives the normalised last hidden states. Both None: of a stage without a head.

        turns: as for `choose_tokens`; `token_ids` is a ring then.   drawing: the ids are drawn instead, by every rank
        from the same logits.
        """
        if drawing is not None and hidden is None:
            hidden = self._final
        x = self._walk(table)
        if hidden is not None:
            if isinstance(x, Folded):
                normalize_rows(x, hidden, pdl=self._pdl)
            elif isinstance(x, Tensor):
                hidden.copy_(x)
            self._behind = x, hidden
        if token_ids is None:
            return
        if drawing is None:
            self._choose(x, table, token_ids, turns)
        elif hidden is not None:
            self._draw(hidden, table, token_ids, turns, drawing)

    def finish(
        self, table: SlotTable, token_ids: Tensor, turns: Tensor, masks: tuple[Tensor, Tensor],
        drawing: Drawing | None = None,
    ) -> None:  # fmt: skip
        """Queue what follows a step that left hidden states, on one rank: tokens that masks allow, out of the very
        logits that `run` would take them from, and to where it would write them.

        masks: index and bits, as for `argmax_tiles`.   The rest: as for `run`.
        """
        if self._behind is None or not self._alone:
            raise RuntimeError("No step of one rank has left hidden states.")
        x, hidden = self._behind
        if drawing is None:
            self._choose(x, table, token_ids, turns, masks)
        else:
            self._draw(hidden, table, token_ids, turns, drawing, masks)

    def _draw(
        self, hidden: Tensor, table: SlotTable, token_ids: Tensor, turns: Tensor | None, drawing: Drawing,
        masks: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        draw_tokens(
            self._logits(hidden), self._slots, self._positions, drawing, table.tokens, table.device_lengths, token_ids,
            turns, masks,
        )  # fmt: skip

    def _walk(self, table: SlotTable) -> Rows:
        """All layers; returns the rows behind the last norm."""
        w, t = self.weights, self._tiling
        rows: DecodeRows | LatentRows
        if self._latent is not None:
            rows = replace(self._latent, tables=table.tables)
        else:
            rows = DecodeRows(
                self._slots, self._positions, table.tables, self._part, self._lse, self._arrived,
                t.splits, t.tile, t.warps, t.stages, t.early, t.ahead, self._shared,
                t.least, t.late,
            )  # fmt: skip
        entries = [_entry(layer, p) for layer, p in zip(w.layers, self._products, strict=True)]
        if self._adapters is not None:
            self._adapters.look_up(self._slots)
        x = self._enter(table, *entries[0])
        # a stage without a head hands on the stream itself: no norm follows its last layer
        for layer, p, following in zip(w.layers, self._products, [*entries[1:], (w.norm, self._head)], strict=True):
            x = self._layer(layer, p, x, rows, *following)
        return x

    def _layer(
        self, layer: LayerWeights, p: _Products, x: Rows, rows: DecodeRows | LatentRows, after: NormWeights | None,
        reader: Product | None,
    ) -> Rows:  # fmt: skip
        """after: the norm behind the layer, whose result the product `reader` takes; None: not a product alone."""
        norms, h, moe = layer.norms, self._stream.h, isinstance(layer.ffn, MoeWeights)
        inner = p.up  # what reads the norm before the MLP; experts of several rows take whole ones
        if moe:
            inner = None if self._chosen is None or self._adapters is not None else p.router
        qkv = self._product(p.qkv, x, self._qkv)
        if isinstance(layer.attention, LatentDecode):
            if not isinstance(rows, LatentRows):
                raise RuntimeError("All layers have latent attention, or none.")
            decode_latent(qkv, self._context, layer.attention, rows, pdl=self._pdl)
        elif isinstance(rows, DecodeRows):
            behind = None if p.up is None else _first_reads(p.up, self._tiling.behind)
            decode_attention(qkv, self._context, layer.attention, rows, pdl=self._pdl, behind=behind)
        match layer.layout:
            case Layout.PRE:
                x = self._add(p.o, self._context, None, norms[1], inner)
                return self._ffn(layer, p, x, None, after, reader)
            case Layout.SANDWICH:
                x = self._add(p.o, self._context, norms[1], norms[2], inner)
                return self._ffn(layer, p, x, norms[3], after, reader)
            case Layout.BRANCH:
                x = self._add(p.o, self._context, norms[0], None, inner)
                return self._ffn(layer, p, x, norms[1], after, reader)
            case Layout.POST:  # the norm's result is the stream
                x = self._add(p.o, self._context, None, norms[0], None, out=h)
                x = self._ffn(layer, p, x, None, norms[1], None, out=h)
                return x if after is None else self._join(None, None, after)
            case Layout.PARALLEL:
                x = self._join(None, None, norms[1])
        # both branches read the stream as it was
        x = self._rise(p, x) if not moe else x
        self._add(p.o, self._context, None, None, None)
        return self._ffn(layer, p, x, None, after, reader, multiplied=not moe)

    def _ffn(
        self, layer: LayerWeights, p: _Products, x: Rows, branch: NormWeights | None, after: NormWeights | None,
        reader: Product | None, *, out: Tensor | None = None, multiplied: bool = False,
    ) -> Rows:  # fmt: skip
        """The feed-forward part of rows x, to the stream. multiplied: x is what `up` has computed."""
        ffn = layer.ffn
        if isinstance(ffn, MlpWeights):
            if p.down is None:
                raise RuntimeError("An MLP without its second product.")
            y = x if multiplied and not isinstance(x, Folded) else self._rise(p, x)
            return self._add(p.down, y, branch, after, reader, out=out)
        if p.router is None:
            raise RuntimeError("Experts without a router.")
        if self._chosen is not None and not isinstance(x, Rounded):
            return self._experts_of_one(layer, ffn, p.router, self._chosen, x, branch, after, reader, out)
        if not isinstance(x, Tensor):
            raise RuntimeError("Experts take rows that are normalised.")
        logits = self._product(p.router, x, self._room(p.router))
        y, weights, home = routed_mlp(
            x, logits, ffn.gate_up, ffn.down, ffn.top_k, ffn.renormalize, ffn.act, pdl=self._pdl
        )
        if p.down is not None:
            if branch is None and out is None:
                self._add(p.down, self._rise(p, x), None, None, None)
            else:  # the norm is of both together
                total = sum_chosen(y, weights, home)
                z = self._product(replace(p.down, mode=STORE, scale=1.0), self._rise(p, x), self._branch)
                return self._collect(total + z, branch, after, layer.scale, out)
        if self._alone:
            return self._join(y, branch, after, None, Chosen(weights, home), layer.scale, out)
        return self._collect(sum_chosen(y, weights, home), branch, after, layer.scale, out)

    def _experts_of_one(
        self, layer: LayerWeights, ffn: MoeWeights, router: Product, room: ChosenExperts, x: Tensor | Folded,
        branch: NormWeights | None, after: NormWeights | None, reader: Product | None, out: Tensor | None,
    ) -> Rows:  # fmt: skip
        """The feed-forward part of one row with experts: what `_ffn` does."""
        s, pdl, weight, shared = self._stream, self._pdl, router.weight, ffn.shared
        chooser = None
        if router.change is not None or not isinstance(weight, Tensor):
            choose_by_logits(self._product(router, x, self._room(router)), room, ffn.renormalize, pdl)
        else:
            soon = None if reader is None or not isinstance(reader.weight, Tensor) else reader.weight
            chooser = Router(weight, ffn.renormalize, soon)
        up, down = (None, None) if shared is None else (shared.up.weight, shared.down.weight)
        if not (up is None or isinstance(up, Tensor)) or not (down is None or isinstance(down, Tensor)):
            raise RuntimeError("A shared expert is stored as plain numbers.")
        rise(x, ffn.gate_up, up, ffn.act, room, pdl, chooser)
        if not self._alone or branch is not None:
            fall(ffn.down, down, room, s, self._branch, pdl=pdl)
            return self._collect(self._branch, branch, after, layer.scale, out)
        if after is None or not self._folds(after, reader):
            fall(ffn.down, down, room, s, scale=layer.scale, pdl=pdl)
            return s.h if after is None else self._join(None, None, after, out=out)
        tiles = fall(ffn.down, down, room, s, scale=layer.scale, next_weight=after.weight, pdl=pdl)
        return Folded(s.scaled, s.squares, tiles, after.eps)

    def _rise(self, p: _Products, x: Rows) -> Tensor | Rounded:
        """The first product of an MLP, or of the shared expert."""
        if p.up is None:
            raise RuntimeError("An MLP without its first product.")
        return self._multiply(p.up, x, self._room(p.up), p.down)

    def _room(self, p: Product) -> Tensor:
        """[rows, outputs] for what is between two products."""
        return self._inner[: self.rows * p.outputs].view(self.rows, p.outputs)

    def _enter(self, table: SlotTable, after: NormWeights | None, reader: Product | None) -> Rows:
        """The embeddings of the rows' tokens as the stream, or what stands there, behind the first norm."""
        w, s = self.weights, self._stream
        if w.entrance is None:
            return s.h if after is None else self._join(None, None, after, reader, first=True)
        folds = after is not None and self._folds(after, reader)
        following = None
        if folds and after is not None and after.weight is not None:
            following = (after.weight, s.scaled, s.squares, 1)
        chosen = None if self._adapters is None else self._adapters.rows
        embed_rows(self._slots, self._positions, table.tokens, w.entrance, s.h, following, chosen)
        if following is not None and after is not None:
            return Folded(s.scaled, s.squares, 1, after.eps)
        if not self._alone:
            total = w.tp.all_reduce(s.h)
            if total is not s.h:
                s.h.copy_(total)
        return s.h if after is None else self._join(None, None, after, reader)

    def _folds(self, norm: NormWeights, reader: Product | None) -> bool:
        """Whether a norm is left to the products before and behind it."""
        return self._alone and self._few and norm.folds and reader is not None

    def _product(self, p: Product, x: Rows, out: Tensor) -> Tensor:
        """`_multiply` whose result nobody takes rounded."""
        y = self._multiply(p, x, out)
        if isinstance(y, Rounded):
            raise RuntimeError("A product was rounded for nobody.")
        return y

    def _multiply(self, p: Product, x: Rows, out: Tensor, reader: Product | None = None) -> Tensor | Rounded:
        """A product with its activation, by our own kernels where they are as fast as others.

        reader: the product that takes the result, which may be rounded for it.
        """
        if isinstance(x, Rounded):
            if not isinstance(p.weight, Float8Weight):
                raise RuntimeError("Rows are rounded for products of 8-bit floats only.")
            return self._activated(p, rounded_product(x, p.weight, p.bias, out.dtype), reader)
        if self._few or (isinstance(p.weight, PackedWords) and self.rows <= MAX_PACKED_ROWS):
            run_product(p, self._stream, x, out, pdl=self._pdl)
            return out
        if isinstance(x, Folded):
            raise RuntimeError("A norm is folded into products of few rows only.")
        wide, weight = self._tiling.wide_gate, p.weight
        if p.mode == GATED and p.act is not None and wide is not None and isinstance(weight, Tensor):
            gated_product(x, weight, out, p.act, wide, pdl=self._pdl)
            return out
        if p.mode == GATED and p.act is not None and p.bias is None and p.change is None:  # noqa: SIM102
            if gated_rows(x, weight, p.act, out, self._pdl):
                return out
        if isinstance(weight, Tensor):
            y: Tensor = linear(x, weight, p.bias)
        else:
            y = many_rows(x, weight, p.bias, x.dtype, self._stream.arrived, self._pdl)
        if p.change is not None:
            _add_change(p.change, y, x)
        return self._activated(p, y, reader)

    def _activated(self, p: Product, y: Tensor, reader: Product | None) -> Tensor | Rounded:
        if p.act is None:
            return y
        if p.mode != GATED:
            done: Tensor = activate(y, p.act)
            return done
        if reader is not None and self._rounded is not None:
            return round_rows(y, act=p.act, pdl=self._pdl)
        gated: Tensor = activate_gated(y, p.act)
        return gated

    def _add(
        self, p: Product, x: Tensor | Rounded, branch: NormWeights | None, after: NormWeights | None,
        reader: Product | None, out: Tensor | None = None,
    ) -> Rows:  # fmt: skip
        """The product of x, behind the norm `branch`, to the stream, which is returned behind the norm `after`."""
        s = self._stream
        if p.mode != RESIDUAL:
            return self._collect(self._product(p, x, self._branch), branch, after, p.scale, out, reader)
        if isinstance(x, Rounded):
            raise RuntimeError("Rows are rounded where there are many.")
        if after is None or not self._folds(after, reader):
            run_product(p, s, x, s.h, pdl=self._pdl)
            return s.h if after is None else self._join(None, None, after, out=out)
        run_product(p, s, x, s.h, after.weight, pdl=self._pdl)
        return Folded(s.scaled, s.squares, p.tiles, after.eps)

    def _collect(
        self, y: Tensor, branch: NormWeights | None, after: NormWeights | None, scale: float, out: Tensor | None,
        reader: Product | None = None,
    ) -> Tensor | Rounded:  # fmt: skip
        """What this rank computed of a branch to the stream, after that of the others has been added."""
        tp, h = self.weights.tp, self._stream.h
        if self._alone:
            return self._join(y, branch, after, reader, None, scale, out)
        plain = branch is None and scale == 1.0 and out is None
        if plain and tp.one_shot is not None and tp.one_shot.accepts(y):  # noqa: SIM102 (what folds has a weight)
            if after is not None and after.folds and after.weight is not None:
                return tp.one_shot.sum_add_norm(y, h, after.weight, after.eps, pdl=self._pdl)
        return self._join(tp.all_reduce(y), branch, after, reader, None, scale, out)

    def _join(
        self, y: Tensor | None, branch: NormWeights | None, after: NormWeights | None, reader: Product | None = None,
        chosen: Chosen | None = None, scale: float = 1.0, out: Tensor | None = None, first: bool = False,
    ) -> Tensor | Rounded:  # fmt: skip
        """reader: the product that takes the result, if one does alone.   first: it begins the step, and so goes
        without PDL.
        """
        h, rounded = self._stream.h, self._rounded
        if (
            rounded is not None
            and reader is not None
            and reader is not self._head
            and after is not None
            and out is None
        ):
            join_rows(h, rounded, y, chosen, branch, after, scale, pdl=self._pdl and not first)
            return rounded
        out = self._x if out is None else out
        join_rows(h, out, y, chosen, branch, after, scale, pdl=self._pdl and not first)
        return h if after is None else out

    def _choose(
        self, x: Rows, table: SlotTable, token_ids: Tensor, turns: Tensor | None,
        masks: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """The most likely token of every row; of several ranks each names the best of its part of the vocabulary.

        masks: of one rank only; then this begins a piece of work, and so goes without PDL.
        """
        w, s, wide, pdl = self.weights, self._stream, self._tiling.wide_head, False
        first = self._pdl and masks is None
        if w.head is None or self._head is None:
            raise RuntimeError("This stage of the pipeline has no head.")
        if isinstance(x, Rounded):
            raise RuntimeError("Rows are rounded for products of 8-bit floats only.")
        if self._few:
            run_product(self._head, s, x, s.h, pdl=first, masks=masks)
            tiles, pdl = self._head.tiles, self._pdl
        elif isinstance(x, Folded):
            raise RuntimeError("A norm is folded into products of few rows only.")
        elif wide is not None:
            tiles = argmax_product(x, w.head, s.best, s.best_at, s.sums, wide, pdl=first, masks=masks)
        else:
            tiles = argmax_tiles(self._rank_logits(x), s.best, s.best_at, s.sums, masks)
        slots, positions, written = self._slots, self._positions, (table.tokens, table.device_lengths, token_ids, turns)
        if self._alone:
            choose_tokens(
                slots, positions, s.best, s.best_at, s.sums, tiles, w.vocab_size, *written, pdl=pdl,
                masked=masks is not None,
            )  # fmt: skip
            return
        nominate(s.best, s.best_at, s.sums, tiles, w.first_row, self._nominees)
        nominees = w.tp.all_gather(self._nominees, 0)
        elect(slots, positions, nominees, w.tp.world, w.vocab_size, *written)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] fp32, of all ranks."""
        w = self.weights
        logits = self._rank_logits(hidden)
        if w.tp.world > 1:
            logits = w.tp.all_gather(F.pad(logits, (0, w.head_rows - logits.shape[1])))[:, : w.vocab_size]
        if w.logit_scale != 1.0:
            logits = logits * w.logit_scale
        if w.logit_softcap is not None:
            logits = w.logit_softcap * torch.tanh(logits / w.logit_softcap)
        return logits

    def _rank_logits(self, hidden: Tensor) -> Tensor:
        """[rows, this rank's vocabulary] fp32."""
        if self._head is None:
            raise RuntimeError("This stage of the pipeline has no head.")
        logits: Tensor = linear(hidden, self.weights.head, self._head.bias, torch.float32)
        if self._head.change is not None:
            _add_change(self._head.change, logits, hidden)
        return logits


class _AdapterRows:
    """The rows' adapters of one program: looked up as its first kernel, then read by all products."""

    def __init__(self, weights: ProgramWeights, rows: int, by_slot: Tensor) -> None:
        parts = [part.lora for layer in weights.layers for part in layer.linears]
        every = [part for part in (*parts, weights.head_lora) if part is not None]
        self._by_slot, adapters = by_slot, max((len(part.a) for part in every), default=1)
        self.rows = torch.full((rows,), -1, dtype=torch.int32, device=by_slot.device)
        self._order = torch.zeros(1 + adapters, dtype=torch.int32, device=by_slot.device)
        size = max((room(part, rows) for part in every), default=1)
        self._small = torch.empty(size, dtype=torch.float32, device=by_slot.device)
        products = sum(counters(part, rows) for part in every)
        self._ready = torch.zeros(products, dtype=torch.int32, device=by_slot.device)
        self._next = 0

    def change(self, weights: LowRank) -> Change:
        """Of one more product, each of which has counters of its own."""
        first, self._next = self._next, self._next + counters(weights, len(self.rows))
        return Change(weights, self.rows, self._order, self._small, self._ready[first : self._next])

    def look_up(self, slots: Tensor) -> None:
        """slots: [rows] int32, -1 for padding."""
        look_up(slots, self._by_slot, self.rows, self._order, self._ready)


def _add_change(change: Change, y: Tensor, x: Tensor) -> None:
    """What adapters add to a product that knows nothing of them, in place."""
    add_lora(y, x, change.weights, RowView(change.rows, ()))


def _first_reads(p: Product, size: int) -> Behind | None:
    """The first rows of a product's weight, of a gated one of both halves, together no more than `size` bytes."""
    weight = p.weight
    stored = weight.words if isinstance(weight, PackedWords) else weight
    stored = stored.codes if isinstance(stored, Float8Weight) else stored
    stride = p.outputs * stored.stride(-2) * stored.element_size()
    blocks = stored.shape[0] if stored.dim() == 3 else 1
    chunks = p.weight.shape[0] // p.outputs * blocks
    each = min(size // chunks, stride) // PIECE * PIECE
    return Behind(stored, each, stride, chunks) if each and stride % 16 == 0 else None


def _takes_rounded(p: Product) -> bool:
    """Whether a product of many rows rounds its inputs, each row with a scale of its own."""
    weight = p.weight
    if not isinstance(weight, Float8Weight) or weight.inputs is None or p.change is not None:
        return False
    return weight.inputs.limit is None and weight.fixed is None


_BRANCH_NORMS = (Layout.SANDWICH, Layout.BRANCH)  # layouts that normalise a branch before it reaches the stream


def _entry(layer: LayerWeights, p: _Products) -> tuple[NormWeights | None, Product | None]:
    """The norm before a layer's attention, and the product that takes what is behind it."""
    if layer.layout in (Layout.POST, Layout.BRANCH):
        return None, None
    whole = layer.layout is Layout.PARALLEL_SHARED and isinstance(layer.ffn, MoeWeights)  # experts take it too
    return layer.norms[0], None if whole else p.qkv
