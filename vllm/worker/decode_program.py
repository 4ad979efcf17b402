"""The fused decode step of the common decoder: five kernels a layer for a few rows, seven for many.

It computes what `DecoderModel.forward` and `.logits` compute for one new token per row, for models of the usual shape:
pre-norm blocks with RMS norms, rotary attention with or without windows, a gated SiLU MLP, bf16, plain weights.
`read_weights` returns None for anything else, and the general path runs. With several ranks the partial sums behind
attention and MLP are added up between the kernels, so that norms are kernels of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.linear_method import UnquantizedLinearMethod
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Decoder, Mlp, Norm, Rope
from vllm.model_executor.models.traits import Model
from vllm.ops.activation import activate_gated
from vllm.ops.linear import linear
from vllm.ops.norm import rms_norm
from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.attention import choose_splits
from vllm.ops.triton.decode_attention import DecodeAttention, DecodeRows, decode_attention
from vllm.ops.triton.decode_linear import (
    ARGMAX,
    DTYPES,
    RESIDUAL,
    SILU,
    STORE,
    Product,
    Stream,
    Tiling,
    choose_tiling,
    run_product,
    supports,
)
from vllm.ops.triton.decode_step import (
    Drawing,
    argmax_tiles,
    choose_tokens,
    draw_tokens,
    elect,
    embed_rows,
    embed_share,
    nominate,
    normalize_rows,
)
from vllm.ops.triton.norm import add_rms_norm
from vllm.ops.triton.wide_linear import (
    WideTiling,
    argmax_product,
    choose_wide_gate,
    choose_wide_head,
    gated_product,
)
from vllm.worker.slot_table import SlotTable

MAX_ROWS = 64  # with more, cuBLAS reads the weights as fast as our own products and multiplies faster


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: weights [out, in], the norms before attention and MLP (offset included), and the attention's
    constants.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor
    attn_norm: Tensor
    ffn_norm: Tensor
    attention: DecodeAttention


@dataclass(frozen=True, slots=True)
class ProgramWeights:
    """All that the fused step reads of a model.

    embedding, head: this rank's rows, which begin at `first_row`.   head_rows: of every rank, padding included.
    """

    layers: tuple[LayerWeights, ...]
    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    eps: float
    vocab_size: int
    first_row: int
    head_rows: int
    tp: TensorParallel


def _plain(linear: Any, mode: int) -> Tensor | None:
    """The linear layer's weight if it is an ordinary one that the kernels can read."""
    if not isinstance(linear.method, UnquantizedLinearMethod) or linear.packed is not None or linear.skip_bias_add:
        return None
    return linear.weight.data if supports(linear.weight.data, mode) else None


def _norm_computed(norm: Norm) -> Norm:
    return Norm("rms", norm.eps, norm.offset)


def _block_computed(block: BlockSpec) -> Block | None:
    """What the step computes of a layer: the spec rebuilt from the fields that are read, all others at their default.

    None for a layer of another kind.
    """
    if type(block) is not Block:
        return None
    attn, ffn = block.attn, block.ffn
    if type(attn) is not Attn or type(ffn) is not Mlp or type(attn.rope) is not Rope:
        return None
    rope = Rope(attn.head_dim, attn.rope.theta, scaling=attn.rope.scaling)  # these two through the table
    qk_norm = None if attn.qk_norm is None else _norm_computed(attn.qk_norm)
    return Block(
        Attn(
            attn.heads,
            attn.kv_heads,
            attn.head_dim,
            rope,
            scale=attn.scale,
            window=attn.window,
            qk_norm=qk_norm,
            qkv_bias=attn.qkv_bias,
        ),
        Mlp("silu", ffn.hidden),
        _norm_computed(block.norm),
    )


def computed(spec: Decoder) -> Decoder | None:
    """What the fused step computes of a decoder: `spec` again if it reads every field that is not at its default.

    None for layers of another kind. A field that is not named here is taken for its default, so that one which is
    added to a spec refuses the step, instead of being ignored by it.
    """
    blocks = tuple(_block_computed(block) for block in spec.blocks)
    if spec.norm is None or None in blocks:
        return None
    known = tuple(block for block in blocks if block is not None)
    # unit_head_rows: through the weights
    return Decoder(
        spec.vocab_size,
        spec.hidden_size,
        known,
        _norm_computed(spec.norm),
        spec.tied,
        unit_head_rows=spec.unit_head_rows,
    )


