"""GGUF files written by the `gguf` package, from tiny models of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

TYPES = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
]  # fmt: skip
# Where the fp16 numbers of a block lie.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "block_sparse_moe.gate": "ffn_gate_inp", "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "model.final_layernorm": "output_norm", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}  # fmt: skip
_GEMMA2 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def random_blocks(kind: str, rows: int, k: int, seed: int) -> np.ndarray:
    """Bytes of [rows, k] random values of a type, with a standard deviation of about 0.1."""
    generator = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = generator.integers(0, 256, (rows * k // values, size), dtype=np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = generator.integers(121, 124, len(raw))
    elif kind == "NVFP4":
        raw[:, :4] = generator.integers(8, 24, (len(raw), 4))
    else:
        scales = 1 + generator.random(len(raw))
        _set_scales(kind, raw, scales)
        _set_scales(kind, raw, scales * 0.1 / float(numbers_of(kind, raw).std()))
    return raw.reshape(rows, -1)


def _set_scales(kind: str, raw: np.ndarray, scales: np.ndarray) -> None:
    halves = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    for at in _HALVES.get(kind, (0,) if kind != "IQ1_M" else ()):
        raw[:, at : at + 2] = halves
    if kind == "IQ1_M":  # the number is spread over the top halves of four words
        words = raw[:, 48:56].view("<u2")
        for i in range(4):
            words[:, i] = words[:, i] & 0x0FFF | (halves.view("<u2")[:, 0] >> 4 * i & 15) << 12


def encode_q6_k(values: np.ndarray) -> np.ndarray:
    """[rows, k] as blocks of 256 numbers of 6 bits: 16 groups, each with a scale of 8 bits, and one for all of them."""
    groups = values.reshape(-1, 16, 16).astype(np.float32)
    scales = np.abs(groups).max(-1) / 31
    whole = (scales.max(-1) / 127).astype(np.float16)
    small = _divided(scales, whole[:, None].astype(np.float32)).round().clip(-128, 127)
    codes = _divided(groups, (whole[:, None] * small)[..., None]).round().clip(-32, 31).astype(np.int16) + 32
    raw = np.zeros((len(groups), 210), np.uint8)
    # in each half, four rows of 32 numbers: low bits of rows 0 and 2, and 1 and 3, share a byte, high bits all four
    codes = codes.reshape(-1, 2, 4, 32).astype(np.uint8)
    low, high = codes & 15, codes >> 4
    raw[:, :128] = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    raw[:, 128:192] = np.bitwise_or.reduce(high << shifts, axis=2).reshape(-1, 64)
    raw[:, 192:208] = small.astype(np.int8).view(np.uint8)
    raw[:, 208:] = whole.view(np.uint8).reshape(-1, 2)
    return raw.reshape(len(values), -1)


def encode_q4_k(values: np.ndarray) -> np.ndarray:
    """[rows, k] as blocks of 256 numbers of 4 bits: 8 groups, each with a scale and a minimum of 6 bits, and one scale
    for all of either.
    """
    groups = values.reshape(-1, 8, 32).astype(np.float32)
    least = np.minimum(groups.min(-1), 0)
    steps = (groups.max(-1) - least) / 15
    whole, whole_min = ((x.max(-1) / 63).astype(np.float16) for x in (steps, -least))
    step = _divided(steps, whole[:, None].astype(np.float32)).round().clip(0, 63).astype(np.uint8)
    minimum = _divided(-least, whole_min[:, None].astype(np.float32)).round().clip(0, 63).astype(np.uint8)
    real = (whole[:, None] * step)[..., None].astype(np.float32)
    codes = _divided(groups + (whole_min[:, None] * minimum)[..., None], real).round().clip(0, 15).astype(np.uint8)
    raw = np.zeros((len(groups), 144), np.uint8)
    raw[:, :2], raw[:, 2:4] = (x.view(np.uint8).reshape(-1, 2) for x in (whole, whole_min))
    raw[:, 4:8] = step[:, :4] | (step[:, 4:] >> 4) << 6
    raw[:, 8:12] = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    raw[:, 12:16] = step[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4
    raw[:, 16:] = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(-1, 128)
    return raw.reshape(len(values), -1)


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


_ENCODERS = {"Q4_K": encode_q4_k, "Q6_K": encode_q6_k}  # which the package only reads


def numbers_of(kind: str, raw: np.ndarray) -> Tensor:
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32))


def gguf_name(module: str, arch: str) -> str:
    """The name that llama.cpp gives a module."""
    prefix, rest = "", module
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        prefix = f"blk.{layer}."
    names = {**_NAMES, **(_GEMMA2 if arch == "gemma2" else {})}
    return prefix + names[rest]


def pairs_together(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to q and k of Llama: old row h * d / 2 + j of a head becomes row 2 j + h."""
    per_head = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(rows.shape)


def write_model(
    file: Path,
    arch: str,
    state: Mapping[str, Tensor],
    fields: Mapping[str, Any],
    kind_of: Callable[[str, Tensor], str],
    *,
    heads: tuple[int, int] | None = None,
    norm_offset: float = 0.0,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    quantized: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Write a model; returns the numbers that it holds under Hugging Face's names.

    kind_of: a tensor's type, "F32" to leave it.   heads: of q and of k, whose rows are permuted; None: they are not.
    quantized: types that the package cannot write become random blocks.
    """
    writer = gguf.GGUFWriter(file, arch, **options)
    for key, value in fields.items():
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    if tokenizer is not None:
        tokenizer(writer)
    held: dict[str, Tensor] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for number, (name, tensor) in enumerate(sorted(state.items())):
        module, leaf = name.rsplit(".", 1)
        kind = kind_of(name, tensor)
        type_ = gguf.GGMLQuantizationType[kind]
        if kind == "F32" or tensor.dim() == 1:
            kind, raw, held[name] = "F32", tensor.float().numpy(), tensor.float()
            if "norm" in name:
                raw = raw + np.float32(norm_offset)
        else:
            try:
                raw = gguf.quantize(tensor.float().numpy(), type_)
            except NotImplementedError:
                if kind in _ENCODERS:
                    raw = _ENCODERS[kind](tensor.float().numpy())
                else:
                    raw = random_blocks(kind, tensor.shape[0], tensor.shape[1], number)
            held[name] = torch.from_numpy(gguf.dequantize(raw, type_).astype(np.float32))
        if ".experts." in module:
            before, _, after = module.partition(".experts.")
            part = {"w1": "gate", "w3": "up", "w2": "down"}[after.split(".")[1]]
            stacks.setdefault(f"blk.{before.split('.')[2]}.ffn_{part}_exps.weight:{kind}", []).append(raw)
            continue
        if heads is not None and module.endswith(("q_proj", "k_proj")):
            raw = pairs_together(raw, heads[module.endswith("k_proj")])
        raw_type = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{gguf_name(module, arch)}.{leaf}", np.ascontiguousarray(raw), raw_dtype=raw_type)
    for name, matrices in stacks.items():
        name, _, kind = name.partition(":")
        raw_type = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, np.stack(matrices), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
