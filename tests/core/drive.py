"""A program that drives the core found on its path with random work, and prints what the core did: one digest a
workload, or every plan and output as JSON lines.

It uses only what the core offered at the commit that later ones are compared with, and runs by itself, so that it can
drive either: `PYTHONPATH=root python drive.py first count [--full]`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from vllm.core.kv_spec import KVGroup, KVKind, KVLayout
from vllm.core.plan import StepPlan, StepResult, TokenLogprobs
from vllm.core.policies import DelayPolicy, PartialPrefillPolicy
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.engine.messages import CoreOutput, CoreRequest
from vllm.sampling_params import SamplingParams

VOCAB, EOS, LONGEST = 50, 3, 60
STEPS = 100  # of a workload, at least; it then runs to its end


class Workload:
    """One scheduler and everything that happens to it, as a function of `seed`."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.now = 1000.0
        windows = rng.choice([(None,), (None,), (None, 10), (10,), (None, 6, 13)])
        groups = tuple(
            KVGroup(KVKind.FULL if w is None else KVKind.SLIDING, (layer,), w) for layer, w in enumerate(windows)
        )
        chunked, priority = rng.random() < 0.75, rng.random() < 0.4
        threshold = rng.choice([0, 0, 0, 7]) if chunked else 0
        budget = rng.choice([9, 16, 64]) if chunked else 64
        limits = SchedulerLimits(rng.choice([1, 3, 8]), budget, LONGEST, chunked, priority, threshold)
        policies: list[Any] = []
        if rng.random() < 0.2:
            policies.append(PartialPrefillPolicy(2, 1, 20))
        if rng.random() < 0.1:
            policies.append(DelayPolicy(0.5, clock=self._clock))
        block_size = rng.choice([4, 4, 2, 8])
        layout: Any = getattr(KVLayout, "alike", KVLayout)(groups, block_size, 1, 8, 2)  # as the tree under test has it
        most = -(-LONGEST // block_size) * len(groups)  # blocks of one request
        blocks = rng.randrange(most + 3 * len(groups), 3 * most)
        self.scheduler = Scheduler(
            limits,
            getattr(layout, "policy", layout),
            blocks,
            enable_prefix_caching=rng.random() < 0.8,
            policies=policies,
            clock=self._clock,
        )
        self.depth = rng.choice([1, 1, 2, 3])
        self.arrivals = rng.choice([0.1, 0.3, 0.6])
        # A suspect that could not start lost its place by priority in the earlier core, and was believed to have been
        # tried: there, everybody can start.
        suspects_start = blocks > limits.max_num_seqs * (most + len(groups))
        self.failures = rng.choice([0.0, 0.02]) if suspects_start and not policies else 0.0  # of steps
        self.chunk = min(budget, threshold or budget)
        self.ends = rng.choice([0.0, 0.0, 0.005])  # of steps that fail for all
        self.errors = rng.choice([0.0, 0.0, 0.01])  # of rows
        self.common = [rng.randrange(VOCAB) for _ in range(40)]
        self.names = itertools.count()
        self.in_slot: dict[int, str] = {}
        self.flying: deque[StepPlan] = deque()

    def _clock(self) -> float:
        return self.now

    def run(self) -> Iterator[dict[str, Any]]:
        """Everything that the core said, in order."""
        rng = self.rng
        steps = idle = 0
        while steps < STEPS or self.scheduler.has_unfinished():
            self.now += 0.125
            steps += 1
            if steps < STEPS:
                yield from self._arrive()
                if self.scheduler.requests and rng.random() < 0.04:
                    yield self._outputs(self.scheduler.abort([rng.choice(sorted(self.scheduler.requests))]))
                if rng.random() < 0.01:
                    yield {"reset": self.scheduler.reset_prefix_cache()}
            said = list(self._step())
            yield from said
            idle = 0 if said else idle + 1
            if idle > 100 and steps > STEPS:
                yield {"stuck": sorted(self.scheduler.requests)}
                return
            if rng.random() < 0.05:
                self.scheduler.check_invariants()
                yield self._stats()

    def _arrive(self) -> Iterator[dict[str, Any]]:
        rng = self.rng
        if rng.random() < self.arrivals:
            for _ in range(rng.choice([1, 1, 2, 6])):
                shared = self.common[: rng.choice([0, 8, 21, rng.randrange(41)])]
                own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 16))]
                yield self._add(shared + own, rng.randrange(3))
        if self.scheduler.requests and rng.random() < 0.06:
            parent = self.scheduler.requests[rng.choice(sorted(self.scheduler.requests))]
            tokens = list(parent.tokens) if rng.random() < 0.5 else list(parent.tokens[: parent.num_prompt_tokens])
            for _ in range(rng.randrange(1, 4)):
                yield self._add(tokens + [5] * rng.randrange(2), parent.priority, parent.id)

    def _add(self, prompt: list[int], priority: int, fork_of: str | None = None) -> dict[str, Any]:
        rng, name = self.rng, f"r{next(self.names)}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=rng.randrange(1, 25),
            min_tokens=rng.choice([0, 0, 1]),
            logprobs=rng.choice([None, None, 1]),
            prompt_logprobs=rng.choice([None] * 9 + [1]),
        )
        if rng.random() < 0.05:
            params.logits_processors = [lambda ids, logits: logits]
        message = CoreRequest(
            name, prompt[: LONGEST + 1], params, seed=1, eos_token_id=EOS,
            stop_token_ids=rng.choice([(EOS,), (EOS, 9)]),
            arrival_time=self.now, priority=priority, lora_id=rng.choice([0] * 9 + [1]),
            cache_salt=rng.choice([None] * 9 + ["s"]), fork_of=fork_of,
        )  # fmt: skip
        try:
            self.scheduler.add(message)
        except ValueError as error:
            return {"refused": str(error)}
        return {"added": name, "tokens": len(prompt)}

    def _step(self) -> Iterator[dict[str, Any]]:
        plan = self.scheduler.schedule() if len(self.flying) < self.depth else None
        if plan is not None:
            yield self._planned(plan)
            self.flying.append(plan)
            for slot in plan.freed:
                self.in_slot.pop(slot, None)
            self.in_slot.update((new.slot, new.request_id) for new in plan.new)
            if self.rng.random() < self.ends:
                self.flying.clear()
                yield self._outputs(self.scheduler.fail_all("everything failed"))
                return
            if self.rng.random() < self.failures and self._suspects_need_a_step_each():
                self.flying.clear()
                yield self._outputs(self.scheduler.isolate("a step failed"))
                return
            if self.rng.random() < 0.5:
                self.scheduler.settle()
        if self.flying and (plan is None or len(self.flying) >= self.depth):
            yield self._outputs(self.scheduler.apply(self._result(self.flying.popleft())))

    def _suspects_need_a_step_each(self) -> bool:
        """The earlier core tried suspects for one step, however far they had come."""
        return all((plan.num_computed + plan.num_tokens <= self.chunk).all() for plan in self.flying)

    def _result(self, plan: StepPlan) -> StepResult:
        """What a device would sample: a function of the request and the position."""
        token_ids, logprobs, prompt_logprobs, errors = [], {}, {}, {}
        rows = zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist(), strict=True)
        for i, (slot, computed, count) in enumerate(rows):
            name = self.in_slot.get(slot)
            request = self.scheduler.requests.get(name or "")
            end = computed + count
            token = (int((name or "r0")[1:]) * 7919 + end * 104_729 >> 3) % VOCAB if plan.sample[i] else -1
            if self.rng.random() < self.errors:
                errors[i], token = "the row failed", -1
            token_ids.append(token)
            if request is None or i in errors:
                continue
            if request.params.logprobs is not None and token >= 0:
                logprobs[i] = TokenLogprobs([token], [-1.0], 1)
            last = min(end, request.num_prompt_tokens - 1)
            if request.params.prompt_logprobs is not None and last > computed:
                prompt_logprobs[i] = [TokenLogprobs([p], [-2.0], 1) for p in range(computed, last)]
        return StepResult(plan.step_id, token_ids, logprobs, prompt_logprobs, errors)

    def _planned(self, plan: StepPlan) -> dict[str, Any]:
        new = [{k: v for k, v in n._asdict().items() if k in _SLOT_FIELDS} for n in plan.new]
        return {
            "step": plan.step_id,
            "freed": list(plan.freed),
            "new": new,
            "blocks": [list(b) for b in plan.blocks],
            "copies": _copies(plan),
            "slots": plan.slots.tolist(),
            "num_tokens": plan.num_tokens.tolist(),
            "num_computed": plan.num_computed.tolist(),
            "sample": plan.sample.tolist(),
        }

    def _outputs(self, outputs: list[CoreOutput]) -> dict[str, Any]:
        return {"outputs": [{name: getattr(out, name) for name in _OUTPUT_FIELDS} for out in outputs]}

    def _stats(self) -> dict[str, Any]:
        stats = self.scheduler.stats()
        return {"stats": {name: getattr(stats, name) for name in _STATS_FIELDS}}


