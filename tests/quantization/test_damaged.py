"""Damaged, truncated and lying files: each is refused with a message or loads; none takes much memory."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.harness import PagedDriver, engine_config
from tests.quantization import writers
from tests.quantization.harness import PROMPT, is_projection, plain_model, quantize_folder
from tests.quantization.test_formats import AWQ, FP8, GPTQ, INT8, QQQ, SPARSE_24, compressed
from tests.quantization.test_gguf import add_demo_tokenizer, mixed, write
from vllm.gguf.config import config_of
from vllm.gguf.container import GgufFile, GgufTensor, read_gguf
from vllm.gguf.folder import folder_of
from vllm.gguf.tokenizer import tokenizer_files
from vllm.model_executor.model_loader import load_model
from vllm.ops.cpu import library
from vllm.ops.cpu.native import NativeKernels
from vllm.ops.quantized import pack_quantized, packs_stored, quantized_linear

MOST_KIB = 1 << 20  # that a series of damaged files may add to the memory of the process


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    before = os.environ.get("VLLM_CACHE_ROOT")
    os.environ["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["VLLM_CACHE_ROOT"]
    else:
        os.environ["VLLM_CACHE_ROOT"] = before


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    _, file = write("llama", folder, mixed, tokenizer=add_demo_tokenizer)
    return file.read_bytes()


def header_end(data: bytes, folder: Path) -> int:
    file = folder / "whole.gguf"
    file.write_bytes(data)
    return min(tensor.start for tensor in read_gguf(file).tensors)


def mutated(data: bytes, end: int, generator: np.random.Generator) -> bytes:
    """One to four changes in the header: bytes, counts and lengths that are large, cuts, pieces moved."""
    changed = bytearray(data)
    # half of the changes fall into the last part, where the tensors are described, and the first
    spots = [
        lambda: int(generator.integers(0, 256)),
        lambda: int(generator.integers(max(0, end - 4096), end)),
        lambda: int(generator.integers(0, end)),
    ]
    for _ in range(int(generator.integers(1, 5))):
        at = min(spots[int(generator.integers(0, 3))](), len(changed) - 1)
        kind = int(generator.integers(0, 6))
        if kind == 0:
            changed[at] = int(generator.integers(0, 256))
        elif kind == 1:
            changed[at : at + 8] = struct.pack(
                "<Q", [0, 1, 2**31, 2**40, 2**63, 2**64 - 1][int(generator.integers(0, 6))]
            )
        elif kind == 2:
            changed[at : at + 4] = struct.pack("<I", [0, 1, 9, 255, 2**31, 2**32 - 1][int(generator.integers(0, 6))])
        elif kind == 3:
            del changed[int(generator.integers(1, len(changed) + 1)) :]
        elif kind == 4:
            other = int(generator.integers(0, end))
            changed[at : at + 16] = changed[other : other + 16]
        else:
            del changed[at : at + int(generator.integers(1, 9))]
    return bytes(changed)


def refused_or_loaded(load: Callable[[], Any], what: Any) -> bool:
    """Whether it loads; a refusal is a ValueError with a message."""
    try:
        load()
        return True
    except ValueError as error:
        assert len(str(error)) > 20, (what, error)
        return False


def load_gguf(file: Path, dtype: str = "float32") -> None:
    model = load_model(engine_config(folder_of(file), max_model_len=64, dtype=dtype), "cpu")
    PagedDriver(model).run([PROMPT[:5]], [5])


def damage_gguf(data: bytes, folder: Path, seeds: range) -> None:
    end = header_end(data, folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = 0
    for seed in seeds:
        file = folder / f"{seed}.gguf"
        file.write_bytes(mutated(data, end, np.random.default_rng(seed)))
        dtype = ("float32", "bfloat16")[seed % 2]  # as numbers, and packed as the file stores them
        loaded += refused_or_loaded(lambda file=file, dtype=dtype: load_gguf(file, dtype), seed)
        file.unlink()
    assert loaded < len(seeds)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


@pytest.fixture
def kernels() -> Iterator[None]:
    """The products of this machine's native library, if there is one, in place of the references."""
    path, ops = library.find(), (pack_quantized, packs_stored, quantized_linear)
    before = [op.kernel("cpu") for op in ops]
    if path is not None:
        native = NativeKernels(library.load(path))
        for op in ops:
            op.register("cpu", getattr(native, op.name))
    yield
    for op, kernel in zip(ops, before, strict=True):
        op.register("cpu", kernel)


