"""Public path of helpers around transformers tokenizers; the engine's own tokenizer is in `vllm.engine.tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.config.model_source import resolve
from vllm.engine.tokenizer_files import load_transformers_tokenizer

AnyTokenizer = Any  # a transformers tokenizer, or one of mistral_common


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> AnyTokenizer:
    """The transformers tokenizer of a folder, a Hub repository, or a model that comes with the package.

    Further arguments go to transformers.
    """
    folder = resolve(
        str(tokenizer_name),
        revision=revision,
        download_dir=download_dir,
        load_format="dummy",
        trust_remote_code=trust_remote_code,
        what="tokenizer",
    )
    if not args and not kwargs:
        return load_transformers_tokenizer(folder, tokenizer_mode, trust_remote_code)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), *args, use_fast=tokenizer_mode != "slow", trust_remote_code=trust_remote_code, **kwargs
    )


def decode_tokens(tokenizer: AnyTokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
    if skip_special_tokens is None:
        return tokenizer.decode(list(token_ids))
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def encode_tokens(tokenizer: AnyTokenizer, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
    if add_special_tokens is None:
        return tokenizer.encode(text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
