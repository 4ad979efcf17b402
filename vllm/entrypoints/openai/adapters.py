"""The adapters that a server offers as models: LoRA adapters from --lora-modules, and loaded or unloaded while it runs;
prompt adapters from --prompt-adapters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm import envs
from vllm.entrypoints.openai.errors import APIError, bad_request, not_found
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.prompt_adapter.source import count_virtual_tokens

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLMEngine

MAX_ADAPTERS = 4096
MAX_NAME = 256


def parse_lora_modules(words: Iterable[str] | None) -> list[LoRARequest]:
    """`name=path`, or JSON with name, path and perhaps base_model_name, as requests numbered from 1.

    Raises ValueError.
    """
    found: list[LoRARequest] = []
    for word in words or ():
        name, path, base = _named(word, "--lora-modules")
        if any(known.lora_name == name for known in found):
            raise ValueError(f"--lora-modules: the name {name!r} is there twice.")
        found.append(LoRARequest(name, len(found) + 1, path, base_model_name=base))
    return found


def parse_prompt_adapters(words: Iterable[str] | None) -> dict[str, str]:
    """`name=path`, or JSON with name and path. Raises ValueError."""
    found: dict[str, str] = {}
    for word in words or ():
        name, path, _ = _named(word, "--prompt-adapters")
        if name in found:
            raise ValueError(f"--prompt-adapters: the name {name!r} is there twice.")
        found[name] = path
    return found


def _named(word: str, flag: str) -> tuple[Any, Any, Any]:
    """(name, path, base_model_name) of `name=path` or JSON. Raises ValueError that names the flag."""
    if word.lstrip().startswith("{"):
        try:
            fields = json.loads(word)
            return fields["name"], fields["path"], fields.get("base_model_name")
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{flag}: expected JSON with name and path, got {word!r:.200}.") from None
    name, equals, path = word.partition("=")
    if not (name and equals and path):
        raise ValueError(f"{flag}: expected name=path, got {word!r:.200}.")
    return name, path, None


def served_prompt_adapters(
    engine: AsyncLLMEngine, words: Iterable[str] | None, taken: Collection[str] = ()
) -> dict[str, PromptAdapterRequest]:
    """The prompt adapters of `--prompt-adapters`, read and checked, by name. Raises ValueError for one that cannot be
    used, or whose name is among `taken`.
    """
    found: dict[str, PromptAdapterRequest] = {}
    for number, (name, path) in enumerate(parse_prompt_adapters(words).items(), 1):
        if name in taken:
            raise ValueError(f"--prompt-adapters: the name {name!r} stands for another model of this server.")
        folder = Path(path).expanduser().resolve()
        request = PromptAdapterRequest(name, number, str(folder), count_virtual_tokens(folder))
        engine.input_processor.virtual_tokens(request)
        found[name] = request
    return found


class ServedAdapters:
    """Owns the names of adapters. `roots`: folders that may be loaded from while the server runs; () for any."""

    def __init__(self, engine: AsyncLLMEngine, requests: Sequence[LoRARequest] = (), roots: Sequence[str] = ()) -> None:
        self._engine = engine
        self._requests = {request.lora_name: request for request in requests}
        self._next_id = len(requests) + 1
        self._roots = [Path(root).expanduser().resolve() for root in roots]
        self._adding = 0  # how many are being read
        # by name: reading takes a while, and no other may take the name meanwhile
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of this name."""
        return self._requests.get(name)

    def all(self) -> list[LoRARequest]:
        """Every adapter, in the order in which they came."""
        return list(self._requests.values())

    async def load(self, name: Any, path: Any, served: Sequence[str]) -> None:
        """Add an adapter under a new name. Raises APIError (400), or is cancelled, with nothing changed.

        served: names that are taken.
        """
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
        if len(name) > MAX_NAME:
            raise _invalid(f"lora_name may have at most {MAX_NAME} characters, got {len(name)}.")
        async with self._lock(name):
            if name in self._requests or name in served:
                raise _invalid(f"The lora adapter '{name}' has already been loaded.")
            await self._add(name, self._inside_root(path))

    async def discover(self, name: Any, served: Sequence[str]) -> None:
        """Add the adapter of a name that is not known, if a resolver finds one and adapters may be changed.

        Raises APIError (400) if what it found cannot be used.
        """
        if not isinstance(name, str) or name in self._requests or name in served or not 0 < len(name) <= MAX_NAME:
            return
        resolvers = LoRAResolverRegistry.all()
        if not resolvers or not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            return
        async with self._lock(name):
            for resolver in resolvers:
                if name in self._requests:
                    return
                found = await resolver.resolve_lora(served[0], name)
                if found is not None:
                    await self._add(name, found.lora_path, found.base_model_name)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._changing.setdefault(name, asyncio.Lock())

    async def _add(self, name: str, path: str, base_model_name: str | None = None) -> None:
        if len(self._requests) + self._adding >= MAX_ADAPTERS:
            raise _invalid(f"At most {MAX_ADAPTERS} adapters may be loaded. Unload one first.")
        request = LoRARequest(name, self._next_id, path, base_model_name=base_model_name)
        self._next_id += 1
        self._adding += 1
        try:
            await self._engine.add_lora(request)
        except (ValueError, VLLMClientError) as error:
            raise bad_request(str(error), "lora_path") from error
        except asyncio.CancelledError:  # nobody waits for it any more, but others do for the thread that reads it
            await self._engine.remove_lora(request.lora_int_id)
            raise
        finally:
            self._adding -= 1
        self._requests[name] = request

    async def unload(self, name: Any) -> None:
        """Forget an adapter; requests in progress end with it. Raises APIError."""
        if not isinstance(name, str) or not name:
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        request = self._requests.pop(name, None)
        if request is None:
            raise not_found(f"The lora adapter '{name[:MAX_NAME]}' cannot be found.", "lora_name")
        await self._engine.remove_lora(request.lora_int_id)

    def _inside_root(self, path: str) -> str:
        """Where the adapter is: absolute where there are roots, so that it is no name of the Hub. Raises APIError."""
        if "\0" in path:
            raise bad_request("lora_path has a NUL character.", "lora_path")
        if not self._roots:
            return path
        try:
            folder = Path(path).expanduser().resolve()
        except RuntimeError as error:  # of a user that there is not, or links that lead to each other
            raise bad_request(f"lora_path is no folder: {error}", "lora_path") from None
        if not any(folder.is_relative_to(root) for root in self._roots):
            raise bad_request("This server loads adapters from the folders of --lora-root only.", "lora_path")
        return str(folder)


def _invalid(message: str) -> APIError:
    return APIError(400, message, "InvalidUserInput", "lora_name")
