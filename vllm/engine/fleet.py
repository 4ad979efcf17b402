"""Several copies of the engine core behind one front end: which copy a request goes to, and what happens when one dies.

A copy (replica) is a core process with its own devices and its own scheduler. No copy knows of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from vllm.engine.adapters import LOADING, READY, UNKNOWN
from vllm.engine.core_client import AsyncCoreClient, DeathHandler, EngineSilentError, OutputHandler
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.step.block_hash import block_hash, root_hash, token_bytes
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats

logger = init_logger(__name__)

# Prefixes are compared in units of so many tokens: fewer are not worth a detour.
PREFIX_UNIT = 64
# A running sequence delays others by about as much as computing so many tokens of a prompt does.
TOKENS_PER_SEQUENCE = 64
# A request that was on this many copies when they died or fell silent is likely to be the reason.
MOST_MOVES = 2
# When no copy is left, and each has failed more often than this without answering anything in between, all is over.
MOST_FAILURES = 3
RESTART_SECONDS = 0.5  # before the second attempt in a row; doubled for each further one, up to:
MOST_RESTART_SECONDS = 60.0


@dataclass(slots=True)
class _Held:
    """A request that a copy works on.   units: hashes of its prompt's prefixes.   begun: it has brought output.

    work: tokens of the prompt that the copy has to compute, as far as is known.   name: what the copy calls it.
    """

    message: CoreRequest
    units: list[bytes]
    name: str
    begun: bool = False
    moves: int = 0
    work: int = 0

    @property
    def may_move(self) -> bool:
        """Whether nobody has seen output: also where what has come is kept for an answer that is given as a whole."""
        if self.moves >= MOST_MOVES:
            return False
        params = self.message.params
        return not self.begun or (
            isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.FINAL_ONLY
        )


class PrefixMemory:
    """Which prefixes a copy has been sent and may still have in its cache: as many units as the cache has room for."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._units: OrderedDict[bytes, None] = OrderedDict()

    def match(self, units: Sequence[bytes]) -> int:
        """Tokens at the head of a prompt with these units that the copy has seen."""
        count = 0
        for unit in units:
            if unit not in self._units:
                break
            count += 1
        return count * PREFIX_UNIT

    def add(self, units: Sequence[bytes]) -> None:
        """The copy computes a prompt with these units. What was not used for longest goes, longest prefixes first."""
        known = self._units
        for unit in reversed(units):
            known[unit] = None
            known.move_to_end(unit)
        while len(known) > self._room:
            known.popitem(last=False)

    def clear(self) -> None:
        self._units.clear()


@dataclass(slots=True)
class _Replica:
    """One copy.   base: what its predecessors have counted.   tokens: to be computed of prompts before their first.

    well: it lives, gives signs of it and finishes steps, as of the last look.
    """

    index: int
    client: AsyncCoreClient
    prefixes: PrefixMemory
    alive: bool = True
    well: bool = True
    held: dict[str, _Held] = field(default_factory=dict)
    tokens: int = 0
    stats: CoreStats = field(default_factory=CoreStats)
    base: CoreStats = field(default_factory=CoreStats)
    failures: int = 0

    def work(self, length: int, units: Sequence[bytes]) -> int:
        """How many tokens of a prompt this copy would have to compute."""
        return max(0, length - self.prefixes.match(units))

    def cost(self, length: int, units: Sequence[bytes]) -> int:
        """About how many tokens have to be computed before a new prompt is."""
        return self.tokens + self.work(length, units) + TOKENS_PER_SEQUENCE * len(self.held)


def prefix_units(message: CoreRequest) -> list[bytes]:
    """What identifies the prefixes of a prompt, one for each whole unit."""
    parent = root_hash(message.lora_id, message.cache_salt, message.encoder_key)
    keys = b"".join(key for _, _, key in message.content_keys)
    units, ids = [], message.prompt_token_ids
    for start in range(0, len(ids) - PREFIX_UNIT + 1, PREFIX_UNIT):
        parent = block_hash(parent, token_bytes(ids[start : start + PREFIX_UNIT]), keys)
        units.append(parent)
    return units