def test_damaged_gguf_files(kernels: None, gguf_bytes: bytes, tmp_path: Path) -> None:
    damage_gguf(gguf_bytes, tmp_path, range(150))


@pytest.mark.fuzz
def test_many_damaged_gguf_files(kernels: None, gguf_bytes: bytes, tmp_path: Path) -> None:
    damage_gguf(gguf_bytes, tmp_path, range(10_000, 12_000))


def damage_safetensors(folder: Path, seeds: range) -> None:
    plain_model(folder, num_hidden_layers=1)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    before, loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for seed in seeds:
        file.write_bytes(mutated(data, end, np.random.default_rng(seed)))

        def load() -> None:
            PagedDriver(load_model(engine_config(folder, max_model_len=64), "cpu")).run([PROMPT[:5]], [5])

        loaded += refused_or_loaded(load, seed)
    assert loaded < len(seeds)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


def test_damaged_safetensors_files(tmp_path: Path) -> None:
    damage_safetensors(tmp_path, range(200))


@pytest.mark.fuzz
def test_many_damaged_safetensors_files(tmp_path: Path) -> None:
    damage_safetensors(tmp_path, range(10_000, 12_000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], "does not begin with GGUF"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version 1, expected 2 or 3"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "other byte order"),
        (lambda d: d[:8] + struct.pack("<Q", 2**40) + d[16:], "the number of tensors is"),
        (lambda d: d[:16] + struct.pack("<Q", 2**40) + d[24:], "the number of settings is"),
        (lambda d: d[:24] + struct.pack("<Q", 2**50) + d[32:], "the length of a key"),
        (lambda d: d[:-100], "outside the file"),
        (lambda d: d[:5000], "more than the file can hold"),
        (lambda d: d[:10], "it has 10 bytes only"),
        # a setting "k": an array (9) of 70,000 arrays
        (lambda d: d[:24] + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 70_000) + bytes(1 << 20), "an array of 70000 arrays"),
    ],
)
def test_lies_in_a_header_are_named(change: Any, message: str, gguf_bytes: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(change(gguf_bytes))
    with pytest.raises(ValueError, match=message):
        read_gguf(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.key_length": 0, "rope.dimension_count": 8}, "4 attention heads of 0"),
        ({"block_count": np.full(2, np.inf, np.float32)}, "expected an integer"),
        ({"block_count": np.full(2, 1.5, np.float32)}, "expected an integer"),
        ({"block_count": np.ones(2, bool)}, "expected an integer"),
    ],
)
def test_settings_that_are_no_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    sizes = {"attention.head_count": 4, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128}
    settings = {**sizes, "context_length": 64, **changes}
    file = Path("x.gguf")
    metadata = {"general.architecture": "llama", **{f"llama.{name}": value for name, value in settings.items()}}
    embedding = GgufTensor("token_embd.weight", "f32", (100, 64), 0, 100 * 64 * 4, file)
    with pytest.raises(ValueError, match=message):
        config_of(GgufFile(file, metadata, (embedding,)))


