"""Runs of decoder layers as one native call: what a layer must be for that, its description, and the call itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.linear_method import UnquantizedLinearMethod
from vllm.model_executor.models.blocks import DecoderBlock, FeedForward, SelfAttention
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Mlp, Norm, Rope
from vllm.model_executor.models.traits import Model
from vllm.ops.cpu import library, lora
from vllm.ops.cpu.library import ACTIVATION_CODES, CACHE_CODES, DTYPE_CODES, LoraArguments
from vllm.ops.cpu.packed import PackedWeight
from vllm.step.inputs import StepInputs

if TYPE_CHECKING:
    from vllm.model_executor.models.decoder import DecoderModel

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Linear(ctypes.Structure):
    _fields_ = [("packed", _P), ("bias", _P), ("out", _L), ("in_", _L), ("lora", ctypes.POINTER(LoraArguments))]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _P), ("bias", _P), ("eps", _F), ("offset", _F), ("centred", _I)]


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, _Norm) for name in ("norm1", "norm2")),
        *((name, _Linear) for name in ("qkv", "o", "up", "down")),
        *((name, _P) for name in ("q_norm", "k_norm", "cos_sin", "cache")),
        *((name, _L) for name in ("block_stride", "heads", "kv_heads", "head_dim", "rotary_dim", "window", "group")),
        *((name, _F) for name in ("scale", "softcap", "qk_eps", "qk_offset", "k_scale", "v_scale")),
        *((name, _I) for name in ("interleaved", "gated", "activation")),
    ]


class _Group(ctypes.Structure):
    _fields_ = [("slots", _P), ("block_table", _P), ("table_stride", _L)]


class _Call(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Block)),
        ("groups", ctypes.POINTER(_Group)),
        *((name, _P) for name in ("residual", "out", "positions", "query_starts", "seq_lens", "rows", "kept")),
        *((name, _P) for name in ("adapters", "kept_adapters")),
        *((name, _L) for name in ("count", "tokens", "hidden", "requests", "block_size", "num_rows")),
        *((name, _I) for name in ("dtype", "cache_dtype")),
    ]


def _place(attn: SelfAttention) -> KVPlace:
    """Where a layer's cache is, which layers that are covered all have."""
    if attn.place is None:
        raise ValueError("A layer without a cache cannot be part of the native layers.")
    return attn.place


