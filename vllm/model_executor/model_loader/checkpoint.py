"""A checkpoint folder: which files hold the weights, and their tensors one by one."""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm.gguf.folder import gguf_files
from vllm.model_executor.model_loader.gguf_weights import iterate_gguf
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors

MAX_INDEX_BYTES = 64 * 2**20

# .bin files that trainers leave beside the weights
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "scaler.bin"})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weight files of a model. `kind`: "safetensors", "pt" or "gguf"."""

    kind: str
    files: tuple[Path, ...]
    map_location: str | dict[str, str] = "cpu"  # where "pt" files are read to

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, Tensor, Path]]:
        """(name, tensor, file). Tensors are views of the mapped files, read when they are used.

        progress: show a bar of the bytes behind, on a terminal and once a second has passed.
        """
        if not (progress and sys.stderr.isatty()):
            yield from self._tensors()
            return
        from tqdm import tqdm

        size = sum(file.stat().st_size for file in self.files)
        with tqdm(desc="Loading weights", total=size, unit="B", unit_scale=True, delay=1.0) as bar:
            for name, tensor, file in self._tensors():
                yield name, tensor, file
                bar.update(tensor.nbytes)

    def _tensors(self) -> Iterator[tuple[str, Tensor, Path]]:
        if self.kind == "gguf":
            for file in self.files:
                yield from iterate_gguf(file)
            return
        for file in self.files:
            safe = self.kind == "safetensors"
            for name, tensor in iterate_tensors(file) if safe else iterate_pickle(file, self.map_location):
                yield name, tensor, file


def find_checkpoint(folder: Path, load_format: str, map_location: str | dict[str, str] = "cpu") -> Checkpoint:
    """The weight files in `folder`. load_format: "auto" (safetensors if there, else pt, else gguf) or one."""
    if load_format in ("auto", "safetensors"):
        files = _files(folder, "model.safetensors.index.json", ("model.safetensors",), ("*.safetensors",))
        if files:
            return Checkpoint("safetensors", files)
    if load_format in ("auto", "pt", "npcache"):
        files = _files(folder, "pytorch_model.bin.index.json", ("pytorch_model.bin",), ("*.bin", "*.pt"))
        if files:
            return Checkpoint("pt", files, map_location)
    if load_format in ("auto", "gguf"):
        models = gguf_files(folder)
        if len(models) > 1:
            raise ValueError(
                f"{folder} holds several GGUF models: {', '.join(m.name for m in models)}. Name one of them."
            )
        if models:
            return Checkpoint("gguf", (models[0],))
    known = {"safetensors": "*.safetensors", "pt": "*.bin or *.pt", "npcache": "*.bin or *.pt", "gguf": "*.gguf"}
    wanted = known.get(load_format, "*.safetensors, *.bin or *.pt")
    raise ValueError(
        f"No weights found in {folder} for load_format={load_format!r}: expected {wanted}. "
        'Use load_format="auto" for whatever is there, or "dummy" to run with random weights.'
    )


def _files(folder: Path, index: str, single: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[Path, ...]:
    """The files an index names; else the single file of the usual name; else whatever matches the patterns."""
    if (folder / index).exists():
        return _indexed_files(folder / index)
    for name in single:
        if (folder / name).exists():
            return (folder / name,)
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.name not in _NOT_WEIGHTS}
    # Mistral's own format lies beside Hugging Face's and holds the same weights under other names
    return tuple(sorted(file for file in found if not file.name.startswith("consolidated")))


def _indexed_files(index: Path) -> tuple[Path, ...]:
    """The files named by a sharded checkpoint's index."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"{index} is larger than {MAX_INDEX_BYTES} bytes. Is it the right file?")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f'{index} is not a checkpoint index: expected {{"weight_map": {{tensor: file}}}}.') from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in (".", ".."):
            raise ValueError(f"{index} names the file {name!r}, expected the plain name of a file in the same folder.")
        if not (index.parent / name).exists():
            raise ValueError(f"{index} names the file {name!r}, which does not exist. Is the download complete?")
    return tuple(index.parent / name for name in names)


def iterate_pickle(file: Path, map_location: str | dict[str, str] = "cpu") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a torch.save file that holds nothing but tensors; code in it is refused and never runs."""
    try:
        state = torch.load(file, map_location=map_location, weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError:
        # torch's own text advises to load the file without this check.
        raise ValueError(
            f"{file} holds something other than tensors, which could run code when it is loaded; it was refused. "
            "Use a safetensors version of the model, or convert the file where you trust it."
        ) from None
    except Exception as error:  # torch lets through whatever reading goes wrong with
        reason = str(error) or "it ends too early"
        raise ValueError(f"{file} is not a complete PyTorch checkpoint: {reason}. Download it again.") from None
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__}, expected a dictionary of tensors.")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{file}: entry {name!r:.200} is a {type(tensor).__name__}, expected a tensor.")
        yield name, tensor