class Fleet:
    """`AsyncCoreClient` over several cores.

    A request goes where the least has to be computed before it, cached prefixes counted; its siblings follow it. When a
    copy dies, requests of which nobody has seen any output move to another one, the others end with an error, and the
    copy is started again, however often that fails while others live. The fleet is dead when no copy is left and none
    can be started. From a copy that falls silent, requests move that have brought nothing, under another name: what it
    says of them later is nobody's, also if they have come back to it meanwhile.
    """

    def __init__(self, make: Callable[[int], AsyncCoreClient], size: int, caches_prefixes: bool = True) -> None:
        """make: a client of a core that is not started yet, by the copy's number."""
        self._make, self._size, self._caches = make, size, caches_prefixes
        self._replicas: list[_Replica] = []
        self._owner: dict[str, tuple[_Replica, _Held]] = {}  # by the front end's name
        self._orphans: dict[str, _Held] = {}  # to be sent as soon as there is a copy again
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_outputs: OutputHandler = lambda outputs, stats: None
        self._on_death: DeathHandler = lambda reason: None
        self._restarts: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._death: str | None = None
        self._turn = 0
        self.info: dict[str, Any] = {}

    # -- life ----------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start all copies at once. Raises what starting the first that failed has raised; then none is left."""
        clients = self._new_clients(range(self._size))
        _launch(clients)
        self.info = clients[0].info
        room = self.info.get("num_blocks", 0) * self.info.get("block_size", 0) // PREFIX_UNIT
        self._replicas = [_Replica(i, client, PrefixMemory(room)) for i, client in enumerate(clients)]

    def _new_clients(self, indices: Iterable[int]) -> list[AsyncCoreClient]:
        """Clients of cores that are to be started together."""
        return [self._make(index) for index in indices]

    async def attach(self, on_outputs: OutputHandler, on_death: DeathHandler) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outputs, self._on_death = on_outputs, on_death
        for replica in self._replicas:
            await self._listen(replica)
            replica.stats = CoreStats(engine=replica.index)
            self._on_outputs([], replica.stats)

    async def _listen(self, replica: _Replica) -> None:
        client = replica.client

        def take(outputs: list[CoreOutput], stats: CoreStats) -> None:
            if replica.client is client and replica.alive:
                self._take(replica, outputs, stats)

        def lose(reason: str) -> None:
            if replica.client is client:
                self._lose(replica, reason)

        await client.attach(take, lose)

    async def stop(self) -> None:
        self._stopping = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(replica.client.stop() for replica in self._replicas if replica.alive))

    def kill(self) -> None:
        self._stopping = True
        for replica in self._replicas:
            replica.client.kill()

    def check_health(self) -> None:
        """Raise EngineDeadError unless a copy lives and makes progress."""
        problems = []
        for replica in self._replicas:
            try:
                if not replica.alive:
                    raise EngineDeadError("It has ended, and is being started again.")
                replica.client.check_health()
                return
            except EngineDeadError as error:
                problems.append(f"replica {replica.index}: {error}")
        raise EngineDeadError(self._death or "No replica of the engine is well: " + "; ".join(problems))

    def stall(self) -> str | None:
        """Give up copies that are stuck; of those that may become so, others get what comes. The fleet never is."""
        silent = []
        for replica in self._replicas:
            if not replica.alive:
                continue
            if self._look_at(replica):
                silent.append(replica)
            problem = replica.client.stall()
            if problem is not None:
                replica.client.kill()
                self._lose(replica, problem)
        if any(replica.alive and replica.well for replica in self._replicas):
            for replica in silent:
                self._relieve(replica)
        return None

    def _relieve(self, replica: _Replica) -> None:
        """Move what has not begun from a copy that is silent to those that are well. (One that says that a step takes
        long keeps it: a request may be the reason, and would hold up the others, too.)
        """
        moving = [held for held in replica.held.values() if not held.begun and held.may_move]
        if not moving:
            return
        logger.warning("Replica %d: %d requests that have not begun move to others.", replica.index, len(moving))
        self.abort([held.message.request_id for held in moving])
        for held in moving:
            held.moves += 1
            held.name = f"{held.message.request_id}-{uuid.uuid4().hex}"  # which nobody can choose for a request
        self._send(moving)

    def _look_at(self, replica: _Replica) -> bool:
        """Note, and say, whether a copy is well. True if it is silent."""
        problem, silent = "", False
        try:
            replica.client.check_health()
        except EngineDeadError as error:
            problem, silent = error.reason, isinstance(error, EngineSilentError)
        if replica.well == (not problem):
            return silent
        replica.well = not problem
        if problem:
            logger.warning("Replica %d: %s New requests go to others.", replica.index, problem)
        else:
            logger.info("Replica %d is well again.", replica.index)
        replica.stats = msgspec.structs.replace(replica.stats, alive=replica.well)
        self._on_outputs([], replica.stats)
        return silent

    def excuse(self) -> None:
        for replica in self._replicas:
            replica.client.excuse()

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, requests: list[CoreRequest]) -> None:
        """Send requests to copies. Raises EngineDeadError if there will never be one again."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._send([_Held(m, prefix_units(m) if self._caches else [], m.request_id) for m in requests])

    def _send(self, requests: Iterable[_Held]) -> None:
        """Send each request to the copy that suits it best, in as few messages as possible."""
        parcels: dict[int, list[_Held]] = {}
        for held in requests:
            replica = self._choose(held)
            if replica is None:
                self._orphans[held.message.request_id] = held
                continue
            parcels.setdefault(replica.index, []).append(held)
            replica.held[held.name] = held
            held.work = replica.work(len(held.message.prompt_token_ids), held.units)
            replica.tokens += held.work
            replica.prefixes.add(held.units)
            self._owner[held.message.request_id] = replica, held
        self._deliver(parcels)

    def _deliver(self, parcels: dict[int, list[_Held]]) -> None:
        """Give each copy the requests that it was chosen for."""
        for index, requests in parcels.items():
            try:
                self._replicas[index].client.add([self._named(held) for held in requests])
            except EngineDeadError:
                continue  # the copy has just ended: `_lose` will look after them
            except Exception:
                self.abort([held.message.request_id for held in requests])
                raise

    def _named(self, held: _Held) -> CoreRequest:
        """A request, and the one that it was forked from, under the names that its copy knows."""
        message = held.message
        parent = self._owner.get(message.fork_of or "")
        fork_of = message.fork_of if parent is None else parent[1].name
        if (held.name, fork_of) == (message.request_id, message.fork_of):
            return message
        return msgspec.structs.replace(message, request_id=held.name, fork_of=fork_of)

    def _send_orphans(self) -> None:
        orphans, self._orphans = self._orphans, {}
        self._send(orphans.values())

    def _choose(self, held: _Held) -> _Replica | None:
        alive = [replica for replica in self._replicas if replica.alive]
        if not alive:
            return None
        alive = [replica for replica in alive if replica.well] or alive
        parent = self._owner.get(held.message.fork_of or "")
        if parent is not None and parent[0] in alive:
            return parent[0]
        self._turn += 1  # of equals each has its turn
        length = len(held.message.prompt_token_ids)
        return min(alive, key=lambda r: (r.cost(length, held.units), (r.index + self._turn) % self._size))

    def abort(self, request_ids: list[str]) -> None:
        parcels: dict[int, list[str]] = {}
        for request_id in request_ids:
            self._orphans.pop(request_id, None)
            found = self._owner.get(request_id)
            if found is not None:
                replica, held = found
                parcels.setdefault(replica.index, []).append(held.name)
                self._forget(replica, held)
        for index, ids in parcels.items():
            with contextlib.suppress(EngineDeadError):
                self._replicas[index].client.abort(ids)

    def _forget(self, replica: _Replica, held: _Held) -> None:
        del replica.held[held.name]
        del self._owner[held.message.request_id]
        if not held.begun:
            replica.tokens -= held.work

    def _take(self, replica: _Replica, outputs: list[CoreOutput], stats: CoreStats) -> None:
        """What a step of one copy has brought."""
        known = []
        for output in outputs:
            held = replica.held.get(output.request_id)
            if held is None:
                continue  # aborted or moved meanwhile
            output.request_id = held.message.request_id
            known.append(output)
            if not held.begun and (output.new_token_ids or output.prompt_logprobs or output.pooled):
                held.begun = True
                replica.tokens -= held.work
            if output.finish_reason is not None:
                self._forget(replica, held)
                replica.failures = 0
        base = replica.base
        replica.stats = stats = msgspec.structs.replace(
            stats,
            engine=replica.index,
            alive=replica.well,
            prefix_cache_queries=stats.prefix_cache_queries + base.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits + base.prefix_cache_hits,
            num_preemptions=stats.num_preemptions + base.num_preemptions,
        )
        self._on_outputs(known, stats)

    # -- death ---------------------------------------------------------------------------------------------------------

    def _lose(self, replica: _Replica, reason: str) -> None:
        """A copy has ended: move what nobody has seen anything of, end the rest, start the copy again."""
        if self._stopping or not replica.alive:
            return
        lost = self._lost_with(replica)
        for other in lost:
            other.alive = False
            other.failures += 1
        for other in lost:
            self._empty(other, reason)
        self._send_orphans()
        assert self._loop is not None
        task = self._loop.create_task(self._restart(lost, reason), name=f"restart-replica-{replica.index}")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    def _lost_with(self, replica: _Replica) -> list[_Replica]:
        """The copies that end with this one, itself first."""
        return [replica]

    def _empty(self, replica: _Replica, reason: str) -> None:
        """Take the requests of a copy that has ended: those that are to move become orphans, the rest end."""
        moving: dict[str, _Held] = {}
        outputs = []
        text = "The engine replica that worked on this request has ended."
        for held in replica.held.values():
            request_id = held.message.request_id
            del self._owner[request_id]
            if held.may_move:
                if held.begun:
                    outputs.append(CoreOutput(request_id, [], again=True))
                held.begun = False
                held.moves += 1
                moving[request_id] = held
            else:
                outputs.append(CoreOutput(request_id, [], finish_reason="error", error=text))
        logger.error(
            "Replica %d has ended: %s Of its requests %d move to others, %d end with an error.",
            replica.index, reason, len(moving), len(replica.held) - len(moving),
        )  # fmt: skip
        replica.held.clear()
        replica.tokens = 0
        replica.prefixes.clear()
        replica.base = replica.stats
        stats = msgspec.structs.replace(
            replica.stats,
            alive=False,
            num_running=0,
            num_waiting=0,
            kv_blocks_free=replica.stats.kv_blocks_total,
            prompt_tokens=0,
            generation_tokens=0,
            running_adapters=[],
            waiting_adapters=[],
        )
        replica.stats = stats
        self._orphans.update(moving)  # of which those are taken out whose siblings have failed
        self._on_outputs(outputs, stats)

    async def _restart(self, lost: list[_Replica], reason: str) -> None:
        """Start copies again that have ended together, and give them what waits for one."""
        names = ", ".join(str(replica.index) for replica in lost)
        while any(replica.alive or replica.failures <= MOST_FAILURES for replica in self._replicas):
            failures = max(replica.failures for replica in lost)
            if failures > 1:
                seconds = min(MOST_RESTART_SECONDS, RESTART_SECONDS * 2 ** min(failures - 2, 30))
                logger.info("Replica %s is started again in %.1f s.", names, seconds)
                await asyncio.sleep(seconds)
            clients, started = self._new_clients(replica.index for replica in lost), time.monotonic()
            launch = asyncio.get_running_loop().run_in_executor(None, _launch, clients)
            try:
                await asyncio.shield(launch)
            except asyncio.CancelledError:  # the engine ends: so must what is being started, or waits for a place
                launch.add_done_callback(partial(_end, clients))
                for client in clients:
                    client.kill()
                raise
            except Exception as error:
                for replica in lost:
                    replica.failures += 1
                reason = str(error)
                logger.error("Replica %s could not be started again: %s", names, reason)
                continue
            for replica, client in zip(lost, clients, strict=True):
                replica.client = client
                await self._listen(replica)
            for replica in lost:  # at once: those that belong together must hear of the same requests
                replica.alive = replica.well = True
                replica.stats = msgspec.structs.replace(replica.stats, alive=True)
                self._on_outputs([], replica.stats)
            logger.info("Replica %s is back after %.1f s.", names, time.monotonic() - started)
            self._send_orphans()
            return
        if self._death is None and not self._stopping:
            for task in self._restarts - {asyncio.current_task()}:
                task.cancel()
            self._death = f"All {self._size} replicas have ended, the last one because: {reason}"
            self._on_death(self._death)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a utility method of every living core; what they answer is joined as the method asks for."""
        alive = [replica.client for replica in self._replicas if replica.alive]
        if not alive:
            raise EngineDeadError(self._death or "No replica of the engine is alive at the moment.")
        found = await asyncio.gather(*(client.call(method, *args, **kwargs) for client in alive))
        return _joined(method, found)