def _copies(plan: Any) -> list[list[int]]:
    """Copied blocks, however the core says it; chains of them as what comes out."""
    pairs = plan.copies if hasattr(plan, "copies") else [(t.src, t.dst) for t in plan.transfers]
    first: dict[int, int] = {}
    for src, dst in pairs:
        first[dst] = first.get(src, src)
    return sorted([src, dst] for dst, src in first.items() if src != dst)


_SLOT_FIELDS = (
    "request_id", "slot", "token_ids", "num_prompt_tokens", "num_computed", "block_ids", "seed", "stop_token_ids",
    "lora_id",
)  # fmt: skip
_OUTPUT_FIELDS = (
    "request_id", "new_token_ids", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs", "num_cached_tokens",
    "error", "first_scheduled_time", "num_preemptions",
)  # fmt: skip
_STATS_FIELDS = (
    "num_running", "num_waiting", "kv_blocks_total", "kv_blocks_free", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions", "prompt_tokens", "generation_tokens",
)  # fmt: skip


def main(first: int, count: int, full: bool) -> None:
    """Print per workload: seed, digest of everything that the core said, number of plans."""
    for seed in range(first, first + count):
        digest, plans = hashlib.sha256(), 0
        for record in Workload(seed).run():
            line = json.dumps(record, sort_keys=True)
            plans += "step" in record
            digest.update(line.encode())
            if full:
                print(line)
        if not full:
            print(seed, digest.hexdigest()[:24], plans)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "--full" in sys.argv)
