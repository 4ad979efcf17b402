"""Triton kernel of rotary embedding: queries and keys rotated, normalised first if asked, and cached, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import rotary as ops
from vllm.ops.attention import OwnKV
from vllm.ops.triton.attention import fp8_limit


@triton.jit
def _square_sum(a, b, ptr, tail_mask, tail, ROTARY: tl.constexpr, D: tl.constexpr):
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if ROTARY < D:
        rest = tl.load(ptr + tail, mask=tail_mask, other=0.0).to(tl.float32)
        total += tl.sum(rest * rest, 1)
    return total


@triton.jit
def _own_weights(
    q_weight, k_weight, h, at, keep, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Columns `at` of every head's own weights: of queries [HEADS, D], then of keys [KV_HEADS, D]."""
    wq = tl.load(q_weight + h * D + at, mask=keep & (h < HEADS), other=0.0)
    wk = tl.load(k_weight + (h - HEADS) * D + at, mask=keep & (h >= HEADS) & (h < HEADS + KV_HEADS), other=0.0)
    return tl.where(h < HEADS, wq, wk)


@triton.jit
def _rotate_kernel(
    x_ptr, positions_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr, cache, slots_ptr,
    eps, offset, inv_k_scale, inv_v_scale, v_offset, stride_block, stride_t, stride_h,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HP: tl.constexpr, VP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr, HALFP: tl.constexpr, BS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, JOINT: tl.constexpr, CACHE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,). x: [tokens, HEADS + 2 * KV_HEADS, D] rotated in place; with CACHE keys and values are cached too.
    JOINT: the norm is of all queries and of all keys, each with weights of its own for every head.

    A thread owns both elements of a pair, so that writing in place cannot overtake a read.
    """
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)[:, None]
    i = tl.arange(0, HALFP)[None, :]
    keep = (h < HEADS + KV_HEADS) & (i < HALF)
    at_a = i
    at_b = i + HALF
    if INTERLEAVED:
        at_a = 2 * i
        at_b = 2 * i + 1
    rows = x_ptr + token * stride_t + h * stride_h
    a = tl.load(rows + at_a, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(rows + at_b, mask=keep, other=0.0).to(tl.float32)
    tail = ROTARY + tl.arange(0, DP)[None, :]
    tail_keep = (h < HEADS + KV_HEADS) & (tail < D)
    is_query = h < HEADS
    if NORM:
        squares = _square_sum(a, b, rows, tail_keep, tail, ROTARY, D)[:, None]
        in_pair = i < HALF
        if JOINT:
            of_queries = tl.sum(tl.where(is_query, squares, 0.0)) / (HEADS * D)
            of_keys = tl.sum(tl.where(is_query, 0.0, squares)) / (KV_HEADS * D)
            rstd = tl.rsqrt(tl.where(is_query, of_queries, of_keys) + eps)
            wa = _own_weights(q_weight_ptr, k_weight_ptr, h, at_a, in_pair, HEADS, KV_HEADS, D)
            wb = _own_weights(q_weight_ptr, k_weight_ptr, h, at_b, in_pair, HEADS, KV_HEADS, D)
        else:
            rstd = tl.rsqrt(squares / D + eps)
            wq = tl.load(q_weight_ptr + at_a, mask=in_pair, other=0.0)
            wa = tl.where(is_query, wq, tl.load(k_weight_ptr + at_a, mask=in_pair, other=0.0))
            wq = tl.load(q_weight_ptr + at_b, mask=in_pair, other=0.0)
            wb = tl.where(is_query, wq, tl.load(k_weight_ptr + at_b, mask=in_pair, other=0.0))
        # the norm's output is rounded to the model's dtype before it is rotated, as in two separate operations
        a = (a * rstd * (wa.to(tl.float32) + offset)).to(x_ptr.dtype.element_ty).to(tl.float32)
        b = (b * rstd * (wb.to(tl.float32) + offset)).to(x_ptr.dtype.element_ty).to(tl.float32)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_sin_ptr + position * ROTARY + i, mask=i < HALF, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    u = (a * cos - b * sin).to(x_ptr.dtype.element_ty)
    w = (b * cos + a * sin).to(x_ptr.dtype.element_ty)
    tl.store(rows + at_a, u, mask=keep)
    tl.store(rows + at_b, w, mask=keep)

    if CACHE:
        slot = tl.load(slots_ptr + token)
        dst = cache + (slot // BS) * stride_block + (slot % BS) * D
        key = dst + (h - HEADS) * (BS * D)
        is_key = keep & (h >= HEADS)
        if LIMIT > 0:
            u = tl.minimum(tl.maximum(u.to(tl.float32) * inv_k_scale, -LIMIT), LIMIT)
            w = tl.minimum(tl.maximum(w.to(tl.float32) * inv_k_scale, -LIMIT), LIMIT)
        tl.store(key + at_a, u.to(cache.dtype.element_ty), mask=is_key)
        tl.store(key + at_b, w.to(cache.dtype.element_ty), mask=is_key)
        g = tl.arange(0, VP)[:, None]
        d = tl.arange(0, DP)[None, :]
        v_keep = (g < KV_HEADS) & (d < D)
        v = tl.load(x_ptr + token * stride_t + (HEADS + KV_HEADS + g) * stride_h + d, mask=v_keep, other=0.0)
        if LIMIT > 0:
            v = tl.minimum(tl.maximum(v.to(tl.float32) * inv_v_scale, -LIMIT), LIMIT)
        tl.store(dst + v_offset + g * (BS * D) + d, v.to(cache.dtype.element_ty), mask=v_keep)
    if (ROTARY < D) & (NORM | CACHE):
        rest = tl.load(rows + tail, mask=tail_keep, other=0.0)
        if NORM:
            in_tail = tail < D
            if JOINT:
                wt = _own_weights(q_weight_ptr, k_weight_ptr, h, tail, in_tail, HEADS, KV_HEADS, D)
            else:
                wq = tl.load(q_weight_ptr + tail, mask=in_tail, other=0.0)
                wt = tl.where(is_query, wq, tl.load(k_weight_ptr + tail, mask=in_tail, other=0.0))
            rest = (rest.to(tl.float32) * rstd * (wt.to(tl.float32) + offset)).to(x_ptr.dtype.element_ty)
            tl.store(rows + tail, rest, mask=tail_keep)
        if CACHE:
            if LIMIT > 0:
                rest = tl.minimum(tl.maximum(rest.to(tl.float32) * inv_k_scale, -LIMIT), LIMIT)
            tl.store(key + tail, rest.to(cache.dtype.element_ty), mask=tail_keep & (h >= HEADS))


def _shape(heads: int, kv_heads: int, head_dim: int, rotary_dim: int, interleaved: bool) -> dict:
    rows = triton.next_power_of_2(heads + kv_heads)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HP": rows,
        "VP": triton.next_power_of_2(max(kv_heads, 1)),
        "D": head_dim,
        "DP": triton.next_power_of_2(head_dim),
        "ROTARY": rotary_dim,
        "HALFP": triton.next_power_of_2(rotary_dim // 2),
        "INTERLEAVED": interleaved,
        "num_warps": 4 if rows * head_dim >= 1024 else 1,
    }


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """`vllm.ops.rotary.rotate` for CUDA, in place where the last dimension is dense."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, head_dim = x.shape
    if tokens:
        _rotate_kernel[(tokens,)](
            x, positions, cos_sin, x, x, x, positions, 0.0, 0.0, 1.0, 1.0, 0, 0, x.stride(0), x.stride(1),
            BS=1, NORM=False, JOINT=False, CACHE=False, LIMIT=0.0,
            **_shape(heads, 0, head_dim, cos_sin.shape[-1], interleaved),
        )  # fmt: skip
    return x


