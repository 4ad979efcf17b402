"""The identity of a full block of tokens: a hash of all that its keys and values depend on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(lora_id: int = 0, salt: str | None = None, lora_key: bytes = b"") -> bytes:
    """What stands for the parent of a sequence's first block: the adapter by its number and the digest of its files,
    and the user's salt if there is one.
    """
    text = (salt or "").encode()
    return hashlib.sha256(b"%d:%d:" % (lora_id, len(text)) + text + lora_key).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """The content of a block: 8 bytes a token, native order of this machine."""
    return array("q", token_ids).tobytes()


def block_hash(parent: bytes, content: bytes, extra: bytes = b"") -> bytes:
    """SHA-256 over the hash of the block before (or `root_hash`), the block's content, and its extra keys: whatever
    else its keys depend on (the pixels behind its placeholders), encoded so that no two of them run together.

    The content's length is the same for all blocks, so that content and extra keys cannot be mistaken for each other.
    """
    return hashlib.sha256(parent + content + extra).digest()
