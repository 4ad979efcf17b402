"""Weights in CoreWeave's tensorizer format: files, web addresses or S3, encrypted or not.

A file that this engine wrote holds one rank's weights as they are kept (`rank_state.py`); any other holds a checkpoint
under the names of its model in Hugging Face's format.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm import envs
from vllm.config.tensorizer import TensorizerArgs, TensorizerConfig
from vllm.model_executor.model_loader.rank_state import DESCRIPTION, RankState, read_description

__all__ = ["TensorizerArgs", "TensorizerConfig", "new_key", "opened", "write"]

_KEY_BYTES = 32


@contextmanager
def _stream(config: TensorizerConfig, rank: int, world: int, mode: str) -> Iterator[Any]:
    """A rank's file or address, open for reading ("rb") or writing ("wb+")."""
    library = _library()
    where = {
        "s3_access_key_id": config.s3_access_key_id or envs.S3_ACCESS_KEY_ID,
        "s3_secret_access_key": config.s3_secret_access_key or envs.S3_SECRET_ACCESS_KEY,
        "s3_endpoint": config.s3_endpoint or envs.S3_ENDPOINT_URL,
    }
    uri = config.uri(rank, world)
    if "w" in mode and "://" not in uri:
        Path(uri).parent.mkdir(parents=True, exist_ok=True)
    try:
        stream = library.stream_io.open_stream(uri, mode, **where)
    except (OSError, ValueError) as error:
        raise ValueError(f"tensorizer cannot open {uri!r}: {error}") from None
    with stream:
        yield stream


def _library() -> Any:
    try:
        import tensorizer
    except ImportError as error:
        raise ValueError(
            f"load_format='tensorizer' needs the package tensorizer ({error}): pip install vllm[tensorizer]"
        ) from None
    return tensorizer


def _with_libsodium(make: Callable[..., Any], *args: Any) -> Any:
    try:
        return make(*args)
    except RuntimeError as error:
        raise ValueError(f"Encrypted weights need libsodium: {error}") from None


def _key(file: str) -> bytes:
    try:
        key = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"The encryption key {file!r} cannot be read: {error.strerror}.") from None
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{file!r} holds {len(key)} bytes, expected a key of {_KEY_BYTES}.")
    return key


def new_key(keyfile: str) -> None:
    """Write a new key. Raises ValueError if the file exists."""
    if Path(keyfile).exists():
        raise ValueError(f"The key file {keyfile!r} exists, and models may be encrypted with it. Name a new one.")
    key = _with_libsodium(_library().EncryptionParams.random).key
    descriptor = os.open(keyfile, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)


def __getattr__(name: str) -> Any:
    if name == "tensorize_vllm_model":  # runs an engine, which stands above this room
        return importlib.import_module("vllm.engine.tensorize").tensorize_vllm_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def write(tensors: Iterable[tuple[str, Tensor]], config: TensorizerConfig, rank: int, world: int) -> None:
    """Write a rank's weights."""
    library, encryption = _library(), None
    if config.encryption_keyfile is not None:
        encryption = _with_libsodium(library.EncryptionParams, _key(config.encryption_keyfile))
    found = {name: tensor.detach() for name, tensor in tensors}
    ordered = {DESCRIPTION: found.pop(DESCRIPTION), **found}  # files are read from front to back
    with _stream(config, rank, world, "wb+") as stream:
        serializer = library.TensorSerializer(stream, encryption=encryption)
        serializer.write_state_dict(ordered)
        serializer.close()


@contextmanager
def opened(
    config: TensorizerConfig, rank: int, world: int, device: torch.device
) -> Iterator[RankState | Iterator[tuple[str, Tensor, Path]]]:
    """A rank's weights, or the tensors of a checkpoint; they are read while this is open."""
    library, decryption = _library(), None
    if config.encryption_keyfile is not None:
        decryption = _with_libsodium(library.DecryptionParams.from_key, _key(config.encryption_keyfile))
    uri = config.uri(rank, world)
    try:
        with _stream(config, rank, world, "rb") as stream:
            tensors = library.TensorDeserializer(
                stream,
                device=str(device),
                lazy_load=True,
                verify_hash=bool(config.verify_hash),
                num_readers=config.num_readers or 1,
                encryption=decryption,
            )
            names = tuple(tensors.keys())
            if DESCRIPTION not in names:
                yield ((name, tensors[name], Path(uri)) for name in names)
                return
            description = read_description(tensors[DESCRIPTION])
            rest = tuple(name for name in names if name != DESCRIPTION)
            yield RankState(description, rest, lambda name: tensors[name], uri)
    except (library.CryptographyError, library.serialization.HashMismatchError, EOFError, OSError) as error:
        raise ValueError(f"tensorizer cannot read {uri!r}: {type(error).__name__}: {error}") from error
