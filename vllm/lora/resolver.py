"""Finds adapters that requests name and the server does not know yet; plug-ins may bring further ways (`register`)."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from pathlib import Path

from vllm import envs
from vllm.lora.config import CONFIG
from vllm.lora.request import LoRARequest

MAX_NAME = 255


class LoRAResolver(ABC):
    """One way to find an adapter by its name."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of this name for this model; None if there is none. lora_name: as a client sent it."""


class FolderResolver(LoRAResolver):
    """Finds `folder/<name>`. Names that lead out of the folder find nothing."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).expanduser().resolve()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if not 0 < len(lora_name) <= MAX_NAME or lora_name in (".", "..") or set(lora_name) & {"/", "\\", "\0"}:
            return None
        found = (self._folder / lora_name).resolve()
        try:
            if found.parent != self._folder or not (found / CONFIG).is_file():
                return None
        except OSError:  # too long for a path
            return None
        return LoRARequest(lora_name, 1 + zlib.crc32(lora_name.encode()), str(found))


class _Registry:
    """The resolvers of this process, by name."""

    def __init__(self) -> None:
        self._resolvers: dict[str, LoRAResolver] = {}

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        """Ask `resolver` too, after those that came before it. Replaces one of the same name."""
        if not isinstance(resolver, LoRAResolver):
            raise TypeError(f"resolver must be a LoRAResolver, got {type(resolver).__name__}.")
        self._resolvers[resolver_name] = resolver

    def get_supported_resolvers(self) -> set[str]:
        """The names of all resolvers."""
        return set(self._resolvers)

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """Raises KeyError."""
        if resolver_name not in self._resolvers:
            raise KeyError(f"LoRA resolver {resolver_name!r} not found; known are: {sorted(self._resolvers)}.")
        return self._resolvers[resolver_name]

    def all(self) -> list[LoRAResolver]:
        """Those to ask, in order; first the one for the folder that the operator has named."""
        folder = envs.VLLM_LORA_RESOLVER_CACHE_DIR
        return [*([FolderResolver(folder)] if folder else []), *self._resolvers.values()]


LoRAResolverRegistry = _Registry()
