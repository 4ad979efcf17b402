"""Settings of the processes and devices that share one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Choice, ClassPath, Flag, Integer, JsonOr, Text


def _copies_are_silent(config: Any) -> str:
    return "copies of the engine do not talk to each other"


def _nobody_to_share_experts(config: Any) -> str:
    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.shares_experts:
        return ""
    if parallel.data_parallel_size > 1:
        return "copies that are started one by one (data_parallel_rank) share no experts, each has all of them"
    return "there is one device to a layer"


def _nobody_to_swap_experts(config: Any) -> str:
    return _nobody_to_share_experts(config) if config.parallel_config.enable_expert_parallel else ""


def _unknown_backend(value: Any) -> str:
    return (
        f"Unrecognized distributed executor backend {value}. Supported values are 'ray', 'mp' 'uni', "
        "'external_launcher' or custom ExecutorBase subclass."
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the work on one model is divided."""

    pipeline_parallel_size: int = setting(
        1, Integer(low=1, high=1024), "Number of pipeline stages; each has some of the layers.", flags=("-pp",)
    )
    tensor_parallel_size: int = setting(
        1, Integer(low=1, high=1024), "Number of devices that share each layer.", flags=("-tp",)
    )
    distributed_executor_backend: str = setting(
        None,
        ClassPath(optional=True, names=("ray", "mp", "uni", "external_launcher"), error=_unknown_backend),
        'What starts the workers: "uni" (in this process; one device), "mp" (one process each), "ray" (on nodes of '
        'a cluster), "external_launcher" (torchrun has), or a class of your own, "module:Class". Default: by size.',
        resolved="uni",
    )
    worker_use_ray: bool = setting(False, Flag(), "Deprecated: distributed_executor_backend=ray.")
    max_parallel_loading_workers: int | None = setting(
        None,
        Integer(low=1, optional=True),
        "Load the model on this many workers at a time.",
        obsolete="every worker streams its own part of the weights, so nothing is gained by taking turns",
    )
    disable_custom_all_reduce: bool = setting(
        False,
        Flag(),
        "Sum tensors of GPUs by NCCL only, also small ones.",
        idle=lambda config: "" if config.parallel_config.world_size > 1 else "there is one worker",
    )
    ray_workers_use_nsight: bool = setting(False, Flag(), "Profile Ray workers with nsight.")
    distributed_timeout_seconds: int | None = setting(
        None,
        Integer(low=1, optional=True),
        "Seconds after which a collective operation counts as failed. Default: 600; on a CPU as long as the largest "
        "step may take.",
        idle=lambda config: "" if config.parallel_config.world_size > 1 else "there is one worker",
    )
    worker_cls: str = setting("auto", Text(), "Class of workers, as module.Class; a subclass of the one here.")
    worker_extension_cls: str = setting(
        "", Text(), "Class mixed into the worker, as module.Class: its methods can be called by collective_rpc."
    )
    data_parallel_size: int = setting(
        1, Integer(low=1, high=1024), "Number of engine copies, each with devices of its own.", flags=("-dp",)
    )
    data_parallel_rank: int | None = setting(
        None,
        Integer(low=0, optional=True),
        "Start this one of the engine copies only; a load balancer of your own stands before all of them.",
        flags=("-dpn",),
    )
    data_parallel_size_local: int | None = setting(
        None,
        Integer(low=1, optional=True),
        "Engine copies of this server. The others are started elsewhere, behind a load balancer of your own.",
        flags=("-dpl",),
    )
    data_parallel_address: str | None = setting(
        None, Text(optional=True), "Address of the first engine copy.", flags=("-dpa",), idle=_copies_are_silent
    )
    data_parallel_rpc_port: int | None = setting(
        None, Integer(low=0, optional=True), "Port between engine copies.", flags=("-dpp",), idle=_copies_are_silent
    )
    data_parallel_backend: str = setting(
        "mp",
        Choice(values=("mp", "ray")),
        'Where engine copies run: "mp" (on this host) or "ray" (where a cluster has devices, each on one node).',
        flags=("-dpb",),
        idle=lambda config: "" if config.parallel_config.local_replicas > 1 else "there is one copy",
    )
    enable_expert_parallel: bool = setting(
        False,
        Flag(),
        "Give each of the devices that share a layer, and of all engine copies, some experts whole, not a share of "
        "every expert.",
        idle=_nobody_to_share_experts,
    )
    enable_eplb: bool = setting(
        False,
        Flag(),
        "Let experts that are dealt out whole change places between devices, so that each has as much to do.",
        needs="enable_expert_parallel",
        idle=_nobody_to_swap_experts,
    )
    num_redundant_experts: int = setting(0, Integer(low=0), "Extra copies of experts.", later="Copies of experts")
    eplb_window_size: int = setting(
        1000, Integer(low=1), "How many of the last steps are counted when experts change places.", needs="enable_eplb"
    )
    eplb_step_interval: int = setting(
        3000, Integer(low=1), "After how many steps experts change places again.", needs="enable_eplb"
    )
    eplb_log_balancedness: bool = setting(
        False, Flag(), "Log how even the load was, and how even it becomes.", needs="enable_eplb"
    )
    kv_transfer_config: Any = setting(
        None,
        JsonOr(optional=True, accept=lambda value: hasattr(value, "kv_role"), expected="a KVTransferConfig"),
        "Where KV caches are sent to or fetched from (prefill and decode on different machines).",
        later="KV cache transfer",
    )
    kv_events_config: Any = setting(
        None,
        JsonOr(optional=True, accept=lambda value: hasattr(value, "publisher"), expected="a KVEventsConfig"),
        "Where events of the KV cache are published.",
        later="KV cache events",
    )

    replica: int = 0  # which of this server's engine copies a core is
    first_copy: int = 0  # which of this host's engine copies replica 0 is, as VLLM_DP_RANK_LOCAL says
    meeting: str = ""  # the file by which copies that share experts find each other
    layer_partition: tuple[int, ...] = ()  # layers of each stage, as VLLM_PP_LAYER_PARTITION says; (): evenly

    def __post_init__(self) -> None:
        stages = self.pipeline_parallel_size
        if self.layer_partition and len(self.layer_partition) != stages:
            raise ValueError(
                f"VLLM_PP_LAYER_PARTITION names the layers of {len(self.layer_partition)} stages, but "
                f"pipeline_parallel_size is {stages}."
            )
        if self.data_parallel_rank is not None and self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank={self.data_parallel_rank} must be below data_parallel_size="
                f"{self.data_parallel_size}."
            )
        if (self.data_parallel_size_local or 0) > self.data_parallel_size:
            raise ValueError(
                f"data_parallel_size_local={self.data_parallel_size_local} exceeds data_parallel_size="
                f"{self.data_parallel_size}."
            )
        if self.data_parallel_backend == "ray" and self.distributed_executor_backend == "ray":
            raise ValueError(
                "data_parallel_backend='ray' places each copy of the engine on one node, where it starts its workers "
                "itself: use distributed_executor_backend='mp' with it. With data_parallel_backend='mp' the copies run "
                "here, and their workers can be Ray's."
            )
        if self.shares_experts:
            self._check_shared_experts()
        if self.ray_workers_use_nsight and self.distributed_executor_backend != "ray":
            raise ValueError("Unable to use nsight profiling unless workers run with Ray.")
        if self.worker_use_ray and self.distributed_executor_backend not in ("ray", "uni"):
            raise ValueError(
                f"worker_use_ray asks for Ray, distributed_executor_backend={self.distributed_executor_backend!r} for "
                "something else. Leave out worker_use_ray, which is deprecated."
            )
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ValueError(
                f"The 'uni' executor runs one device, but {self.sizes} asks for {self.world_size}. "
                f"Use distributed_executor_backend='mp', or leave out {self.sizes.replace(' with', ' and')}."
            )
        if self.distributed_executor_backend == "external_launcher" and self.pipeline_parallel_size > 1:
            raise ValueError(
                "distributed_executor_backend='external_launcher' works without a pipeline, "
                f"pipeline_parallel_size={self.pipeline_parallel_size} asks for one. Use tensor_parallel_size, or 'mp' "
                "or 'ray'."
            )

    def _check_shared_experts(self) -> None:
        why = None
        if self.local_replicas != self.data_parallel_size:
            why = "all of them run behind one server: leave out data_parallel_size_local"
        elif self.pipeline_parallel_size > 1:
            why = "a copy has one stage: use tensor_parallel_size in place of pipeline_parallel_size"
        elif self.distributed_executor_backend not in ("uni", "mp") or self.data_parallel_backend != "mp":
            backends = "distributed_executor_backend and data_parallel_backend"
            why = f"their workers are processes of one host: use 'mp' for {backends}"
        if why is not None:
            raise ValueError(
                f"Where the {self.data_parallel_size} copies of the engine (data_parallel_size) share experts, {why}. "
                "Without enable_expert_parallel each copy has all experts, and the copies are independent."
            )

    @property
    def sizes(self) -> str:
        """What asks for several devices, for messages."""
        tensor, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        found = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        named = [f"{name}={size}" for name, size in found.items() if size > 1]
        return " with ".join(named or [f"tensor_parallel_size={tensor}"])

    @property
    def shares_experts(self) -> bool:
        """Whether experts are dealt out to the workers of all copies of the engine, which then step together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1 and self.data_parallel_rank is None

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def local_replicas(self) -> int:
        """Engine copies behind this server."""
        if self.data_parallel_rank is not None:
            return 1
        return self.data_parallel_size_local or self.data_parallel_size

    @property
    def copy(self) -> tuple[int, int]:
        """(number, count) of this copy of the engine among those that it knows of."""
        if self.data_parallel_rank is not None:
            return self.data_parallel_rank, self.data_parallel_size
        return self.replica, self.local_replicas

    @property
    def first_device(self) -> int:
        """The first of this host's devices that belongs to this copy of the engine."""
        return (self.first_copy + self.replica) * self.world_size

    def layers_of(self, stage: int, num_layers: int) -> range:
        """The layers of a pipeline stage. Raises ValueError if the stages cannot share so many."""
        sizes = stage_sizes(num_layers, self.pipeline_parallel_size, self.layer_partition)
        first = sum(sizes[:stage])
        return range(first, first + sizes[stage])


