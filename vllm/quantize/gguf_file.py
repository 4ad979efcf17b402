"""Writing GGUF files: blocks of quantized numbers, the container, and what it says about a model and its tokenizer.

The inverse of `vllm/gguf/`, where the format is described.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.config.hf import HFConfig, RopeSettings
from vllm.gguf.config import ARCHITECTURES, Architecture, Settings, add_rope_scaling
from vllm.gguf.container import TYPES, GgufFile
from vllm.gguf.tokenizer import SPLITS, Kind
from vllm.model_executor.layers.rope import scaling_from_params

ALIGNMENT = 32
_IDS = {name: number for number, (name, _, _) in TYPES.items()}
_SIZES = {name: (values, size) for name, values, size in TYPES.values()}
_U32, _F32, _BOOL, _TEXT, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
Values = Mapping[str, Any]


# ---- blocks ------------------------------------------------------------------------------------------------------


def _halves(values: Tensor) -> Tensor:
    """[blocks] -> their fp16 numbers as bytes, [blocks, 2]."""
    return values.half().view(torch.uint8).view(-1, 2)


def _over(numbers: Tensor, steps: Tensor) -> Tensor:
    return torch.where(steps != 0, numbers / torch.where(steps != 0, steps, torch.ones_like(steps)), 0.0)


def _q8_0(x: Tensor) -> Tensor:
    steps = x.abs().amax(1) / 127
    codes = _over(x, steps[:, None]).round().to(torch.int8)
    return torch.cat([_halves(steps), codes.view(torch.uint8)], 1)


def _q4_0(x: Tensor) -> Tensor:
    """The number of the largest size becomes -8."""
    most = x.gather(1, x.abs().argmax(1, keepdim=True))
    steps = most / -8
    codes = (_over(x, steps).round() + 8).clamp(0, 15).to(torch.uint8)
    return torch.cat([_halves(steps[:, 0]), codes[:, :16] | codes[:, 16:] << 4], 1)


def _q4_k(x: Tensor) -> Tensor:
    """Eight groups of 32, each with a scale and a minimum of 6 bits, and one scale for all of either."""
    groups = x.view(-1, 8, 32)
    least = groups.amin(2).clamp(max=0)
    steps = (groups.amax(2) - least) / 15
    whole, whole_min = (v.amax(1, keepdim=True).div(63).half().float() for v in (steps, -least))
    step, low = (_over(v, w).round().clamp(0, 63) for v, w in ((steps, whole), (-least, whole_min)))
    codes = _over(groups + (whole_min * low)[..., None], (whole * step)[..., None]).round().clamp(0, 15)
    step, low, codes = step.to(torch.uint8), low.to(torch.uint8), codes.to(torch.uint8)
    scales = torch.cat(
        [
            step[:, :4] | (step[:, 4:] >> 4) << 6,
            low[:, :4] | (low[:, 4:] >> 4) << 6,
            step[:, 4:] & 15 | (low[:, 4:] & 15) << 4,
        ],
        1,
    )
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).flatten(1)
    return torch.cat([_halves(whole[:, 0]), _halves(whole_min[:, 0]), scales, packed], 1)


def _q6_k(x: Tensor) -> Tensor:
    """Sixteen groups of 16, each with a scale of 8 bits, and one scale for all of them."""
    groups = x.view(-1, 16, 16)
    steps = groups.abs().amax(2) / 31
    whole = steps.amax(1, keepdim=True).div(127).half().float()
    step = _over(steps, whole).round().clamp(-128, 127)
    codes = (_over(groups, (whole * step)[..., None]).round().clamp(-32, 31) + 32).to(torch.uint8)
    # in each half, four rows of 32: low bits of rows 0 and 2, and 1 and 3, share a byte, high bits all four
    codes = codes.view(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    packed = (low[:, :, :2] | low[:, :, 2:] << 4).flatten(1)
    tops = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return torch.cat([packed, tops.flatten(1), step.to(torch.int8).view(torch.uint8), _halves(whole[:, 0])], 1)


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"q8_0": _q8_0, "q4_0": _q4_0, "q4_k": _q4_k, "q6_k": _q6_k}


def encode(kind: str, weight: Tensor) -> Tensor:
    """A weight [out, in] as bytes [out, ...] of blocks of `kind`, each number to the nearest."""
    values = _SIZES[kind][0]
    if weight.shape[1] % values:
        raise ValueError(f"{weight.shape[1]} inputs are not whole blocks of {values}")
    return ENCODERS[kind](weight.float().reshape(-1, values)).view(len(weight), -1)


# ---- the container -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A tensor to write. shape: slowest dimension first.   data: makes its bytes when their turn comes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        values, size = _SIZES[self.kind]
        return math.prod(self.shape) // values * size


def write_gguf(file: Path, metadata: Values, entries: Iterable[Entry]) -> None:
    """Write a file of version 3. metadata: texts, truth values, integers, floats, lists of texts, numpy arrays."""
    entries, offset = list(entries), 0
    with file.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata)))
        for key, value in metadata.items():
            out.write(_text(key) + _typed(value))
        for entry in entries:
            out.write(_text(entry.name) + struct.pack("<I", len(entry.shape)))
            out.write(struct.pack(f"<{len(entry.shape)}Q", *entry.shape[::-1]))
            out.write(struct.pack("<IQ", _IDS[entry.kind], offset))
            offset += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
        out.write(b"\0" * (-out.tell() % ALIGNMENT))
        for entry in entries:
            data = entry.data().contiguous().view(torch.uint8).numpy()
            if data.nbytes != entry.num_bytes:
                raise RuntimeError(f"{entry.name} has {data.nbytes} bytes, not {entry.num_bytes}")
            out.write(data.tobytes())
            out.write(b"\0" * (-data.nbytes % ALIGNMENT))


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, np.ndarray):
        kind = {"f": _F32, "i": _I32}[value.dtype.kind]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.astype("<f4" if kind == _F32 else "<i4").tobytes()
    return struct.pack("<IIQ", _ARRAY, _TEXT, len(value)) + b"".join(map(_text, value))


# ---- a model -----------------------------------------------------------------------------------------------------


def architecture_for(hf: HFConfig) -> tuple[str, Architecture]:
    """(GGUF's name, its entry) for a model. Raises ValueError if there is none."""
    name = hf.architectures[0] if hf.architectures else ""
    name = "LlamaForCausalLM" if name == "MistralForCausalLM" else name
    found = next((item for item in ARCHITECTURES.items() if item[1].name == name), None)
    if found is None:
        known = ", ".join(sorted({arch.name for arch in ARCHITECTURES.values()} | {"MistralForCausalLM"}))
        raise ValueError(f"GGUF files of {name or 'this model'} cannot be written, only of {known}.")
    return found


def names_for(arch: Architecture) -> Callable[[str], str | None]:
    """From a checkpoint's name of a tensor to GGUF's, None if it has none."""
    by_theirs = {theirs: ours for ours, theirs in arch.names.items()}

    def name(theirs: str) -> str | None:
        numbered = re.fullmatch(r"(model\.layers\.)(\d+)(\..+)", theirs)
        if numbered is None:
            return by_theirs.get(theirs)
        ours = by_theirs.get(f"{numbered[1]}{{i}}{numbered[3]}")
        return None if ours is None else ours.replace("{i}", numbered[2])

    return name


def metadata_for(hf: HFConfig, name: str, title: str) -> tuple[dict[str, Any], np.ndarray | None]:
    """(what a file says about a model, the divisors of its rotary frequencies if it has such)."""
    rope, positions = hf.rope, hf.max_position_embeddings or 2048
    values: dict[str, Any] = {
        "general.architecture": name,
        "general.name": title,
        "general.quantization_version": 2,
        "general.alignment": ALIGNMENT,
    }
    own: dict[str, Any] = {
        "vocab_size": hf.vocab_size,
        "context_length": positions,
        "embedding_length": hf.hidden_size,
        "block_count": hf.num_layers,
        "feed_forward_length": hf.get_int("intermediate_size", "n_inner"),
        "attention.head_count": hf.num_heads,
        "attention.head_count_kv": hf.num_kv_heads,
        "attention.key_length": hf.head_dim,
        "attention.value_length": hf.head_dim,
        "rope.dimension_count": int(hf.head_dim * rope.partial_rotary_factor),
        "rope.freq_base": float(rope.theta),
    }
    epsilon = hf.get_float("rms_norm_eps", default=None)
    if epsilon is not None:
        own["attention.layer_norm_rms_epsilon"] = float(epsilon)
    else:
        own["attention.layer_norm_epsilon"] = float(hf.get_float("layer_norm_eps", "norm_epsilon", default=1e-5))
    if hf.sliding_window is not None:
        own["attention.sliding_window"] = hf.sliding_window
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        cap = hf.get_float(field, default=None)
        if cap is not None:
            own[field] = float(cap)
    divisors = None
    if rope.kind in ("linear", "yarn"):
        own["rope.scaling.type"] = rope.kind
        own["rope.scaling.factor"] = float(rope.params["factor"])
        if rope.kind == "yarn":
            own["rope.scaling.original_context_length"] = int(rope.params["original_max_position_embeddings"])
    elif rope.kind == "llama3":
        divisors = _llama3_divisors(rope.theta, own["rope.dimension_count"], rope.params)
    elif rope.kind != "default":
        raise ValueError(f"GGUF files of models whose rotary embeddings are scaled by {rope.kind!r} cannot be written.")
    values |= {f"{name}.{key}": value for key, value in own.items()}
    _check_rope(rope, positions, GgufFile(Path(f"A GGUF file of {title}"), values, ()), divisors)
    return values, divisors


def _check_rope(rope: RopeSettings, positions: int, written: GgufFile, divisors: np.ndarray | None) -> None:
    """Raise ValueError if a reader would not find the model's rotary embeddings in what is written."""
    found: dict[str, Any] = {"rope_theta": rope.theta, "max_position_embeddings": positions}
    add_rope_scaling(found, Settings(written), {"rope_freqs.weight": divisors})
    params = found.get("rope_scaling", {})
    wanted = scaling_from_params(rope.kind, rope.params, positions)
    if divisors is None and scaling_from_params(params.get("rope_type", "default"), params, positions) != wanted:
        raise ValueError(f"{written.file} has no place for all of its rotary embeddings' settings: {wanted}.")


def _llama3_divisors(theta: float, head_dim: int, params: Values) -> np.ndarray:
    """By what Llama 3.1 divides the rotary frequencies: long waves wholly, short ones not, smoothly between."""
    low, high, factor = (float(params[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((params["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def paired(rows: Tensor, heads: int, rotary: int) -> Tensor:
    """Rows of q or k [heads * head_dim, ..] in the order of architectures whose rotation takes neighbouring pairs."""
    per_head = rows.unflatten(0, (heads, -1))
    turned = per_head[:, :rotary].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, per_head[:, rotary:]], 1).flatten(0, 1)


# ---- its tokenizer -----------------------------------------------------------------------------------------------


def tokenizer_metadata(folder: Path, vocab_size: int) -> tuple[dict[str, Any], str | None]:
    """(what a file says about the tokenizer in `folder`, a warning of what other programs will not know).

    tokenizer.json travels as a whole, as the format's `tokenizer.huggingface.json`.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}, "There is no tokenizer.json, so the file has no tokenizer: name one where it is used."
    text = file.read_text(encoding="utf-8")
    document = json.loads(text)
    values: dict[str, Any] = {"tokenizer.huggingface.json": text}
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.is_file() else {}
    template = settings.get("chat_template")
    if not isinstance(template, str) and (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, str):
        values["tokenizer.chat_template"] = template
    model, warning = document.get("model") or {}, None
    if model.get("type") != "BPE":
        return values, f"Other programs do not know a tokenizer of the kind {model.get('type')!r}."
    tokens, types = _tokens(document, vocab_size)
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    values |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if model.get("byte_fallback"):
        scores: np.ndarray = np.full(len(tokens), -1e4, np.float32)
        for rank, (left, right) in reversed(list(enumerate(pairs))):
            scores[ids[left + right]] = -rank
        values |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
    else:
        values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs]}
        cut = _split_name(document)
        if cut is None:
            warning = "Other programs will cut text in a way of their own: this tokenizer's has no name among theirs."
        else:
            values["tokenizer.ggml.pre"] = cut
    for name in ("bos", "eos", "pad", "unk"):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            values[f"tokenizer.ggml.{ {'pad': 'padding', 'unk': 'unknown'}.get(name, name) }_token_id"] = ids[token]
    values["tokenizer.ggml.add_bos_token"] = _adds_bos(document, settings)
    return values, warning


def _tokens(document: Values, vocab_size: int) -> tuple[list[str], np.ndarray]:
    """The text and the kind of every row of the embedding."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds: np.ndarray = np.full(vocab_size, Kind.UNUSED, np.int32)
    for token, index in document["model"]["vocab"].items():
        if index < vocab_size:
            tokens[index] = token
            kinds[index] = Kind.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else Kind.NORMAL
    for entry in document.get("added_tokens") or []:
        if entry["id"] < vocab_size:
            tokens[entry["id"]] = entry["content"]
            kinds[entry["id"]] = Kind.CONTROL if entry.get("special") else Kind.USER
    if document["model"].get("unk_token") in document["model"]["vocab"]:
        kinds[document["model"]["vocab"][document["model"]["unk_token"]]] = Kind.UNKNOWN
    return tokens, kinds


def _split_name(document: Values) -> str | None:
    """What llama.cpp calls the way in which a byte-level tokenizer cuts text."""
    before = document.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers") or [before]
    found = tuple(step["pattern"].get("Regex") for step in steps if step.get("type") == "Split")
    if not found and steps[-1].get("type") == "ByteLevel" and steps[-1].get("use_regex", True):
        return "gpt-2"
    return next((name for name, regexes in SPLITS.items() if regexes == found), None)


def _adds_bos(document: Values, settings: Values) -> bool:
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    after = json.dumps(document.get("post_processor") or {})
    token = settings.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return isinstance(token, str) and json.dumps(token) in after
