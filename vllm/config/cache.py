"""Settings of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.fields import on_cpu, setting
from vllm.config.kinds import Choice, Flag, Integer, Number, Text

CACHE_DTYPES = ("auto", "fp8", "fp8_e5m2", "fp8_e4m3")
HASH_ALGORITHMS = ("builtin", "sha256")
GIB = 2**30


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache: its blocks, its size, and what is kept for later requests."""

    block_size: int = setting(
        None,
        Integer(optional=True),
        "Tokens per block of KV cache: a power of two up to 256. Default: 16.",
        resolved=16,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        Number(),
        "The part of the device's memory, from 0 to 1, that weights, activations and KV cache of this engine may take.",
        idle=on_cpu("VLLM_CPU_KVCACHE_SPACE sets the size of the cache on the CPU"),
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        Integer(low=1, human=True, optional=True),
        "The size of the KV cache in bytes. If set, memory is not profiled and gpu_memory_utilization has no effect.",
    )
    kv_offloading_size: float | None = setting(
        None,
        Number(optional=True),
        "GiB of host memory, of all ranks together, for copies of KV cache blocks. What the device has no room for any "
        "more comes back from there when a later request has the same beginning. Default: none.",
    )
    kv_offloading_backend: str = setting(
        "native",
        Choice(values=("native", "lmcache")),
        "What keeps these blocks.",
        needs="kv_offloading_size",
        later={"lmcache": "Keeping the KV cache in LMCache (kv_offloading_backend='lmcache')"},
    )
    swap_space: float = setting(
        4,
        Number(),
        "GiB of host memory per device for preempted requests.",
        obsolete="preempted requests are computed again, nothing is swapped to host memory",
    )
    cache_dtype: str = setting(
        "auto",
        Choice(values=CACHE_DTYPES, error=lambda x: f"Unknown kv cache dtype: {x}. Must be one of {[*CACHE_DTYPES]}."),
        'The type that keys and values are stored in; "auto": the model\'s. The fp8 types take half the memory.',
        name="kv_cache_dtype",
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        Integer(low=1, high=2**31 - 1, optional=True),
        "The number of KV cache blocks, whatever the memory profile says. For tests of preemption.",
    )
    enable_prefix_caching: bool = setting(
        None,
        Flag(optional=True),
        "Keep the blocks of finished requests, so that a later request with the same beginning need not compute it. "
        "Default: on.",
        resolved=True,
    )
    prefix_caching_hash_algo: str = setting(
        "builtin",
        Choice(
            values=HASH_ALGORITHMS,
            error=lambda value: f"Unknown prefix caching hash algorithm: {value}. Must be one of {HASH_ALGORITHMS}.",
        ),
        "How blocks are identified. Both names mean the same here: SHA-256 chains, with the tokens compared on a hit.",
    )
    cpu_offload_gb: float = setting(
        0,
        Number(),
        "GiB of weights per device that are kept in host memory.",
        later="Keeping weights in host memory (cpu_offload_gb)",
    )
    quantization_param_path: str | None = setting(
        None,
        Text(optional=True),
        "JSON file with the scales of an fp8 KV cache; those of the checkpoint, if there are any, are not used then.",
    )
    calculate_kv_scales: bool = setting(
        False,
        Flag(),
        "Compute the scales of an fp8 KV cache when the model has been loaded, from a few made-up prompts.",
    )
    sliding_window: int | None = None
    # What the engine adds once the model is loaded: blocks of the KV cache on its device, whatever that is.
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 256 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two from 1 to 256, got {self.block_size}.")
        if self.cpu_offload_gb < 0:
            raise ValueError(f"CPU offload space must be non-negative, but got {self.cpu_offload_gb}")
        if self.gpu_memory_utilization > 1.0:
            raise ValueError(f"GPU memory utilization must be less than 1.0. Got {self.gpu_memory_utilization}.")
        if self.gpu_memory_utilization <= 0:
            raise ValueError(f"gpu_memory_utilization must be greater than 0, got {self.gpu_memory_utilization}.")
        if self.kv_offloading_size is not None and self.kv_offloading_size < 0:
            raise ValueError(f"kv_offloading_size must be non-negative, got {self.kv_offloading_size}.")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ValueError(
                "kv_offloading_size keeps blocks for later requests, which prefix caching finds: leave "
                "enable_prefix_caching on, or kv_offloading_size unset (some models, as encoders, keep no blocks)."
            )
        scales = {
            "quantization_param_path": self.quantization_param_path is not None,
            "calculate_kv_scales": self.calculate_kv_scales,
        }
        for name in (name for name, given in scales.items() if given and not self.cache_dtype.startswith("fp8")):
            raise ValueError(
                f"{name} is about the scales of an fp8 KV cache: set kv_cache_dtype='fp8', or leave it unset."
            )
        if all(scales.values()):
            raise ValueError(
                "Both quantization_param_path and calculate_kv_scales say where scales come from: set one."
            )
        if self.swap_space < 0:
            raise ValueError(f"swap_space must be non-negative, got {self.swap_space}.")

    @property
    def swap_space_bytes(self) -> int:
        return int(self.swap_space * GIB)