def test_a_vocabulary_of_all_pieces_of_a_text_takes_little_memory() -> None:
    """The pieces of a text of 250 letters take 8 MB, and are made of each other in 2.6 million ways."""
    text = "".join(chr(0x4E00 + i) for i in range(250))
    tokens = [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    with pytest.raises(ValueError, match="too many pieces of pieces"):
        tokenizer_files(GgufFile(Path("x.gguf"), metadata, ()))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (lambda w: writers.gptq(w, act_order=True, symmetric=False), {**GPTQ, "sym": False, "desc_act": True}),
    "awq": (lambda w: writers.awq(w), AWQ),
    "fp8": (lambda w: writers.fp8(w, static=True), {**FP8, "activation_scheme": "static"}),
    "marlin 2:4": (writers.marlin_24, {**GPTQ, "group_size": 128, "checkpoint_format": "marlin_24"}),
    "qqq": (lambda w: writers.qqq(w, group=64), QQQ),
    "sparse": (lambda w: writers.sparse(w, "fp8"), compressed("float-quantized", {**INT8, "type": "float"}, SPARSE_24)),
}


def damage_settings(settings: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    values: list[Any] = [None, -1, 0, 3, 7, 2**70, "x", True, [], {}, [1], 1e400, "gemv", 16, ["re:("], {"(": {}}]
    changed = dict(settings)
    for _ in range(int(generator.integers(1, 3))):
        more = ("modules_to_not_convert", "dynamic", "weight_block_size")
        key = [*settings, *more][int(generator.integers(0, len(settings) + len(more)))]
        changed[key] = values[int(generator.integers(0, len(values)))]
    return changed


def damage_tensors(tensors: dict[str, torch.Tensor], generator: np.random.Generator) -> dict[str, torch.Tensor]:
    changed = dict(tensors)
    names = sorted(name for name in tensors if is_projection(name))
    for _ in range(int(generator.integers(1, 4))):
        name = names[int(generator.integers(0, len(names)))]
        tensor = changed.get(name, tensors[name])
        kind = int(generator.integers(0, 6))
        if kind == 0:
            changed.pop(name, None)
        elif kind == 1:
            changed[name] = tensor.flatten()[: max(1, tensor.numel() // 2)].clone()
        elif kind == 2 and tensor.dtype not in (torch.float8_e4m3fn,):
            changed[name] = torch.full_like(tensor, int(generator.integers(-128, 127)))
        elif kind == 3:
            changed[name] = tensor.reshape(-1).clone().view(torch.uint8)
        elif kind == 4:
            changed[
                f"{name.rpartition('.')[0]}.{['weight', 'scales', 'g_idx', 'odd'][int(generator.integers(0, 4))]}"
            ] = torch.zeros(3, dtype=torch.int32)
        else:
            changed[name] = tensor.t().contiguous() if tensor.dim() == 2 else tensor[None].clone()
    return changed


def damage_checkpoints(folder: Path, seeds: range) -> None:
    loaded, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, (write_weight, settings) in FORMATS.items():
        own = folder / name
        reference, state = plain_model(own, num_hidden_layers=1)
        quantize_folder(
            own, reference, state, lambda m, w, write=write_weight: write(w) if is_projection(m) else None, settings
        )
        tensors = load_file(own / "model.safetensors")
        config = json.loads((own / "config.json").read_text())
        for seed in seeds:
            generator = np.random.default_rng(seed)
            if generator.random() < 0.5:
                damaged = {**config, "quantization_config": damage_settings(settings, generator)}
                (own / "config.json").write_text(json.dumps(damaged))
            else:
                save_file(damage_tensors(tensors, generator), own / "model.safetensors")

            def load(own: Path = own) -> None:
                model = load_model(engine_config(own, max_model_len=64), "cpu")
                PagedDriver(model).run([PROMPT[:5]], [5])

            loaded += refused_or_loaded(load, (name, seed))
            save_file(tensors, own / "model.safetensors")
            (own / "config.json").write_text(json.dumps(config))
    assert loaded < len(seeds) * len(FORMATS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


def test_damaged_quantized_checkpoints(tmp_path: Path) -> None:
    damage_checkpoints(tmp_path, range(60))


@pytest.mark.fuzz
def test_many_damaged_quantized_checkpoints(tmp_path: Path) -> None:
    damage_checkpoints(tmp_path, range(10_000, 10_700))
