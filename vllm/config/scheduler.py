"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.fields import on_cpu, setting
from vllm.config.kinds import Choice, ClassPath, Flag, Integer, Number

DEFAULT_SCHEDULER_CLASS = "vllm.core.scheduler.Scheduler"


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step may hold, and the order of requests."""

    max_num_batched_tokens: int = setting(
        None,
        Integer(low=1, high=2**31 - 1, human=True, optional=True),
        "The most tokens that one step computes. Default: by device and use, see --explain.",
        resolved=2048,
    )
    max_num_seqs: int = setting(
        None,
        Integer(low=1, high=2**20, optional=True),
        "The most sequences in one step; of a pipeline, in each of those in flight. Default: by device and use, "
        "see --explain.",
        resolved=256,
    )
    enable_chunked_prefill: bool = setting(
        None,
        Flag(optional=True, value_follows=True),
        "Divide long prompts over several steps, mixed with decoding. Default: on.",
        resolved=True,
    )
    policy: str = setting(
        "fcfs",
        Choice(values=("fcfs", "priority")),
        'Order of requests: "fcfs" (as they come) or "priority" (smaller numbers first, then as they come).',
        name="scheduling_policy",
    )
    delay_factor: float = setting(
        0.0,
        Number(low=0),
        "Wait this many times the latency of the last prompt before the next prompt is scheduled.",
        name="scheduler_delay_factor",
    )
    max_num_partial_prefills: int = setting(1, Integer(), "The most prompts that may be divided at the same time.")
    max_long_partial_prefills: int = setting(
        1, Integer(), "The most of them that may be longer than long_prefill_token_threshold."
    )
    long_prefill_token_threshold: int = setting(
        0, Integer(low=0), "A prompt is long above this many tokens; 0: no prompt is, or 4 % of max_model_len with "
        "max_num_partial_prefills > 1.",
    )  # fmt: skip
    max_token_gap: float = setting(
        None,
        Number(low=0, optional=True),
        "Milliseconds that a step may take which computes next tokens of answers beside prompts: of these it gets as "
        "many tokens as steps so far have taken in that time. 0: no limit; there is none either where prompts are not "
        "divided. Default: 60 in a server, else 0.",
        resolved=0.0,
    )
    max_num_queued_reqs: int | None = setting(
        None,
        Integer(low=1, optional=True),
        "The most requests that may wait in a server, beside those for which there are free slots; more are refused. "
        "Default: 8 for each that may run at once.",
    )
    max_num_queued_tokens: int | None = setting(
        None,
        Integer(low=1, human=True, optional=True),
        "The most prompt tokens that may wait in a server; more are refused. Default: 4194304.",
    )
    preemption_mode: str | None = setting(
        None,
        Choice(optional=True, values=("recompute", "swap")),
        'What becomes of a request that must make room: "recompute" computes it again later.',
        later={"swap": "Swapping preempted requests to host memory (preemption_mode='swap')"},
    )
    num_scheduler_steps: int = setting(
        1,
        Integer(),
        "Forward passes per call of the scheduler. Accepted for compatibility: scheduling always overlaps with the "
        "device's work, which is what more than one step was for.",
    )
    multi_step_stream_outputs: bool = setting(
        True,
        Flag(),
        "Stream every token of a multi-step call.",
        obsolete="there are no multi-step calls, every token is streamed",
    )
    num_lookahead_slots: int = setting(
        0,
        Integer(),
        "Extra KV cache slots per sequence and step.",
        later="Lookahead slots (speculative decoding, num_lookahead_slots)",
    )
    async_scheduling: bool | None = setting(
        None,
        Flag(optional=True),
        "Plan the next step while the device runs this one. Default: on, where the device works by itself (CUDA).",
        idle=on_cpu("steps never overlap on the CPU"),
    )
    scheduler_cls: str = setting(
        DEFAULT_SCHEDULER_CLASS,
        ClassPath(optional=True),
        "The scheduler: a class derived from vllm.core.scheduler.Scheduler.",
    )
    disable_hybrid_kv_cache_manager: bool = setting(
        False,
        Flag(optional=True),
        "Give all layers the cache of full-attention layers, also those with a sliding window.",
        later="Turning KV cache groups off (disable_hybrid_kv_cache_manager)",
    )
    stream_interval: int | None = setting(
        None,
        Integer(low=1, high=1, optional=True),
        "1: each token of a stream is an event by itself. By default tokens share one while their reader is behind.",
    )
    max_model_len: int = 8192
    num_drafts: int = 0  # tokens that a drafter on the device proposes behind each; no setting has one yet

    def __post_init__(self) -> None:
        tokens, length = self.max_num_batched_tokens, self.max_model_len
        if tokens < length and not self.enable_chunked_prefill:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}). This effectively limits "
                "the maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please "
                "increase max_num_batched_tokens or decrease max_model_len."
            )
        if tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs "
                f"({self.max_num_seqs})."
            )
        if self.num_lookahead_slots < 0:
            raise ValueError(f"num_lookahead_slots ({self.num_lookahead_slots}) must be greater than or equal to 0.")
        if self.num_scheduler_steps < 1:
            raise ValueError(f"num_scheduler_steps ({self.num_scheduler_steps}) must be greater than or equal to 1.")
        self._check_partial_prefills()

    def _check_partial_prefills(self) -> None:
        most, long = self.max_num_partial_prefills, self.max_long_partial_prefills
        if most < 1:
            raise ValueError(f"max_num_partial_prefills ({most}) must be greater than or equal to 1.")
        if most > 1 and not self.enable_chunked_prefill:
            raise ValueError("Chunked prefill must be enabled to set max_num_partial_prefills > 1.")
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) cannot be greater than the "
                f"max_model_len ({self.max_model_len})."
            )
        if not 1 <= long <= most:
            raise ValueError(
                f"max_long_partial_prefills ({long}) must be greater than or equal to 1 and less than or equal to "
                f"max_num_partial_prefills ({most})."
            )

    @property
    def chunked_prefill_enabled(self) -> bool:
        return self.enable_chunked_prefill

    @property
    def scheduler_delay_factor(self) -> float:
        return self.delay_factor