def _launch(clients: Sequence[AsyncCoreClient]) -> None:
    """Start cores at once. Raises what the first that fails has raised; then none is left."""
    with ThreadPoolExecutor(len(clients), thread_name_prefix="replica") as pool:
        launches = {pool.submit(client.launch): client for client in clients}
        failed = next((launch for launch in as_completed(launches) if launch.exception() is not None), None)
        if failed is not None:
            for launch, client in launches.items():
                if launch is not failed:
                    client.kill()
    if failed is not None:
        for launch, client in launches.items():
            if launch.exception() is None:
                client.kill()
        failed.result()


def _end(clients: Sequence[AsyncCoreClient], launched: asyncio.Future[None]) -> None:
    if launched.cancelled() or launched.exception() is None:
        for client in clients:
            client.kill()


def _joined(method: str, found: list[Any]) -> Any:
    """One answer of all cores: results of all workers, adapters that all have, sums of what is held."""
    first = found[0]
    match method:
        case "collective_rpc":
            return [value for values in found for value in values]
        case "list_loras":
            return sorted(set(first).intersection(*found[1:]))
        case "idle_report":
            return {key: sum(values[key] for values in found) for key in first}
        case "adapter_state":  # bad news first
            return min(found, key=lambda state: {LOADING: 1, UNKNOWN: 2, READY: 3}.get(state, 0))
        case "remove_lora":
            return any(found)
        case "reset_prefix_cache" | "pin_lora":
            return all(found)
    return first
