"""`load_format="npcache"`: PyTorch files turned into one numpy file per tensor, once, which later loads map."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm.model_executor.model_loader.checkpoint import MAX_INDEX_BYTES, find_checkpoint

_FOLDER, _NAMES = "np", "weight_names.json"


def cached_tensors(folder: Path) -> Iterator[tuple[str, Tensor, Path]]:
    """(name, tensor, file) of the PyTorch weights in `folder`, from `folder`/np, which is written first if it is not
    there, or older than they.

    bfloat16, which numpy lacks, is kept as float32.   Raises ValueError for weights that are not complete.
    """
    cache = folder / _FOLDER
    if not _is_current(folder, cache):
        _write(folder, cache)
    for name in _names(cache / _NAMES):
        file = cache / f"{name}.npy"
        try:
            array = np.load(file, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{file} cannot be read: {error}. Remove {cache}, which is then written anew.") from None
        yield name, torch.from_numpy(array), file


def _is_current(folder: Path, cache: Path) -> bool:
    """Whether there is a cache, and no file of weights is newer."""
    if not (cache / _NAMES).exists():
        return False
    written = (cache / _NAMES).stat().st_mtime_ns
    files = [file for pattern in ("*.bin", "*.pt") for file in folder.glob(pattern) if file.exists()]
    return all(file.stat().st_mtime_ns <= written for file in files)


def _write(folder: Path, cache: Path) -> None:
    """Write the cache beside its place and move it there when it is complete; one process at a time."""
    checkpoint = find_checkpoint(folder, "npcache")
    unfinished = folder / f".{_FOLDER}.part"
    try:
        lock = (folder / f".{_FOLDER}.lock").open("w")
    except OSError as error:
        raise ValueError(
            f"load_format='npcache' writes the folder {cache}, which cannot be done: {error.strerror}. "
            "Use load_format='pt'."
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_current(folder, cache):
            return  # another process has written it
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        names = []
        for name, tensor, file in checkpoint.tensors():
            if Path(name).name != name or name.startswith("."):
                raise ValueError(f"{file}: the tensor {name!r} cannot be the name of a file. Use load_format='pt'.")
            wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            np.save(unfinished / f"{name}.npy", wide.numpy(), allow_pickle=False)
            names.append(name)
        (unfinished / _NAMES).write_text(json.dumps(names))
        if cache.exists():
            shutil.rmtree(cache)
        os.replace(unfinished, cache)
    with contextlib.suppress(OSError):
        (folder / f".{_FOLDER}.lock").unlink()


def _names(file: Path) -> list[str]:
    try:
        document = json.loads(file.read_bytes()[: MAX_INDEX_BYTES + 1])
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, list) or not all(isinstance(n, str) and Path(n).name == n for n in document):
        raise ValueError(f"{file} is not a list of tensors' names. Remove its folder, which is then written anew.")
    return document