class FusedBlocks:
    """All layers of a decoder as one native call; the same bits as calling them one by one.

    Made by `fuse_layers`. The layers' tensors must stay where they are.

    handles: step features, by name, that the call honours: adapters, if all products had theirs when it was made.
    """

    def __init__(self, native: ctypes.CDLL, blocks: Sequence[DecoderBlock]) -> None:
        self._run = native.vllm_run_blocks
        self._run.restype, self._run.argtypes = _I, [ctypes.POINTER(_Call)]
        self._blocks = tuple(blocks)  # keeps the tensors alive
        adapted = all(layer.lora is not None for block in blocks for layer in _linears(block))
        self.handles = frozenset({"adapters"} if adapted else ())
        places = [_place(block.attn) for block in blocks]
        self._tensors = [place.tensor for place in places]
        self._layers = (_Block * len(blocks))(*(_describe(block) for block in blocks))
        self._groups = (_Group * (1 + max(place.group for place in places)))()
        self._caches: Sequence[Tensor] | None = None

    def __call__(
        self, x: Tensor, step: StepInputs, kv_caches: Sequence[Tensor], rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden], overwritten -> (x, residual), whose sum is the stream after the last layer.

        rows: [rows] int64, at most as many as tokens: those whose output is wanted, and all that is returned; None for
        all.
        """
        if self._caches is not kv_caches:
            for layer, tensor in zip(self._layers, self._tensors, strict=True):
                layer.cache, layer.block_stride = kv_caches[tensor].data_ptr(), kv_caches[tensor].stride(0)
            self._caches = kv_caches
        groups = (_Group * len(self._groups))()
        for entry, group in zip(groups, step.groups, strict=False):
            entry.slots, entry.block_table = group.slot_mapping.data_ptr(), group.block_table.data_ptr()
            entry.table_stride = group.block_table.stride(0)
        out = torch.empty_like(x)
        tokens, hidden = x.shape
        wanted = tokens if rows is None else len(rows)
        stream = x if rows is None else torch.empty(wanted, hidden, dtype=x.dtype)
        cache = kv_caches[0]
        call = _Call(
            self._layers, groups, x.data_ptr(), out.data_ptr(), step.positions.data_ptr(), step.query_starts.data_ptr(),
            step.seq_lens.data_ptr(), _pointer(rows), stream.data_ptr(), *_adapters(step), len(self._layers), tokens,
            hidden, len(step.host_seq_lens), cache.shape[3], wanted, DTYPE_CODES[x.dtype],
            CACHE_CODES[cache.dtype],
        )  # fmt: skip
        if self._run(ctypes.byref(call)):
            raise MemoryError("The decoder layers found no memory for their working copies.")
        return out[:wanted], stream


def _adapters(step: StepInputs) -> tuple[int | None, int | None]:
    """Where the adapters of tokens and of wanted rows stand; None where none of them uses one."""
    every, wanted = step.view(picked=False), step.view(picked=True)
    if every is None:
        return None, None
    return every.adapters.data_ptr(), None if wanted is None else wanted.adapters.data_ptr()


def fuse(model: Model) -> None:
    """Run the layers of a decoder as one native call, with the same result, if the library is there and knows all they
    do. Called after loading.
    """
    path = library.find()
    if path is None or model.traits.decoder is None:
        return
    try:
        loaded = library.load(path)
    except (OSError, RuntimeError):
        return  # registering the kernels has said why
    decoder = cast("DecoderModel", model)

    def fuse_again() -> None:
        decoder.fused_blocks = fuse_layers(loaded, decoder)

    decoder.fuse_again = fuse_again
    fuse_again()


def fuse_layers(native: ctypes.CDLL, model: DecoderModel) -> FusedBlocks | None:
    """The model's layers as one call; None if one of them does something that the call does not know.

    Known: an attention and a plain or gated feed-forward layer, each after a norm and added to the stream, on one rank,
    with unquantized packed weights of the model's dtype.
    """
    specs = [spec for spec, _ in model.own_blocks]
    blocks: list[DecoderBlock] = [block for _, block in model.own_blocks]  # type: ignore[misc]
    pairs = zip(specs, blocks, strict=True)
    if blocks and all(computed(spec) == spec and _covers(block, model.dtype) for spec, block in pairs):
        return FusedBlocks(native, blocks)
    return None


def computed(block: BlockSpec) -> Block | None:
    """What the call computes of a layer: its spec again if the call reads every field that is not at its default.

    None for a layer of another kind. A field that is not named here is taken for its default, so that one which is
    added to a spec refuses the call, instead of being ignored by it.
    """
    if type(block) is not Block:
        return None
    attn, ffn = block.attn, block.ffn
    if type(attn) is not Attn or type(ffn) is not Mlp:
        return None
    rope = attn.rope
    if rope is not None:  # dimensions, base and scaling through the table
        rope = Rope(rope.dim, rope.theta, rope.interleaved, rope.scaling)
    qk_norm = attn.qk_norm
    if qk_norm is not None:
        qk_norm = Norm("rms", qk_norm.eps, qk_norm.offset)
    norm = block.norm
    return Block(
        Attn(
            attn.heads, attn.kv_heads, attn.head_dim, rope, attn.scale, attn.window, attn.softcap, qk_norm,
            attn.qkv_bias, attn.out_bias,
        ),
        Mlp(ffn.act, ffn.hidden, ffn.gated, ffn.bias),
        Norm(norm.kind, norm.eps, norm.offset, norm.weight, norm.bias),
    )  # fmt: skip


def _covers(block: DecoderBlock, dtype: torch.dtype) -> bool:
    attn, ffn = block.attn, block.ffn
    if type(block) is not DecoderBlock or block.tp.world != 1 or type(ffn) is not FeedForward:
        return False
    head_norms = (attn.q_norm, attn.k_norm)
    return (
        all(_covers_linear(layer, dtype) for layer in _linears(block))
        and all(_covers_norm(norm, dtype) for norm in block.norms)
        and (head_norms == (None, None) or all(_covers_head_norm(norm, dtype) for norm in head_norms))
        and attn.params.alibi_slopes is None
        and ffn.act in ACTIVATION_CODES
    )


def _covers_linear(layer: LinearBase, dtype: torch.dtype) -> bool:
    return (
        type(layer.method) is UnquantizedLinearMethod
        and type(layer.packed) is PackedWeight
        and layer.packed.dtype == dtype
        and not layer.skip_bias_add
        and (layer.bias is None or layer.bias.dtype == dtype)
        and (
            layer.lora is None
            or (layer.lora.whole and lora.covers(layer.lora.matrices) and layer.lora.matrices.a.dtype == dtype)
        )
    )


def _covers_norm(norm: nn.Module, dtype: torch.dtype) -> bool:
    if not isinstance(norm, RMSNorm | LayerNorm):
        return False
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    return all(t is None or (t.dtype == dtype and t.is_contiguous()) for t in (norm.weight, bias))


def _covers_head_norm(norm: nn.Module | None, dtype: torch.dtype) -> bool:
    return isinstance(norm, RMSNorm) and norm.weight is not None and _covers_norm(norm, dtype)


def _linears(block: DecoderBlock) -> tuple[LinearBase, ...]:
    """The products of a layer whose feed-forward part is a `FeedForward`."""
    assert isinstance(block.ffn, FeedForward)
    return block.attn.qkv, block.attn.o, _up(block.ffn), block.ffn.down


def _up(ffn: FeedForward) -> LinearBase:
    """The first product of a feed-forward layer."""
    up: LinearBase = ffn.gate_up if ffn.spec.gated else ffn.up
    return up


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linear(layer: LinearBase) -> _Linear:
    packed: PackedWeight = layer.packed
    adapters = None if layer.lora is None else ctypes.pointer(lora.describe(layer.lora.matrices))
    return _Linear(packed.pointer, _pointer(layer.bias), packed.shape[0], packed.shape[1], adapters)


def _norm(norm: RMSNorm | LayerNorm) -> _Norm:
    centred = isinstance(norm, LayerNorm)
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    return _Norm(_pointer(norm.weight), _pointer(bias), norm.variance_epsilon, norm.offset, centred)


def _describe(block: DecoderBlock) -> _Block:
    attn, ffn, params = block.attn, block.ffn, block.attn.params
    assert isinstance(ffn, FeedForward)  # `_covers` has seen to it
    gated = isinstance(ffn.spec, Mlp) and ffn.spec.gated
    norms: list[RMSNorm | LayerNorm] = list(block.norms)  # type: ignore[arg-type]
    described = _Block(
        norm1=_norm(norms[0]),
        norm2=_norm(norms[1]),
        qkv=_linear(attn.qkv),
        o=_linear(attn.o),
        up=_linear(_up(ffn)),
        down=_linear(ffn.down),
        heads=attn.heads,
        kv_heads=attn.kv_heads,
        head_dim=attn.spec.head_dim,
        window=params.window or 0,
        group=_place(attn).group,
        scale=params.scale,
        softcap=params.softcap or 0.0,
        k_scale=params.k_scale,
        v_scale=params.v_scale,
        gated=gated,
        activation=ACTIVATION_CODES[ffn.act],
    )
    if attn.spec.rope is not None:
        described.cos_sin, described.rotary_dim = attn.cos_sin.data_ptr(), attn.cos_sin.shape[-1]
        described.interleaved = attn.spec.rope.interleaved
    q_norm, k_norm = attn.q_norm, attn.k_norm
    if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
        described.q_norm, described.k_norm = _pointer(q_norm.weight), _pointer(k_norm.weight)
        described.qk_eps, described.qk_offset = q_norm.variance_epsilon, q_norm.offset
    return described