def rotate_and_write_kv(
    qkv: Tensor,
    heads: int,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    qk_norm: ops.QKNorm | None = None,
) -> tuple[Tensor, OwnKV | None]:
    """`vllm.ops.rotary.rotate_and_write_kv` for CUDA; queries and keys are rotated inside `qkv`."""
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    tokens = qkv.shape[0]
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    if tokens:
        weights = (qkv, qkv) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight)
        eps, offset = (0.0, 0.0) if qk_norm is None else (qk_norm.eps, qk_norm.offset)
        _rotate_kernel[(tokens,)](
            qkv, positions, cos_sin, *weights, kv_cache, slot_mapping, eps, offset, 1.0 / k_scale, 1.0 / v_scale,
            kv_cache.stride(1), kv_cache.stride(0), qkv.stride(0), head_dim,
            BS=block_size, NORM=qk_norm is not None, JOINT=qk_norm is not None and qk_norm.joint, CACHE=True,
            LIMIT=fp8_limit(kv_cache.dtype),
            **_shape(heads, kv_heads, head_dim, cos_sin.shape[-1], interleaved),
        )  # fmt: skip
    q, k, v = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    return q, (k, v)


def register(device_type: str) -> None:
    ops.rotate.register(device_type, rotate)
    ops.rotate_and_write_kv.register(device_type, rotate_and_write_kv)
