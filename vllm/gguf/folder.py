"""A model folder in Hugging Face's format for a GGUF file: its settings as JSON files beside links to the file.

So that whatever reads a model folder (configuration, tokenizer, chat template) reads GGUF files too.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from vllm import envs
from vllm.gguf.config import config_of
from vllm.gguf.container import files_of, read_model
from vllm.gguf.tokenizer import end_tokens, tokenizer_files
from vllm.logger import init_logger

__all__ = ["folder_of", "gguf_files"]

logger = init_logger(__name__)

_VERSION = 2  # of what is written


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF models in a folder: single files, and the first file of each split."""
    files = sorted(folder.glob("*.gguf"))
    return [file for file in files if files_of(file)[0] == file] if files else []


def folder_of(file: Path) -> Path:
    """The folder of the model in `file` (or in its split), made in the cache if it is not there yet.

    Raises ValueError if the file is damaged or holds something that is not supported.
    """
    files = files_of(file)  # links, in a download cache, to files with other names
    parts = [f"{part.resolve()} {part.stat().st_size} {part.stat().st_mtime_ns}" for part in files]
    key = hashlib.sha256("\n".join([str(_VERSION), *parts]).encode()).hexdigest()[:32]
    folder = Path(envs.VLLM_CACHE_ROOT).expanduser() / "gguf" / key
    if (folder / "config.json").is_file():
        return folder
    gguf = read_model(file)
    config = config_of(gguf)
    texts = {"config.json": json.dumps(config, indent=2)}
    try:
        texts.update(tokenizer_files(gguf))
    except ValueError as error:
        logger.warning("%s", error)  # another tokenizer may have been named
    texts["generation_config.json"] = json.dumps({"eos_token_id": end_tokens(gguf)} if end_tokens(gguf) else {})
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as fresh:
            for name, text in texts.items():
                Path(fresh, name).write_text(text, encoding="utf-8")
            for part in files:
                Path(fresh, part.name).symlink_to(part.resolve())
            os.rename(fresh, folder)
    except OSError as error:
        if not folder.exists():  # else another process was faster
            raise ValueError(
                f"The settings of {file} could not be unpacked into {folder.parent}: {error.strerror}. Set "
                "VLLM_CACHE_ROOT to a folder that can be written."
            ) from None
    return folder