def _canonical(spec: Decoder) -> Decoder:
    """The same decoder, synonyms replaced."""

    def canonical(block: BlockSpec) -> BlockSpec:
        if type(block) is not Block or type(block.ffn) is not Mlp or block.ffn.act not in ("silu", "swish"):
            return block
        return replace(block, ffn=replace(block.ffn, act="silu"))

    return replace(spec, blocks=tuple(canonical(block) for block in spec.blocks))


def covers(spec: Decoder) -> bool:
    """Whether the fused step computes what a decoder of this spec does."""
    wanted = _canonical(spec)
    blocks = [block for block in spec.blocks if isinstance(block, Block)]
    if not blocks or computed(wanted) != wanted:
        return False
    eps = {spec.norm.eps if spec.norm is not None else None, *(block.norm.eps for block in blocks)}
    # buffers are made for the first layer, and serve all
    sizes = {(b.attn.heads, b.attn.kv_heads, b.attn.head_dim, b.ffn.hidden) for b in blocks}
    heads, kv_heads, head_dim, _ = next(iter(sizes))
    return len(eps) == len(sizes) == 1 and head_dim in (64, 128) and heads // kv_heads <= 16


def read_weights(model: Model, kv_caches: list[Tensor]) -> ProgramWeights | None:
    """The weights of a model that the fused step can run, else None."""
    if not isinstance(model, DecoderModel) or model.dtype not in DTYPES:
        return None
    spec = model.spec
    same = all(cache.dtype == model.dtype for cache in kv_caches)
    if spec.norm is None or not covers(spec) or not same or not (model.head.plain and model.embed.plain):
        return None
    eps = spec.norm.eps
    if not supports(model.head.weight.data, ARGMAX):
        return None
    head_rows = len(model.head.weight.data)
    if spec.vocab_size <= (model.tp.world - 1) * head_rows:  # the last rank has padding only
        return None
    layers = []
    blocks: Iterable[Any] = model.blocks
    for block in blocks:
        attn, ffn = block.attn, block.ffn
        products = (
            _plain(attn.qkv, STORE),
            _plain(attn.o, RESIDUAL),
            _plain(ffn.gate_up, SILU),
            _plain(ffn.down, RESIDUAL),
        )
        qkv, o, gate_up, down = products
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        qk_norm = attn.spec.qk_norm
        attention = DecodeAttention(
            heads=attn.heads,
            scale=attn.params.scale,
            cache=kv_caches[attn.place.tensor],
            cos_sin=attn.cos_sin,
            q_weight=None if qk_norm is None else attn.q_norm.weight.data,
            k_weight=None if qk_norm is None else attn.k_norm.weight.data,
            eps=0.0 if qk_norm is None else qk_norm.eps,
            offset=0.0 if qk_norm is None else qk_norm.offset,
            group=attn.place.group,
            window=attn.params.window,
        )
        bias = attn.qkv.bias.data if attn.spec.qkv_bias else None
        before_attn, before_ffn = (_norm_factor(norm) for norm in block.norms)
        layers.append(LayerWeights(qkv, bias, o, gate_up, down, before_attn, before_ffn, attention))
    factor = _norm_factor(model.norm)
    first_row = model.tp.rank * head_rows
    head = model.head.weight.data[: spec.vocab_size - first_row]
    return ProgramWeights(
        tuple(layers),
        model.embed.weight.data,
        head,
        factor,
        eps,
        spec.vocab_size,
        first_row,
        head_rows,
        model.tp,
    )


def _norm_factor(norm: Any) -> Tensor:
    """What the normalised row is multiplied by; kept in fp32 if an offset is added, to lose nothing."""
    weight: Tensor = norm.weight.data
    return weight if norm.offset == 0.0 else weight.float() + norm.offset


@dataclass(frozen=True, slots=True)
class StepTiling:
    """How every kernel of a step is cut: its products, and the attention's splits, keys at a time, warps and stages.

    early: as in `DecodeRows`.   wide_gate, wide_head: for many rows; None leaves these products to cuBLAS.
    """

    qkv: Tiling
    o: Tiling
    gate_up: Tiling
    down: Tiling
    head: Tiling
    splits: int
    tile: int
    warps: int
    stages: int
    early: bool = False
    wide_gate: WideTiling | None = None
    wide_head: WideTiling | None = None