def stage_sizes(num_layers: int, stages: int, partition: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Layers of each stage: as the user says, else evenly. What is left over goes to stages from the last but one
    backwards: the last has the output head to compute, the first the embedding.
    """
    if stages == 1:
        return (num_layers,)
    if partition:
        if sum(partition) != num_layers:
            raise ValueError(
                f"VLLM_PP_LAYER_PARTITION={','.join(map(str, partition))!r} deals out {sum(partition)} layers, but the "
                f"model has {num_layers}."
            )
        return partition
    if num_layers < stages:
        raise ValueError(
            f"{num_layers} layers cannot be dealt out to {stages} pipeline stages: each needs at least one. Use a "
            "smaller pipeline_parallel_size."
        )
    sizes = [num_layers // stages] * stages
    for i in range(num_layers % stages):
        sizes[(stages - 2 - i) % stages] += 1
    return tuple(sizes)


def read_partition(text: str | None) -> tuple[int, ...]:
    """VLLM_PP_LAYER_PARTITION, e.g. "8,10,10,4". Raises ValueError unless it is a list of positive numbers."""
    if not text:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"VLLM_PP_LAYER_PARTITION={text!r} is not a list of numbers of layers, one for each pipeline stage, as in "
            "'8,10,10,4'."
        )
    return tuple(int(part) for part in parts)
