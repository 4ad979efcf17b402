"""How many KV cache blocks there are, and the tensors that hold them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.logger import init_logger
from vllm.step.kv_policy import CacheTensor, KVLayout

logger = init_logger(__name__)

GIB = 1 << 30
NO_CACHE = 1  # the null block, of no bytes: all there is for a model that keeps nothing
_CPU_DEFAULT = 4 * GIB
_CPU_SHARE = 0.4  # of the memory that is free at start, when VLLM_CPU_KVCACHE_SPACE is not set
_HUGE_PAGE = 2 << 20
_GRAPHS = 128 << 20  # bytes that graphs take beside the tensors in them
_CONTEXT = 512 << 20  # bytes that a process has on a device beside PyTorch's tensors, before any library was loaded
_LIBRARIES = 4 * GIB  # that libraries take later, at most; what the device lacks beyond it has gone to others
_LEFT = 0.02  # of a device's memory, which is not taken where others leave no more than is asked for
_CACHE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def cache_dtype(name: str, model_dtype: str) -> torch.dtype:
    """The dtype of the cache for a `kv_cache_dtype` ("auto": the model's)."""
    return _CACHE_DTYPES[model_dtype if name == "auto" else name]


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What the cache must be able to hold.

    override: number of usable blocks that the user fixed, or None.   fixed_bytes: size that the user fixed, or None.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    override: int | None = None
    fixed_bytes: int | None = None


def blocks_per_request(layout: KVLayout, tokens: int, chunk: int) -> int:
    """Most blocks that one request of `tokens` tokens holds at once when it is computed `chunk` tokens at a time."""
    return layout.blocks_for(tokens, min(chunk, tokens))


def count_blocks(layout: KVLayout, request: CacheRequest, available: int, hint: str, *, bounded: bool) -> int:
    """Blocks that fit into `available` bytes, the null block included.

    bounded: take no more than `max_num_seqs` requests of `max_model_len` tokens can use.   hint: what to do about too
    little memory on this device, beyond what the message says anyway. Raises ValueError if one request does not fit.
    """
    if request.override is not None:
        return request.override + 1
    if request.fixed_bytes is not None:
        available, bounded = request.fixed_bytes, False
    if available <= 0:
        raise ValueError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            f"engine.{hint}"
        )
    states = layout.bytes_of_states(request.max_num_seqs)
    if states >= available:
        raise ValueError(
            f"The recurrent states of max_num_seqs={request.max_num_seqs} requests and of {layout.policy.snapshots} "
            f"cached prefixes take {states / GIB:.2f} GiB, which is larger than the available KV cache memory "
            f"({available / GIB:.2f} GiB). Try decreasing `max_num_seqs` or increasing `gpu_memory_utilization` when "
            f"initializing the engine.{hint}"
        )
    available -= states
    chunk = request.max_num_batched_tokens
    needed = blocks_per_request(layout, request.max_model_len, chunk)
    if not layout.bytes_per_block:
        return 2  # nothing is kept by tokens: the null block, and one so that there is something to count
    blocks = available // layout.bytes_per_block
    if needed + 1 > blocks:
        raise ValueError(_too_small(layout, request, available, (needed + 1) * layout.bytes_per_block, hint))
    if bounded:
        blocks = min(blocks, needed * request.max_num_seqs + 1)
    return blocks


def _too_small(layout: KVLayout, request: CacheRequest, available: int, needed: int, hint: str) -> str:
    longest = longest_request(layout, request, available // layout.bytes_per_block - 1)
    estimate = f" Based on the available memory, the estimated maximum model length is {longest}." if longest else ""
    return (
        f"To serve at least one request with the models's max seq len ({request.max_model_len}), "
        f"({needed / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
        f"({available / GIB:.2f} GiB).{estimate} Try increasing `gpu_memory_utilization` or decreasing `max_model_len` "
        f"when initializing the engine.{hint}"
    )


def longest_request(layout: KVLayout, request: CacheRequest, blocks: int) -> int:
    """The longest `max_model_len` of which one request fits into `blocks` usable blocks; 0 if none does."""
    low, high = 0, request.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_request(layout, middle, request.max_num_batched_tokens) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def cpu_available(space_gib: float, ranks: int) -> tuple[int, bool]:
    """Bytes for the cache in host memory, per rank, and whether to take no more than can be used.

    space_gib: VLLM_CPU_KVCACHE_SPACE, per rank as in the guide; 0 for the default: 4 GiB or 40 % of what is free,
    whichever is less, over all ranks.
    """
    if space_gib > 0:
        return int(space_gib * GIB), False
    return min(_CPU_DEFAULT, int(_free_host_memory() * _CPU_SHARE)) // ranks, True


def _free_host_memory() -> int:
    """MemAvailable, and what the control group still allows."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit,
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as used,
        ):
            bound = limit.read().strip()
            if bound != "max":
                free = min(free, int(bound) - int(used.read()))
    except (OSError, ValueError):
        return free
    return max(free, 0)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device's memory was when an engine began, in bytes.   held: by PyTorch in this process."""

    free: int
    held: int

    @classmethod
    def now(cls, device: torch.device) -> DeviceMemory:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return cls(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))