def choose_step_tiling(w: ProgramWeights, rows: int, width: int) -> StepTiling:
    """The tiling for `rows` rows of sequences of up to `width` tokens."""
    layer, kv_heads = w.layers[0], w.layers[0].attention.cache.shape[2]

    def product(weight: Tensor, mode: int) -> Tiling:
        return choose_tiling(rows, weight.shape[0] // (2 if mode == SILU else 1), weight.shape[1], mode)

    windows = [layer.attention.window for layer in w.layers]
    if None not in windows:
        width = min(width, max(window or 0 for window in windows))
    # Few rows: several warps a program, and fewer programs than there is room for, because somebody has to merge them.
    # Programs without keys cost less than nothing: they keep the next product's from reading weights at the same time.
    few = rows * kv_heads <= 64
    # with more warps and a tile in registers attention is faster, but the programs of the next product have less room:
    # that pays where they need little
    light = layer.o.numel() <= 1 << (22 if rows == 1 else 21)
    alone = w.tp.world == 1
    splits = choose_splits(rows * kv_heads, max(width // 2, 2048) if few else width, None)
    return StepTiling(
        product(layer.qkv, STORE),
        product(layer.o, RESIDUAL),
        product(layer.gate_up, SILU),
        product(layer.down, RESIDUAL),
        product(w.head, ARGMAX),
        splits,
        tile=64 if few else 32,
        warps=(4 if light else 2) if few else 1,
        stages=2,
        early=few and light,
        wide_gate=choose_wide_gate(rows, *layer.gate_up.shape) if alone else None,
        wide_head=choose_wide_head(rows) if alone else None,
    )


class DecodeProgram:
    """The fused step for exactly `rows` rows, over static buffers. One instance per graph size; weights are shared."""

    def __init__(
        self, weights: ProgramWeights, rows: int, width: int, slots: Tensor, positions: Tensor, *,
        tiling: StepTiling | None = None, pdl: bool = True, shared: SharedPlan | None = None,
    ) -> None:  # fmt: skip
        """slots, positions: [rows] int32 views of the uploaded inputs.   width: the longest sequence that may come.

        shared: where a plan for the rows' common keys stands, if the step is to use one.
        """
        self.weights, self.rows, self._pdl = weights, rows, pdl
        self._slots, self._positions, self._shared = slots, positions, shared
        first = weights.layers[0]
        device, hidden = weights.embedding.device, weights.embedding.shape[1]
        self._tiling = t = choose_step_tiling(weights, rows, width) if tiling is None else tiling
        alone = weights.tp.world == 1
        back = RESIDUAL if alone else STORE  # of products that go back to the stream
        self._products = [
            (
                Product(layer.qkv, layer.qkv_bias, STORE, alone, t.qkv),
                Product(layer.o, None, back, False, t.o),
                Product(layer.gate_up, None, SILU, alone, t.gate_up),
                Product(layer.down, None, back, False, t.down),
            )
            for layer in weights.layers
        ]
        self._head = Product(weights.head, None, ARGMAX, alone, t.head)
        products = [*self._products[0], self._head]

        def empty(*shape: int, dtype: torch.dtype = weights.embedding.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        fp32, int32 = torch.float32, torch.int32
        tile_rows = max(16, 1 << (rows - 1).bit_length())
        part = max(p.tiling.split * tile_rows * p.outputs if p.tiling.split > 1 else 1 for p in products)
        tiles = max(p.tiles for p in products)
        if t.wide_head is not None:
            tiles = max(tiles, -(-weights.head.shape[0] // t.wide_head.outputs))
        self._stream = Stream(
            rows, hidden, weights.eps, empty(rows, hidden), empty(part, dtype=fp32),
            torch.zeros(tiles, dtype=int32, device=device), empty(rows, tiles, dtype=fp32),
            empty(rows, tiles, dtype=int32), empty(rows, tiles, dtype=fp32),
        )  # fmt: skip
        self._scaled = (empty(rows, hidden), empty(rows, hidden))  # before attention, before the MLP
        self._squares = tuple(empty(rows, hidden, dtype=fp32) for _ in range(2))
        attn = first.attention
        kv_heads, head_dim = attn.cache.shape[2], attn.cache.shape[4]
        self._qkv = empty(rows, first.qkv.shape[0])
        self._context = empty(rows, attn.heads * head_dim)
        self._mlp = empty(rows, first.down.shape[1])
        self._part = empty(rows * attn.heads * t.splits, head_dim, dtype=fp32)
        self._lse = empty(rows * attn.heads * t.splits, dtype=fp32)
        self._arrived = torch.zeros(rows * kv_heads, dtype=int32, device=device)
        self._final = empty(rows, hidden)
        self._nominees = empty(rows, 3, dtype=fp32)

    def run(
        self, table: SlotTable, *, token_ids: Tensor | None = None, hidden: Tensor | None = None,
        turns: Tensor | None = None, drawing: Drawing | None = None,
    ) -> None:  # fmt: skip
        """Queue the step. token_ids: [rows] int32 receives the greedy ids (also written to the table); hidden:
        [rows, hidden] receives the normalised last hidden states.

        turns: as for `choose_tokens`; `token_ids` is a ring then.   drawing: the ids are drawn instead, by every rank
        from the same logits.
        """
        if drawing is not None and hidden is None:
            hidden = self._final
        greedy = None if drawing is not None else token_ids
        if self.weights.tp.world > 1:
            run = self._run_ranks
        else:
            run = self._run_few if self.rows <= MAX_ROWS else self._run_many
        run(table, greedy, hidden, turns)
        if drawing is not None and token_ids is not None and hidden is not None:
            draw_tokens(self._logits(hidden), self._slots, self._positions, drawing, table.tokens, token_ids, turns)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] fp32, of all ranks."""
        w = self.weights
        part: Tensor = linear(hidden, w.head, None, torch.float32)
        if w.tp.world == 1:
            return part
        return w.tp.all_gather(F.pad(part, (0, w.head_rows - part.shape[1])))[:, : w.vocab_size]

    def _attention_rows(self, table: SlotTable) -> DecodeRows:
        t = self._tiling
        return DecodeRows(
            self._slots, self._positions, table.tables, self._part, self._lse, self._arrived,
            t.splits, t.tile, t.warps, t.stages, t.early, self._shared,
        )  # fmt: skip

    def _run_many(
        self, table: SlotTable, token_ids: Tensor | None, hidden: Tensor | None, turns: Tensor | None
    ) -> None:
        """Norms are kernels of their own; cuBLAS multiplies where nothing can be folded into the product."""
        w, h, rows, tokens, t = self.weights, self._stream.h, self._attention_rows(table), table.tokens, self._tiling
        scaled, squares, s, pdl = self._scaled[0], self._squares[0], self._stream, self._pdl
        embed_rows(self._slots, self._positions, tokens, w.embedding, w.layers[0].attn_norm, h, scaled, squares, 1)
        x = rms_norm(h, w.layers[0].attn_norm, w.eps)
        for i, layer in enumerate(w.layers):
            after = w.layers[i + 1].attn_norm if i + 1 < len(w.layers) else w.final_norm
            qkv = linear(x, layer.qkv, layer.qkv_bias)
            decode_attention(qkv, self._context, layer.attention, rows, pdl=pdl)
            x, h = add_rms_norm(linear(self._context, layer.o), h, layer.ffn_norm, w.eps, pdl=pdl)
            if t.wide_gate is None:
                mlp = activate_gated(linear(x, layer.gate_up), "silu")
            else:
                mlp = self._mlp
                gated_product(x, layer.gate_up, mlp, t.wide_gate, pdl=pdl)
            x, h = add_rms_norm(linear(mlp, layer.down), h, after, w.eps, pdl=pdl)
        if hidden is not None:
            hidden.copy_(x)
        if token_ids is None:
            return
        if t.wide_head is None:
            tiles = argmax_tiles(linear(x, w.head, None, torch.float32), s.best, s.best_at, s.sums)
        else:
            tiles = argmax_product(x, w.head, s.best, s.best_at, s.sums, t.wide_head, pdl=pdl)
        choose_tokens(
            self._slots, self._positions, s.best, s.best_at, s.sums, tiles, w.vocab_size, tokens, token_ids, turns
        )

    def _run_few(self, table: SlotTable, token_ids: Tensor | None, hidden: Tensor | None, turns: Tensor | None) -> None:
        """Norms, activation and argmax folded into our own products."""
        w, s, pdl = self.weights, self._stream, self._pdl
        attn_in, mlp_in = self._scaled
        before_attn, before_mlp = self._squares
        down_tiles, o_tiles = self._products[0][3].tiles, self._products[0][1].tiles
        rows, tokens = self._attention_rows(table), table.tokens
        embed_rows(
            self._slots,
            self._positions,
            tokens,
            w.embedding,
            w.layers[0].attn_norm,
            s.h,
            attn_in,
            before_attn,
            down_tiles,
        )
        for i, (layer, (qkv, o, gate_up, down)) in enumerate(zip(w.layers, self._products, strict=True)):
            after = w.layers[i + 1].attn_norm if i + 1 < len(w.layers) else w.final_norm
            run_product(qkv, s, attn_in, self._qkv, squares_in=(before_attn, down_tiles), pdl=pdl)
            decode_attention(self._qkv, self._context, layer.attention, rows, pdl=pdl)
            run_product(o, s, self._context, s.h, None, layer.ffn_norm, mlp_in, before_mlp, pdl=pdl)
            run_product(gate_up, s, mlp_in, self._mlp, squares_in=(before_mlp, o_tiles), pdl=pdl)
            run_product(down, s, self._mlp, s.h, None, after, attn_in, before_attn, pdl=pdl)
        if hidden is not None:
            normalize_rows(attn_in, before_attn, down_tiles, w.eps, hidden, pdl=pdl)
        if token_ids is not None:
            run_product(self._head, s, attn_in, attn_in, squares_in=(before_attn, down_tiles), pdl=pdl)
            choose_tokens(
                self._slots, self._positions, s.best, s.best_at, s.sums, self._head.tiles, w.vocab_size, tokens,
                token_ids, turns, pdl=pdl,
            )  # fmt: skip

    def _run_ranks(
        self, table: SlotTable, token_ids: Tensor | None, hidden: Tensor | None, turns: Tensor | None
    ) -> None:
        """One of several ranks: the ranks' sums are made after attention, after the MLP and of the embedding."""
        w, s, tp, rows = self.weights, self._stream, self.weights.tp, self._attention_rows(table)
        embed_share(self._slots, self._positions, table.tokens, w.embedding, w.first_row, s.h)
        h = tp.all_reduce(s.h)
        x, partial = rms_norm(h, w.layers[0].attn_norm, w.eps), self._scaled[0]
        for i, (layer, (qkv, o, gate_up, down)) in enumerate(zip(w.layers, self._products, strict=True)):
            after = w.layers[i + 1].attn_norm if i + 1 < len(w.layers) else w.final_norm
            decode_attention(self._product(qkv, x, self._qkv), self._context, layer.attention, rows, pdl=self._pdl)
            x = self._join(self._product(o, self._context, partial), h, layer.ffn_norm)
            x = self._join(self._product(down, self._product(gate_up, x, self._mlp), partial), h, after)
        if hidden is not None:
            hidden.copy_(x)
        if token_ids is not None:
            self._vote(x, table.tokens, token_ids, turns)

    def _join(self, partial: Tensor, h: Tensor, norm: Tensor) -> Tensor:
        """Add what the ranks have computed to the stream h, and normalise it."""
        w = self.weights
        if w.tp.one_shot is not None and w.tp.one_shot.accepts(partial):
            return w.tp.one_shot.sum_add_norm(partial, h, norm, w.eps, pdl=self._pdl)
        return add_rms_norm(w.tp.all_reduce(partial), h, norm, w.eps)[0]

    def _product(self, p: Product, x: Tensor, out: Tensor) -> Tensor:
        """One product by our own kernel, into `out`, or by cuBLAS where there are many rows."""
        if self.rows <= MAX_ROWS:
            run_product(p, self._stream, x, out, pdl=self._pdl)
            return out
        y: Tensor = linear(x, p.weight, p.bias)
        return activate_gated(y, "silu") if p.mode == SILU else y

    def _vote(self, x: Tensor, tokens: Tensor, token_ids: Tensor, turns: Tensor | None) -> None:
        """Each rank finds the most likely token of its part of the vocabulary; all choose among these."""
        w, s = self.weights, self._stream
        if self.rows <= MAX_ROWS:
            run_product(self._head, s, x, x, pdl=self._pdl)
            tiles = self._head.tiles
        else:
            tiles = argmax_tiles(linear(x, w.head, None, torch.float32), s.best, s.best_at, s.sums)
        nominate(s.best, s.best_at, s.sums, tiles, w.first_row, self._nominees)
        nominees = w.tp.all_gather(self._nominees, 0)
        elect(self._slots, self._positions, nominees, w.tp.world, w.vocab_size, tokens, token_ids, turns)
