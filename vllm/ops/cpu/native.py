"""The native library's kernels behind the operations; each falls back to the reference for what it does not cover."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from vllm.ops.activation import activate, activate_gated
from vllm.ops.attention import AttentionParams, OwnKV, attend, write_kv
from vllm.ops.bitmask import apply_bitmask, apply_bitmask_and_finite, greedy_under_masks
from vllm.ops.cpu import lora
from vllm.ops.cpu.library import ACTIVATION_CODES, CACHE_CODES, DTYPE_CODES, AttentionCall
from vllm.ops.cpu.packed import (
    STORED,
    PackedGroups,
    PackedInt8,
    PackedWeight,
    WeightMemory,
    pack,
    pack_groups,
    pack_int8,
    pack_stored,
)
from vllm.ops.draw import DrawParams, draw, draw_and_finite
from vllm.ops.embedding import embedding, pack_table
from vllm.ops.greedy import finite_rows, greedy, greedy_and_finite
from vllm.ops.linear import linear, pack_weight
from vllm.ops.logprobs import top_logprobs
from vllm.ops.lora import add_lora, lay_out_b
from vllm.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from vllm.ops.quantized import pack_quantized, packs_stored, quantized_linear
from vllm.ops.quantized_weights import GroupedWeight, StoredRows, grouped
from vllm.ops.rotary import QKNorm, rotate, rotate_and_write_kv
from vllm.step.inputs import GroupInputs, StepInputs


class _StepCall(threading.local):
    """The attention call of the step at hand: what all layers of a group share is filled in once."""

    def __init__(self) -> None:
        self.step: StepInputs | None = None
        self.group: GroupInputs | None = None
        self.call = AttentionCall()
        self.reference = ctypes.byref(self.call)


class NativeKernels:
    """One loaded build of the library, and the functions that stand in for the references."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._memory = WeightMemory(library)
        self._step_call = _StepCall()
        self._linear = library.vllm_linear
        self._norm = library.vllm_norm
        self._activate = library.vllm_activate
        self._rotate_and_write = library.vllm_rotate_and_write
        self._attend = library.vllm_attend

    def register(self) -> None:
        """Use these kernels for tensors on the CPU."""
        for operation, kernel in (
            (linear, self.linear),
            (pack_weight, self.pack_weight),
            (pack_quantized, self.pack_quantized),
            (packs_stored, self.packs_stored),
            (quantized_linear, self.quantized_linear),
            (pack_table, self.pack_weight),
            (embedding, self.embedding),
            (rms_norm, self.rms_norm),
            (add_rms_norm, self.add_rms_norm),
            (layer_norm, self.layer_norm),
            (add_layer_norm, self.add_layer_norm),
            (activate, self.activate),
            (activate_gated, self.activate_gated),
            (rotate, self.rotate),
            (rotate_and_write_kv, self.rotate_and_write_kv),
            (write_kv, self.write_kv),
            (attend, self.attend),
            (greedy, self.greedy),
            (finite_rows, self.finite_rows),
            (greedy_and_finite, self.greedy_and_finite),
            (apply_bitmask, self.apply_bitmask),
            (apply_bitmask_and_finite, self.apply_bitmask_and_finite),
            (greedy_under_masks, self.greedy_under_masks),
            (draw, self.draw),
            (draw_and_finite, self.draw_and_finite),
            (top_logprobs, self.top_logprobs),
            (lay_out_b, lora.lay_out_b),
            (add_lora, lora.NativeLora(self.library).add_lora),
        ):
            operation.register("cpu", kernel)

    # ---- linear

    def pack_weight(self, weight: Tensor) -> Any:
        if weight.dim() != 2 or weight.dtype not in DTYPE_CODES:
            return weight
        return pack(self.library, self._memory, weight)

    def linear(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if type(weight) is not PackedWeight:
            return linear.reference(x, weight, bias, out_dtype)
        n, k = weight.shape
        if x.dim() != 2 or x.stride(1) != 1:
            flat = x.reshape(-1, k).contiguous()
            return self.linear(flat, weight, bias, out_dtype).view(*x.shape[:-1], n)
        m = x.shape[0]
        if x.dtype != weight.dtype or x.shape[1] != k:
            raise TypeError(f"linear: x is {x.dtype} {list(x.shape)}, but the weight is {weight.dtype} {[n, k]}")
        if out_dtype is None:
            out_dtype = x.dtype
        elif out_dtype != x.dtype and out_dtype != torch.float32:
            raise TypeError(f"linear: out_dtype is {out_dtype}, expected {x.dtype} or torch.float32")
        out = torch.empty((m, n), dtype=out_dtype)
        bias_pointer = None
        if bias is not None:
            if bias.dtype != x.dtype:
                bias = bias.to(x.dtype)
            bias_pointer = bias.data_ptr()
        status = self._linear(
            out.data_ptr(), x.data_ptr(), weight.pointer, bias_pointer, m, n, k, x.stride(0), n, weight.code,
            DTYPE_CODES[out_dtype],
        )  # fmt: skip
        if status:
            raise MemoryError("linear: no memory for the working copy of x")
        return out

    # ---- 8-bit linear: what quantized formats are built on; no operation of its own

    def pack_int8(self, weight: Tensor, scales: Tensor) -> PackedInt8:
        """weight: [out, in] int8; scales: [out]."""
        return pack_int8(self.library, self._memory, weight, scales)

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [rows, in], finite -> ([rows, in] uint8 around 128, [rows] fp32); x is their product to half a scale."""
        if x.stride(1) != 1:
            x = x.contiguous()
        m, k = x.shape
        quantized, scales = torch.empty((m, k), dtype=torch.uint8), torch.empty(m)
        status = self.library.vllm_quantize_rows(
            quantized.data_ptr(), scales.data_ptr(), x.data_ptr(), m, k, x.stride(0), DTYPE_CODES[x.dtype]
        )
        if status:
            raise MemoryError("quantize_rows: no memory")
        return quantized, scales

    def linear_int8(self, x: Tensor, weight: PackedInt8, bias: Tensor | None = None) -> Tensor:
        """x: [rows, in], quantized row by row on the way -> [rows, out] of x's dtype."""
        n, k = weight.shape
        if x.dim() != 2 or x.shape[1] != k or (bias is not None and bias.dtype != x.dtype):
            raise TypeError(
                f"linear_int8: expected x [rows, {k}] and a bias of its dtype, got {list(x.shape)}, {x.dtype}"
            )
        quantized, scales = self.quantize_rows(x)
        out = torch.empty((x.shape[0], n), dtype=x.dtype)
        status = self.library.vllm_linear_int8(
            out.data_ptr(), quantized.data_ptr(), scales.data_ptr(), weight.pointer, weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(), x.shape[0], n, k, DTYPE_CODES[x.dtype],
        )  # fmt: skip
        if status:
            raise MemoryError("linear_int8: no memory for the working copy of x")
        return out

    # ---- products with quantized weights

    def pack_quantized(self, weight: GroupedWeight | StoredRows, dtype: torch.dtype) -> Any:
        """fp32 means exact: only rows of 16 bits, which are rounded already, are rounded to 8 on the way."""
        packed: PackedGroups | None = None
        if dtype != torch.float32:
            if isinstance(weight, StoredRows):
                packed = pack_stored(self.library, self._memory, weight)
            if packed is None:
                packed = pack_groups(self.library, self._memory, grouped(weight))
        return pack_quantized.reference(weight, dtype) if packed is None else packed

    def packs_stored(self, weight: StoredRows, dtype: torch.dtype) -> bool:
        return weight.kind in STORED and dtype != torch.float32

    def quantized_linear(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if type(weight) is not PackedGroups:
            return linear(x, weight.weight, bias, out_dtype)
        n, k = weight.shape
        if x.dim() != 2 or x.stride(1) != 1:
            flat = x.reshape(-1, k).contiguous()
            return self.quantized_linear(flat, weight, bias, out_dtype).view(*x.shape[:-1], n)
        if x.shape[1] != k or x.dtype not in DTYPE_CODES:
            raise TypeError(f"quantized_linear: x is {x.dtype} {list(x.shape)}, but the weight is {[n, k]}")
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        out = torch.empty((x.shape[0], n), dtype=x.dtype if out_dtype is None else out_dtype)
        status = self.library.vllm_linear_groups(
            out.data_ptr(), x.data_ptr(), weight.pointer, None if bias is None else bias.data_ptr(), x.shape[0], n, k,
            x.stride(0), weight.group, weight.bits, weight.zero, weight.has_offsets, DTYPE_CODES[x.dtype],
            DTYPE_CODES[out.dtype],
        )  # fmt: skip
        if status == 1:
            raise TypeError(f"quantized_linear: out_dtype is {out_dtype}, expected {x.dtype} or torch.float32")
        if status:
            raise MemoryError("quantized_linear: no memory for the working copy of x")
        return out

    def embedding(self, ids: Tensor, table: Any) -> Tensor:
        if type(table) is not PackedWeight:
            return embedding.reference(ids, table)
        ids = ids.contiguous()
        n, k = table.shape
        out = torch.empty((*ids.shape, k), dtype=table.dtype)
        if self.library.vllm_unpack_rows(out.data_ptr(), table.pointer, ids.data_ptr(), ids.numel(), n, k, table.code):
            raise IndexError(f"embedding: an id is not in [0, {n})")
        return out

    # ---- norms

    def _norm_into(
        self, out: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None,
        eps: float, offset: float, centred: int,
    ) -> None:  # fmt: skip
        dim = x.shape[-1]
        self._norm(
            out.data_ptr(),
            None if residual is None else residual.data_ptr(),
            x.data_ptr(),
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            x.numel() // dim, dim, dim, eps, offset, centred, DTYPE_CODES[x.dtype],
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
        if not _norm_covers(x, weight, None):
            return rms_norm.reference(x, weight, eps, offset)
        out = torch.empty_like(x)
        self._norm_into(out, None, x, weight, None, eps, offset, 0)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        if not (_norm_covers(x, weight, None) and _alike(x, residual)):
            return add_rms_norm.reference(x, residual, weight, eps, offset)
        self._norm_into(x, residual, x, weight, None, eps, offset, 0)
        return x, residual

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0
    ) -> Tensor:
        if not _norm_covers(x, weight, bias):
            return layer_norm.reference(x, weight, bias, eps, offset)
        out = torch.empty_like(x)
        self._norm_into(out, None, x, weight, bias, eps, offset, 1)
        return out

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        if not (_norm_covers(x, weight, bias) and _alike(x, residual)):
            return add_layer_norm.reference(x, residual, weight, bias, eps, offset)
        self._norm_into(x, residual, x, weight, bias, eps, offset, 1)
        return x, residual

    # ---- activations

    def activate(self, x: Tensor, kind: str) -> Tensor:
        code = ACTIVATION_CODES.get(kind)
        if code is None or not x.is_contiguous() or x.dtype not in DTYPE_CODES:
            return activate.reference(x, kind)
        out = torch.empty_like(x)
        dim = x.shape[-1]
        if out.numel():
            self._activate(out.data_ptr(), x.data_ptr(), x.numel() // dim, dim, dim, 0, code, DTYPE_CODES[x.dtype])
        return out

    def activate_gated(self, x: Tensor, kind: str, limit: float | None = None) -> Tensor:
        code = ACTIVATION_CODES.get(kind)
        if code is None or limit is not None or not x.is_contiguous() or x.dtype not in DTYPE_CODES:
            return activate_gated.reference(x, kind, limit)
        width = x.shape[-1]
        dim = width // 2
        out = x.new_empty(*x.shape[:-1], dim)
        if out.numel():
            self._activate(out.data_ptr(), x.data_ptr(), x.numel() // width, dim, width, 1, code, DTYPE_CODES[x.dtype])
        return out

    # ---- rotation and cache

    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
        if not (_heads_packed(x) and _rotary_covers(x, positions, cos_sin)):
            return rotate.reference(x, positions, cos_sin, interleaved)
        tokens, heads, head_dim = x.shape
        self._rotate_and_write(
            x.data_ptr(), tokens, x.stride(0), heads, 0, head_dim, positions.data_ptr(), cos_sin.data_ptr(),
            cos_sin.shape[-1], interleaved, None, 0, 1, None, None, None, 0.0, 0.0, 1.0, 1.0, DTYPE_CODES[x.dtype], 0,
        )  # fmt: skip
        return x

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        heads: int,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        qk_norm: QKNorm | None = None,
    ) -> tuple[Tensor, OwnKV | None]:
        cache_code = CACHE_CODES.get(kv_cache.dtype)
        covered = cache_code is not None and qkv.stride(1) == 1 and _rotary_covers(qkv, positions, cos_sin)
        q_weight = k_weight = None
        eps = offset = 0.0
        if qk_norm is not None and qk_norm.joint and covered:
            heads_of = qkv.view(len(qkv), -1, kv_cache.shape[4])
            q, k = heads_of[:, :heads], heads_of[:, heads : heads + kv_cache.shape[2]]
            for x, normalised in zip((q, k), qk_norm.apply(q, k), strict=True):
                x.copy_(normalised)
            qk_norm = None
        if qk_norm is not None:
            q_weight, k_weight = qk_norm.q_weight.data_ptr(), qk_norm.k_weight.data_ptr()
            eps, offset = qk_norm.eps, qk_norm.offset
            covered = covered and qk_norm.q_weight.dtype == qk_norm.k_weight.dtype == qkv.dtype
        if not covered:
            return rotate_and_write_kv.reference(
                qkv, heads, positions, cos_sin, interleaved, kv_cache, slot_mapping, k_scale, v_scale, qk_norm
            )
        _, _, kv_heads, block_size, head_dim = kv_cache.shape
        tokens = qkv.shape[0]
        self._rotate_and_write(
            qkv.data_ptr(), tokens, qkv.stride(0), heads, kv_heads, head_dim, positions.data_ptr(), cos_sin.data_ptr(),
            cos_sin.shape[-1], interleaved, kv_cache.data_ptr(), kv_cache.stride(0), block_size,
            slot_mapping.data_ptr(), q_weight, k_weight, eps, offset, k_scale, v_scale, DTYPE_CODES[qkv.dtype],
            cache_code,
        )  # fmt: skip
        return qkv.view(tokens, -1, head_dim)[:, :heads], None

    def write_kv(
        self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> None:
        code, cache_code = DTYPE_CODES.get(k.dtype), CACHE_CODES.get(kv_cache.dtype)
        if code is None or cache_code is None or v.dtype != k.dtype or not (_heads_packed(k) and _heads_packed(v)):
            write_kv.reference(k, v, kv_cache, slot_mapping, k_scale, v_scale)
            return
        _, _, kv_heads, block_size, head_dim = kv_cache.shape
        self.library.vllm_write_kv(
            k.data_ptr(), v.data_ptr(), k.shape[0], k.stride(0), v.stride(0), kv_heads, head_dim, kv_cache.data_ptr(),
            kv_cache.stride(0), block_size, slot_mapping.data_ptr(), k_scale, v_scale, code, cache_code,
        )  # fmt: skip

    # ---- attention

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        params: AttentionParams,
        step: StepInputs,
        group: GroupInputs,
        own: OwnKV | None = None,
    ) -> Tensor:
        code, cache_code = DTYPE_CODES.get(q.dtype), CACHE_CODES.get(kv_cache.dtype)
        if code is None or cache_code is None or params.is_unusual or not _heads_packed(q):
            return attend.reference(q, kv_cache, params, step, group)
        if group.block_table.stride(-1) != 1:
            return attend.reference(q, kv_cache, params, step, group)
        state = self._step_call
        call = state.call
        if state.step is not step or state.group is not group:
            call.block_table = group.block_table.data_ptr()
            call.table_stride = group.block_table.stride(0)
            call.query_starts = step.query_starts.data_ptr()
            call.seq_lens = step.seq_lens.data_ptr()
            call.requests = len(step.host_seq_lens)
            state.step, state.group = step, group
        tokens, heads, head_dim = q.shape
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype)
        slopes = params.alibi_slopes
        if slopes is not None and slopes.dtype != torch.float32:
            slopes = slopes.float()
        call.out, call.q, call.cache = out.data_ptr(), q.data_ptr(), kv_cache.data_ptr()
        call.alibi_slopes = None if slopes is None else slopes.data_ptr()
        call.q_stride, call.heads, call.head_dim = q.stride(0), heads, head_dim
        call.block_stride, call.kv_heads, call.block_size = kv_cache.stride(0), *kv_cache.shape[2:4]
        call.window = params.window or 0
        call.scale = params.scale * params.k_scale
        call.softcap = params.softcap or 0.0
        call.v_scale = params.v_scale
        call.dtype, call.cache_dtype = code, cache_code
        if self._attend(state.reference):
            raise MemoryError("attend: no memory for the working copies of keys and values")
        return out

    # ---- sampling

    def greedy(self, logits: Tensor) -> Tensor:
        return self._greedy(logits, None) if _rows_cover(logits) else greedy.reference(logits)

    def greedy_and_finite(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not _rows_cover(logits):
            return greedy_and_finite.reference(logits)
        finite = torch.empty(len(logits), dtype=torch.bool)
        return self._greedy(logits, finite.data_ptr()), finite

    def _greedy(self, logits: Tensor, finite: int | None) -> Tensor:
        rows, vocab = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self.library.vllm_greedy(logits.data_ptr(), rows, vocab, logits.stride(0), ids.data_ptr(), finite)
        return ids

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        return self._draw(logits, params, None) if _draw_covers(logits, params) else draw.reference(logits, params)

    def draw_and_finite(self, logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
        if not _draw_covers(logits, params):
            return draw_and_finite.reference(logits, params)
        finite = torch.empty(len(logits), dtype=torch.bool)
        return self._draw(logits, params, finite.data_ptr()), finite

    def _draw(self, logits: Tensor, p: DrawParams, finite: int | None) -> Tensor:
        rows, vocab = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        status = self.library.vllm_draw(
            logits.data_ptr(), rows, vocab, logits.stride(0), p.temperature.data_ptr(), p.min_p.data_ptr(),
            p.top_k.data_ptr(), p.top_p.data_ptr(), p.uniform.data_ptr(), ids.data_ptr(), finite,
            DTYPE_CODES[logits.dtype],
        )  # fmt: skip
        if status:
            raise MemoryError("draw: no memory for the tokens to draw from")
        return ids

    def top_logprobs(self, logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        if not _rows_cover(logits) or token_ids.dtype != torch.int64:
            reference: tuple[Tensor, Tensor, Tensor] = top_logprobs.reference(logits, token_ids, count)
            return reference
        rows, vocab = logits.shape
        count = vocab if count < 0 else min(count, vocab)
        token_ids = token_ids.contiguous()
        ids, ranks = torch.empty((rows, 1 + count), dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty((rows, 1 + count))
        status = self.library.vllm_top_logprobs(
            logits.data_ptr(), rows, vocab, logits.stride(0), count, token_ids.data_ptr(), ids.data_ptr(),
            logprobs.data_ptr(), ranks.data_ptr(),
        )  # fmt: skip
        if status:
            raise MemoryError("top_logprobs: no memory for the tokens to sort")
        return ids, logprobs, ranks

    def finite_rows(self, logits: Tensor) -> Tensor:
        if not _rows_cover(logits):
            return finite_rows.reference(logits)
        rows, vocab = logits.shape
        finite = torch.empty(rows, dtype=torch.bool)
        self.library.vllm_finite_rows(logits.data_ptr(), rows, vocab, logits.stride(0), finite.data_ptr())
        return finite

    def apply_bitmask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        if _rows_cover(logits):
            self._mask_rows(logits, rows, bits, None)
        else:
            apply_bitmask.reference(logits, rows, bits)

    def apply_bitmask_and_finite(self, logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
        if not _rows_cover(logits):
            known: Tensor = apply_bitmask_and_finite.reference(logits, rows, bits)
            return known
        finite = torch.empty(len(logits), dtype=torch.bool)
        self._mask_rows(logits, rows, bits, finite.data_ptr())
        return finite

    def greedy_under_masks(self, logits: Tensor, rows: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not _rows_cover(logits):
            known: tuple[Tensor, Tensor, Tensor] = greedy_under_masks.reference(logits, rows, bits)
            return known
        count, vocab = logits.shape
        ids, found = torch.empty(count, dtype=torch.int64), torch.empty((2, count), dtype=torch.bool)
        finite, possible = found[0], found[1]
        status = self.library.vllm_greedy_masked(
            logits.data_ptr(), count, vocab, logits.stride(0), rows.data_ptr(), len(rows), bits.data_ptr(),
            bits.shape[1], ids.data_ptr(), finite.data_ptr(), possible.data_ptr(),
        )  # fmt: skip
        if status:
            raise MemoryError("greedy_under_masks: no memory for the masks' places")
        return ids, finite, possible

    def _mask_rows(self, logits: Tensor, rows: Tensor, bits: Tensor, finite: int | None) -> None:
        count, vocab = logits.shape
        self.library.vllm_mask_rows(
            logits.data_ptr(), count, vocab, logits.stride(0), rows.data_ptr(), len(rows), bits.data_ptr(),
            bits.shape[1], finite,
        )  # fmt: skip


def _rows_cover(logits: Tensor) -> bool:
    return logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.shape[1] > 0


def _draw_covers(logits: Tensor, p: DrawParams) -> bool:
    vectors = (p.temperature, p.min_p, p.top_p, p.uniform)
    return (
        logits.dtype in DTYPE_CODES
        and logits.stride(1) == 1
        and logits.shape[1] > 0
        and all(v.dtype == torch.float32 and v.is_contiguous() for v in vectors)
        and p.top_k.dtype == torch.int32
        and p.top_k.is_contiguous()
    )


def _alike(x: Tensor, residual: Tensor) -> bool:
    return residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()


def _norm_covers(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    return (
        x.is_contiguous()
        and x.dtype in DTYPE_CODES
        and x.numel() > 0
        and (weight is None or weight.dtype == x.dtype)
        and (bias is None or bias.dtype == x.dtype)
    )


def _heads_packed(x: Tensor) -> bool:
    """[tokens, heads, head_dim] with a token's heads in one piece; tokens may lie anywhere."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) and x.dtype in DTYPE_CODES


def _rotary_covers(x: Tensor, positions: Tensor, cos_sin: Tensor) -> bool:
    return (
        x.dtype in DTYPE_CODES
        and positions.dtype == torch.int64
        and positions.dim() == 1
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
    )