def cuda_available(
    device: torch.device, utilization: float, begin: DeviceMemory, profile: Callable[[], None], captured: float = 0.0
) -> tuple[int, str]:
    """Bytes that the cache may take so that this engine never holds more than `utilization` of the device's memory, and
    a table. Others, in this process or another, may hold the rest; if they hold more, the cache takes what they leave.

    begin: before the weights were loaded.   profile: runs the largest step once.   captured: the largest captured step,
    as a share of that one; graphs keep their memory, 0 if there will be none. Call it when weights are loaded.
    """
    before = DeviceMemory.now(device)
    total = torch.cuda.mem_get_info(device)[1]
    weights = before.held - begin.held
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_reserved(device) - before.held
    after = DeviceMemory.now(device)
    free = min(before.free, after.free)
    graphs = int(activations * captured) + _GRAPHS if captured else 0
    allowed, left = cache_bytes(total, utilization, begin.free - free, weights, free)
    available = min(allowed, left) - activations - graphs
    table = (
        f"Device memory: {total / GIB:.2f} GiB, of which this engine may use {utilization:.0%}: weights "
        f"{weights / GIB:.2f}, activations {activations / GIB:.2f}, graphs {graphs / GIB:.2f}, libraries "
        f"{(total * utilization - allowed - weights) / GIB:.2f}, KV cache {available / GIB:.2f} GiB."
    )
    if left < allowed:
        table += f" Others hold so much that the cache is {(allowed - left) / GIB:.2f} GiB smaller than it might be."
    return available, table


def cache_bytes(total: int, utilization: float, gone: int, weights: int, free: int) -> tuple[int, int]:
    """What an engine may still take by its share of a device, and what there is to take.

    gone: bytes that the device has lost since the engine began.   weights: of these, its own tensors.   free: now.
    """
    libraries = _CONTEXT + min(max(gone - weights, 0), _LIBRARIES)
    return int(total * utilization) - weights - libraries, free - int(total * _LEFT)


def log_cache(device_type: str, layout: KVLayout, request: CacheRequest, num_blocks: int) -> None:
    """The guide's line, and how many requests of full length fit at once."""
    usable = num_blocks - 1
    if not layout.groups:
        logger.info("The model keeps nothing between steps: there is no KV cache")
        return
    logger.info("# %s blocks: %d", "GPU" if device_type == "cuda" else "CPU", usable)
    needed = blocks_per_request(layout, request.max_model_len, request.max_num_batched_tokens)
    if layout.state_bytes:
        states, snapshots = layout.bytes_of_states(request.max_num_seqs), layout.policy.snapshots
        logger.info("Recurrent states: %.2f GiB, %d cached prefixes among them", states / GIB, snapshots)
    if not needed:
        return
    logger.info(
        "KV cache: %.2f GiB; maximum concurrency for %d tokens per request: %.2fx",
        num_blocks * layout.bytes_per_block / GIB,
        request.max_model_len,
        usable / needed,
    )


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """tensors: what layers read, [blocks, ...] each, as `KVPlace` numbers them.

    pools: the memories behind them, pages of tokens and then recurrent states, each [blocks, words]: its rows are whole
    blocks, and no byte is in two of them.
    """

    tensors: list[Tensor]
    pools: tuple[list[Tensor], list[Tensor]]


def allocate(
    layout: KVLayout, num_blocks: int, num_states: int, dtype: torch.dtype, device: torch.device
) -> CacheMemory:
    """Zeros for so many blocks and states. For the usual cache that is one tensor [num_blocks, 2, kv_heads, block_size,
    head_dim] per layer of a group.

    Zeros matter: masked positions are multiplied by 0, and 0 * NaN is NaN. On the host they come from the kernel,
        page by page on first use, so that starting is fast and an unused cache costs nothing.
    """

    def zeros(count: int, size: int) -> Tensor:
        if device.type == "cpu":
            return lazy_zeros((count, size), torch.uint8)
        return torch.zeros(count, size, dtype=torch.uint8, device=device)

    memories = (
        [zeros(num_blocks, size) for size in layout.page_bytes],
        [zeros(num_states, size) for size in layout.state_bytes],
    )
    tensors = [_view(memories[t.pool][t.memory], t, dtype) for t in layout.tensors]
    return CacheMemory(tensors, ([_words(m) for m in memories[0]], [_words(m) for m in memories[1]]))


def _view(memory: Tensor, tensor: CacheTensor, dtype: torch.dtype) -> Tensor:
    """memory: [blocks, bytes] -> [blocks, *shape]."""
    dtype = dtype if tensor.dtype is None else _CACHE_DTYPES[tensor.dtype]
    size = math.prod(tensor.shape) * dtype.itemsize
    bytes_of_it = memory[:, tensor.offset : tensor.offset + size]
    return bytes_of_it.view(dtype).view(len(memory), *tensor.shape)


def _words(memory: Tensor) -> Tensor:
    """The same bytes as the widest integers that fill its rows, since they move faster."""
    wide = next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if not memory.shape[1] % dtype.itemsize
    )
    return memory.view(wide)


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that are made page by page when they are first touched."""
    count = 1
    for n in shape:
        count *= n
    size = count * dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(size, 1))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{size / GIB:.2f} GiB for a part of the KV cache are more than this machine can give. Lower "
            "VLLM_CPU_KVCACHE_SPACE, kv_cache_memory_bytes or num_gpu_blocks_override."
        ) from error
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive, and unmaps it when it is dropped.
    return torch.frombuffer(memory, dtype=torch.uint8, count=size).view(dtype).view(shape)
